//! What an instruction set must offer: 16 lanes of `f32`, and 64 bytes of integer dot products.
//!
//! The loops that use it (`tiles`, `tiles_q8`, `transpose`) are written once; each instruction set
//! compiles them inside a function that enables its features, into which everything is inlined.

/// 16 lanes of `f32`.
///
/// # Safety
/// The methods may be called only where the processor has the instruction set of the
/// implementation; pointers must be readable (or writable) for the bytes that a method names, at
/// any alignment.
pub(crate) trait Simd: Copy {
    /// All lanes +0.
    unsafe fn zero() -> Self;
    /// All lanes `value`.
    unsafe fn splat(value: f32) -> Self;
    /// 16 `f32` (64 bytes).
    unsafe fn load_f32(p: *const u8) -> Self;
    /// 16 `f16` (32 bytes).
    unsafe fn load_f16(p: *const u8) -> Self;
    /// 16 `bf16` (32 bytes).
    unsafe fn load_bf16(p: *const u8) -> Self;
    /// 16 signed bytes.
    unsafe fn load_i8(p: *const u8) -> Self;
    /// 16 nibbles, value + 8 (8 bytes).
    unsafe fn load_i4(p: *const u8) -> Self;
    /// 16 E4M3 codes.
    unsafe fn load_fp8(p: *const u8) -> Self;
    /// Writes 16 `f32` (64 bytes).
    unsafe fn store(self, p: *mut u8);
    /// self · b, lane by lane.
    unsafe fn mul(self, b: Self) -> Self;
    /// self + b, lane by lane.
    unsafe fn add(self, b: Self) -> Self;
    /// self · b + c with one rounding.
    unsafe fn fma(self, b: Self, c: Self) -> Self;
    /// [`Simd::fma`] in the first `lanes` lanes; the others keep c.
    unsafe fn fma_first(self, b: Self, c: Self, lanes: usize) -> Self;
    /// Eight lanes each of two values.
    unsafe fn halves(values: [f32; 2]) -> Self;
    /// Four lanes each of four values.
    unsafe fn quarters(values: [f32; 4]) -> Self;
    /// Folds the lanes by halves.
    unsafe fn reduce(self) -> f32;
    /// 16 signed 32-bit numbers (64 bytes); exact below 2²⁴.
    unsafe fn load_i32(p: *const i32) -> Self;
    /// Hints that the byte at `p`, any address, is wanted soon.
    unsafe fn prefetch(p: *const u8);
    /// Likewise, into the second-level cache, past the few buffers between the first and memory.
    unsafe fn prefetch_second(p: *const u8);
}

/// 64 weights as bytes, ready for integer dot products in [`Simd`] lanes of four columns each.
///
/// # Safety
/// As [`Simd`].
pub(crate) trait Dot64: Simd {
    /// 64 unsigned nibbles or 64 weights.
    type Bytes: Copy;
    /// 64 nibbles in column order, 0..=15 (32 bytes).
    unsafe fn load_nibbles(p: *const u8) -> Self::Bytes;
    /// 64 signed bytes.
    unsafe fn load_bytes(p: *const u8) -> Self::Bytes;
    /// Exact dot products of (nibble − 8) and 64 `i8`; `offsets`: −8 · Σx, 16 `i32`.
    unsafe fn dot_nibbles(w: Self::Bytes, x: *const i8, offsets: *const i32) -> Self;
    /// Exact dot products of 64 weights and 64 `i8`; `offsets` as above.
    unsafe fn dot_bytes(w: Self::Bytes, x: *const i8, offsets: *const i32) -> Self;
}

/// The whole numbers that codes of four bits stand for.
pub(crate) struct Table {
    /// As bytes.
    pub codes: [i8; 16],
    /// As `f32`.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "the others widen the bytes"))]
    pub values: [f32; 16],
}

impl Table {
    /// Both forms of one table.
    pub const fn new(codes: [i8; 16]) -> Table {
        let mut values = [0.0; 16];
        let mut i = 0;
        while i < 16 {
            values[i] = codes[i] as f32;
            i += 1;
        }
        Table { codes, values }
    }

    /// Codes that are numbers above `zero` modulo 2^`bits`; the bits above those are ignored.
    pub const fn plain(bits: u32, zero: i8) -> Table {
        let mut codes = [0; 16];
        let mut i = 0;
        while i < 16 {
            codes[i] = (i % (1 << bits)) as i8 - zero;
            i += 1;
        }
        Table::new(codes)
    }
}

/// 64 codes as bytes, and what unpacking them from blocks of GGUF takes.
///
/// # Safety
/// As [`Simd`].
pub(crate) trait Codes64: Dot64 {
    /// 32 bytes and 32 others.
    unsafe fn join(a: *const u8, b: *const u8) -> Self::Bytes;
    /// Nibbles of 16 bytes and of 16 others: the low ones of a, the high ones, the same of b.
    unsafe fn nibble_pairs(a: *const u8, b: *const u8) -> Self::Bytes;
    /// 64 bytes: (byte >> shift) & mask, where mask keeps at most 8 − shift bits.
    unsafe fn shifted(p: *const u8, shift: u32, mask: u8) -> Self::Bytes;
    /// The same 32 bytes twice, shifted by `low` and by `high`: (byte >> shift) & mask, as above.
    unsafe fn twice(p: *const u8, low: u32, high: u32, mask: u8) -> Self::Bytes;
    /// 16 where a bit is set, 0 elsewhere; bit i is byte i.
    unsafe fn sixteens(bits: u64) -> Self::Bytes;
    /// low | high << SHIFT; no byte of `high` may lose bits.
    unsafe fn or_shifted<const SHIFT: u32>(low: Self::Bytes, high: Self::Bytes) -> Self::Bytes;
    /// 16 bytes: the values of (byte >> SHIFT) & 15.
    unsafe fn table_vector<const SHIFT: u32>(p: *const u8, table: &Table) -> Self;
    /// Values of codes 0..=15.
    unsafe fn look_up(codes: Self::Bytes, table: &[i8; 16]) -> Self::Bytes;
    /// codes − zero, wrapping.
    unsafe fn minus(codes: Self::Bytes, zero: i8) -> Self::Bytes;
    /// Writes 64 bytes.
    unsafe fn store_codes(codes: Self::Bytes, p: *mut i8);
    /// Exact dot products of (code − zero), codes 0..=63 and zero 0, 4, 8, 16 or 32, with 64 `i8`; `offsets` as in
    /// [`Dot64`].
    unsafe fn dot_codes(codes: Self::Bytes, zero: i32, x: *const i8, offsets: *const i32) -> Self;
    /// Exact dot products of signed codes; `offsets` as in [`Dot64`].
    unsafe fn dot_signed(codes: Self::Bytes, x: *const i8, offsets: *const i32) -> Self;
    /// Writes the `f16` at `a` and at `b` as two `f32`.
    unsafe fn widen_halves(a: *const u8, b: *const u8, out: *mut f32);
}

/// How 16 columns of one format are read.
pub(crate) trait Stored {
    /// Bytes of 16 columns.
    const BYTES: usize;
    /// 16 stored numbers, before any scale.
    ///
    /// # Safety
    /// As [`Simd`]; `p` is readable for [`Stored::BYTES`].
    unsafe fn load<S: Simd>(p: *const u8) -> S;
}

/// One implementation of [`Stored`] for each encoding.
macro_rules! stored {
    ($($(#[$doc:meta])* $name:ident: $bytes:literal by $load:ident;)*) => {$(
        $(#[$doc])*
        pub(crate) struct $name;
        impl Stored for $name {
            const BYTES: usize = $bytes;
            #[inline(always)]
            unsafe fn load<S: Simd>(p: *const u8) -> S {
                // SAFETY: the caller's promise is the one that this method asks for.
                unsafe { S::$load(p) }
            }
        }
    )*};
}

stored! {
    /// binary32.
    F32: 64 by load_f32;
    /// binary16.
    F16: 32 by load_f16;
    /// bfloat16.
    Bf16: 32 by load_bf16;
    /// Signed bytes.
    I8: 16 by load_i8;
    /// Nibbles.
    I4: 8 by load_i4;
    /// E4M3.
    Fp8: 16 by load_fp8;
}

/// The entry points of one instruction set, but for those of the integer path: functions that enable its
/// features and inline the shared loops for its lanes.
///
/// # Safety
/// The processor must have the features; for the rest see the loops.
macro_rules! float_entry_points {
    ($lanes:ty, $features:literal) => {
        #[target_feature(enable = $features)]
        pub(crate) unsafe fn matmul(job: &crate::job::FloatJob<'_>, rows: std::ops::Range<usize>) {
            // SAFETY: this function's features are those of the lanes; rows are checked by the caller.
            unsafe { crate::tiles::matmul::<$lanes>(job, rows) }
        }

        #[target_feature(enable = $features)]
        pub(crate) unsafe fn matmul_t(
            m: metaltail_quant::MatrixRef<'_>,
            rows: std::ops::Range<usize>,
            x: &[f32],
            out: &mut [f32],
        ) {
            // SAFETY: as above.
            unsafe { crate::transpose::matmul_t::<$lanes>(m, rows, x, out) }
        }

        pub(crate) unsafe fn gguf_matmul(
            format: metaltail_quant::GgufFormat,
            job: &crate::job::FloatJob<'_>,
            rows: std::ops::Range<usize>,
        ) {
            #[target_feature(enable = $features)]
            unsafe fn of<B: crate::gguf::unpack::Blocks>(
                job: &crate::job::FloatJob<'_>,
                rows: std::ops::Range<usize>,
            ) {
                // SAFETY: as above; `B` is the matrix's format.
                unsafe { crate::gguf::float::matmul::<$lanes, B>(job, rows) }
            }
            // SAFETY: the caller's promise.
            unsafe { crate::gguf::for_format!(format, of(job, rows)) }
        }

        pub(crate) unsafe fn gguf_matmul_t(
            format: metaltail_quant::GgufFormat,
            m: metaltail_quant::MatrixRef<'_>,
            rows: std::ops::Range<usize>,
            x: &[f32],
            out: &mut [f32],
        ) {
            #[target_feature(enable = $features)]
            unsafe fn of<B: crate::gguf::unpack::Blocks>(
                m: metaltail_quant::MatrixRef<'_>,
                rows: std::ops::Range<usize>,
                x: &[f32],
                out: &mut [f32],
            ) {
                // SAFETY: as above.
                unsafe { crate::gguf::transpose::matmul_t::<$lanes, B>(m, rows, x, out) }
            }
            // SAFETY: the caller's promise.
            unsafe { crate::gguf::for_format!(format, of(m, rows, x, out)) }
        }

        #[target_feature(enable = $features)]
        pub(crate) unsafe fn dot(a: &[f32], b: &[f32]) -> f32 {
            // SAFETY: as above.
            unsafe { crate::tiles::dot::<$lanes>(a, b) }
        }

        #[target_feature(enable = $features)]
        pub(crate) unsafe fn axpy(alpha: f32, x: &[f32], out: &mut [f32]) {
            // SAFETY: as above.
            unsafe { crate::tiles::axpy::<$lanes>(alpha, x, out) }
        }
    };
}
pub(crate) use float_entry_points;

/// The entry points of the integer path, likewise. Instruction sets that differ in their integer dot product
/// alone share the others.
macro_rules! integer_entry_points {
    ($lanes:ty, $features:literal) => {
        #[target_feature(enable = $features)]
        pub(crate) unsafe fn matmul_q8(job: &crate::job::Q8Job<'_>, rows: std::ops::Range<usize>) {
            // SAFETY: this function's features are those of the lanes; rows are checked by the caller.
            unsafe { crate::tiles_q8::matmul::<$lanes>(job, rows) }
        }

        pub(crate) unsafe fn gguf_matmul_q8(
            format: metaltail_quant::GgufFormat,
            job: &crate::job::Q8Job<'_>,
            rows: std::ops::Range<usize>,
        ) {
            #[target_feature(enable = $features)]
            unsafe fn of<B: crate::gguf::unpack::Blocks>(
                job: &crate::job::Q8Job<'_>,
                rows: std::ops::Range<usize>,
            ) {
                // SAFETY: as above.
                unsafe { crate::gguf::integer::matmul::<$lanes, B>(job, rows) }
            }
            // SAFETY: the caller's promise.
            unsafe { crate::gguf::for_format!(format, of(job, rows)) }
        }
    };
}
pub(crate) use integer_entry_points;
