//! `metaltail inspect` of a GGUF file: what is in it, and whether it can be run.

use std::path::Path;

use metaltail_container::gguf::{Gguf, GgufExpertLayer, GgufReport, Support};
use serde_json::{Value, json};

use crate::args::InspectArgs;
use crate::commands::inspect::numerics;
use crate::exit::{Failure, Kind};
use crate::opened::{Opened, refused};
use crate::output;
use crate::report::bytes as size;
use crate::settings::Settings;
use crate::words::{count, exact_size, table};

/// Whether the model can be run: its family, or why not.
type Runnable = Result<String, String>;

/// Describes the file, or the set that it is a part of.
///
/// # Errors
/// A file that is refused; `--verify`, which needs what GGUF lacks; `--numerics` of a model that cannot be run.
pub fn execute(path: &Path, args: &InspectArgs, settings: &Settings) -> Result<(), Failure> {
    let name = path.display();
    if args.verify {
        let reason = format!("{name} is a GGUF file, and those carry no checksums: leave --verify out");
        return Err(Failure::new(Kind::Usage, reason));
    }
    let report = Gguf::open(path).map_err(|error| refused(&error))?.report();
    let numerics = match args.numerics {
        true => Some(numerics::measure(path, args.ids.as_deref(), settings)?),
        false => None,
    };
    let runnable = runnable(path);
    if settings.json() {
        let mut object = to_json(path, &report, &runnable)?;
        if let Some(numerics) = &numerics {
            object["numerics"] = json!(numerics);
        }
        return output::print(&format!("{object}\n"));
    }
    let mut text = words(path, &report, &runnable);
    text.push_str(&numerics.map_or(String::new(), |numerics| numerics.to_words()));
    output::print(&text)
}

/// Opens the model and holds its tensors against its plan.
fn runnable(path: &Path) -> Runnable {
    let opened = Opened::at(path).map_err(|failure| failure.message)?;
    opened.checkpoint.check(&opened.inventory).map_err(|error| error.to_string())?;
    Ok(opened.plan.family)
}

fn to_json(path: &Path, report: &GgufReport, runnable: &Runnable) -> Result<Value, Failure> {
    let mut object = json!({"path": path.to_string_lossy()});
    let report = serde_json::to_value(report).map_err(|error| Failure::from_error(Kind::Failed, &error))?;
    if let (Some(object), Value::Object(report)) = (object.as_object_mut(), report) {
        object.extend(report);
    }
    object["runnable"] = match runnable {
        Ok(family) => json!({"value": true, "family": family}),
        Err(reason) => json!({"value": false, "reason": reason}),
    };
    Ok(object)
}

fn words(path: &Path, report: &GgufReport, runnable: &Runnable) -> String {
    let file_bytes = report.files.iter().fold(0u64, |sum, file| sum.saturating_add(file.bytes));
    let mut text = format!(
        "{}: {} (gguf, version {}), {} of {} in all\n",
        path.display(),
        report.architecture.as_deref().map_or("no architecture".to_owned(), plain),
        report.version,
        count(report.files.len(), "file"),
        exact_size(file_bytes)
    );
    text.push_str(&match runnable {
        Ok(family) => format!("can be run in place, as {family}\n"),
        Err(reason) => format!("cannot be run: {}\n", plain(reason)),
    });
    if let Some(name) = &report.name {
        text.push_str(&format!("name: {}\n", plain(name)));
    }
    text.push_str(&shape(report));
    text.push_str(&quantisation(report));
    text.push_str(&text_parts(report));
    text.push('\n');
    text.push_str(&roles(report));
    text.push('\n');
    text.push_str(&types(report));
    if !report.layers.is_empty() {
        text.push('\n');
        text.push_str(&layers(report));
    }
    if report.files.len() > 1 {
        text.push('\n');
        text.push_str(&files(report));
    }
    report.notices.iter().for_each(|notice| text.push_str(&format!("note: {notice}\n")));
    text
}

/// A file's text on one line, without what would move the cursor.
fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).take(200).collect()
}

fn shape(report: &GgufReport) -> String {
    let model = &report.model;
    let parts = [
        ("layers", model.layers),
        ("hidden", model.hidden),
        ("vocabulary", model.vocab),
        ("heads", model.heads),
        ("key-value heads", model.kv_heads),
        ("experts", model.experts),
        ("chosen", model.top_k),
        ("shared experts", model.shared_experts),
        ("expert width", model.expert_width),
        ("draft layers", model.draft_layers),
        ("context up to", model.max_context),
    ];
    let said: Vec<String> =
        parts.iter().filter_map(|(name, value)| Some(format!("{name} {}", (*value)?))).collect();
    match said.is_empty() {
        true => "the metadata say nothing of the model's shape\n".to_owned(),
        false => format!("{}\n", said.join(", ")),
    }
}

fn quantisation(report: &GgufReport) -> String {
    let parameters = report.parameter_count;
    let bits = report.bytes as f64 * 8.0 / parameters.max(1) as f64;
    let said = report.file_type.map(|kind| match kind.name {
        Some(name) => format!("; quantisation {name}"),
        None => format!("; quantisation of the unknown number {}", kind.number),
    });
    format!(
        "{parameters} parameters, {} of them in routed experts; {bits:.2} bits each in the mean{}\n",
        report.routed_parameter_count,
        said.unwrap_or_default()
    )
}

fn text_parts(report: &GgufReport) -> String {
    let tokenizer = match &report.tokenizer {
        None => "tokenizer: none".to_owned(),
        Some(tokenizer) => {
            let pre = tokenizer.pre.as_deref().map(|pre| format!(" ({})", plain(pre)));
            let tokens = tokenizer.tokens.map(|n| format!(", {}", count(n as u64, "token")));
            let merges = tokenizer.merges.map(|n| format!(", {}", count(n as u64, "merge")));
            let rest = [pre, tokens, merges].map(Option::unwrap_or_default).concat();
            format!("tokenizer: {}{rest}", plain(&tokenizer.model))
        }
    };
    let templates: Vec<String> = report
        .chat_templates
        .iter()
        .map(|template| match &template.name {
            Some(name) => format!("{} of {} bytes", plain(name), template.bytes),
            None => format!("{} bytes", template.bytes),
        })
        .collect();
    let templates = if templates.is_empty() { "none".to_owned() } else { templates.join(", ") };
    format!("{tokenizer}; chat template: {templates}\n")
}

fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(str::to_owned).to_vec()
}

fn roles(report: &GgufReport) -> String {
    let mut rows = vec![row(["role", "tensors", "bytes", "", "types"])];
    for (role, counted) in &report.roles {
        let kinds: Vec<String> = counted.formats.iter().map(|(kind, n)| format!("{kind} × {n}")).collect();
        let (tensors, bytes) = (counted.tensors.to_string(), counted.bytes.to_string());
        rows.push(row([role, &tensors, &bytes, &size(counted.bytes), &kinds.join(", ")]));
    }
    let (tensors, bytes) = (report.tensors.to_string(), report.bytes.to_string());
    rows.push(row(["sum", &tensors, &bytes, &size(report.bytes), "padding apart"]));
    table(&rows, &[false, true, true, true, false])
}

fn types(report: &GgufReport) -> String {
    let mut rows = vec![row(["type", "tensors", "bytes", "", "bits", "arithmetic"])];
    for (kind, counted) in &report.types {
        let (tensors, bytes) = (counted.tensors.to_string(), counted.bytes.to_string());
        let support = match counted.support {
            Support::Computed => "in place",
            Support::None => "none, cannot be computed",
        };
        let bits = format!("{:.4}", counted.bits_per_weight);
        let bits = bits.trim_end_matches('0').trim_end_matches('.');
        rows.push(row([kind, &tensors, &bytes, &size(counted.bytes), bits, support]));
    }
    table(&rows, &[false, true, true, true, true, false])
}

/// A line for each stretch of layers whose experts are stored alike.
fn layers(report: &GgufReport) -> String {
    let mut rows = vec![row(["layers", "experts", "an expert", "runs", "types"])];
    let alike = |a: &GgufExpertLayer, b: &GgufExpertLayer| {
        GgufExpertLayer { layer: b.layer, ..a.clone() } == *b && a.layer.checked_add(1) == Some(b.layer)
    };
    for stretch in report.layers.chunk_by(alike) {
        let (Some(first), Some(last)) = (stretch.first(), stretch.last()) else { continue };
        let numbers = super::stretch_name((first.layer, last.layer), first.draft);
        let (experts, runs) = (first.experts.to_string(), first.runs.to_string());
        rows.push(row([
            &numbers,
            &experts,
            &exact_size(first.expert_bytes),
            &runs,
            &first.formats.join(", "),
        ]));
    }
    table(&rows, &[false, true, true, true, false])
}

fn files(report: &GgufReport) -> String {
    let mut rows = vec![row(["part", "tensors", "bytes", ""])];
    for file in &report.files {
        rows.push(row([
            &plain(&file.name),
            &file.tensors.to_string(),
            &file.bytes.to_string(),
            &size(file.bytes),
        ]));
    }
    table(&rows, &[false, true, true, true])
}
