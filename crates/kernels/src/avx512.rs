//! AVX-512: 16 lanes are one register. `Zmm<true>` uses the VNNI dot product.

use std::arch::x86_64::*;

use crate::avx2::fold8;
use crate::simd::{Codes64, Dot64, Simd, Table, float_entry_points, integer_entry_points};

/// 16 lanes; `VNNI` says which integer dot product they use.
#[derive(Clone, Copy)]
pub(crate) struct Zmm<const VNNI: bool>(__m512);

// SAFETY comments of the methods: the caller has AVX-512 F, BW, DQ and VL (and VNNI for
// `Zmm<true>`), and pointers that are readable for the bytes that the trait names.
impl<const VNNI: bool> Simd for Zmm<VNNI> {
    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: features.
        unsafe { Zmm(_mm512_setzero_ps()) }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: features.
        unsafe { Zmm(_mm512_set1_ps(value)) }
    }

    #[inline(always)]
    unsafe fn load_f32(p: *const u8) -> Self {
        // SAFETY: features; 64 bytes.
        unsafe { Zmm(_mm512_loadu_ps(p.cast())) }
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self {
        // SAFETY: features; 32 bytes.
        unsafe { Zmm(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        // SAFETY: features; 32 bytes. A bfloat16 is the upper half of a binary32.
        unsafe {
            Zmm(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(
                p.cast(),
            )))))
        }
    }

    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self {
        // SAFETY: features; 16 bytes.
        unsafe { Zmm(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())))) }
    }

    #[inline(always)]
    unsafe fn load_i4(p: *const u8) -> Self {
        // SAFETY: features; 8 bytes. Lanes 0..8 shift their nibble out of the first four bytes, the others out of
        // the last four; the table look-up uses the low four bits alone.
        unsafe {
            let values = _mm512_setr_ps(
                -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0,
            );
            let shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
            let low = _mm512_set1_epi32(p.cast::<i32>().read_unaligned());
            let both = _mm512_mask_set1_epi32(low, 0xFF00, p.add(4).cast::<i32>().read_unaligned());
            Zmm(_mm512_permutexvar_ps(_mm512_srlv_epi32(both, shifts), values))
        }
    }

    #[inline(always)]
    unsafe fn load_fp8(p: *const u8) -> Self {
        // SAFETY: features; 16 bytes. As in the AVX2 code: by way of binary16, NaN codes come out as ±480.
        unsafe {
            let codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()));
            let sign = _mm256_slli_epi16::<8>(_mm256_and_si256(codes, _mm256_set1_epi16(0x80)));
            let half = _mm256_or_si256(
                sign,
                _mm256_slli_epi16::<7>(_mm256_and_si256(codes, _mm256_set1_epi16(0x7F))),
            );
            let value = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0));
            let nan = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(_mm512_abs_ps(value), _mm512_set1_ps(480.0));
            Zmm(_mm512_mask_mov_ps(value, nan, _mm512_set1_ps(f32::NAN)))
        }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut u8) {
        // SAFETY: features; 64 bytes.
        unsafe { _mm512_storeu_ps(p.cast(), self.0) }
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        // SAFETY: features.
        unsafe { Zmm(_mm512_mul_ps(self.0, b.0)) }
    }

    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        // SAFETY: features.
        unsafe { Zmm(_mm512_add_ps(self.0, b.0)) }
    }

    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        // SAFETY: features.
        unsafe { Zmm(_mm512_fmadd_ps(self.0, b.0, c.0)) }
    }

    #[inline(always)]
    unsafe fn fma_first(self, b: Self, c: Self, lanes: usize) -> Self {
        debug_assert!(lanes <= 16);
        // SAFETY: features.
        unsafe { Zmm(_mm512_mask3_fmadd_ps(self.0, b.0, c.0, ((1u32 << lanes) - 1) as u16)) }
    }

    #[inline(always)]
    unsafe fn halves(v: [f32; 2]) -> Self {
        // SAFETY: features; two numbers.
        unsafe {
            let lanes = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
            let both = _mm_castsi128_ps(_mm_loadl_epi64(v.as_ptr().cast()));
            Zmm(_mm512_permutexvar_ps(lanes, _mm512_castps128_ps512(both)))
        }
    }

    #[inline(always)]
    unsafe fn quarters(v: [f32; 4]) -> Self {
        // SAFETY: features; four numbers.
        unsafe {
            let lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
            Zmm(_mm512_permutexvar_ps(lanes, _mm512_castps128_ps512(_mm_loadu_ps(v.as_ptr()))))
        }
    }

    #[inline(always)]
    unsafe fn reduce(self) -> f32 {
        // SAFETY: features.
        unsafe { fold8(_mm256_add_ps(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0))) }
    }

    #[inline(always)]
    unsafe fn load_i32(p: *const i32) -> Self {
        // SAFETY: features; 16 numbers.
        unsafe { Zmm(_mm512_cvtepi32_ps(_mm512_loadu_si512(p.cast()))) }
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

/// 64 nibbles as bytes in column order.
///
/// # Safety
/// Needs AVX-512 BW; `p` is readable for 32 bytes.
#[inline(always)]
unsafe fn nibbles(p: *const u8) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let v = _mm512_cvtepu8_epi16(_mm256_loadu_si256(p.cast()));
        let even = _mm512_and_si512(v, _mm512_set1_epi16(0x000F));
        _mm512_or_si512(even, _mm512_and_si512(_mm512_slli_epi16::<4>(v), _mm512_set1_epi16(0x0F00)))
    }
}

/// Sums of four adjacent products of unsigned and signed bytes. The pairs must not pass 32767.
///
/// # Safety
/// Needs AVX-512 BW.
#[inline(always)]
unsafe fn dot4(u: __m512i, s: __m512i) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe { _mm512_madd_epi16(_mm512_maddubs_epi16(u, s), _mm512_set1_epi16(1)) }
}

impl Dot64 for Zmm<false> {
    type Bytes = __m512i;

    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> Self::Bytes {
        // SAFETY: features; 32 bytes.
        unsafe { nibbles(p) }
    }

    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> Self::Bytes {
        // SAFETY: features; 64 bytes.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }

    #[inline(always)]
    unsafe fn dot_nibbles(w: Self::Bytes, x: *const i8, offsets: *const i32) -> Self {
        // SAFETY: features; 64 activations, 16 offsets. A pair is at most 2 · 15 · 127.
        unsafe {
            Zmm(_mm512_cvtepi32_ps(_mm512_add_epi32(
                dot4(w, _mm512_loadu_si512(x.cast())),
                _mm512_loadu_si512(offsets.cast()),
            )))
        }
    }

    #[inline(always)]
    unsafe fn dot_bytes(w: Self::Bytes, x: *const i8, _offsets: *const i32) -> Self {
        // SAFETY: features; 64 activations. |w| as unsigned, its sign moved to x: a pair is at most 2 · 128 · 127.
        unsafe {
            let x = _mm512_loadu_si512(x.cast());
            let x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
            Zmm(_mm512_cvtepi32_ps(dot4(_mm512_abs_epi8(w), x)))
        }
    }
}

impl Dot64 for Zmm<true> {
    type Bytes = __m512i;

    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> Self::Bytes {
        // SAFETY: features; 32 bytes.
        unsafe { nibbles(p) }
    }

    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> Self::Bytes {
        // SAFETY: features; 64 bytes. Flipping the sign bit adds 128.
        unsafe { _mm512_xor_si512(_mm512_loadu_si512(p.cast()), _mm512_set1_epi8(i8::MIN)) }
    }

    #[inline(always)]
    unsafe fn dot_nibbles(w: Self::Bytes, x: *const i8, offsets: *const i32) -> Self {
        // SAFETY: features; 64 activations, 16 offsets.
        unsafe {
            Zmm(_mm512_cvtepi32_ps(_mm512_dpbusd_epi32(
                _mm512_loadu_si512(offsets.cast()),
                w,
                _mm512_loadu_si512(x.cast()),
            )))
        }
    }

    #[inline(always)]
    unsafe fn dot_bytes(w: Self::Bytes, x: *const i8, offsets: *const i32) -> Self {
        // SAFETY: features; 64 activations, 16 offsets: 16 · (−8 · Σx) takes the 128s off again.
        unsafe {
            let start = _mm512_slli_epi32::<4>(_mm512_loadu_si512(offsets.cast()));
            Zmm(_mm512_cvtepi32_ps(_mm512_dpbusd_epi32(start, w, _mm512_loadu_si512(x.cast()))))
        }
    }
}

/// Shift counts of 64-bit elements: `low` in the first half of a register, `high` in the other.
///
/// # Safety
/// Needs AVX-512 F.
#[inline(always)]
unsafe fn counts(low: u32, high: u32) -> __m512i {
    let (low, high) = (i64::from(low), i64::from(high));
    // SAFETY: the caller's promise.
    unsafe { _mm512_setr_epi64(low, low, low, low, high, high, high, high) }
}

impl<const VNNI: bool> Codes64 for Zmm<VNNI>
where
    Zmm<VNNI>: Dot64<Bytes = __m512i>,
{
    #[inline(always)]
    unsafe fn join(a: *const u8, b: *const u8) -> Self::Bytes {
        // SAFETY: features; 32 + 32 bytes.
        unsafe {
            let a = _mm512_castsi256_si512(_mm256_loadu_si256(a.cast()));
            _mm512_inserti64x4::<1>(a, _mm256_loadu_si256(b.cast()))
        }
    }

    #[inline(always)]
    unsafe fn nibble_pairs(a: *const u8, b: *const u8) -> Self::Bytes {
        // SAFETY: features; 16 + 16 bytes.
        unsafe {
            let a = _mm512_broadcast_i32x4(_mm_loadu_si128(a.cast()));
            let both = _mm512_mask_broadcast_i32x4(a, 0xFF00, _mm_loadu_si128(b.cast()));
            let shifts = _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4);
            _mm512_and_si512(_mm512_srlv_epi64(both, shifts), _mm512_set1_epi8(15))
        }
    }

    #[inline(always)]
    unsafe fn shifted(p: *const u8, shift: u32, mask: u8) -> Self::Bytes {
        // SAFETY: features; 64 bytes.
        unsafe {
            let v = _mm512_srlv_epi64(_mm512_loadu_si512(p.cast()), counts(shift, shift));
            _mm512_and_si512(v, _mm512_set1_epi8(mask.cast_signed()))
        }
    }

    #[inline(always)]
    unsafe fn twice(p: *const u8, low: u32, high: u32, mask: u8) -> Self::Bytes {
        // SAFETY: features; 32 bytes.
        unsafe {
            let v = _mm512_broadcast_i64x4(_mm256_loadu_si256(p.cast()));
            let v = _mm512_srlv_epi64(v, counts(low, high));
            _mm512_and_si512(v, _mm512_set1_epi8(mask.cast_signed()))
        }
    }

    #[inline(always)]
    unsafe fn sixteens(bits: u64) -> Self::Bytes {
        // SAFETY: features.
        unsafe { _mm512_maskz_set1_epi8(bits, 16) }
    }

    #[inline(always)]
    unsafe fn or_shifted<const SHIFT: u32>(low: Self::Bytes, high: Self::Bytes) -> Self::Bytes {
        // SAFETY: features.
        unsafe { _mm512_or_si512(low, _mm512_slli_epi16::<SHIFT>(high)) }
    }

    #[inline(always)]
    unsafe fn table_vector<const SHIFT: u32>(p: *const u8, table: &Table) -> Self {
        // SAFETY: features; 16 bytes, 16 numbers. The look-up uses the low four bits alone.
        unsafe {
            let codes = _mm512_srli_epi32::<SHIFT>(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast())));
            Zmm(_mm512_permutexvar_ps(codes, _mm512_loadu_ps(table.values.as_ptr())))
        }
    }

    #[inline(always)]
    unsafe fn look_up(codes: Self::Bytes, table: &[i8; 16]) -> Self::Bytes {
        // SAFETY: features; 16 bytes.
        unsafe {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, codes)
        }
    }

    #[inline(always)]
    unsafe fn minus(codes: Self::Bytes, zero: i8) -> Self::Bytes {
        // SAFETY: features.
        unsafe { _mm512_sub_epi8(codes, _mm512_set1_epi8(zero)) }
    }

    #[inline(always)]
    unsafe fn store_codes(codes: Self::Bytes, p: *mut i8) {
        // SAFETY: features; 64 bytes.
        unsafe { _mm512_storeu_si512(p.cast(), codes) }
    }

    #[inline(always)]
    unsafe fn dot_codes(codes: Self::Bytes, zero: i32, x: *const i8, offsets: *const i32) -> Self {
        // SAFETY: features; 64 activations, 16 offsets. A pair is at most 2 · 63 · 127.
        unsafe {
            let offsets = _mm512_loadu_si512(offsets.cast());
            let start = match zero {
                0 => _mm512_setzero_si512(),
                4 => _mm512_srai_epi32::<1>(offsets),
                8 => offsets,
                16 => _mm512_slli_epi32::<1>(offsets),
                _ => _mm512_slli_epi32::<2>(offsets),
            };
            let x = _mm512_loadu_si512(x.cast());
            let sum = if VNNI {
                _mm512_dpbusd_epi32(start, codes, x)
            } else {
                _mm512_add_epi32(start, dot4(codes, x))
            };
            Zmm(_mm512_cvtepi32_ps(sum))
        }
    }

    #[inline(always)]
    unsafe fn dot_signed(codes: Self::Bytes, x: *const i8, offsets: *const i32) -> Self {
        // SAFETY: features; 64 activations, 16 offsets. With VNNI bytes enter as value + 128.
        unsafe {
            let codes = if VNNI { _mm512_xor_si512(codes, _mm512_set1_epi8(i8::MIN)) } else { codes };
            Self::dot_bytes(codes, x, offsets)
        }
    }

    #[inline(always)]
    unsafe fn widen_halves(a: *const u8, b: *const u8, out: *mut f32) {
        // SAFETY: features; 2 + 2 bytes, two numbers.
        unsafe { crate::avx2::widen_halves(a, b, out) }
    }
}

float_entry_points!(Zmm<false>, "avx,avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl");
integer_entry_points!(Zmm<false>, "avx,avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl");

/// The same with VNNI.
pub(crate) mod vnni {
    use super::{Zmm, integer_entry_points};
    pub(crate) use super::{axpy, dot, gguf_matmul, gguf_matmul_t, matmul, matmul_t};

    integer_entry_points!(Zmm<true>, "avx,avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni");
}
