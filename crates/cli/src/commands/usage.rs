//! `metaltail usage`: the usage profile of a model, and histories of colibrì.

use std::path::{Path, PathBuf};

use metaltail_container::NotRegular;
use metaltail_engine::usage::{coli_model, identity, read_coli};
use metaltail_engine::{UsageMode, UsagePlace};
use metaltail_model::{Plan, expert_places};
use metaltail_store::LayerExperts;
use metaltail_store::usage::{
    PinFile, ProfileLock, UsageError, UsageIdentity, UsageProfile, read_own, write_coli, write_profile,
};
use serde_json::{Value, json};

use crate::args::UsageCommand;
use crate::exit::{Failure, Kind};
use crate::opened::Opened;
use crate::output::{notice, print};
use crate::pins::usage_mode;
use crate::runtime::{failure, model_dir};
use crate::settings::Settings;
use crate::words::table;

/// Experts that `show` lists.
const LISTED: usize = 10;

/// A model, and where its profile lies.
struct Subject {
    plan: Plan,
    places: Vec<LayerExperts>,
    identity: UsageIdentity,
    file: PathBuf,
    writes: bool,
}

/// Runs the command.
///
/// # Errors
/// A model, a profile or a history that is refused; a file that cannot be written.
pub fn execute(command: &UsageCommand, settings: &Settings) -> Result<(), Failure> {
    let subject = Subject::new(settings)?;
    let (object, text) = match command {
        UsageCommand::Show(_) => subject.show()?,
        UsageCommand::Export(args) => subject.export(&args.file)?,
        UsageCommand::Import(args) => subject.import(&args.file)?,
    };
    match settings.json() {
        true => print(&format!("{object}\n")),
        false => print(&text),
    }
}

/// The exit that an error of a profile means: what was named is wrong, unless the machine failed.
fn refused(error: &UsageError) -> Failure {
    let kind = match error {
        UsageError::Write { source, .. } if NotRegular::in_error(source).is_none() => Kind::Failed,
        _ => Kind::Usage,
    };
    Failure::from_error(kind, error)
}

/// The refusal of a file that was typed, which an error of its text does not name.
fn of_file(file: &Path, error: UsageError) -> Failure {
    match error {
        UsageError::Line { .. } | UsageError::History { .. } => {
            Failure::new(Kind::Usage, format!("{}: {error}", file.display()))
        }
        UsageError::Read { source, .. } => {
            Failure::new(Kind::Usage, format!("cannot read {}: {source}", file.display()))
        }
        error => refused(&error),
    }
}

impl Subject {
    fn new(settings: &Settings) -> Result<Subject, Failure> {
        let opened = Opened::at(&model_dir(settings)?)?;
        let places = expert_places(&opened.checkpoint, &opened.inventory, false)
            .map_err(|error| failure(&error.into()))?;
        let identity =
            identity(&opened.checkpoint, &opened.plan, &places).map_err(|error| refused(&error))?;
        let (place, writes): (UsagePlace, bool) = match usage_mode(settings, true) {
            UsageMode::On(place) => (place, true),
            UsageMode::ReadOnly(place) => (place, false),
            UsageMode::Off => {
                let hint = "there is no usage profile: name one with --usage FILE (neither XDG_STATE_HOME nor HOME is set, or --usage is off)";
                return Err(Failure::new(Kind::Usage, hint));
            }
        };
        Ok(Subject { plan: opened.plan, places, file: place.file(&identity), identity, writes })
    }

    /// The profile, or an empty one.
    fn profile(&self) -> Result<UsageProfile, Failure> {
        let found = read_own(&self.file, &self.identity).map_err(|error| refused(&error))?;
        Ok(found.unwrap_or_else(|| UsageProfile::new(self.identity.clone())))
    }

    fn import(&self, from: &Path) -> Result<(Value, String), Failure> {
        if !self.writes {
            return Err(Failure::new(
                Kind::Usage,
                "--usage read-only writes nothing: leave it out to import",
            ));
        }
        let lock = ProfileLock::take(&self.file)
            .map_err(|source| refused(&UsageError::Write { file: self.file.clone(), source }))?;
        if lock.is_late() {
            notice("note: another process keeps the profile's directory locked: not waiting any longer");
        }
        let mut profile = self.profile()?;
        let model = coli_model(&self.plan);
        let imported = match PinFile::read(from).map_err(|error| of_file(from, error))? {
            PinFile::Experts(_) => {
                let reason = format!("{} lists experts and counts nothing", from.display());
                return Err(Failure::new(Kind::Usage, reason));
            }
            PinFile::Profile(other) => profile.add_profile(&other),
            PinFile::History(_) => {
                let history = read_coli(from).map_err(|error| of_file(from, error))?;
                // The path was typed, so that another engine's name is worth a word and no refusal.
                if let Some(reason) = history.other_engine(&model) {
                    notice(&format!("note: {}: {reason}", from.display()));
                }
                profile.add_coli(&history, &model)
            }
        };
        let imported = imported.map_err(|error| of_file(from, error))?;
        write_profile(&self.file, &profile).map_err(|error| refused(&error))?;
        let object = json!({
            "file": self.file.to_string_lossy(), "imported": imported, "weight": profile.weight(),
        });
        let text = format!("{}: {imported} uses imported\n", self.file.display());
        Ok((object, text))
    }

    fn export(&self, to: &Path) -> Result<(Value, String), Failure> {
        let profile = self.profile()?;
        // Writing a profile makes its directory; where an export goes was typed, perhaps wrongly.
        let directory = to.parent().filter(|parent| !parent.as_os_str().is_empty());
        if let Some(directory) = directory.filter(|directory| !directory.is_dir()) {
            let reason =
                format!("cannot write {}: there is no directory {}", to.display(), directory.display());
            return Err(Failure::new(Kind::Failed, reason));
        }
        write_coli(to, &profile, &coli_model(&self.plan)).map_err(|error| refused(&error))?;
        let object = json!({
            "file": self.file.to_string_lossy(), "output": to.to_string_lossy(), "weight": profile.weight(),
        });
        let text = format!("{}: {} uses of {}\n", to.display(), profile.weight(), self.file.display());
        Ok((object, text))
    }

    fn show(&self) -> Result<(Value, String), Failure> {
        let profile = self.profile()?;
        let even = vec![1; self.places.len()];
        let hottest: Vec<(u32, u32, f64)> = profile
            .hottest(&even)
            .into_iter()
            .take(LISTED)
            .map(|(layer, expert)| (layer, expert, profile.count(layer, expert)))
            .collect();
        let layers: Vec<LayerUse> = self
            .identity
            .layers
            .iter()
            .map(|&(layer, experts)| LayerUse::of(&profile, layer, experts))
            .collect();
        let object = json!({
            "file": self.file.to_string_lossy(),
            "exists": self.file.exists(),
            "fingerprint": format!("{:016x}", self.identity.fingerprint()),
            "selections": profile.selections(),
            "tokens": profile.selections() / self.identity.selections_per_token().max(1),
            "weight": profile.weight(),
            "half_life": self.identity.half_life(),
            "sampled_tokens": profile.sampled(),
            "layers": layers.iter().map(LayerUse::to_json).collect::<Vec<_>>(),
            "hottest": hottest.iter().map(|&(l, e, n)| json!({"layer": l, "expert": e, "uses": n})).collect::<Vec<_>>(),
        });
        let mut text = format!(
            "{}{}\n{} selections recorded, a weight of {} now (half-life {}), {} tokens sampled\n",
            self.file.display(),
            if self.file.exists() { "" } else { " (not there yet)" },
            profile.selections(),
            profile.weight(),
            self.identity.half_life(),
            profile.sampled()
        );
        let mut rows =
            vec![["layer", "experts", "used", "uses", "by the hottest eighth"].map(str::to_owned).to_vec()];
        rows.extend(layers.iter().map(LayerUse::to_row));
        text.push_str(&table(&rows, &[true; 5]));
        for (layer, expert, uses) in &hottest {
            text.push_str(&format!("layer {layer}, expert {expert}: {uses:.1} uses\n"));
        }
        Ok((object, text))
    }
}

/// How a layer's experts were used.
struct LayerUse {
    layer: u32,
    experts: u32,
    used: usize,
    uses: f64,
    /// Share of the uses that the hottest eighth of the experts has.
    eighth: Option<f64>,
}

impl LayerUse {
    fn of(profile: &UsageProfile, layer: u32, experts: u32) -> LayerUse {
        let mut counts: Vec<f64> = (0..experts).map(|expert| profile.count(layer, expert)).collect();
        counts.sort_unstable_by(|a, b| b.total_cmp(a));
        let uses: f64 = counts.iter().sum();
        let hot: f64 = counts.iter().take((experts as usize).div_ceil(8)).sum();
        let used = counts.iter().filter(|&&count| count > 0.0).count();
        LayerUse { layer, experts, used, uses, eighth: (uses > 0.0).then(|| hot / uses) }
    }

    fn to_json(&self) -> Value {
        json!({
            "layer": self.layer, "experts": self.experts, "used": self.used, "uses": self.uses,
            "hottest_eighth": self.eighth,
        })
    }

    fn to_row(&self) -> Vec<String> {
        let eighth = self.eighth.map_or("–".to_owned(), |share| format!("{:.1} %", 100.0 * share));
        let uses = format!("{:.0}", self.uses);
        vec![self.layer.to_string(), self.experts.to_string(), self.used.to_string(), uses, eighth]
    }
}
