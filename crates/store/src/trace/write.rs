//! Writing traces.

use std::io::{self, Write};

use super::{Trace, TracePhase};

/// Writes a trace as it comes.
pub struct TraceWriter<W> {
    out: W,
    /// (number, bytes an expert)
    layers: Vec<(u32, u64)>,
}

impl<W: Write> TraceWriter<W> {
    /// Writes the head. `model` names the model, `layers` has each layer's number and bytes an expert.
    ///
    /// # Errors
    /// What writing says.
    pub fn new(mut out: W, model: &str, layers: Vec<(u32, u64)>) -> io::Result<TraceWriter<W>> {
        // The name must not begin a line of its own.
        let model: String = model.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        writeln!(out, "# route_trace v1\n# model={model} n_layer={}", layers.len())?;
        for (layer, bytes) in &layers {
            writeln!(out, "# layer={layer} expert_bytes={bytes}")?;
        }
        writeln!(out, "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes")?;
        Ok(TraceWriter { out, layers })
    }

    /// Writes what row `step` of a turn's phase chose in a layer, as (expert, weight).
    ///
    /// # Errors
    /// What writing says.
    pub fn row(
        &mut self,
        turn: u32,
        phase: TracePhase,
        step: u32,
        layer: u32,
        chosen: &[(u32, f32)],
    ) -> io::Result<()> {
        let bytes = self.layers.iter().find(|known| known.0 == layer).map_or(0, |known| known.1);
        let phase = u32::from(phase == TracePhase::Decode);
        for (slot, (expert, weight)) in chosen.iter().enumerate() {
            writeln!(self.out, "{turn},{phase},{step},{layer},{slot},{expert},{weight},0,{bytes}")?;
        }
        Ok(())
    }

    /// Ends the trace.
    ///
    /// # Errors
    /// What writing says.
    pub fn finish(mut self) -> io::Result<W> {
        self.out.flush()?;
        Ok(self.out)
    }
}

impl Trace {
    /// Writes a trace whose rows come token by token, as one turn. Weights are written as if all experts of
    /// a token weighed the same.
    ///
    /// # Errors
    /// What writing says.
    pub fn write(&self, out: impl Write, model: &str) -> io::Result<()> {
        let layers = self.layers.iter().map(|layer| (layer.number, layer.expert_bytes)).collect();
        let mut writer = TraceWriter::new(out, model, layers)?;
        let mut steps = vec![0u32; self.layers.len()];
        for row in &self.rows {
            let step = &mut steps[row.layer as usize];
            let chosen: Vec<(u32, f32)> = self.selections[row.selections.clone()]
                .iter()
                .map(|selection| (selection.expert, 1.0))
                .collect();
            writer.row(0, row.phase, *step, self.layers[row.layer as usize].number, &chosen)?;
            *step += 1;
        }
        writer.finish().map(drop)
    }
}
