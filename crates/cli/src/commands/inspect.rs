//! `metaltail inspect`: what a model directory or a GGUF file holds.
//!
//! Headers alone are read, unless `--verify` asks for every byte or `--numerics` for a run.

mod gguf;
mod numerics;

use std::path::Path;

use metaltail_container::gguf::is_gguf;
use metaltail_container::{Damage, Draft, Report, Verification, inspect, verify};
use metaltail_model::{AttentionPlan, LayerPlan, Plan};
use serde_json::{Value, json};

use numerics::Numerics;

use crate::args::InspectArgs;
use crate::exit::{Failure, Kind};
use crate::opened::{Opened, chosen, refused};
use crate::output;
use crate::progress::Bar;
use crate::report::bytes as size;
use crate::settings::Settings;
use crate::words::{count, exact_size, shell_word, table};

/// Damaged places that an error lists before it says how many more there are.
const LISTED: usize = 50;

/// Inspects.
///
/// # Errors
/// A model that is refused, or damage that `--verify` found.
pub fn execute(args: &InspectArgs, settings: &Settings) -> Result<(), Failure> {
    let dir = chosen(args.dir.as_ref(), settings)?;
    if is_gguf(&dir) {
        return gguf::execute(&dir, args, settings);
    }
    let opened = Opened::at(&dir)?;
    let report = inspect(&opened.checkpoint, &opened.inventory).map_err(|error| refused(&error))?;
    let json = settings.json();
    let mut text = words(&report, &opened.plan);
    let verification = match args.verify {
        true => Some(verified(&opened, json)?),
        false => None,
    };
    if let Some(verification) = &verification {
        text.push_str(&verification_words(verification));
        if !verification.damage.is_empty() {
            // The report stands above the error for people; a program gets the error alone.
            if !json {
                output::print(&text)?;
            }
            return Err(damaged(&dir, &verification.damage));
        }
    }
    drop(opened.checkpoint);
    let numerics = match args.numerics {
        true => Some(numerics::measure(&dir, args.ids.as_deref(), settings)?),
        false => None,
    };
    if json {
        let object = to_json(&report, &opened.plan, verification.as_ref(), numerics.as_ref())?;
        return output::print(&format!("{object}\n"));
    }
    text.push_str(&match &numerics {
        Some(numerics) => numerics.to_words(),
        None => format!(
            "numerics: not measured; metaltail inspect {} --numerics measures what quantised activations cost\n",
            shell_word(&dir)
        ),
    });
    output::print(&text)
}

fn verified(opened: &Opened, json: bool) -> Result<Verification, Failure> {
    let bar = Bar::bytes("verify", 0, json);
    let found = verify(&opened.checkpoint, &opened.inventory, &mut |progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.bytes);
    });
    found.map_err(|error| refused(&error))
}

/// The refusal of a damaged directory, each place by name.
fn damaged(dir: &Path, damage: &[Damage]) -> Failure {
    let places = count(damage.len(), "place");
    let mut failure = Failure::new(
        Kind::Model,
        format!("{} is damaged in {places}: copy, download or convert it again", dir.display()),
    );
    failure.causes = damage.iter().take(LISTED).map(place_words).collect();
    if damage.len() > LISTED {
        failure.causes.push(format!("and {} more", damage.len() - LISTED));
    }
    failure
}

fn place_words(damage: &Damage) -> String {
    let what = match (damage.layer, damage.expert) {
        (Some(layer), Some(expert)) => format!("layer {layer}, expert {expert} "),
        _ => String::new(),
    };
    format!(
        "{what}in {}, {} bytes from offset {}: {}",
        damage.file.display(),
        damage.bytes,
        damage.offset,
        damage.reason
    )
}

fn to_json(
    report: &Report,
    plan: &Plan,
    verification: Option<&Verification>,
    numerics: Option<&Numerics>,
) -> Result<Value, Failure> {
    // JSON is text, and a path need not be.
    let report = Report { dir: report.dir.to_string_lossy().into_owned().into(), ..report.clone() };
    let mut object =
        serde_json::to_value(&report).map_err(|error| Failure::from_error(Kind::Failed, &error))?;
    object["architecture"] = architecture(plan);
    object["verification"] = json!(verification);
    object["numerics"] = json!(numerics);
    Ok(object)
}

/// The kinds of attention of a model; "hybrid" where layers differ.
fn attention(plan: &Plan) -> &'static str {
    let kind = |layer: &LayerPlan| match &layer.attention {
        AttentionPlan::Mla(_) => "latent",
        AttentionPlan::Gqa(_) => "grouped-query",
        AttentionPlan::DeltaNet(_) => "linear",
    };
    let mut kinds = plan.layers.iter().map(kind);
    let Some(first) = kinds.next() else { return "none" };
    if kinds.all(|kind| kind == first) { first } else { "hybrid" }
}

fn architecture(plan: &Plan) -> Value {
    let moe = plan.layers.iter().find_map(|layer| layer.moe());
    json!({
        "family": plan.family,
        "attention": attention(plan),
        "hidden": plan.hidden,
        "vocab": plan.vocab,
        "max_context": plan.max_context,
        "layers": plan.layers.len(),
        "sparse_layers": plan.sparse_layers(),
        "experts": moe.map(|moe| moe.experts),
        "top_k": moe.map(|moe| moe.top_k),
        "expert_width": moe.map(|moe| moe.width),
        "shared_width": moe.and_then(|moe| moe.shared_width),
        "draft_layer": plan.draft.is_some(),
        "kv_bytes_per_token": plan.kv_floats_per_token() * size_of::<f32>(),
        "state_bytes": plan.state_bytes(),
    })
}

/// What headers say of a directory, for people.
pub fn words(report: &Report, plan: &Plan) -> String {
    let file_bytes = report.files.iter().fold(0u64, |sum, file| sum.saturating_add(file.bytes));
    let mut text = format!(
        "{}: {} ({}), {} of {} in all\n",
        report.dir.display(),
        plan.family,
        report.kind,
        count(report.files.len(), "weight file"),
        exact_size(file_bytes)
    );
    if let Some(made) = &report.parameters {
        text.push_str(&format!(
            "made from {}: experts {}, rest {}, draft experts {}\n",
            made.source, made.experts, made.rest, made.draft_experts
        ));
    }
    text.push_str(&format!(
        "{} layers, {} of them sparse; hidden {}, vocabulary {}, {} attention, context up to {}\n",
        plan.layers.len(),
        plan.sparse_layers(),
        plan.hidden,
        plan.vocab,
        attention(plan),
        plan.max_context
    ));
    text.push('\n');
    text.push_str(&roles(report));
    text.push('\n');
    text.push_str(&layers(report, plan));
    text.push_str(&draft(&report.census.draft));
    if report.census.unused > 0 {
        let unused = count(report.census.unused, "stored tensor");
        text.push_str(&format!("{unused} that the model does not use\n"));
    }
    report.notices.iter().for_each(|notice| text.push_str(&format!("note: {notice}\n")));
    text
}

fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(str::to_owned).to_vec()
}

fn roles(report: &Report) -> String {
    let mut rows = vec![row(["role", "tensors", "bytes", "", "formats"])];
    for (role, counted) in &report.census.roles {
        let formats: Vec<String> =
            counted.formats.iter().map(|(format, n)| format!("{format} × {n}")).collect();
        let (tensors, bytes) = (counted.tensors.to_string(), counted.bytes.to_string());
        rows.push(row([role, &tensors, &bytes, &size(counted.bytes), &formats.join(", ")]));
    }
    let (tensors, bytes) = (report.census.tensors.to_string(), report.census.bytes.to_string());
    rows.push(row(["sum", &tensors, &bytes, &size(report.census.bytes), "padding apart"]));
    table(&rows, &[false, true, true, true, false])
}

/// Layers from the first to the last, as people read them.
fn stretch_name((first, last): (u32, u32), draft: bool) -> String {
    let draft = if draft { " (draft)" } else { "" };
    match first == last {
        true => format!("{first}{draft}"),
        false => format!("{first}–{last}{draft}"),
    }
}

/// A line for each stretch of layers that are stored alike.
fn layers(report: &Report, plan: &Plan) -> String {
    let header = ["layers", "experts", "chosen", "an expert", "reads", "checksums", "formats"];
    let mut rows = vec![row(header)];
    let census = &report.census.layers;
    let stretches = census.chunk_by(|a, b| {
        let alike = |layer: &metaltail_container::LayerCensus| {
            let formats = layer.formats.clone();
            (layer.experts, layer.draft, layer.expert_bytes, layer.runs, layer.checksummed, formats)
        };
        alike(a) == alike(b)
    });
    for stretch in stretches {
        let (Some(first), Some(last)) = (stretch.first(), stretch.last()) else { continue };
        let numbers = stretch_name((first.layer, last.layer), first.draft);
        let planned = match first.draft {
            true => plan.draft.as_ref(),
            false => plan.layers.get(first.layer as usize),
        };
        let chosen = planned.and_then(|layer| layer.moe()).map_or(0, |moe| moe.top_k);
        let formats: Vec<&str> = first.formats.iter().map(String::as_str).collect();
        rows.push(row([
            &numbers,
            &first.experts.to_string(),
            &chosen.to_string(),
            &exact_size(first.expert_bytes),
            &first.runs.to_string(),
            if first.checksummed { "yes" } else { "no" },
            &formats.join(", "),
        ]));
    }
    table(&rows, &[false, true, true, true, true])
}

fn draft(draft: &Draft) -> String {
    match draft {
        Draft::None => "draft layer: the model has none\n".to_owned(),
        Draft::Absent => "draft layer: none of its tensors is there\n".to_owned(),
        Draft::Complete => "draft layer: complete\n".to_owned(),
        Draft::Partial { present, wanted, missing } => format!(
            "draft layer: {present} of {wanted} tensors, so it is not used; missing: {}, …\n",
            missing.join(", ")
        ),
    }
}

fn verification_words(found: &Verification) -> String {
    let unchecked = found.experts.saturating_sub(found.checksummed);
    let mut text = format!(
        "verified: {} read; {} of {} experts and {} other files held against checksums, {} damaged\n",
        size(found.bytes),
        found.checksummed,
        found.experts,
        found.files,
        found.damage.len()
    );
    if unchecked > 0 {
        text.push_str(&format!(
            "note: {unchecked} experts carry no checksum and could only be read; a slab container has one for each\n"
        ));
    }
    text
}
