//! AVX2 with FMA and F16C: 16 lanes are two registers of 8. `Ymm2<true>` uses the VNNI dot product of AVX.

use std::arch::x86_64::*;

use crate::simd::{Codes64, Dot64, Simd, Table, float_entry_points, integer_entry_points};

/// Lanes 0..8 and 8..16; `VNNI` says which integer dot product they use.
#[derive(Clone, Copy)]
pub(crate) struct Ymm2<const VNNI: bool>(__m256, __m256);

/// Window from which the mask of the first n lanes is loaded, at 16 − n.
static FIRST: [i32; 32] = [
    -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    0, 0,
];

/// Folds 8 lanes: l += l + 4, then + 2, + 1.
///
/// # Safety
/// Needs AVX.
#[inline(always)]
pub(crate) unsafe fn fold8(v: __m256) -> f32 {
    // SAFETY: the caller has AVX.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
    }
}

/// Nibbles of 16-bit elements that each hold one byte, as two bytes in column order.
///
/// # Safety
/// Needs AVX2.
#[inline(always)]
unsafe fn spread(v: __m256i) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe {
        _mm256_or_si256(
            _mm256_and_si256(v, _mm256_set1_epi16(0x000F)),
            _mm256_and_si256(_mm256_slli_epi16::<4>(v), _mm256_set1_epi16(0x0F00)),
        )
    }
}

/// 8 nibbles (4 bytes): each lane shifts its own down.
///
/// # Safety
/// Needs AVX2; `p` is readable for 4 bytes.
#[inline(always)]
unsafe fn eight_nibbles(p: *const u8) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        let shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
        let nibbles = _mm256_srlv_epi32(_mm256_set1_epi32(p.cast::<i32>().read_unaligned()), shifts);
        let values = _mm256_sub_epi32(_mm256_and_si256(nibbles, _mm256_set1_epi32(15)), _mm256_set1_epi32(8));
        _mm256_cvtepi32_ps(values)
    }
}

/// 8 E4M3 numbers from binary16 bits that are 2⁻⁸ of them; ±480 is a NaN code.
///
/// # Safety
/// Needs AVX and F16C.
#[inline(always)]
unsafe fn fp8_of_half(half: __m128i) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        let value = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0));
        let magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0), value);
        _mm256_or_ps(value, _mm256_cmp_ps::<_CMP_EQ_OQ>(magnitude, _mm256_set1_ps(480.0)))
    }
}

// SAFETY comments of the methods: the caller has AVX2, FMA and F16C, and pointers that are readable
// for the bytes that the trait names.
impl<const VNNI: bool> Simd for Ymm2<VNNI> {
    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: features.
        unsafe { Ymm2(_mm256_setzero_ps(), _mm256_setzero_ps()) }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: features.
        unsafe { Ymm2(_mm256_set1_ps(value), _mm256_set1_ps(value)) }
    }

    #[inline(always)]
    unsafe fn load_f32(p: *const u8) -> Self {
        // SAFETY: features; 64 bytes.
        unsafe { Ymm2(_mm256_loadu_ps(p.cast()), _mm256_loadu_ps(p.add(32).cast())) }
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self {
        // SAFETY: features; 32 bytes.
        unsafe {
            Ymm2(
                _mm256_cvtph_ps(_mm_loadu_si128(p.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(p.add(16).cast())),
            )
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        // SAFETY: features; 32 bytes. A bfloat16 is the upper half of a binary32.
        unsafe {
            let low = _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())));
            let high = _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(16).cast())));
            Ymm2(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high))
        }
    }

    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self {
        // SAFETY: features; 16 bytes.
        unsafe {
            let low = _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()));
            let high = _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.add(8).cast()));
            Ymm2(_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high))
        }
    }

    #[inline(always)]
    unsafe fn load_i4(p: *const u8) -> Self {
        // SAFETY: features; 4 + 4 bytes.
        unsafe { Ymm2(eight_nibbles(p), eight_nibbles(p.add(4))) }
    }

    #[inline(always)]
    unsafe fn load_fp8(p: *const u8) -> Self {
        // SAFETY: features; 16 bytes. The bits of an E4M3 code, moved to those of a binary16, are 2⁻⁸ of its
        // value (biases 7 and 15), subnormals too; the NaN codes come out as ±480.
        unsafe {
            let codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()));
            let sign = _mm256_slli_epi16::<8>(_mm256_and_si256(codes, _mm256_set1_epi16(0x80)));
            let half = _mm256_or_si256(
                sign,
                _mm256_slli_epi16::<7>(_mm256_and_si256(codes, _mm256_set1_epi16(0x7F))),
            );
            Ymm2(fp8_of_half(_mm256_castsi256_si128(half)), fp8_of_half(_mm256_extracti128_si256::<1>(half)))
        }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut u8) {
        // SAFETY: features; 64 bytes.
        unsafe {
            _mm256_storeu_ps(p.cast(), self.0);
            _mm256_storeu_ps(p.add(32).cast(), self.1);
        }
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        // SAFETY: features.
        unsafe { Ymm2(_mm256_mul_ps(self.0, b.0), _mm256_mul_ps(self.1, b.1)) }
    }

    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        // SAFETY: features.
        unsafe { Ymm2(_mm256_add_ps(self.0, b.0), _mm256_add_ps(self.1, b.1)) }
    }

    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        // SAFETY: features.
        unsafe { Ymm2(_mm256_fmadd_ps(self.0, b.0, c.0), _mm256_fmadd_ps(self.1, b.1, c.1)) }
    }

    #[inline(always)]
    unsafe fn fma_first(self, b: Self, c: Self, lanes: usize) -> Self {
        debug_assert!(lanes <= 16);
        // SAFETY: features; 16 − lanes + 16 <= 32 numbers of the window.
        unsafe {
            let mask = Self::load_f32(FIRST.as_ptr().add(16 - lanes).cast());
            let sum = self.fma(b, c);
            Ymm2(_mm256_blendv_ps(c.0, sum.0, mask.0), _mm256_blendv_ps(c.1, sum.1, mask.1))
        }
    }

    #[inline(always)]
    unsafe fn halves(v: [f32; 2]) -> Self {
        // SAFETY: features.
        unsafe { Ymm2(_mm256_set1_ps(v[0]), _mm256_set1_ps(v[1])) }
    }

    #[inline(always)]
    unsafe fn quarters(v: [f32; 4]) -> Self {
        // SAFETY: features.
        unsafe {
            Ymm2(
                _mm256_set_m128(_mm_set1_ps(v[1]), _mm_set1_ps(v[0])),
                _mm256_set_m128(_mm_set1_ps(v[3]), _mm_set1_ps(v[2])),
            )
        }
    }

    #[inline(always)]
    unsafe fn reduce(self) -> f32 {
        // SAFETY: features.
        unsafe { fold8(_mm256_add_ps(self.0, self.1)) }
    }

    #[inline(always)]
    unsafe fn load_i32(p: *const i32) -> Self {
        // SAFETY: features; 16 numbers.
        unsafe {
            Ymm2(
                _mm256_cvtepi32_ps(_mm256_loadu_si256(p.cast())),
                _mm256_cvtepi32_ps(_mm256_loadu_si256(p.add(8).cast())),
            )
        }
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a hint; it cannot fault.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }

    #[inline(always)]
    unsafe fn prefetch_second(p: *const u8) {
        // SAFETY: a hint; it cannot fault.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
}

/// Sums of four adjacent products of unsigned and signed bytes. The pairs must not pass 32767.
///
/// # Safety
/// Needs AVX2.
#[inline(always)]
unsafe fn dot4(u: __m256i, s: __m256i) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe { _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)) }
}

/// start + Σ of four products of unsigned and signed bytes. Without VNNI pairs must not pass 32767.
///
/// # Safety
/// Needs AVX2, and AVX-VNNI where `VNNI` is set.
#[inline(always)]
unsafe fn dot_add<const VNNI: bool>(start: __m256i, u: __m256i, s: __m256i) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { if VNNI { _mm256_dpbusd_avx_epi32(start, u, s) } else { _mm256_add_epi32(start, dot4(u, s)) } }
}

/// Writes the `f16` at `a` and at `b` as two `f32`.
///
/// # Safety
/// Needs F16C; 2 + 2 readable bytes, two writable numbers.
#[inline(always)]
pub(crate) unsafe fn widen_halves(a: *const u8, b: *const u8, out: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        let a = u32::from(a.cast::<u16>().read_unaligned());
        let b = u32::from(b.cast::<u16>().read_unaligned());
        let both = _mm_cvtsi32_si128((a | b << 16).cast_signed());
        _mm_storel_epi64(out.cast(), _mm_castps_si128(_mm_cvtph_ps(both)));
    }
}

impl<const VNNI: bool> Dot64 for Ymm2<VNNI> {
    type Bytes = [__m256i; 2];

    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> Self::Bytes {
        // SAFETY: features; 32 bytes.
        unsafe {
            let low = _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()));
            let high = _mm256_cvtepu8_epi16(_mm_loadu_si128(p.add(16).cast()));
            [spread(low), spread(high)]
        }
    }

    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> Self::Bytes {
        // SAFETY: features; 64 bytes.
        unsafe { [_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast())] }
    }

    #[inline(always)]
    unsafe fn dot_nibbles(w: Self::Bytes, x: *const i8, offsets: *const i32) -> Self {
        // SAFETY: the caller's promise; nibbles are codes with the zero 8.
        unsafe { Self::dot_codes(w, 8, x, offsets) }
    }

    #[inline(always)]
    unsafe fn dot_bytes(w: Self::Bytes, x: *const i8, offsets: *const i32) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self::dot_signed(w, x, offsets) }
    }
}

impl<const VNNI: bool> Codes64 for Ymm2<VNNI> {
    #[inline(always)]
    unsafe fn join(a: *const u8, b: *const u8) -> Self::Bytes {
        // SAFETY: features; 32 + 32 bytes.
        unsafe { [_mm256_loadu_si256(a.cast()), _mm256_loadu_si256(b.cast())] }
    }

    #[inline(always)]
    unsafe fn nibble_pairs(a: *const u8, b: *const u8) -> Self::Bytes {
        // SAFETY: features; 16 + 16 bytes.
        unsafe { [split_nibbles(a), split_nibbles(b)] }
    }

    #[inline(always)]
    unsafe fn shifted(p: *const u8, shift: u32, mask: u8) -> Self::Bytes {
        // SAFETY: features; 64 bytes.
        unsafe {
            let v = Self::load_bytes(p);
            [shifted(v[0], shift, mask), shifted(v[1], shift, mask)]
        }
    }

    #[inline(always)]
    unsafe fn twice(p: *const u8, low: u32, high: u32, mask: u8) -> Self::Bytes {
        // SAFETY: features; 32 bytes.
        unsafe {
            let v = _mm256_loadu_si256(p.cast());
            [shifted(v, low, mask), shifted(v, high, mask)]
        }
    }

    #[inline(always)]
    unsafe fn sixteens(bits: u64) -> Self::Bytes {
        // SAFETY: features.
        unsafe { [sixteens(bits as u32), sixteens((bits >> 32) as u32)] }
    }

    #[inline(always)]
    unsafe fn or_shifted<const SHIFT: u32>(low: Self::Bytes, high: Self::Bytes) -> Self::Bytes {
        // SAFETY: features.
        unsafe {
            let shifts = _mm256_set1_epi64x(i64::from(SHIFT));
            let high = [_mm256_sllv_epi64(high[0], shifts), _mm256_sllv_epi64(high[1], shifts)];
            [_mm256_or_si256(low[0], high[0]), _mm256_or_si256(low[1], high[1])]
        }
    }

    #[inline(always)]
    unsafe fn table_vector<const SHIFT: u32>(p: *const u8, table: &Table) -> Self {
        // SAFETY: features; 16 bytes, 16 numbers.
        unsafe {
            let shift = _mm_cvtsi32_si128(SHIFT.cast_signed());
            let codes = _mm_and_si128(_mm_srl_epi16(_mm_loadu_si128(p.cast()), shift), _mm_set1_epi8(15));
            let values = _mm_shuffle_epi8(_mm_loadu_si128(table.codes.as_ptr().cast()), codes);
            let high = _mm_unpackhi_epi64(values, values);
            Ymm2(
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(values)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high)),
            )
        }
    }

    #[inline(always)]
    unsafe fn look_up(codes: Self::Bytes, table: &[i8; 16]) -> Self::Bytes {
        // SAFETY: features; 16 bytes.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            [_mm256_shuffle_epi8(table, codes[0]), _mm256_shuffle_epi8(table, codes[1])]
        }
    }

    #[inline(always)]
    unsafe fn minus(codes: Self::Bytes, zero: i8) -> Self::Bytes {
        // SAFETY: features.
        unsafe {
            let zero = _mm256_set1_epi8(zero);
            [_mm256_sub_epi8(codes[0], zero), _mm256_sub_epi8(codes[1], zero)]
        }
    }

    #[inline(always)]
    unsafe fn store_codes(codes: Self::Bytes, p: *mut i8) {
        // SAFETY: features; 64 bytes.
        unsafe {
            _mm256_storeu_si256(p.cast(), codes[0]);
            _mm256_storeu_si256(p.add(32).cast(), codes[1]);
        }
    }

    #[inline(always)]
    unsafe fn dot_codes(codes: Self::Bytes, zero: i32, x: *const i8, offsets: *const i32) -> Self {
        // SAFETY: features; 64 activations, 16 offsets. A pair is at most 2 · 63 · 127.
        unsafe {
            let (x_low, x_high) = (_mm256_loadu_si256(x.cast()), _mm256_loadu_si256(x.add(32).cast()));
            let low = dot_add::<VNNI>(start(zero, offsets), codes[0], x_low);
            let high = dot_add::<VNNI>(start(zero, offsets.add(8)), codes[1], x_high);
            Ymm2(_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high))
        }
    }

    #[inline(always)]
    unsafe fn dot_signed(codes: Self::Bytes, x: *const i8, _offsets: *const i32) -> Self {
        // SAFETY: features; 64 activations. |w| as unsigned, its sign moved to x: a pair is at most 2 · 128 · 127.
        unsafe {
            let (x_low, x_high) = (_mm256_loadu_si256(x.cast()), _mm256_loadu_si256(x.add(32).cast()));
            let (x_low, x_high) = (_mm256_sign_epi8(x_low, codes[0]), _mm256_sign_epi8(x_high, codes[1]));
            let low = dot_add::<VNNI>(_mm256_setzero_si256(), _mm256_abs_epi8(codes[0]), x_low);
            let high = dot_add::<VNNI>(_mm256_setzero_si256(), _mm256_abs_epi8(codes[1]), x_high);
            Ymm2(_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high))
        }
    }

    #[inline(always)]
    unsafe fn widen_halves(a: *const u8, b: *const u8, out: *mut f32) {
        // SAFETY: features; 2 + 2 bytes, two numbers.
        unsafe { widen_halves(a, b, out) }
    }
}

/// The low nibbles of 16 bytes, then the high ones.
///
/// # Safety
/// Needs AVX2; `p` is readable for 16 bytes.
#[inline(always)]
unsafe fn split_nibbles(p: *const u8) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let v = _mm256_broadcastsi128_si256(_mm_loadu_si128(p.cast()));
        let v = _mm256_srlv_epi64(v, _mm256_setr_epi64x(0, 0, 4, 4));
        _mm256_and_si256(v, _mm256_set1_epi8(15))
    }
}

/// 16 where a bit is set: each byte gets the eight bits among which its own is, and keeps that one.
///
/// # Safety
/// Needs AVX2.
#[inline(always)]
unsafe fn sixteens(bits: u32) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe {
        let own = _mm256_set1_epi64x(0x8040_2010_0804_0201u64.cast_signed());
        let eights =
            _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
        let v = _mm256_shuffle_epi8(_mm256_set1_epi32(bits.cast_signed()), eights);
        let set = _mm256_cmpeq_epi8(_mm256_and_si256(v, own), own);
        _mm256_and_si256(set, _mm256_set1_epi8(16))
    }
}

/// −zero · Σx from −8 · Σx: where the dot product of codes above that zero begins.
///
/// # Safety
/// Needs AVX2; 8 numbers are readable.
#[inline(always)]
unsafe fn start(zero: i32, offsets: *const i32) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let offsets = _mm256_loadu_si256(offsets.cast());
        match zero {
            0 => _mm256_setzero_si256(),
            4 => _mm256_srai_epi32::<1>(offsets),
            8 => offsets,
            16 => _mm256_slli_epi32::<1>(offsets),
            _ => _mm256_slli_epi32::<2>(offsets),
        }
    }
}

/// (byte >> shift) & mask, where mask keeps at most 8 − shift bits.
///
/// # Safety
/// Needs AVX2.
#[inline(always)]
unsafe fn shifted(v: __m256i, shift: u32, mask: u8) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe {
        let v = _mm256_srlv_epi64(v, _mm256_set1_epi64x(i64::from(shift)));
        _mm256_and_si256(v, _mm256_set1_epi8(mask.cast_signed()))
    }
}

float_entry_points!(Ymm2<false>, "avx,avx2,fma,f16c");
integer_entry_points!(Ymm2<false>, "avx,avx2,fma,f16c");

/// The same with AVX-VNNI.
pub(crate) mod vnni {
    use super::{Ymm2, integer_entry_points};
    pub(crate) use super::{axpy, dot, gguf_matmul, gguf_matmul_t, matmul, matmul_t};

    integer_entry_points!(Ymm2<true>, "avx,avx2,fma,f16c,avxvnni");
}
