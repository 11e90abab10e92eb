//! Rotary position embedding: frequencies from the configuration, rotation of heads.

use std::f64::consts::PI;

use crate::config::{ConfigError, ConfigReader};
use crate::plan::{RopePairs, RopePlan};

/// What a family takes for granted where its configuration is silent.
#[derive(Clone, Copy)]
pub(crate) struct Defaults {
    /// Base of the frequencies.
    pub theta: f64,
    /// Share of a head that is rotated; `None` in families that rotate all of it, in which no
    /// configuration may ask for less.
    pub part: Option<f64>,
}

impl Defaults {
    /// Those of most families.
    pub(crate) const USUAL: Defaults = Defaults { theta: 10_000.0, part: None };
}

/// Reads the rotation of heads of `width` elements from `rope_parameters`, or from the older
/// `rope_theta` and `rope_scaling`.
pub(crate) fn plan(
    config: &ConfigReader<'_>,
    width: usize,
    pairs: RopePairs,
    defaults: Defaults,
) -> Result<RopePlan, ConfigError> {
    let Rotation { theta, part, yarn } = Rotation::of(config, defaults)?;
    // Cut to whole elements, as the reference does; `part` is at most 1.
    let dim = (width as f64 * part) as usize;
    config.refuse_unless(dim.is_multiple_of(2) && dim > 0, format!("a rotation of {dim} elements"))?;
    Ok(match yarn {
        None => RopePlan { dim, inv_freq: frequencies(theta, dim), pairs, magnitude: 1.0 },
        Some(yarn) => {
            let inv_freq = yarn.frequencies(theta, dim);
            RopePlan { dim, inv_freq, pairs, magnitude: yarn.magnitude() as f32 }
        }
    })
}

/// What a configuration says about rotation, whatever the width.
#[derive(PartialEq)]
struct Rotation {
    theta: f64,
    /// Share of a head that is rotated.
    part: f64,
    yarn: Option<Yarn>,
}

impl Rotation {
    /// Reads the newer and the older keys; where a file has both they must say the same, since only
    /// one of them can be computed.
    fn of(config: &ConfigReader<'_>, defaults: Defaults) -> Result<Rotation, ConfigError> {
        let (newer, older) = (config.object("rope_parameters")?, config.object("rope_scaling")?);
        if defaults.part.is_none() {
            for object in [Some(*config), newer, older].into_iter().flatten() {
                object.only_number("partial_rotary_factor", 1.0)?;
            }
        }
        let top = (
            config.number_or("rope_theta", defaults.theta)?,
            config.number_or("partial_rotary_factor", defaults.part.unwrap_or(1.0))?,
        );
        let Some(newer) = newer else {
            return Self::read(config, older, top);
        };
        let rotation = Self::read(config, Some(newer), top)?;
        for (key, found) in [("rope_theta", rotation.theta), ("partial_rotary_factor", rotation.part)] {
            let said = config.number_or(key, found)?;
            if said != found {
                return Err(ConfigError::Inconsistent(format!(
                    "`{key}` is {said}, but `rope_parameters.{key}` is {found}"
                )));
            }
        }
        if older.is_some() && Self::read(config, older, (rotation.theta, rotation.part))? != rotation {
            return Err(ConfigError::Inconsistent(
                "`rope_scaling` and `rope_parameters` ask for different rotations".into(),
            ));
        }
        Ok(rotation)
    }

    fn read(
        config: &ConfigReader<'_>,
        parameters: Option<ConfigReader<'_>>,
        (mut theta, mut part): (f64, f64),
    ) -> Result<Rotation, ConfigError> {
        let mut kind = "default";
        if let Some(parameters) = parameters {
            theta = parameters.number_or("rope_theta", theta)?;
            part = parameters.number_or("partial_rotary_factor", part)?;
            for key in ["type", "rope_type"] {
                if parameters.get(key).is_some() {
                    kind = parameters.text(key)?;
                }
            }
        }
        config.refuse_unless(theta > 1.0, format!("rope_theta {theta}"))?;
        config.refuse_unless(part > 0.0 && part <= 1.0, format!("partial_rotary_factor {part}"))?;
        let yarn = match (kind, parameters) {
            ("yarn", Some(parameters)) => Some(Yarn::read(&parameters, config)?),
            ("default", _) => None,
            (other, _) => return Err(config.unsupported(format!("rope_type {other:?}"))),
        };
        Ok(Rotation { theta, part, yarn })
    }
}

/// `1 / theta^(2j / dim)` in f32, as the reference computes it.
fn frequencies(theta: f64, dim: usize) -> Vec<f32> {
    (0..dim / 2).map(|j| 1.0 / power(theta, 2 * j, dim)).collect()
}

fn power(theta: f64, index: usize, dim: usize) -> f32 {
    let exponent = index as f32 / dim as f32;
    theta.powf(f64::from(exponent)) as f32
}

/// Context extension by interpolation of low frequencies (YaRN, arXiv 2309.00071, §3.2–3.4).
#[derive(PartialEq)]
pub(crate) struct Yarn {
    factor: f64,
    beta_fast: f64,
    beta_slow: f64,
    original_context: f64,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    attention_factor: Option<f64>,
    truncate: bool,
}

impl Yarn {
    /// The parameters, if the configuration asks for YaRN.
    pub(crate) fn of(config: &ConfigReader<'_>) -> Result<Option<Yarn>, ConfigError> {
        Ok(Rotation::of(config, Defaults::USUAL)?.yarn)
    }

    fn read(parameters: &ConfigReader<'_>, config: &ConfigReader<'_>) -> Result<Self, ConfigError> {
        let optional = |key| -> Result<Option<f64>, ConfigError> {
            parameters.get(key).map(|_| parameters.number_or(key, 0.0)).transpose()
        };
        let context = config.size_or("max_position_embeddings", 4096, 1..=1 << 28)?;
        let yarn = Yarn {
            factor: parameters.number_or("factor", 1.0)?,
            beta_fast: parameters.number_or("beta_fast", 32.0)?,
            beta_slow: parameters.number_or("beta_slow", 1.0)?,
            original_context: parameters.number_or("original_max_position_embeddings", context as f64)?,
            mscale: optional("mscale")?,
            mscale_all_dim: optional("mscale_all_dim")?,
            attention_factor: optional("attention_factor")?,
            truncate: parameters.flag_or("truncate", true)?,
        };
        config.refuse_unless(yarn.factor >= 1.0, format!("a YaRN factor of {}", yarn.factor))?;
        config.refuse_unless(
            yarn.original_context >= 1.0 && yarn.beta_fast > 0.0 && yarn.beta_slow > 0.0,
            "YaRN parameters that are not positive",
        )?;
        Ok(yarn)
    }

    /// `0.1 · m · ln(factor) + 1`.
    fn scale_of(&self, m: f64) -> f64 {
        if self.factor <= 1.0 { 1.0 } else { 0.1 * m * self.factor.ln() + 1.0 }
    }

    fn magnitude(&self) -> f64 {
        match (self.attention_factor, self.mscale, self.mscale_all_dim) {
            (Some(factor), _, _) => factor,
            (None, Some(m), Some(all)) if m != 0.0 && all != 0.0 => self.scale_of(m) / self.scale_of(all),
            _ => self.scale_of(1.0),
        }
    }

    /// Factor on the attention scale of models that set `mscale_all_dim` (DeepSeek).
    pub(crate) fn score_factor(&self) -> f64 {
        match self.mscale_all_dim {
            Some(all) if all != 0.0 => self.scale_of(all).powi(2),
            _ => 1.0,
        }
    }

    fn frequencies(&self, theta: f64, dim: usize) -> Vec<f32> {
        let rotations =
            |count: f64| dim as f64 * (self.original_context / (count * 2.0 * PI)).ln() / (2.0 * theta.ln());
        let (mut low, mut high) = (rotations(self.beta_fast), rotations(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let low = low.max(0.0);
        let mut high = high.min(dim as f64 - 1.0);
        if low == high {
            high += 0.001;
        }
        (0..dim / 2)
            .map(|j| {
                let base = power(theta, 2 * j, dim);
                let ramp = ((j as f64 - low) / (high - low)).clamp(0.0, 1.0) as f32;
                let kept = 1.0 - ramp;
                (1.0 / (self.factor as f32 * base)) * (1.0 - kept) + (1.0 / base) * kept
            })
            .collect()
    }
}

/// Cosine and sine of every pair at one position.
pub(crate) struct Angles {
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Angles {
    /// Cosine of every pair.
    pub(crate) fn cosines(&self) -> &[f32] {
        &self.cos
    }

    /// Sine of every pair.
    pub(crate) fn sines(&self) -> &[f32] {
        &self.sin
    }
}

impl RopePlan {
    /// Angles are formed in f32, as the reference forms them.
    pub(crate) fn angles(&self, position: u32) -> Angles {
        let angle = |frequency: &f32| f64::from(position as f32 * frequency);
        let scaled = |value: f64| value as f32 * self.magnitude;
        Angles {
            cos: self.inv_freq.iter().map(|f| scaled(angle(f).cos())).collect(),
            sin: self.inv_freq.iter().map(|f| scaled(angle(f).sin())).collect(),
        }
    }

    /// Rotates the first `dim` elements of `head` in place; results are written as halves.
    pub(crate) fn rotate(&self, head: &mut [f32], angles: &Angles) {
        let half = self.dim / 2;
        let mut result = vec![0.0f32; self.dim];
        for j in 0..half {
            let (a, b) = match self.pairs {
                RopePairs::Interleaved => (head[2 * j], head[2 * j + 1]),
                RopePairs::Halves => (head[j], head[half + j]),
            };
            result[j] = a * angles.cos[j] - b * angles.sin[j];
            result[half + j] = b * angles.cos[j] + a * angles.sin[j];
        }
        head[..self.dim].copy_from_slice(&result);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(pairs: RopePairs) -> RopePlan {
        RopePlan { dim: 4, inv_freq: frequencies(10_000.0, 4), pairs, magnitude: 1.0 }
    }

    #[test]
    fn interleaved_pairs_come_out_as_halves() {
        let rope = rope(RopePairs::Interleaved);
        let mut head = [1.0, 2.0, 3.0, 4.0, 9.0];
        rope.rotate(&mut head, &rope.angles(0));
        assert_eq!(head, [1.0, 3.0, 2.0, 4.0, 9.0]);
    }

    #[test]
    fn scores_depend_on_the_distance_alone() {
        for pairs in [RopePairs::Interleaved, RopePairs::Halves] {
            let rope = rope(pairs);
            let score = |q: u32, k: u32| {
                let mut a = [0.3, -0.7, 1.1, 0.2];
                let mut b = [-0.4, 0.9, 0.5, -1.3];
                rope.rotate(&mut a, &rope.angles(q));
                rope.rotate(&mut b, &rope.angles(k));
                a.iter().zip(&b).map(|(x, y)| x * y).sum::<f32>()
            };
            assert!((score(7, 3) - score(104, 100)).abs() < 1e-5);
        }
    }
}
