// Norms of rows that lie in strides: rms_norm and layer_norm of crates/kernels/src/ops.rs.
//
// The reference sums in double precision, which Metal has not; here each thread adds few numbers and the rest is a
// tree, so the error grows with the tree's depth and the thread's share, not with the width.

struct NormParameters {
    uint rows;
    uint width;
    uint from_stride;  // from the beginning of a row to that of the next
    uint to_stride;
    float eps;
};

// The sum of `value` over all threads of a threadgroup.
inline float group_sum(float value, threadgroup float* part, uint lane, uint simd, uint simds) {
    const float sum = simd_sum(value);
    // The sum before may still be read from `part`.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (lane == 0) part[simd] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return simd_sum(lane < simds ? part[lane] : 0.0f);
}

// to = from / rms(from) * weight, rms = sqrt(mean(from^2) + eps). A threadgroup takes a row; its threads are a
// multiple of 32, and follow from the width alone.
kernel void rms_norm(device const float* from [[buffer(0)]],
                     device const float* weight [[buffer(1)]],
                     device float* to [[buffer(2)]],
                     constant NormParameters& p [[buffer(3)]],
                     uint group [[threadgroup_position_in_grid]],
                     uint groups [[threadgroups_per_grid]],
                     uint tid [[thread_index_in_threadgroup]],
                     uint threads [[threads_per_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]],
                     uint simd [[simdgroup_index_in_threadgroup]],
                     uint simds [[simdgroups_per_threadgroup]]) {
    threadgroup float part[32];
    for (uint row = group; row < p.rows; row += groups) {
        device const float* in = from + ulong(row) * p.from_stride;
        device float* out = to + ulong(row) * p.to_stride;
        float sum = 0.0f;
        for (uint i = tid; i < p.width; i += threads) sum = fma(in[i], in[i], sum);
        sum = group_sum(sum, part, lane, simd, simds);
        const float factor = 1.0f / sqrt(sum / float(p.width) + p.eps);
        for (uint i = tid; i < p.width; i += threads) out[i] = in[i] * factor * weight[i];
    }
}

// to = (from - mean) / sqrt(variance + eps) * weight + bias, the variance over the width. In two passes: the square of
// a mean and the mean of squares would cancel.
kernel void layer_norm(device const float* from [[buffer(0)]],
                       device const float* weight [[buffer(1)]],
                       device const float* bias [[buffer(2)]],
                       device float* to [[buffer(3)]],
                       constant NormParameters& p [[buffer(4)]],
                       uint group [[threadgroup_position_in_grid]],
                       uint groups [[threadgroups_per_grid]],
                       uint tid [[thread_index_in_threadgroup]],
                       uint threads [[threads_per_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]],
                       uint simd [[simdgroup_index_in_threadgroup]],
                       uint simds [[simdgroups_per_threadgroup]]) {
    threadgroup float part[32];
    for (uint row = group; row < p.rows; row += groups) {
        device const float* in = from + ulong(row) * p.from_stride;
        device float* out = to + ulong(row) * p.to_stride;
        float sum = 0.0f;
        for (uint i = tid; i < p.width; i += threads) sum += in[i];
        const float mean = group_sum(sum, part, lane, simd, simds) / float(p.width);
        float squares = 0.0f;
        for (uint i = tid; i < p.width; i += threads) {
            const float apart = in[i] - mean;
            squares = fma(apart, apart, squares);
        }
        const float variance = group_sum(squares, part, lane, simd, simds) / float(p.width);
        const float factor = 1.0f / sqrt(variance + p.eps);
        for (uint i = tid; i < p.width; i += threads) out[i] = (in[i] - mean) * factor * weight[i] + bias[i];
    }
}
