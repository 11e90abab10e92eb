// Latent attention in the absorbed form: Mla::absorbed of crates/model/src/attention/mla.rs, in five launches.
//
// Of a head, W_K and W_V are `nope` and `value` rows of kv_b. Keys are never built: W_K is applied to the query,
// W_V to the mix of latents, so a position costs lora + rope numbers for all heads together.
//
// A row of the step attends to its own positions: 0 .. count, or a list (of the indexer, DSA). No sum's order depends
// on what other rows or heads there are.

// Heads that read a position together.
static constant constexpr const uint HEADS = 4;

// SIMD groups of a threadgroup that mixes latents; the order of the mix depends on it.
static constant constexpr const uint SLICES = 8;

// Of AttentionRow::first: the row has no list.
static constant constexpr const uint NO_LIST = 0xFFFFFFFF;

struct AttentionParameters {
    uint rows;
    uint heads;
    uint nope;
    uint rope;
    uint value;
    uint lora;
    uint span;   // scores of a row and head, from one to the next; the most positions of a row
    float scale;
};

struct AttentionRow {
    uint count;  // positions that it reads
    uint first;  // where its list begins, or NO_LIST
};

inline uint position_of(AttentionRow row, device const uint* lists, uint i) {
    return row.first == NO_LIST ? i : lists[row.first + i];
}

// Sums of N inputs over the columns col .. col + 8.
template <uint N>
struct EightSums {
    float v[N][STEP];
};

// sums[n][i] = sum over r of m[first + r][col + i] * x[inputs.at[n] + r], r ascending: the transposed product.
template <uint FORMAT, uint N>
inline EightSums<N> transposed(Matrix m, uint first, uint rows, uint col, device const float* x, Inputs<N> inputs) {
    EightSums<N> sums;
    for (uint n = 0; n < N; n++) {
        for (uint i = 0; i < STEP; i++) sums.v[n][i] = 0.0f;
    }
    const uint count = min(uint(STEP), m.cols - col);
    for (uint r = 0; r < rows; r++) {
        const uint row = first + r;
        device const uchar* weights = m.weights + ulong(row) * m.row_bytes;
        Eight w;
        if (count == STEP) {
            w = eight_stored(FORMAT, weights, col, m.words != 0);
        } else {
            for (uint i = 0; i < STEP; i++) w.v[i] = i < count ? stored(FORMAT, weights, col + i) : 0.0f;
        }
        float scale = 1.0f;
        if (scale_is_per_group(FORMAT)) {
            const ulong scale_row = ulong(FORMAT == FP8 ? row / 128 : row) * m.scale_cols;
            scale = float_at(m.scales + 4 * (scale_row + col / m.span));
        } else if (scale_is_per_row(FORMAT)) {
            scale = float_at(m.scales + 4 * ulong(row));
        }
        for (uint n = 0; n < N; n++) {
            const float factor = x[inputs.at[n] + r] * scale;
            for (uint i = 0; i < STEP; i++) sums.v[n][i] = fma(w.v[i], factor, sums.v[n][i]);
        }
    }
    return sums;
}

template <uint N>
inline EightSums<N> transposed_of(Matrix m, uint first, uint rows, uint col, device const float* x, Inputs<N> inputs) {
    switch (m.format) {
    case F32: return transposed<F32, N>(m, first, rows, col, x, inputs);
    case F16: return transposed<F16, N>(m, first, rows, col, x, inputs);
    case BF16: return transposed<BF16, N>(m, first, rows, col, x, inputs);
    case INT8: return transposed<INT8, N>(m, first, rows, col, x, inputs);
    case INT4_ROW: return transposed<INT4_ROW, N>(m, first, rows, col, x, inputs);
    case INT4_GROUP: return transposed<INT4_GROUP, N>(m, first, rows, col, x, inputs);
    default: return transposed<FP8, N>(m, first, rows, col, x, inputs);
    }
}

// absorbed[row][head] = [W_K^T . q_nope | q_rope], so that one product with a cached row gives the score. The x axis
// of the grid goes over eights of columns (a thread each), y over heads. N rows of the step share the weights.
template <uint N>
kernel void mla_absorb(constant Matrix* kv_b [[buffer(0)]],
                       device const float* queries [[buffer(1)]],
                       device float* absorbed [[buffer(2)]],
                       constant AttentionParameters& p [[buffer(3)]],
                       uint2 group [[threadgroup_position_in_grid]],
                       uint2 groups [[threadgroups_per_grid]],
                       uint tid [[thread_index_in_threadgroup]],
                       uint2 threads [[threads_per_threadgroup]]) {
    const Matrix m = matrix_of(kv_b[0]);
    const uint query = p.nope + p.rope, width = p.lora + p.rope;
    const uint eights = (p.lora + STEP - 1) / STEP;
    for (uint head = group.y; head < p.heads; head += groups.y) {
        for (uint first = 0; first < p.rows; first += N) {
            const uint count = min(uint(N), p.rows - first);
            Inputs<N> inputs;
            for (uint n = 0; n < N; n++) {
                inputs.at[n] = (ulong(first + min(n, count - 1)) * p.heads + head) * query;
            }
            for (uint e = group.x * threads.x + tid; e < eights; e += groups.x * threads.x) {
                const uint col = e * STEP, from = head * (p.nope + p.value);
                const EightSums<N> sums = transposed_of<N>(m, from, p.nope, col, queries, inputs);
                for (uint n = 0; n < count; n++) {
                    device float* out = absorbed + (ulong(first + n) * p.heads + head) * width + col;
                    for (uint i = 0; i < min(uint(STEP), p.lora - col); i++) out[i] = sums.v[n][i];
                }
            }
            for (uint i = group.x * threads.x + tid; i < p.rope; i += groups.x * threads.x) {
                for (uint n = 0; n < count; n++) {
                    const ulong to = (ulong(first + n) * p.heads + head) * width + p.lora;
                    absorbed[to + i] = queries[inputs.at[n] + p.nope + i];
                }
            }
        }
    }
}

// scores[row][head][i] = absorbed . key of the row's i-th position * scale. A SIMD group takes a position, the y axis
// goes over rows and tiles of heads.
kernel void mla_scores(device const float* absorbed [[buffer(0)]],
                       device const float* keys [[buffer(1)]],
                       constant AttentionRow* rows [[buffer(2)]],
                       device const uint* lists [[buffer(3)]],
                       device float* scores [[buffer(4)]],
                       constant AttentionParameters& p [[buffer(5)]],
                       uint2 group [[threadgroup_position_in_grid]],
                       uint2 groups [[threadgroups_per_grid]],
                       uint lane [[thread_index_in_simdgroup]],
                       uint simd [[simdgroup_index_in_threadgroup]],
                       uint simds [[simdgroups_per_threadgroup]]) {
    const uint width = p.lora + p.rope, tiles = (p.heads + HEADS - 1) / HEADS;
    for (uint t = group.y; t < p.rows * tiles; t += groups.y) {
        const uint r = t / tiles, head = t % tiles * HEADS, count = min(uint(HEADS), p.heads - head);
        AttentionRow row;
        row.count = rows[r].count;
        row.first = rows[r].first;
        for (uint i = group.x * simds + simd; i < row.count; i += groups.x * simds) {
            device const float* key = keys + ulong(position_of(row, lists, i)) * width;
            device const float* query = absorbed + (ulong(r) * p.heads + head) * width;
            float sums[HEADS];
            for (uint n = 0; n < HEADS; n++) sums[n] = 0.0f;
            for (uint col = lane; col < width; col += LANES) {
                const float k = key[col];
                // A tile that is not full reads its last head again.
                for (uint n = 0; n < HEADS; n++) sums[n] = fma(k, query[min(n, count - 1) * width + col], sums[n]);
            }
            for (uint n = 0; n < HEADS; n++) {
                const float sum = simd_sum(sums[n]);
                if (lane == 0 && n < count) scores[(ulong(r) * p.heads + head + n) * p.span + i] = sum * p.scale;
            }
        }
    }
}

// Softmax of the scores of each row and head, in place: softmax_in_place of crates/kernels/src/ops.rs. A threadgroup
// takes one. Its size must not follow the number of positions: the order of the sum would, and with it a row's bits.
kernel void mla_softmax(device float* scores [[buffer(0)]],
                        constant AttentionRow* rows [[buffer(1)]],
                        constant AttentionParameters& p [[buffer(2)]],
                        uint group [[threadgroup_position_in_grid]],
                        uint groups [[threadgroups_per_grid]],
                        uint tid [[thread_index_in_threadgroup]],
                        uint threads [[threads_per_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]],
                        uint simd [[simdgroup_index_in_threadgroup]],
                        uint simds [[simdgroups_per_threadgroup]]) {
    threadgroup float part[32];
    for (uint t = group; t < p.rows * p.heads; t += groups) {
        device float* at = scores + ulong(t) * p.span;
        const uint count = rows[t / p.heads].count;
        float most = -INFINITY;
        for (uint i = tid; i < count; i += threads) most = max(most, at[i]);
        most = simd_max(most);
        // The row before may still be reading `part`.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (lane == 0) part[simd] = most;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        most = simd_max(lane < simds ? part[lane] : -INFINITY);
        float sum = 0.0f;
        for (uint i = tid; i < count; i += threads) {
            const float power = exp(at[i] - most);
            at[i] = power;
            sum += power;
        }
        sum = simd_sum(sum);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (lane == 0) part[simd] = sum;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        sum = simd_sum(lane < simds ? part[lane] : 0.0f);
        for (uint i = tid; i < count; i += threads) at[i] /= sum;
    }
}

// mixed[row][head] = sum over i of scores[row][head][i] * latent of the row's i-th position. The x axis goes over
// blocks of 32 columns; each of the SLICES SIMD groups takes every SLICES-th position, and their sums are added in
// order. The y axis goes over rows and tiles of heads.
kernel void mla_mix(device const float* scores [[buffer(0)]],
                    device const float* keys [[buffer(1)]],
                    constant AttentionRow* rows [[buffer(2)]],
                    device const uint* lists [[buffer(3)]],
                    device float* mixed [[buffer(4)]],
                    constant AttentionParameters& p [[buffer(5)]],
                    uint2 group [[threadgroup_position_in_grid]],
                    uint2 groups [[threadgroups_per_grid]],
                    uint lane [[thread_index_in_simdgroup]],
                    uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float part[SLICES][HEADS][LANES];
    const uint width = p.lora + p.rope, tiles = (p.heads + HEADS - 1) / HEADS;
    for (uint t = group.y; t < p.rows * tiles; t += groups.y) {
        const uint r = t / tiles, head = t % tiles * HEADS, count = min(uint(HEADS), p.heads - head);
        AttentionRow row;
        row.count = rows[r].count;
        row.first = rows[r].first;
        device const float* weights = scores + (ulong(r) * p.heads + head) * p.span;
        for (uint block = group.x * LANES; block < p.lora; block += groups.x * LANES) {
            // A lane past the last column reads the last again.
            const uint col = min(block + lane, p.lora - 1);
            float sums[HEADS];
            for (uint n = 0; n < HEADS; n++) sums[n] = 0.0f;
            for (uint i = simd; i < row.count; i += SLICES) {
                const float latent = keys[ulong(position_of(row, lists, i)) * width + col];
                for (uint n = 0; n < HEADS; n++) {
                    sums[n] = fma(weights[ulong(min(n, count - 1)) * p.span + i], latent, sums[n]);
                }
            }
            for (uint n = 0; n < HEADS; n++) part[simd][n][lane] = sums[n];
            threadgroup_barrier(mem_flags::mem_threadgroup);
            // SIMD group n adds up for head n.
            if (simd < count && block + lane < p.lora) {
                float sum = part[0][simd][lane];
                for (uint s = 1; s < SLICES; s++) sum += part[s][simd][lane];
                mixed[(ulong(r) * p.heads + head + simd) * p.lora + col] = sum;
            }
            // The next block writes `part` again.
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
    }
}

// out[row][head] = W_V . mixed[row][head]. A SIMD group takes a row of W_V; the x axis goes over those of all heads,
// y over tiles of N rows of the step.
template <uint N>
kernel void mla_values(constant Matrix* kv_b [[buffer(0)]],
                       device const float* mixed [[buffer(1)]],
                       device float* out [[buffer(2)]],
                       constant AttentionParameters& p [[buffer(3)]],
                       uint2 group [[threadgroup_position_in_grid]],
                       uint2 groups [[threadgroups_per_grid]],
                       uint lane [[thread_index_in_simdgroup]],
                       uint simd [[simdgroup_index_in_threadgroup]],
                       uint simds [[simdgroups_per_threadgroup]]) {
    const Matrix m = matrix_of(kv_b[0]);
    for (uint first = group.y * N; first < p.rows; first += groups.y * N) {
        const uint count = min(uint(N), p.rows - first);
        for (uint v = group.x * simds + simd; v < p.heads * p.value; v += groups.x * simds) {
            const uint head = v / p.value, row = head * (p.nope + p.value) + p.nope + v % p.value;
            Inputs<N> inputs;
            for (uint n = 0; n < N; n++) {
                inputs.at[n] = (ulong(first + min(n, count - 1)) * p.heads + head) * p.lora;
            }
            const Sums<N> sums = lane_products_of<N>(m, row, mixed, inputs, lane);
            const float scale = row_scale(m, row);
            for (uint n = 0; n < N; n++) {
                const float sum = simd_sum(sums.v[n]) * scale;
                if (lane == 0 && n < count) out[ulong(first + n) * p.heads * p.value + v] = sum;
            }
        }
    }
}

#define MLA(N)                                                                                  \
    template [[host_name("mla_absorb_" #N)]] [[kernel]] decltype(mla_absorb<N>) mla_absorb<N>; \
    template [[host_name("mla_values_" #N)]] [[kernel]] decltype(mla_values<N>) mla_values<N>;
MLA(1)
MLA(4)
