// out = x / rms(x) * weight, rms = sqrt(mean(x^2) + eps): rms_norm of crates/kernels/src/ops.rs.
//
// The reference sums squares in double precision, which Metal has not; here each lane adds few of them and the rest
// is a tree, so the error grows with the tree's depth and the lane's share, not with the width.

struct NormParameters {
    uint rows;
    uint width;
    float eps;
};

// A threadgroup takes a row; its threads are a multiple of 32.
kernel void rms_norm(device const float* x [[buffer(0)]],
                     device const float* weight [[buffer(1)]],
                     device float* out [[buffer(2)]],
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
        device const float* in = x + ulong(row) * p.width;
        float sum = 0.0f;
        for (uint i = tid; i < p.width; i += threads) sum = fma(in[i], in[i], sum);
        sum = simd_sum(sum);
        // The row before may still be reading `part`.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (lane == 0) part[simd] = sum;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        sum = simd_sum(lane < simds ? part[lane] : 0.0f);
        const float factor = 1.0f / sqrt(sum / float(p.width) + p.eps);
        for (uint i = tid; i < p.width; i += threads) out[ulong(row) * p.width + i] = in[i] * factor * weight[i];
    }
}
