// Matrices in the formats of crates/quant, and the product of one of their rows with some inputs.
//
// Layouts: docs/design/formats.md. A matrix is rows x cols, row-major, a row one output; weights and scales are two
// byte strings at any address. Comes before the other files: the host joins them into one source.
#include <metal_stdlib>
using namespace metal;

// A SIMD group is 32 threads on every GPU of Apple's.
static constant constexpr const uint LANES = 32;

// Columns that a lane takes at a time. Every group of int4 and every block of fp8 is a multiple of 16 columns, so
// these share one scale; and they are a 4-byte word of int4, two of int8 and fp8, four of the halves.
static constant constexpr const uint STEP = 8;

// Values of Matrix::format, as in src/metal/layout.rs.
static constant constexpr const uint F32 = 0;
static constant constexpr const uint F16 = 1;
static constant constexpr const uint BF16 = 2;
static constant constexpr const uint INT8 = 3;
static constant constexpr const uint INT4_ROW = 4;
static constant constexpr const uint INT4_GROUP = 5;
static constant constexpr const uint FP8 = 6;

// As in src/metal/layout.rs: 48 bytes.
struct Matrix {
    device const uchar* weights;
    device const uchar* scales;  // little-endian f32; not read in formats without
    uint format;
    uint rows;
    uint cols;
    uint row_bytes;
    uint scale_cols;  // scales along a row
    uint span;        // columns that share a scale
    uint words;       // 1 where every row of weights begins at a multiple of 4, 0 otherwise
    uint unused;
};

inline Matrix matrix_of(constant Matrix& from) {
    Matrix m;
    m.weights = from.weights;
    m.scales = from.scales;
    m.format = from.format;
    m.rows = from.rows;
    m.cols = from.cols;
    m.row_bytes = from.row_bytes;
    m.scale_cols = from.scale_cols;
    m.span = from.span;
    m.words = from.words;
    return m;
}

inline bool scale_is_per_row(uint format) { return format == INT8 || format == INT4_ROW; }
inline bool scale_is_per_group(uint format) { return format == INT4_GROUP || format == FP8; }

// Four bytes, little-endian. Where an expert lies in a checkpoint is the checkpoint's affair: its bytes may begin at
// any address, and a wider load there is not defined.
inline uint word_at(device const uchar* p, bool aligned) {
    if (aligned) return *(device const uint*)p;
    return uint(p[0]) | uint(p[1]) << 8 | uint(p[2]) << 16 | uint(p[3]) << 24;
}

inline float float_at(device const uchar* p) { return as_type<float>(word_at(p, false)); }

// OCP E4M3 ("FN"). A subnormal is mantissa * 2^-9, by a product of two normal numbers, since GPUs may flush
// subnormals of binary32; NaN is made of bits, since fast math takes none to exist.
inline float from_e4m3(uint code) {
    const uint exponent = code >> 3 & 15, mantissa = code & 7;
    const uint sign = (code & 0x80) << 24;
    const float small = float(mantissa) * 0.001953125f;
    uint bits = exponent == 0 ? as_type<uint>(small) : (exponent + 120) << 23 | mantissa << 20;
    if ((code & 0x7F) == 0x7F) bits = 0x7FC00000;
    return as_type<float>(bits | sign);
}

// The stored number at a column, before any scale.
inline float stored(uint format, device const uchar* row, uint col) {
    switch (format) {
    case F32: return float_at(row + 4 * ulong(col));
    case F16: {
        const ushort bits = ushort(row[2 * col]) | ushort(row[2 * col + 1] << 8);
        return float(as_type<half>(bits));
    }
    case BF16: return as_type<float>(uint(row[2 * col]) << 16 | uint(row[2 * col + 1]) << 24);
    case INT8: return float(as_type<char>(row[col]));
    case FP8: return from_e4m3(row[col]);
    default: return float(row[col / 2] >> (4 * (col & 1)) & 15) - 8.0f;
    }
}

struct Eight {
    float v[STEP];
};

// The stored numbers of the columns col .. col + 8, all of which exist; col is a multiple of 8.
inline Eight eight_stored(uint format, device const uchar* row, uint col, bool words) {
    Eight e;
    switch (format) {
    case F32:
        for (uint i = 0; i < STEP; i++) e.v[i] = as_type<float>(word_at(row + 4 * (ulong(col) + i), words));
        break;
    case F16:
    case BF16:
        for (uint i = 0; i < STEP; i += 2) {
            const uint pair = word_at(row + 2 * (ulong(col) + i), words);
            if (format == BF16) {
                e.v[i] = as_type<float>(pair << 16);
                e.v[i + 1] = as_type<float>(pair & 0xFFFF0000);
            } else {
                e.v[i] = float(as_type<half>(ushort(pair)));
                e.v[i + 1] = float(as_type<half>(ushort(pair >> 16)));
            }
        }
        break;
    case INT8:
    case FP8:
        for (uint i = 0; i < STEP; i += 4) {
            const uint four = word_at(row + col + i, words);
            for (uint j = 0; j < 4; j++) {
                const uint byte = four >> (8 * j) & 255;
                e.v[i + j] = format == INT8 ? float(as_type<char>(uchar(byte))) : from_e4m3(byte);
            }
        }
        break;
    default: {
        // Offset binary, the even column in the low nibble.
        const uint nibbles = word_at(row + col / 2, words);
        for (uint i = 0; i < STEP; i++) e.v[i] = float(nibbles >> (4 * i) & 15) - 8.0f;
    }
    }
    return e;
}

// Sums of N inputs with one row of a matrix.
template <uint N>
struct Sums {
    float v[N];
};

// Where input i of a tile begins, in floats.
template <uint N>
struct Inputs {
    ulong at[N];
};

// A lane's share of the products of row `row` with N inputs of x. Weights are decoded once for all inputs. The order
// of a sum depends on the columns alone, not on N: a draft and its verification must agree.
//
// Group scales join each eight; a row's scale is left to `row_scale`, behind the sum.
template <uint FORMAT, uint N>
inline Sums<N> lane_products(Matrix m, uint row, device const float* x, Inputs<N> inputs, uint lane) {
    Sums<N> sums;
    for (uint n = 0; n < N; n++) sums.v[n] = 0.0f;
    device const uchar* weights = m.weights + ulong(row) * m.row_bytes;
    const ulong scale_row = ulong(FORMAT == FP8 ? row / 128 : row) * m.scale_cols;
    const bool words = m.words != 0;
    for (uint col = lane * STEP; col < m.cols; col += LANES * STEP) {
        const uint count = min(uint(STEP), m.cols - col);
        Eight w;
        if (count == STEP) {
            w = eight_stored(FORMAT, weights, col, words);
        } else {
            for (uint i = 0; i < count; i++) w.v[i] = stored(FORMAT, weights, col + i);
        }
        float scale = 1.0f;
        if (scale_is_per_group(FORMAT)) scale = float_at(m.scales + 4 * (scale_row + col / m.span));
        for (uint n = 0; n < N; n++) {
            device const float* in = x + inputs.at[n] + col;
            float sum = 0.0f;
            if (count == STEP) {
                for (uint i = 0; i < STEP; i++) sum = fma(w.v[i], in[i], sum);
            } else {
                for (uint i = 0; i < count; i++) sum = fma(w.v[i], in[i], sum);
            }
            sums.v[n] = scale_is_per_group(FORMAT) ? fma(sum, scale, sums.v[n]) : sums.v[n] + sum;
        }
    }
    return sums;
}

// What a whole row's sum is multiplied by.
inline float row_scale(Matrix m, uint row) {
    return scale_is_per_row(m.format) ? float_at(m.scales + 4 * ulong(row)) : 1.0f;
}

// `lane_products` for a format that only the table of experts knows. All lanes take the same way.
template <uint N>
inline Sums<N> lane_products_of(Matrix m, uint row, device const float* x, Inputs<N> inputs, uint lane) {
    switch (m.format) {
    case F32: return lane_products<F32, N>(m, row, x, inputs, lane);
    case F16: return lane_products<F16, N>(m, row, x, inputs, lane);
    case BF16: return lane_products<BF16, N>(m, row, x, inputs, lane);
    case INT8: return lane_products<INT8, N>(m, row, x, inputs, lane);
    case INT4_ROW: return lane_products<INT4_ROW, N>(m, row, x, inputs, lane);
    case INT4_GROUP: return lane_products<INT4_GROUP, N>(m, row, x, inputs, lane);
    default: return lane_products<FP8, N>(m, row, x, inputs, lane);
    }
}
