//! Exponential decay in whole numbers.

/// `2^(−ticks / half-life)` for any number of ticks, by a table of one octave in 1/2^31: the same bits on
/// every machine, and since a value is decayed from its last change on, no error adds up.
pub(super) struct Decay {
    roots: Vec<u32>,
}

const ONE: u64 = 1 << 31;

impl Decay {
    /// With a half-life of `2^log` ticks.
    pub(super) fn new(log: u32) -> Decay {
        let root = (0..log).fold(ONE / 2, |x, _| (x * ONE).isqrt());
        let octave = std::iter::successors(Some(ONE), |x| Some(x * root / ONE));
        // All at most 2^31.
        Decay { roots: octave.take(1 << log).map(|x| x as u32).collect() }
    }

    /// `value`, below 2^32, after `ticks`; rounded down.
    pub(super) fn after(&self, value: u64, ticks: u32) -> u64 {
        let octave = self.roots.len() as u32;
        let shift = ticks / octave;
        if shift >= 32 {
            return 0;
        }
        (value * u64::from(self.roots[(ticks % octave) as usize])) >> (31 + shift)
    }

    /// What is added a tick so that the sum of a value added every tick tends to `one`.
    pub(super) fn unit(&self, one: u64) -> u64 {
        one - self.after(one, 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decay_is_the_power_of_two() {
        for log in [0, 2, 4, 6] {
            let decay = Decay::new(log);
            for ticks in 0..400u32 {
                let half_life = f64::from(1u32 << log);
                let wanted = (f64::from(1u32 << 24) * (-f64::from(ticks) / half_life).exp2()).floor();
                let got = decay.after(1 << 24, ticks) as f64;
                assert!((got - wanted).abs() <= 1.0, "{log} {ticks}: {got} {wanted}");
            }
        }
        assert_eq!(Decay::new(2).after(u32::MAX.into(), u32::MAX), 0);
    }
}
