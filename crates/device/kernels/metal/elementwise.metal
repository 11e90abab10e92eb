// Sums and copies of activations. A thread takes every `threads`-th number.

struct AddParameters {
    uint count;
};

// to += from.
kernel void add(device const float* from [[buffer(0)]],
                device float* to [[buffer(1)]],
                constant AddParameters& p [[buffer(2)]],
                uint at [[thread_position_in_grid]],
                uint threads [[threads_per_grid]]) {
    for (ulong i = at; i < p.count; i += threads) to[i] += from[i];
}

struct CopyParameters {
    uint rows;
    uint width;
    uint from_stride;  // from the beginning of a row to that of the next
    uint to_stride;
};

// Rows from one place to another, bit by bit: what is copied need not be floats.
kernel void copy_rows(device const uint* from [[buffer(0)]],
                      device uint* to [[buffer(1)]],
                      constant CopyParameters& p [[buffer(2)]],
                      uint2 group [[threadgroup_position_in_grid]],
                      uint2 groups [[threadgroups_per_grid]],
                      uint2 in_group [[thread_position_in_threadgroup]],
                      uint2 threads [[threads_per_threadgroup]]) {
    for (uint row = group.y; row < p.rows; row += groups.y) {
        device const uint* in = from + ulong(row) * p.from_stride;
        device uint* out = to + ulong(row) * p.to_stride;
        for (uint i = group.x * threads.x + in_group.x; i < p.width; i += groups.x * threads.x) out[i] = in[i];
    }
}

struct CombineParameters {
    uint rows;
    uint top_k;
    uint width;
    uint has_shared;  // 1 or 0
};

// x[row] += (sum over k of weights[row][k] * products[row * top_k + k]) + shared[row].
//
// The sum begins at zero, k ascends, each term is fused; then comes the shared expert, then the residual stream. An
// expert of weight zero was not computed: its product is not read.
kernel void combine(device const float* products [[buffer(0)]],
                    device const float* shared [[buffer(1)]],
                    device float* x [[buffer(2)]],
                    constant float* weights [[buffer(3)]],
                    constant CombineParameters& p [[buffer(4)]],
                    uint2 group [[threadgroup_position_in_grid]],
                    uint2 groups [[threadgroups_per_grid]],
                    uint2 in_group [[thread_position_in_threadgroup]],
                    uint2 threads [[threads_per_threadgroup]]) {
    for (uint row = group.y; row < p.rows; row += groups.y) {
        device const float* of_row = products + ulong(row) * p.top_k * p.width;
        for (uint i = group.x * threads.x + in_group.x; i < p.width; i += groups.x * threads.x) {
            float sum = 0.0f;
            for (uint k = 0; k < p.top_k; k++) {
                const float weight = weights[row * p.top_k + k];
                // By bits: a GPU may take a subnormal weight for zero, and NaN is none.
                if ((as_type<uint>(weight) << 1) != 0) sum = fma(weight, of_row[ulong(k) * p.width + i], sum);
            }
            if (p.has_shared != 0) sum += shared[ulong(row) * p.width + i];
            x[ulong(row) * p.width + i] += sum;
        }
    }
}
