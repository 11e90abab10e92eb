//! What an accelerator may hold, for `plan` and `doctor`.

use metaltail_engine::{AcceleratorFacts, DeviceKind, DeviceOptions, accelerator_facts};
use serde_json::{Value, json};

use crate::report::bytes as size;
use crate::runtime;
use crate::settings::Settings;

/// An accelerator as it was asked; none for the processor.
#[derive(Debug)]
pub struct Accelerator {
    device: &'static str,
    facts: Result<AcceleratorFacts, String>,
}

impl Accelerator {
    /// The one that the settings name.
    pub fn named(settings: &Settings) -> Option<Accelerator> {
        Accelerator::of(&runtime::device(settings))
    }

    /// The one that the settings name; where they name none, the one that this system could have.
    pub fn found(settings: &Settings) -> Option<Accelerator> {
        match runtime::device(settings) {
            named if named.kind != DeviceKind::Cpu => Accelerator::of(&named),
            named if cfg!(target_os = "macos") => {
                Accelerator::of(&DeviceOptions { kind: DeviceKind::Metal, ..named })
            }
            _ => None,
        }
    }

    fn of(options: &DeviceOptions) -> Option<Accelerator> {
        let facts = accelerator_facts(options).map_err(|error| error.to_string()).transpose()?;
        Some(Accelerator { device: options.kind.name(), facts })
    }

    /// As JSON; `reason` says why it cannot be used.
    pub fn to_json(&self) -> Value {
        let facts = self.facts.as_ref();
        json!({
            "device": self.device,
            "machine": facts.ok().map(|f| &f.machine),
            "resident_bytes": facts.ok().map(|f| f.working_set),
            "setting": facts.ok().and_then(|f| f.setting),
            "largest_allocation_bytes": facts.ok().map(|f| f.allocation),
            "residency_sets": facts.ok().map(|f| f.sets),
            "told": facts.ok().map(|f| &f.lines),
            "reason": facts.err(),
        })
    }

    /// A line for people.
    pub fn words(&self) -> String {
        match &self.facts {
            Err(reason) => reason.clone(),
            Ok(facts) => {
                let raised =
                    facts.setting.map(|name| format!(" ({name} there raises it)")).unwrap_or_default();
                let sets = match facts.sets {
                    0 => "no residency sets: memory is declared with each submission".to_owned(),
                    sets => format!("{sets} residency sets"),
                };
                format!(
                    "{} ({}): keeps {} resident at most{raised}, allocations up to {}, {sets}",
                    self.device,
                    facts.machine,
                    size(facts.working_set),
                    size(facts.allocation),
                )
            }
        }
    }

    /// Why it cannot be used.
    pub fn refusal(&self) -> Option<&str> {
        self.facts.as_ref().err().map(String::as_str)
    }

    /// What else it tells of itself.
    pub fn lines(&self) -> &[String] {
        self.facts.as_ref().map_or(&[], |facts| &facts.lines)
    }
}
