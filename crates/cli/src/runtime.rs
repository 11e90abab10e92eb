//! From settings to a loaded model with its text parts.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use metaltail_container::Checkpoint;
use metaltail_engine::sampler::Sampling;
use metaltail_engine::telemetry::{Event, Listener, Telemetry};
use metaltail_engine::{
    DeviceKind, DeviceOptions, Engine, EngineError, EngineOptions, ResidencyMode, SlabAllocation,
};
use metaltail_model::ModelError;
use metaltail_model::text::{ChatTemplate, StopIds, TextError, Tokenizer};
use metaltail_store::{PolicyKind, StoreError};
use serde_json::Value;

use crate::exit::{Failure, Kind};
use crate::output::notice;
use crate::pins::{self, pin_mode, usage_mode};
use crate::progress::Bar;
use crate::settings::{self, Settings};

/// Where the demo model lies in a checkout.
const DEMO: &str = "models/hummingbird-56m";

/// A loaded model with what text needs.
pub struct Runtime {
    /// The loaded model.
    pub engine: Engine,
    /// Its tokenizer, where the directory has one.
    pub tokenizer: Option<Tokenizer>,
    /// Why there is none, where there should be one.
    no_tokenizer: Option<String>,
    /// Ids that end an answer.
    pub stop_ids: StopIds,
    /// How tokens are chosen.
    pub sampling: Sampling,
}

/// Prints notices as they come.
struct Notices;

impl Listener for Notices {
    fn on_event(&self, event: &Event<'_>) {
        if let Event::Notice(text) = event {
            notice(&format!("note: {text}"));
        }
    }
}

impl Runtime {
    /// Opens the model that the settings name, or the demo model. `seed` is what an unset seed
    /// becomes.
    ///
    /// # Errors
    /// A model, a budget or settings that are refused.
    pub fn open(settings: &Settings, seed: u64) -> Result<Runtime, Failure> {
        Runtime::open_with(settings, seed, None, true)
    }

    /// As [`Runtime::open`], for what measures: the usage profile is only read unless a file is named, and one
    /// more may hear every event.
    ///
    /// # Errors
    /// As [`Runtime::open`].
    pub fn open_to_measure(
        settings: &Settings,
        listener: Option<Arc<dyn Listener>>,
    ) -> Result<Runtime, Failure> {
        Runtime::open_with(settings, 0, listener, false)
    }

    fn open_with(
        settings: &Settings,
        seed: u64,
        listener: Option<Arc<dyn Listener>>,
        records: bool,
    ) -> Result<Runtime, Failure> {
        let (dir, further) = directories(&model_dir(settings)?)?;
        let notices: Arc<dyn Listener> = Arc::new(Notices);
        let telemetry = Arc::new(Telemetry::new(std::iter::once(notices).chain(listener).collect()));
        let bar = Bar::bytes("loading", 0, settings.json());
        let progress = |done: u64, total: u64| {
            bar.set_length(total);
            bar.set_position(done);
        };
        let usage = usage_mode(settings, records);
        let options = EngineOptions { further, usage, ..engine_options(settings) };
        let opened = Engine::open(&dir, &options, telemetry, &progress);
        bar.finish();
        let engine = opened.map_err(|error| failure(&error))?;
        note_idle_settings(settings, &engine);
        let (tokenizer, no_tokenizer) = tokenizer(engine.checkpoint())?;
        if let Some(tokenizer) = &tokenizer {
            tokenizer.check_vocab(engine.plan().vocab).map_err(|error| text_failure(&error))?;
        }
        let checkpoint = engine.checkpoint();
        let config = checkpoint.config().as_object().cloned().unwrap_or_default();
        let generation = checkpoint.generation_config();
        let stop_ids =
            StopIds::gather(&config, generation, tokenizer.as_ref()).map_err(|error| text_failure(&error))?;
        let sampling = sampling(settings, generation, seed);
        check_sampling(settings, &sampling, &dir)?;
        if settings.verbose() {
            notice(&engine.budget().to_string());
            let mode = engine.store().io_mode();
            let way = if mode.direct { "direct" } else { "buffered" };
            notice(&format!("reads: {way} ({}), by {} ({})", mode.reason, mode.carrier(), mode.uring_reason));
            notice(&pins::to_words(engine.pins()));
        }
        Ok(Runtime { engine, tokenizer, no_tokenizer, stop_ids, sampling })
    }

    /// The chat template, where the model has one: read and compiled now, since ids, raw prompts and scores
    /// have no use of it.
    ///
    /// # Errors
    /// A template that is damaged, or too little memory to work on it.
    pub fn template(&self) -> Result<Option<ChatTemplate>, Failure> {
        ChatTemplate::of(self.engine.checkpoint()).map_err(|error| text_failure(&error))
    }

    /// Says where it is measured what left out experts cost; for commands that only generate.
    pub fn point_to_score(&self) {
        if self.engine.expert_top_p().is_some() {
            self.engine.telemetry().notice("metaltail score says what --expert-top-p costs");
        }
    }

    /// The tokenizer, or a refusal that says what to do without one.
    ///
    /// # Errors
    /// The model directory has no tokenizer.
    pub fn need_tokenizer(&self) -> Result<&Tokenizer, Failure> {
        self.tokenizer.as_ref().ok_or_else(|| {
            let dir = self.engine.checkpoint().dir().display();
            let reason = match &self.no_tokenizer {
                Some(reason) => format!("{reason}: use `run --ids FILE`, which needs no tokenizer"),
                None if self.engine.checkpoint().gguf().is_some() => {
                    format!("{dir} has no tokenizer in its metadata: use `run --ids FILE`, which needs none")
                }
                None => {
                    format!("{dir} has no tokenizer.json: add one, or use `run --ids FILE`, which needs none")
                }
            };
            Failure::new(Kind::Model, reason)
        })
    }
}

/// The tokenizer of a model, or why one in GGUF cannot be used: token ids go without.
fn tokenizer(checkpoint: &Checkpoint) -> Result<(Option<Tokenizer>, Option<String>), Failure> {
    match Tokenizer::of(checkpoint) {
        Ok(tokenizer) => Ok((tokenizer, None)),
        Err(error @ TextError::Metadata { .. }) => Ok((None, Some(error.to_string()))),
        Err(error) => Err(text_failure(&error)),
    }
}

/// Says so where settings of an accelerator were given and the processor computes.
fn note_idle_settings(settings: &Settings, engine: &Engine) {
    if device(settings).kind != DeviceKind::Cpu {
        return;
    }
    let given = [
        ("--residency", settings.residency.is_some()),
        ("--slab-allocation", settings.slab_allocation.is_some()),
    ];
    for (flag, _) in given.into_iter().filter(|(_, given)| *given) {
        let text =
            format!("{flag} has no effect on the processor; it is for --device metal and --device sim");
        engine.telemetry().notice(&text);
    }
}

/// The directory of a model, and further ones that `DIR,DIR` names. A directory whose name has a comma and
/// that exists is one.
///
/// # Errors
/// Nothing stands before, between or behind commas.
pub fn directories(path: &Path) -> Result<(PathBuf, Vec<PathBuf>), Failure> {
    let text = path.as_os_str().as_bytes();
    if !text.contains(&b',') || path.exists() {
        return Ok((path.to_owned(), Vec::new()));
    }
    let names = text.split(|&byte| byte == b',');
    let mut dirs = names.map(|name| PathBuf::from(OsStr::from_bytes(name)));
    let first = dirs.next().unwrap_or_default();
    let further: Vec<PathBuf> = dirs.collect();
    if further.iter().chain([&first]).any(|dir| dir.as_os_str().is_empty()) {
        let hint = "write DIR, or DIR,DIR for several drives";
        return Err(Failure::new(
            Kind::Usage,
            format!("`{}` names an empty directory: {hint}", path.display()),
        ));
    }
    Ok((first, further))
}

/// The directory that the settings name (as written, see [`directories`]), else the demo model of the checkout.
///
/// # Errors
/// There is neither.
pub fn model_dir(settings: &Settings) -> Result<PathBuf, Failure> {
    if let Some(dir) = &settings.input.model {
        return Ok(dir.clone());
    }
    let above = |start: Option<PathBuf>| {
        let start = start?;
        start.ancestors().map(|dir| dir.join(DEMO)).find(|dir| dir.join("manifest.json").exists())
    };
    let near_program = || above(std::env::current_exe().ok());
    above(std::env::current_dir().ok()).or_else(near_program).ok_or_else(|| {
        Failure::new(
            Kind::Usage,
            format!(
                "no model was named, and there is no {DEMO} here or above: use --model DIR or METALTAIL_MODEL"
            ),
        )
    })
}

/// The replacement policy that the settings name.
fn policy(settings: &Settings) -> Option<PolicyKind> {
    Some(match settings.policy? {
        settings::Policy::Lru => PolicyKind::Lru,
        settings::Policy::Slru => PolicyKind::Slru,
        settings::Policy::Sieve => PolicyKind::Sieve,
        settings::Policy::S3Fifo => PolicyKind::S3Fifo,
        settings::Policy::Lfu => PolicyKind::Lfu,
        settings::Policy::Frecency => PolicyKind::Frecency,
    })
}

/// The device that the settings name.
pub fn device(settings: &Settings) -> DeviceOptions {
    DeviceOptions {
        kind: match settings.device {
            None | Some(settings::Device::Auto | settings::Device::Cpu) => DeviceKind::Cpu,
            Some(settings::Device::Metal) => DeviceKind::Metal,
            Some(settings::Device::Sim) => DeviceKind::Sim,
        },
        residency: match settings.residency {
            None | Some(settings::Residency::Set) => ResidencyMode::Set,
            Some(settings::Residency::Walk) => ResidencyMode::Walk,
        },
        slabs: match settings.slab_allocation {
            None | Some(settings::SlabAllocation::Arena) => SlabAllocation::Arena,
            Some(settings::SlabAllocation::PerExpert) => SlabAllocation::PerExpert,
        },
        ..DeviceOptions::default()
    }
}

/// An engine's options as the settings have them.
pub fn engine_options(settings: &Settings) -> EngineOptions {
    EngineOptions {
        ram: settings.ram,
        cap: settings.cap,
        cap_growth: settings.cap_growth,
        policy: policy(settings),
        prefetch: settings.prefetch,
        loaders: settings.loaders,
        direct: match settings.direct {
            None | Some(settings::Direct::Auto) => metaltail_store::Direct::Auto,
            Some(settings::Direct::On) => metaltail_store::Direct::On,
            Some(settings::Direct::Off) => metaltail_store::Direct::Off,
        },
        io: match settings.io {
            None | Some(settings::Io::Auto) => metaltail_store::Io::Auto,
            Some(settings::Io::Uring) => metaltail_store::Io::Uring,
            Some(settings::Io::Threads) => metaltail_store::Io::Threads,
        },
        device: device(settings),
        chunk_bytes: settings.chunk_size,
        checksums: settings.checksums,
        mlock: settings.mlock,
        prefill_chunk: settings.prefill_chunk,
        context: settings.context,
        threads: settings.threads,
        exact: settings.exact.unwrap_or(false),
        expert_top_p: settings.expert_top_p,
        // What measures or compares only reads the profile unless a file is named.
        usage: usage_mode(settings, false),
        pin: pin_mode(settings),
        pin_size: settings.pin_size,
        ..EngineOptions::default()
    }
}

/// Sampling as set, else as `generation_config.json` recommends, else greedy (which is what the
/// reference does without a recommendation).
fn sampling(settings: &Settings, generation: Option<&Value>, seed: u64) -> Sampling {
    let number = |key: &str| generation.and_then(|value| value.get(key)).and_then(Value::as_f64);
    let samples =
        generation.and_then(|value| value.get("do_sample")).and_then(Value::as_bool).unwrap_or(false);
    let (temperature, top_p, top_k, min_p) = match samples {
        true => (
            number("temperature").unwrap_or(1.0) as f32,
            number("top_p").unwrap_or(1.0) as f32,
            number("top_k").unwrap_or(0.0) as usize,
            number("min_p").unwrap_or(0.0) as f32,
        ),
        false => (0.0, 1.0, 0, 0.0),
    };
    Sampling {
        temperature: settings.temperature.unwrap_or(temperature),
        top_p: settings.top_p.unwrap_or(top_p),
        top_k: settings.top_k.unwrap_or(top_k),
        min_p: settings.min_p.unwrap_or(min_p),
        seed: settings.seed.unwrap_or(seed),
    }
}

/// Refuses what no token can be chosen by; where that is not what was set, the model's recommendation is
/// named, in which it stands.
fn check_sampling(settings: &Settings, asked: &Sampling, dir: &Path) -> Result<(), Failure> {
    let Err(error) = asked.validate() else { return Ok(()) };
    match sampling(settings, None, asked.seed).validate() {
        Err(error) => Err(Failure::from_error(Kind::Usage, &error)),
        Ok(()) => {
            let file = dir.join("generation_config.json");
            let text = format!("{} recommends what cannot be: {error}", file.display());
            Err(Failure::new(Kind::Model, format!("{text}. Correct it, or set it for this run")))
        }
    }
}

/// The exit that an engine's error means.
pub fn failure(error: &EngineError) -> Failure {
    let kind = match error {
        EngineError::Config(_) | EngineError::NotFinite { .. } => Kind::Model,
        EngineError::Container(error) => container_kind(error),
        EngineError::Budget(_) | EngineError::Limit { .. } => Kind::Budget,
        EngineError::Store(error) => store_kind(error),
        EngineError::Model(error) => match error {
            ModelError::Config(_) | ModelError::Layout(_) => Kind::Model,
            ModelError::Container(error) => container_kind(error),
            ModelError::Store(error) => store_kind(error),
            ModelError::TokenOutOfRange { .. } => Kind::Usage,
            ModelError::Cancelled => Kind::Interrupted,
            _ => Kind::Failed,
        },
        EngineError::Usage(_)
        | EngineError::EmptyPrompt
        | EngineError::PromptTooLong { .. }
        | EngineError::ContextTooLong { .. }
        | EngineError::PositionPastEnd { .. }
        | EngineError::NoDevice { .. }
        | EngineError::Setting(_) => Kind::Usage,
        _ => Kind::Failed,
    };
    Failure::from_error(kind, error)
}

/// The exit that an error of the model's files means: the files are at fault, unless the machine
/// lacked what reading them takes.
pub fn container_kind(error: &metaltail_container::Error) -> Kind {
    if error.is_io() { Kind::Failed } else { Kind::Model }
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Failure {
        failure(&error)
    }
}

fn store_kind(error: &StoreError) -> Kind {
    match error {
        StoreError::Checksum { .. } | StoreError::EndOfFile { .. } | StoreError::Place { .. } => Kind::Model,
        StoreError::Config(_) | StoreError::Direct { .. } | StoreError::Uring { .. } => Kind::Usage,
        _ => Kind::Failed,
    }
}

/// The exit that an error of tokenizer or template means.
pub fn text_failure(error: &TextError) -> Failure {
    let kind = match error {
        TextError::IdOutOfRange { .. } => Kind::Usage,
        TextError::TemplateThread { .. } | TextError::OpenFiles { .. } => Kind::Failed,
        _ => Kind::Model,
    };
    Failure::from_error(kind, error)
}

/// A seed that nobody knows beforehand.
pub fn drawn_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // The standard library seeds its hashers from the system's random source.
    std::collections::hash_map::RandomState::new().build_hasher().finish() >> 11
}
