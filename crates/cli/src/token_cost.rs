//! What one decoded token reads: the left side of every speed bound.

use metaltail_container::{Inventory, Role, TensorSpec};
use metaltail_engine::memory::resident_bytes;
use metaltail_model::{LayerPlan, Plan};
use metaltail_store::LayerExperts;

/// Bytes that one row reads while it is decoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenCost {
    /// Resident dense weights. The embedding table counts with one row, unless it is the head too.
    pub dense: u64,
    /// Weights and scales of the chosen experts of all sparse layers.
    pub routed: u64,
    /// The same as it lies on the drive, padding included: what a token reads without a cache.
    pub routed_on_drive: u64,
}

impl TokenCost {
    /// The cost of a plan whose dense tensors have `stored` bytes and whose experts lie at `places`
    /// (main layers in order). An expert counts with its layer's mean.
    ///
    /// # Errors
    /// What `stored` refuses.
    pub fn of<E>(
        plan: &Plan,
        inventory: &Inventory,
        places: &[LayerExperts],
        mut stored: impl FnMut(&TensorSpec) -> Result<u64, E>,
    ) -> Result<TokenCost, E> {
        let mut cost = TokenCost::default();
        // Optional tensors are the draft layer's, which decoding without drafts does not read.
        for spec in inventory.tensors.iter().filter(|spec| !spec.optional) {
            let bytes = resident_bytes(spec, &mut stored)?;
            let one_row = spec.role == Role::Embedding && !plan.tied_head;
            let read = if one_row { bytes.div_ceil(spec.rows as u64) } else { bytes };
            cost.dense = cost.dense.saturating_add(read);
        }
        let chosen = plan.layers.iter().filter_map(LayerPlan::moe).map(|moe| moe.top_k);
        for (top_k, layer) in chosen.zip(places) {
            let of_layer = |bytes: u64| mean_times(bytes, top_k, layer.experts.len());
            cost.routed = cost.routed.saturating_add(of_layer(weight_bytes(layer)));
            let on_drive = of_layer(drive_bytes(layer));
            cost.routed_on_drive = cost.routed_on_drive.saturating_add(on_drive);
        }
        Ok(cost)
    }

    /// All that memory must deliver for one token when every expert is there.
    pub fn resident(&self) -> u64 {
        self.dense.saturating_add(self.routed)
    }
}

/// `bytes / parts × times` without overflow and without rounding in between.
fn mean_times(bytes: u64, times: usize, parts: usize) -> u64 {
    let product = u128::from(bytes) * times as u128;
    u64::try_from(product / parts.max(1) as u128).unwrap_or(u64::MAX)
}

/// Bytes of all experts of a layer, weights and scales alone.
fn weight_bytes(layer: &LayerExperts) -> u64 {
    let parts = layer.experts.iter().flat_map(|place| &place.parts);
    parts.fold(0, |sum, part| sum.saturating_add(part.layout.bytes() as u64))
}

/// Bytes of all runs of a layer.
pub fn drive_bytes(layer: &LayerExperts) -> u64 {
    let runs = layer.experts.iter().flat_map(|place| &place.runs);
    runs.fold(0, |sum, run| sum.saturating_add(run.len))
}
