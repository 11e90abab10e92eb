// out[i][row] = matrix[row] . x[i]: a dense matrix with few inputs, as in decoding.

struct MatmulParameters {
    uint inputs;
};

// A SIMD group takes a row, the y axis of the grid a tile of N inputs. Both are loops, since a launch may have fewer
// threadgroups than there is work.
template <uint FORMAT, uint N>
kernel void matmul(constant Matrix* matrix [[buffer(0)]],
                   device const float* x [[buffer(1)]],
                   device float* out [[buffer(2)]],
                   constant MatmulParameters& p [[buffer(3)]],
                   uint2 group [[threadgroup_position_in_grid]],
                   uint2 groups [[threadgroups_per_grid]],
                   uint lane [[thread_index_in_simdgroup]],
                   uint simd [[simdgroup_index_in_threadgroup]],
                   uint simds [[simdgroups_per_threadgroup]]) {
    const Matrix m = matrix_of(matrix[0]);
    for (uint first = group.y * N; first < p.inputs; first += groups.y * N) {
        Inputs<N> inputs;
        // A tile that is not full takes the last input again and writes it once.
        for (uint n = 0; n < N; n++) inputs.at[n] = ulong(min(first + n, p.inputs - 1)) * m.cols;
        for (uint row = group.x * simds + simd; row < m.rows; row += groups.x * simds) {
            const Sums<N> sums = lane_products<FORMAT, N>(m, row, x, inputs, lane);
            const float scale = row_scale(m, row);
            for (uint n = 0; n < N; n++) {
                const float sum = simd_sum(sums.v[n]);
                if (lane == 0 && first + n < p.inputs) {
                    out[ulong(first + n) * m.rows + row] = scale_is_per_row(FORMAT) ? sum * scale : sum;
                }
            }
        }
    }
}

#define MATMUL(NAME, FORMAT, N) \
    template [[host_name("matmul_" NAME "_" #N)]] [[kernel]] decltype(matmul<FORMAT, N>) matmul<FORMAT, N>;
#define MATMUL_TILES(NAME, FORMAT) MATMUL(NAME, FORMAT, 1) MATMUL(NAME, FORMAT, 4) MATMUL(NAME, FORMAT, 8)
MATMUL_TILES("f32", F32)
MATMUL_TILES("f16", F16)
MATMUL_TILES("bf16", BF16)
MATMUL_TILES("int8", INT8)
MATMUL_TILES("int4", INT4_ROW)
MATMUL_TILES("int4g", INT4_GROUP)
MATMUL_TILES("fp8", FP8)
