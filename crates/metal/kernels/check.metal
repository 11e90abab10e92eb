// What the check of a device runs: every chunk of memory is read through an address, and through nothing else.
#include <metal_stdlib>
using namespace metal;

struct Chunk {
    device const uint* words;
    ulong count;
};

struct CheckParameters {
    uint chunks;
};

// sums[chunk] = the sum of its words, modulo 2^32. A SIMD group takes a chunk at a time.
kernel void check_sums(constant Chunk* chunks [[buffer(0)]],
                       device uint* sums [[buffer(1)]],
                       constant CheckParameters& p [[buffer(2)]],
                       uint group [[threadgroup_position_in_grid]],
                       uint groups [[threadgroups_per_grid]],
                       uint lane [[thread_index_in_simdgroup]],
                       uint width [[threads_per_simdgroup]],
                       uint simd [[simdgroup_index_in_threadgroup]],
                       uint simds [[simdgroups_per_threadgroup]]) {
    for (uint chunk = group * simds + simd; chunk < p.chunks; chunk += groups * simds) {
        device const uint* words = chunks[chunk].words;
        uint sum = 0;
        for (ulong i = lane; i < chunks[chunk].count; i += width) sum += words[i];
        sum = simd_sum(sum);
        if (lane == 0) sums[chunk] = sum;
    }
}

// doubled[i] = 2 * sums[i]: reads what `check_sums` of the same submission wrote, behind a barrier.
kernel void check_doubled(device const uint* sums [[buffer(0)]],
                          device uint* doubled [[buffer(1)]],
                          constant CheckParameters& p [[buffer(2)]],
                          uint i [[thread_position_in_grid]]) {
    if (i < p.chunks) doubled[i] = 2 * sums[i];
}
