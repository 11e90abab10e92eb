//! Reading traces.

use std::collections::HashMap;

use super::{Selection, Trace, TraceError, TraceLayer, TracePhase, TraceRow};
use crate::policy::Share;

/// Experts of all layers together that a trace may name: ten times those of the largest models.
const MOST_EXPERTS: usize = 1 << 20;
const MOST_LAYERS: u32 = 1 << 12;
/// Bytes of an expert: 16 TiB.
const MOST_BYTES: u64 = 1 << 44;
const NAMES: &str = "turn,phase,step,layer,slot,expert,weight";

/// Where a row belongs: (turn, phase, step, layer).
type Place = [u32; 4];

#[derive(Default)]
struct Parser {
    /// By layer number.
    bytes: HashMap<u32, u64>,
    /// By layer number: one more than the largest expert.
    experts: HashMap<u32, usize>,
    places: Vec<(Place, usize)>,
    chosen: Vec<(u32, f32)>,
}

impl Trace {
    /// Parses a trace.
    ///
    /// # Errors
    /// A line of another form, sizes that are missing, or numbers beyond reason.
    pub fn parse(text: &str) -> Result<Trace, TraceError> {
        let mut parser = Parser::default();
        let mut named = false;
        for (line, content) in (1..).zip(text.lines()) {
            let wrong = |reason: String| TraceError::Line { line, reason };
            if let Some(head) = content.strip_prefix('#') {
                parser.head(head).map_err(wrong)?;
            } else if !named {
                if !content.starts_with(NAMES) {
                    return Err(wrong(format!("wanted the names `{NAMES},…`, got {}", quoted(content))));
                }
                named = true;
            } else if !content.trim().is_empty() {
                parser.selection(content).map_err(wrong)?;
            }
        }
        parser.finish()
    }
}

impl Parser {
    /// A line such as ` layer=3 expert_bytes=3059712 …`; others say nothing that is needed.
    fn head(&mut self, head: &str) -> Result<(), String> {
        let value = |name: &str| {
            let mut words = head.split_whitespace();
            words.find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
        };
        let (Some(layer), Some(bytes)) = (value("layer"), value("expert_bytes")) else { return Ok(()) };
        let layer = number(layer, "layer", MOST_LAYERS)?;
        let bytes: u64 = bytes.parse().map_err(|_| format!("expert_bytes {} is no number", quoted(bytes)))?;
        self.size(layer, bytes)
    }

    fn size(&mut self, layer: u32, bytes: u64) -> Result<(), String> {
        if bytes > MOST_BYTES {
            return Err(format!(
                "an expert of {bytes} bytes is larger than any: at most {MOST_BYTES} are taken"
            ));
        }
        if bytes > 0 {
            self.bytes.entry(layer).or_insert(bytes);
        }
        Ok(())
    }

    fn selection(&mut self, line: &str) -> Result<(), String> {
        let mut fields = line.split(',').map(str::trim);
        let mut next = |name| fields.next().ok_or_else(|| format!("field {name} is missing"));
        let turn = number(next("turn")?, "turn", u32::MAX)?;
        let phase = number(next("phase")?, "phase", 1)?;
        let step = number(next("step")?, "step", u32::MAX)?;
        let layer = number(next("layer")?, "layer", MOST_LAYERS)?;
        number(next("slot")?, "slot", u32::MAX)?;
        let expert = number(next("expert")?, "expert", MOST_EXPERTS as u32)?;
        let weight = next("weight")?;
        let weight: f32 = weight.parse().map_err(|_| format!("weight {} is no number", quoted(weight)))?;
        if let Some(bytes) = fields.nth(1) {
            let wrong = |_| format!("expert_bytes {} is no number", quoted(bytes));
            self.size(layer, bytes.parse().map_err(wrong)?)?;
        }
        let experts = self.experts.entry(layer).or_default();
        *experts = (*experts).max(expert as usize + 1);
        let place = [turn, phase, step, layer];
        if self.places.last().is_none_or(|last| last.0 != place) {
            self.places.push((place, self.chosen.len()));
        }
        self.chosen.push((expert, weight));
        Ok(())
    }

    fn finish(self) -> Result<Trace, TraceError> {
        if self.chosen.is_empty() {
            return Err(TraceError::Empty);
        }
        let total: usize = self.experts.values().sum();
        if total > MOST_EXPERTS {
            return Err(TraceError::TooManyExperts { experts: total, most: MOST_EXPERTS });
        }
        let mut numbers: Vec<u32> = self.experts.keys().copied().collect();
        numbers.sort_unstable();
        let layers = numbers
            .iter()
            .map(|&number| {
                let expert_bytes = *self.bytes.get(&number).ok_or(TraceError::NoSize { layer: number })?;
                Ok(TraceLayer { number, expert_bytes, experts: self.experts[&number] })
            })
            .collect::<Result<_, TraceError>>()?;
        let index: HashMap<u32, u32> = numbers.into_iter().zip(0..).collect();
        let ends = self.places.iter().skip(1).map(|place| place.1).chain([self.chosen.len()]);
        let mut rows = Vec::with_capacity(self.places.len());
        let mut selections = Vec::with_capacity(self.chosen.len());
        let (mut group, mut last) = (0, None);
        for (&([turn, phase, step, layer], start), end) in self.places.iter().zip(ends) {
            let together = (turn, phase, if phase == 0 { 0 } else { step }, layer);
            if last.is_some_and(|last| last != together) {
                group += 1;
            }
            last = Some(together);
            let chosen = &self.chosen[start..end];
            let sum = chosen.iter().map(|c| c.1).sum();
            selections.extend(
                chosen.iter().map(|&(expert, weight)| Selection {
                    expert,
                    share: Share::of(weight, sum, chosen.len()),
                }),
            );
            let phase = if phase == 0 { TracePhase::Prefill } else { TracePhase::Decode };
            rows.push(TraceRow { layer: index[&layer], phase, group, selections: start..end });
        }
        Ok(Trace { layers, rows, selections })
    }
}

fn number(text: &str, name: &str, most: u32) -> Result<u32, String> {
    let value: u32 = text.parse().map_err(|_| format!("{name} {} is no number", quoted(text)))?;
    match value <= most {
        true => Ok(value),
        false => Err(format!("{name} {value} is too large: at most {most} is taken")),
    }
}

/// What was got, in short: a line may be a whole file.
fn quoted(text: &str) -> String {
    let short: String = text.chars().take(40).collect();
    format!("{short:?}{}", if short.len() < text.len() { " …" } else { "" })
}
