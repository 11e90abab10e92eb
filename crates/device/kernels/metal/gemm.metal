// out[i][row] = matrix[row] . x[i] for many inputs, as in prefill: matmul with 8x8 matrices of a SIMD group.
//
// The order of a sum is another than matmul's, and the scale of a group joins each weight, not each eight: a second
// class of numerics, in f32 like the first. Keys and values of both are not mixed under one claim of same bits.

struct GemmParameters {
    uint inputs;
};

// A threadgroup of four SIMD groups makes TILE x TILE results, TILE columns at a time.
static constant constexpr const uint TILE = 32;

template <uint FORMAT>
kernel void gemm(constant Matrix* matrix [[buffer(0)]],
                 device const float* x [[buffer(1)]],
                 device float* out [[buffer(2)]],
                 constant GemmParameters& p [[buffer(3)]],
                 uint2 group [[threadgroup_position_in_grid]],
                 uint2 groups [[threadgroups_per_grid]],
                 uint tid [[thread_index_in_threadgroup]],
                 uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float weights[TILE * TILE];
    threadgroup float inputs[TILE * TILE];
    threadgroup float results[TILE * TILE];
    const Matrix m = matrix_of(matrix[0]);
    // Each thread stages an eight of a row of both.
    const uint staged = tid / 4, eight = tid % 4 * STEP;
    // And each SIMD group makes a quarter: 16 inputs x 16 rows, four 8x8 matrices.
    const uint input_half = simd / 2 * 16, row_half = simd % 2 * 16;
    for (uint first = group.y * TILE; first < p.inputs; first += groups.y * TILE) {
        for (uint top = group.x * TILE; top < m.rows; top += groups.x * TILE) {
            simdgroup_float8x8 sums[2][2];
            for (uint a = 0; a < 2; a++) {
                for (uint b = 0; b < 2; b++) sums[a][b] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
            }
            const uint row = top + staged, input = first + staged;
            for (uint left = 0; left < m.cols; left += TILE) {
                const uint col = left + eight;
                const uint count = col < m.cols ? min(uint(STEP), m.cols - col) : 0;
                Eight w;
                for (uint i = 0; i < STEP; i++) w.v[i] = 0.0f;
                if (row < m.rows && count > 0) {
                    device const uchar* bytes = m.weights + ulong(row) * m.row_bytes;
                    if (count == STEP) {
                        w = eight_stored(FORMAT, bytes, col, m.words != 0);
                    } else {
                        for (uint i = 0; i < count; i++) w.v[i] = stored(FORMAT, bytes, col + i);
                    }
                    if (scale_is_per_group(FORMAT)) {
                        const ulong scale_row = ulong(FORMAT == FP8 ? row / 128 : row) * m.scale_cols;
                        const float scale = float_at(m.scales + 4 * (scale_row + col / m.span));
                        for (uint i = 0; i < STEP; i++) w.v[i] *= scale;
                    }
                }
                // The products before may still be reading.
                threadgroup_barrier(mem_flags::mem_threadgroup);
                for (uint i = 0; i < STEP; i++) {
                    const bool inside = input < p.inputs && i < count;
                    weights[staged * TILE + eight + i] = w.v[i];
                    inputs[staged * TILE + eight + i] = inside ? x[ulong(input) * m.cols + col + i] : 0.0f;
                }
                threadgroup_barrier(mem_flags::mem_threadgroup);
                for (uint k = 0; k < TILE; k += 8) {
                    simdgroup_float8x8 a[2], b[2];
                    for (uint h = 0; h < 2; h++) {
                        simdgroup_load(a[h], inputs + (input_half + 8 * h) * TILE + k, TILE);
                        simdgroup_load(b[h], weights + (row_half + 8 * h) * TILE + k, TILE, ulong2(0, 0), true);
                    }
                    for (uint h = 0; h < 2; h++) {
                        for (uint v = 0; v < 2; v++) simdgroup_multiply_accumulate(sums[h][v], a[h], b[v], sums[h][v]);
                    }
                }
            }
            for (uint h = 0; h < 2; h++) {
                for (uint v = 0; v < 2; v++) {
                    simdgroup_store(sums[h][v], results + (input_half + 8 * h) * TILE + row_half + 8 * v, TILE);
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (uint i = 0; i < STEP; i++) {
                const uint at = top + eight + i;
                if (input < p.inputs && at < m.rows) {
                    out[ulong(input) * m.rows + at] = results[staged * TILE + eight + i] * row_scale(m, at);
                }
            }
        }
    }
}

#define GEMM(NAME, FORMAT) template [[host_name("gemm_" NAME)]] [[kernel]] decltype(gemm<FORMAT>) gemm<FORMAT>;
GEMM("f32", F32)
GEMM("f16", F16)
GEMM("bf16", BF16)
GEMM("int8", INT8)
GEMM("int4", INT4_ROW)
GEMM("int4g", INT4_GROUP)
GEMM("fp8", FP8)
