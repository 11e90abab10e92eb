//! `metaltail doctor`: the machine, what this process may have of it, where a model lies and what it holds;
//! and what to change, with the reason.

mod drive;
mod findings;
mod limits;
mod machine;
mod storage;

use std::path::Path;

use metaltail_container::Report as Census;
use metaltail_store::{Budget, Machine};
use serde_json::{Value, json};

use findings::{Finding, Severity};
use limits::Limits;
use machine::Hardware;
use storage::Storage;

use crate::accelerator::Accelerator;
use crate::commands::inspect;
use crate::commands::plan::{self, Planned, budget_json};
use crate::exit::{Failure, Kind};
use crate::opened::refused;
use crate::output;
use crate::settings::Settings;
use crate::words::table;

/// A model as it was examined.
struct Examined {
    /// What the files hold, and the same in words; none for a configuration alone.
    census: Option<(Census, String)>,
    /// Memory and bound, or why the model does not fit.
    plan: Result<Box<plan::Report>, Failure>,
    storage: Storage,
    drive: drive::Probed,
}

/// All that was found.
struct Diagnosis {
    hardware: Hardware,
    limits: Limits,
    accelerator: Option<Accelerator>,
    /// What the budget is without a model; a demand that cannot be is a refusal.
    budget: Result<Budget, String>,
    here: Storage,
    model: Option<Examined>,
    findings: Vec<Finding>,
}

/// Examines. A budget that is refused is a finding, not a failure.
///
/// # Errors
/// A model that is refused; a machine that says nothing of its memory.
pub fn execute(settings: &Settings) -> Result<(), Failure> {
    let machine = Machine::probe().map_err(|error| Failure::from_error(Kind::Failed, &error))?;
    let model = match &settings.input.model {
        Some(path) => Some(Examined::at(path, settings)?),
        None => None,
    };
    let diagnosis = Diagnosis::new(&machine, model, settings);
    match settings.json() {
        true => output::print(&format!("{}\n", diagnosis.to_json()?)),
        false => output::print(&diagnosis.to_words()),
    }
}

impl Examined {
    fn at(path: &Path, settings: &Settings) -> Result<Examined, Failure> {
        let planned = Planned::at(path)?;
        let census = match &planned.checkpoint {
            Some(checkpoint) => {
                let census = metaltail_container::inspect(checkpoint, &planned.inventory)
                    .map_err(|error| refused(&error))?;
                let words = inspect::words(&census, &planned.plan);
                Some((census, words))
            }
            None => None,
        };
        let drive = drive::probe(&planned);
        let plan = plan::Report::new(planned, settings).map(Box::new);
        Ok(Examined { census, plan, storage: Storage::of(path), drive })
    }

    fn findings(&self, limits: &Limits) -> Vec<Finding> {
        let mut found = Vec::new();
        if let Some((census, _)) = &self.census {
            found.extend(findings::of_census(census, limits));
        }
        match &self.plan {
            Ok(report) => {
                // A drive from which nothing is read while tokens are generated is nobody's concern.
                if report.planned.checkpoint.is_some() && report.reads.expected > 0.0 {
                    let rate = report.drive.as_ref().map(|drive| drive.gb_per_second).map_err(Clone::clone);
                    let half = drive::half_took(&self.drive);
                    found.extend(findings::of_storage(&self.storage, &rate, half));
                    found.extend(drive::findings(&self.drive));
                }
                found.extend(findings::of_plan(report));
            }
            Err(refusal) => found.push(Finding {
                severity: Severity::Error,
                what: "the model cannot be run like this".into(),
                why: refusal.message.clone(),
                action: match refusal.kind {
                    Kind::Usage => "change the setting that it names".into(),
                    _ => "give more memory, or demand less, as the sum above says".into(),
                },
            }),
        }
        found
    }

    fn to_json(&self) -> Result<Value, Failure> {
        let census = match &self.census {
            Some((census, _)) => {
                // JSON is text, and a path need not be.
                let shown =
                    Census { dir: census.dir.to_string_lossy().into_owned().into(), ..census.clone() };
                serde_json::to_value(&shown).map_err(|error| Failure::from_error(Kind::Failed, &error))?
            }
            None => Value::Null,
        };
        let report = self.plan.as_ref().ok();
        Ok(json!({
            "census": census,
            "experts": report.map(|report| report.experts_json()),
            "token": report.map(|report| report.token_json()),
            "storage": self.storage,
            "drive": drive::to_json(&self.drive),
            "refusal": self.plan.as_ref().err().map(|refusal| refusal.message.clone()),
            "notices": report.map(|report| report.notices()).unwrap_or_default(),
        }))
    }
}

impl Diagnosis {
    fn new(machine: &Machine, model: Option<Examined>, settings: &Settings) -> Diagnosis {
        let (hardware, limits) = (Hardware::probe(machine), Limits::probe(machine));
        let mut findings = findings::of_machine(&hardware, &limits, machine);
        let budget = Budget::new(machine, settings.ram).map_err(|error| error.to_string());
        if let (Err(refusal), None) = (&budget, &model) {
            findings.push(Finding {
                severity: Severity::Error,
                what: "the memory that is demanded cannot be had".into(),
                why: refusal.clone(),
                action: "demand less, or leave --ram out to have it fitted".into(),
            });
        }
        if let Some(model) = &model {
            findings.extend(model.findings(&limits));
        }
        let (here, accelerator) = (Storage::of(Path::new(".")), Accelerator::found(settings));
        findings.extend(accelerator.as_ref().and_then(findings::of_accelerator));
        findings.sort_by_key(|finding| finding.severity);
        Diagnosis { hardware, limits, accelerator, budget, here, model, findings }
    }

    /// The budget with a model's terms, else without any.
    fn budget(&self) -> Option<&Budget> {
        match &self.model {
            Some(model) => model.plan.as_ref().ok().map(|report| &report.budget),
            None => self.budget.as_ref().ok(),
        }
    }

    fn report(&self) -> Option<&plan::Report> {
        self.model.as_ref()?.plan.as_deref().ok()
    }

    fn to_json(&self) -> Result<Value, Failure> {
        let model = match &self.model {
            Some(model) => model.to_json()?,
            None => Value::Null,
        };
        Ok(json!({
            "machine": self.hardware,
            "limits": self.limits.to_json(),
            "accelerator": self.accelerator.as_ref().map(Accelerator::to_json),
            "storage": self.here,
            "memory": self.budget().map(budget_json),
            "bound": self.report().map(plan::Report::bound_json),
            "model": model,
            "findings": self.findings,
        }))
    }

    fn to_words(&self) -> String {
        let mut rows = self.hardware.rows();
        rows.extend(self.limits.rows());
        if let Some(accelerator) = &self.accelerator {
            rows.push(["accelerator".into(), accelerator.words()]);
            rows.extend(accelerator.lines().iter().map(|line| [String::new(), line.clone()]));
        }
        let storage = self.model.as_ref().map_or(&self.here, |model| &model.storage);
        rows.push(["storage".into(), storage.to_words()]);
        let rows: Vec<Vec<String>> = rows.into_iter().map(Vec::from).collect();
        let mut text = table(&rows, &[]);
        if let Some((_, words)) = self.model.as_ref().and_then(|model| model.census.as_ref()) {
            text.push_str(&format!("\n{words}"));
        }
        if let Some(model) = self.model.as_ref().filter(|model| !model.drive.is_empty()) {
            text.push_str(&format!("\ndrive, random experts\n{}", drive::to_words(&model.drive)));
        }
        if let Some(budget) = self.budget() {
            text.push_str(&format!("\nmemory\n{budget}\n"));
        }
        if let Some(report) = self.report() {
            text.push_str(&format!("\n{}", report.bound_words()));
        }
        text.push_str("\nwhat to change\n");
        if self.findings.is_empty() {
            text.push_str("nothing was found\n");
        }
        for Finding { severity, what, why, action } in &self.findings {
            let name = match severity {
                Severity::Error => "error",
                Severity::Warning => "warning",
                Severity::Hint => "hint",
            };
            text.push_str(&format!("{name}: {what}\n  why: {why}\n  do: {action}\n"));
        }
        text
    }
}
