//! Instruction sets and their detection.

use std::fmt;

use thiserror::Error;

/// An instruction set that the kernels can be written in. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust: the reference.
    Scalar,
    /// aarch64 Advanced SIMD.
    Neon,
    /// x86-64 AVX2 with FMA and F16C.
    Avx2,
    /// [`Isa::Avx2`] with AVX-VNNI integer dot products.
    AvxVnni,
    /// x86-64 AVX-512 F, BW, DQ and VL.
    Avx512,
    /// [`Isa::Avx512`] with VNNI integer dot products.
    Avx512Vnni,
}

/// An instruction set that this machine lacks.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("this processor cannot run the {isa} kernels; the best it can run is {}", Isa::detect())]
pub struct UnsupportedIsa {
    /// Instruction set asked for.
    pub isa: Isa,
}

impl Isa {
    /// Every instruction set, slowest first.
    pub const ALL: [Isa; 6] = [Isa::Scalar, Isa::Neon, Isa::Avx2, Isa::AvxVnni, Isa::Avx512, Isa::Avx512Vnni];

    /// The best instruction set of this machine.
    pub fn detect() -> Isa {
        Isa::ALL.into_iter().rev().find(|isa| isa.is_supported()).unwrap_or(Isa::Scalar)
    }

    /// Whether this machine can run it.
    pub fn is_supported(self) -> bool {
        match self {
            Isa::Scalar => true,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => Isa::Avx2.is_supported() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.is_supported()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => Isa::Avx512.is_supported() && is_x86_feature_detected!("avx512vnni"),
            #[allow(unreachable_patterns, reason = "which arms exist depends on the target")]
            _ => false,
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Scalar => "scalar",
            Isa::Neon => "neon",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avx-vnni",
            Isa::Avx512 => "avx512",
            Isa::Avx512Vnni => "avx512-vnni",
        })
    }
}
