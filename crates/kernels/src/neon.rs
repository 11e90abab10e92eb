//! aarch64 Advanced SIMD: 16 lanes are four registers of 4.

use std::arch::aarch64::*;

use half::{bf16, f16};
use metaltail_quant::FP8_TABLE;

use crate::simd::{Codes64, Dot64, Simd, Table, float_entry_points, integer_entry_points};

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
    unsafe fn add(self, b: Self) -> Self {
        // SAFETY: features.
        unsafe { Quad(std::array::from_fn(|i| vaddq_f32(self.0[i], b.0[i]))) }
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
    unsafe fn halves(v: [f32; 2]) -> Self {
        // SAFETY: features.
        unsafe { Self::quarters([v[0], v[0], v[1], v[1]]) }
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
    unsafe fn load_i32(p: *const i32) -> Self {
        // SAFETY: 16 numbers.
        unsafe { Quad([0, 4, 8, 12].map(|at| vcvtq_f32_s32(vld1q_s32(p.add(at))))) }
    }

    #[inline(always)]
    unsafe fn prefetch(_p: *const u8) {}

    #[inline(always)]
    unsafe fn prefetch_second(_p: *const u8) {}
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

/// (byte >> shift) & mask.
///
/// # Safety
/// Needs NEON.
#[inline(always)]
unsafe fn shifted(v: uint8x16_t, shift: u32, mask: u8) -> int8x16_t {
    // SAFETY: the caller's promise. A negative count shifts to the right.
    unsafe { vreinterpretq_s8_u8(vandq_u8(vshlq_u8(v, vdupq_n_s8(-(shift as i8))), vdupq_n_u8(mask))) }
}

impl Codes64 for Quad {
    #[inline(always)]
    unsafe fn join(a: *const u8, b: *const u8) -> Self::Bytes {
        // SAFETY: 32 + 32 bytes.
        unsafe { [a, a.add(16), b, b.add(16)].map(|p| vreinterpretq_s8_u8(vld1q_u8(p))) }
    }

    #[inline(always)]
    unsafe fn nibble_pairs(a: *const u8, b: *const u8) -> Self::Bytes {
        // SAFETY: 16 + 16 bytes.
        unsafe {
            let (a, b) = (vld1q_u8(a), vld1q_u8(b));
            [shifted(a, 0, 15), shifted(a, 4, 15), shifted(b, 0, 15), shifted(b, 4, 15)]
        }
    }

    #[inline(always)]
    unsafe fn shifted(p: *const u8, shift: u32, mask: u8) -> Self::Bytes {
        // SAFETY: 64 bytes.
        unsafe { [0, 16, 32, 48].map(|at| shifted(vld1q_u8(p.add(at)), shift, mask)) }
    }

    #[inline(always)]
    unsafe fn twice(p: *const u8, low: u32, high: u32, mask: u8) -> Self::Bytes {
        // SAFETY: 32 bytes.
        unsafe {
            let (a, b) = (vld1q_u8(p), vld1q_u8(p.add(16)));
            [shifted(a, low, mask), shifted(b, low, mask), shifted(a, high, mask), shifted(b, high, mask)]
        }
    }

    #[inline(always)]
    unsafe fn sixteens(bits: u64) -> Self::Bytes {
        // SAFETY: features. Each byte gets the eight bits among which its own is, and keeps that one.
        unsafe {
            let own = vreinterpretq_u8_u64(vdupq_n_u64(0x8040_2010_0804_0201));
            [0, 16, 32, 48].map(|at| {
                let (low, high) = (vdup_n_u8((bits >> at) as u8), vdup_n_u8((bits >> (at + 8)) as u8));
                let set = vtstq_u8(vcombine_u8(low, high), own);
                vreinterpretq_s8_u8(vandq_u8(set, vdupq_n_u8(16)))
            })
        }
    }

    #[inline(always)]
    unsafe fn or_shifted<const SHIFT: u32>(low: Self::Bytes, high: Self::Bytes) -> Self::Bytes {
        // SAFETY: features.
        unsafe { std::array::from_fn(|i| vorrq_s8(low[i], vshlq_s8(high[i], vdupq_n_s8(SHIFT as i8)))) }
    }

    #[inline(always)]
    unsafe fn table_vector<const SHIFT: u32>(p: *const u8, table: &Table) -> Self {
        // SAFETY: 16 bytes, 16 numbers.
        unsafe {
            let codes = vreinterpretq_u8_s8(shifted(vld1q_u8(p), SHIFT, 15));
            Self::from_i8(vqtbl1q_s8(vld1q_s8(table.codes.as_ptr()), codes))
        }
    }

    #[inline(always)]
    unsafe fn look_up(codes: Self::Bytes, table: &[i8; 16]) -> Self::Bytes {
        // SAFETY: 16 bytes.
        unsafe {
            let table = vld1q_s8(table.as_ptr());
            codes.map(|codes| vqtbl1q_s8(table, vreinterpretq_u8_s8(codes)))
        }
    }

    #[inline(always)]
    unsafe fn minus(codes: Self::Bytes, zero: i8) -> Self::Bytes {
        // SAFETY: features.
        unsafe { codes.map(|codes| vsubq_s8(codes, vdupq_n_s8(zero))) }
    }

    #[inline(always)]
    unsafe fn store_codes(codes: Self::Bytes, p: *mut i8) {
        for (i, v) in codes.into_iter().enumerate() {
            // SAFETY: 64 bytes.
            unsafe { vst1q_s8(p.add(16 * i), v) };
        }
    }

    #[inline(always)]
    unsafe fn dot_codes(codes: Self::Bytes, zero: i32, x: *const i8, offsets: *const i32) -> Self {
        // SAFETY: codes are below 64, so they are signed bytes with and without their zero.
        unsafe { Self::dot_bytes(Self::minus(codes, zero as i8), x, offsets) }
    }

    #[inline(always)]
    unsafe fn dot_signed(codes: Self::Bytes, x: *const i8, offsets: *const i32) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self::dot_bytes(codes, x, offsets) }
    }

    #[inline(always)]
    unsafe fn widen_halves(a: *const u8, b: *const u8, out: *mut f32) {
        for (i, p) in [a, b].into_iter().enumerate() {
            // SAFETY: 2 + 2 bytes, two numbers.
            unsafe { *out.add(i) = f16::from_le_bytes(p.cast::<[u8; 2]>().read()).to_f32() };
        }
    }
}

float_entry_points!(Quad, "neon");
integer_entry_points!(Quad, "neon");
