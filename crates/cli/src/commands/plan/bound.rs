//! From bytes and measured rates to a bound on tokens a second.

use metaltail_store::LayerExperts;

use crate::token_cost::{TokenCost, drive_bytes};

/// What a token reads, and from where.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reads {
    /// Bytes by role.
    pub cost: TokenCost,
    /// Share of look-ups that a cache of the planned size answers, by bytes, when the router
    /// chooses every expert equally often; none where the model has no experts.
    pub hit_rate: Option<f64>,
    /// Bytes expected from the drive.
    pub expected: f64,
}

impl Reads {
    /// With `cap` experts of each layer in memory. Whichever these are, an expert drawn uniformly
    /// is among them with probability cap / N.
    pub fn new(cost: &TokenCost, places: &[LayerExperts], cap: usize) -> Reads {
        let total: f64 = places.iter().map(|layer| drive_bytes(layer) as f64).sum();
        let kept = |layer: &LayerExperts| {
            let n = layer.experts.len().max(1);
            drive_bytes(layer) as f64 * cap.min(n) as f64 / n as f64
        };
        let cached: f64 = places.iter().map(kept).sum();
        let hit_rate = (total > 0.0).then(|| cached / total);
        let missed = hit_rate.map_or(0.0, |rate| 1.0 - rate);
        Reads { cost: *cost, hit_rate, expected: cost.routed_on_drive as f64 * missed }
    }
}

/// How fast decoding can be at most, reading and computing at the same time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    /// What is busy all the time: `memory` or `drive`.
    pub resource: &'static str,
    /// Tokens a second at most.
    pub tokens_per_second: f64,
    /// Seconds that memory is busy for a token.
    pub memory_seconds: f64,
    /// Seconds that the drive is busy for a token, where its rate is known.
    pub drive_seconds: Option<f64>,
}

impl Bound {
    /// `t_mem = (dense + routed + read) / memory` (what is read is also written to memory once),
    /// `t_drive = read / drive`; overlapped, the longer one decides. Rates in 10⁹ bytes a second.
    pub fn new(reads: &Reads, memory: f64, drive: Option<f64>) -> Bound {
        let resident = reads.cost.resident() as f64;
        let memory_seconds = (resident + reads.expected) / (memory * 1e9);
        let drive_seconds = drive.map(|rate| reads.expected / (rate * 1e9));
        let (resource, seconds) = match drive_seconds {
            Some(drive) if drive > memory_seconds => ("drive", drive),
            _ => ("memory", memory_seconds),
        };
        Bound { resource, tokens_per_second: 1.0 / seconds, memory_seconds, drive_seconds }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use metaltail_container::Extent;
    use metaltail_store::testing::place;

    const COST: TokenCost =
        TokenCost { dense: 1_000_000_000, routed: 1_000_000_000, routed_on_drive: 1_000_000_000 };

    fn reads(missed: f64) -> Reads {
        Reads { cost: COST, hit_rate: Some(1.0 - missed), expected: 1e9 * missed }
    }

    #[test]
    fn the_slower_resource_binds() {
        let cold = Bound::new(&reads(1.0), 20.0, Some(1.0));
        assert_eq!((cold.resource, cold.tokens_per_second), ("drive", 1.0));
        let warm = Bound::new(&reads(0.0), 20.0, Some(1.0));
        assert_eq!((warm.resource, warm.tokens_per_second), ("memory", 10.0));
        assert_eq!(Bound::new(&reads(1.0), 20.0, None).drive_seconds, None);
    }

    #[test]
    fn reads_fall_with_the_share_of_experts_in_memory() {
        let extent = |expert: u64| Extent { file: 0, offset: expert * 4096, len: 4096 };
        let experts = (0..4).map(|expert| place(&[extent(expert)])).collect();
        let layers = [LayerExperts { layer: 0, experts }];
        let expected = |cap| Reads::new(&COST, &layers, cap).expected;
        assert_eq!(expected(0), 1e9);
        assert_eq!(expected(1), 0.75e9);
        assert_eq!(expected(9), 0.0);
    }
}
