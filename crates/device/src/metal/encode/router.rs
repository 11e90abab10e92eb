//! The launch of the choice of experts.

use metaltail_kernels::{ComputeError, Route};

use super::{Grid, THREADGROUP_BYTES, sixteen, threads_for};
use crate::metal::launch::Launch;
use crate::metal::layout::{narrow, too_large, words};

/// The choice of experts for all rows.
pub(in crate::metal) fn route(grid: Grid, route: &Route) -> Result<Launch, ComputeError> {
    let (groups, kept) = route.groups.unwrap_or((1, 1));
    let mut memory = [route.experts, route.experts, groups, route.top_k];
    for bytes in &mut memory {
        *bytes = sixteen("experts of a layer", *bytes)?;
    }
    if memory.iter().fold(0usize, |sum, bytes| sum.saturating_add(*bytes)) > THREADGROUP_BYTES {
        // Scores and keys, and where each expert is a group and all are chosen as much again.
        return Err(too_large("experts of a layer", route.experts, THREADGROUP_BYTES / 16));
    }
    let (rows, experts) =
        (narrow("rows to route", route.rows)?, narrow("experts of a layer", route.experts)?);
    let parameters = [
        rows,
        experts,
        narrow("experts of a row", route.top_k)?,
        u32::from(route.softmax),
        u32::from(route.bias.is_some()),
        narrow("groups of experts", groups)?,
        narrow("groups that are kept", kept)?,
        u32::from(route.normalise),
        route.scale.to_bits(),
    ];
    let launch = Launch::new("route", [grid.cap(rows), 1], threads_for(experts));
    let launch = launch.reads(route.logits.extent(route.rows * route.experts)?);
    let launch = match route.bias {
        Some(bias) => launch.reads(bias.extent(route.experts)?),
        None => launch.stand_in(route.logits.buffer),
    };
    let chosen = route.rows * route.top_k;
    let launch = launch.writes(route.ids.extent(chosen)?).writes(route.weights.extent(chosen)?);
    let launch = launch.writes(route.broken.extent(route.rows)?).given(words(&parameters));
    Ok(memory.into_iter().fold(launch, Launch::threadgroup))
}
