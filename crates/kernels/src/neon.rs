//! aarch64 Advanced SIMD: 16 lanes are four registers of 4.

use std::arch::aarch64::*;

use half::{bf16, f16};
use metaltail_quant::FP8_TABLE;

use crate::simd::{Dot64, Simd, entry_points};

/// Lanes 0..4, 4..8, 8..12, 12..16.
#[derive(Clone, Copy)]
pub(crate) struct Quad([float32x4_t; 4]);

impl Quad {
    /// From 16 numbers.
    ///
    /// # Safety
    /// Needs NEON.
    #[inline(always)]
    unsafe fn from_array(values: [f32; 16]) -> Quad {
        // SAFETY: 16 numbers.
        unsafe { Quad([0, 4, 8, 12].map(|at| vld1q_f32(values.as_ptr().add(at)))) }
    }

    /// From 16 signed bytes.
    ///
    /// # Safety
    /// Needs NEON.
    #[inline(always)]
    unsafe fn from_i8(v: int8x16_t) -> Quad {
        // SAFETY: no pointers.
        unsafe {
            let (low, high) = (vmovl_s8(vget_low_s8(v)), vmovl_high_s8(v));
            let widen = |v: int16x4_t| vcvtq_f32_s32(vmovl_s16(v));
            Quad([
                widen(vget_low_s16(low)),
                widen(vget_high_s16(low)),
                widen(vget_low_s16(high)),
                widen(vget_high_s16(high)),
            ])
        }
    }
}

/// 16 nibbles (8 bytes) as signed bytes v − 8 in column order.
///
/// # Safety
/// Needs NEON; `p` is readable for 8 bytes.
#[inline(always)]
unsafe fn nibbles(p: *const u8) -> int8x16_t {
    // SAFETY: the caller's promise.
    unsafe {
        let bytes = vld1_u8(p);
        let pairs = vzip_u8(vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8::<4>(bytes));
        vsubq_s8(vreinterpretq_s8_u8(vcombine_u8(pairs.0, pairs.1)), vdupq_n_s8(8))
    }
}

// SAFETY comments of the methods: the caller has NEON, and pointers that are readable for the bytes
// that the trait names.
impl Simd for Quad {
    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: features.
        unsafe { Self::splat(0.0) }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: features.
        unsafe { Quad([vdupq_n_f32(value); 4]) }
    }

    #[inline(always)]
    unsafe fn load_f32(p: *const u8) -> Self {
        // SAFETY: 64 bytes. Loaded as bytes, which may lie at any alignment.
        unsafe { Quad([0, 16, 32, 48].map(|at| vreinterpretq_f32_u8(vld1q_u8(p.add(at))))) }
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self {
        // SAFETY: 32 bytes.
        unsafe { Self::from_array(p.cast::<[[u8; 2]; 16]>().read().map(|b| f16::from_le_bytes(b).to_f32())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        // SAFETY: 32 bytes.
        unsafe { Self::from_array(p.cast::<[[u8; 2]; 16]>().read().map(|b| bf16::from_le_bytes(b).to_f32())) }
    }

    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self {
        // SAFETY: 16 bytes.
        unsafe { Self::from_i8(vreinterpretq_s8_u8(vld1q_u8(p))) }
    }

    #[inline(always)]
    unsafe fn load_i4(p: *const u8) -> Self {
        // SAFETY: 8 bytes.
        unsafe { Self::from_i8(nibbles(p)) }
    }

    #[inline(always)]
    unsafe fn load_fp8(p: *const u8) -> Self {
        // SAFETY: 16 bytes.
        unsafe { Self::from_array(p.cast::<[u8; 16]>().read().map(|code| FP8_TABLE[usize::from(code)])) }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut u8) {
        for (i, v) in self.0.into_iter().enumerate() {
            // SAFETY: 64 bytes.
            unsafe { vst1q_u8(p.add(16 * i), vreinterpretq_u8_f32(v)) };
        }
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        // SAFETY: features.
        unsafe { Quad(std::array::from_fn(|i| vmulq_f32(self.0[i], b.0[i]))) }
    }

    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        // SAFETY: features.
        unsafe { Quad(std::array::from_fn(|i| vfmaq_f32(c.0[i], self.0[i], b.0[i]))) }
    }

    #[inline(always)]
    unsafe fn fma_first(self, b: Self, c: Self, lanes: usize) -> Self {
        // SAFETY: features.
        unsafe {
            let sum = self.fma(b, c);
            let index = [0u32, 1, 2, 3];
            let index = vld1q_u32(index.as_ptr());
            let count = vdupq_n_u32(lanes as u32);
            Quad(std::array::from_fn(|i| {
                let mask = vcltq_u32(vaddq_u32(index, vdupq_n_u32(4 * i as u32)), count);
                vbslq_f32(mask, sum.0[i], c.0[i])
            }))
        }
    }

    #[inline(always)]
    unsafe fn quarters(values: [f32; 4]) -> Self {
        // SAFETY: features.
        unsafe { Quad(values.map(|v| vdupq_n_f32(v))) }
    }

    #[inline(always)]
    unsafe fn reduce(self) -> f32 {
        // SAFETY: features.
        unsafe {
            let [a, b, c, d] = self.0;
            let four = vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d));
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        }
    }

    #[inline(always)]
    unsafe fn prefetch(_p: *const u8) {}
}

impl Dot64 for Quad {
    type Bytes = [int8x16_t; 4];

    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> Self::Bytes {
        // SAFETY: 32 bytes.
        unsafe { [0, 8, 16, 24].map(|at| nibbles(p.add(at))) }
    }

    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> Self::Bytes {
        // SAFETY: 64 bytes.
        unsafe { [0, 16, 32, 48].map(|at| vreinterpretq_s8_u8(vld1q_u8(p.add(at)))) }
    }

    #[inline(always)]
    unsafe fn dot_nibbles(w: Self::Bytes, x: *const i8, offsets: *const i32) -> Self {
        // SAFETY: the nibbles are signed already.
        unsafe { Self::dot_bytes(w, x, offsets) }
    }

    #[inline(always)]
    unsafe fn dot_bytes(w: Self::Bytes, x: *const i8, _offsets: *const i32) -> Self {
        // SAFETY: 64 activations. A product is at most 128 · 127, so 16 bits hold it; sums are taken in 32.
        unsafe {
            Quad(std::array::from_fn(|i| {
                let x = vld1q_s8(x.add(16 * i));
                let low = vpaddlq_s16(vmull_s8(vget_low_s8(w[i]), vget_low_s8(x)));
                let high = vpaddlq_s16(vmull_high_s8(w[i], x));
                vcvtq_f32_s32(vpaddq_s32(low, high))
            }))
        }
    }
}

entry_points!(Quad, "neon");
