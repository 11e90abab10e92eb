// Rotary position embedding of parts of heads, in place: RopePlan::rotate of crates/model/src/rope.rs.
//
// Cosines and sines come from the host, which forms the angles as the reference does. Pairs are read interleaved
// (2j, 2j + 1) or as halves (j, half + j), and written as halves.

struct RopeParameters {
    uint rows;
    uint heads;
    uint stride;       // floats from a head to the next
    uint offset;       // where in a head the rotated part begins
    uint dim;          // floats that are rotated; even
    uint interleaved;  // 1 or 0
};

// A threadgroup takes a head. `staged` has `dim` floats: written as halves, an interleaved pair lands where another
// thread's pair still has to be read.
kernel void rope(device float* x [[buffer(0)]],
                 device const float* cosines [[buffer(1)]],
                 device const float* sines [[buffer(2)]],
                 constant RopeParameters& p [[buffer(3)]],
                 threadgroup float* staged [[threadgroup(0)]],
                 uint group [[threadgroup_position_in_grid]],
                 uint groups [[threadgroups_per_grid]],
                 uint tid [[thread_index_in_threadgroup]],
                 uint threads [[threads_per_threadgroup]]) {
    const uint half_dim = p.dim / 2;
    const uint heads = p.rows * p.heads;
    for (uint head = group; head < heads; head += groups) {
        device float* at = x + ulong(head) * p.stride + p.offset;
        const ulong angles = ulong(head / p.heads) * half_dim;
        for (uint j = tid; j < half_dim; j += threads) {
            const float a = p.interleaved != 0 ? at[2 * j] : at[j];
            const float b = p.interleaved != 0 ? at[2 * j + 1] : at[half_dim + j];
            const float c = cosines[angles + j], s = sines[angles + j];
            staged[j] = a * c - b * s;
            staged[half_dim + j] = b * c + a * s;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = tid; i < p.dim; i += threads) at[i] = staged[i];
        // The next head writes `staged` again.
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}
