// From router logits to chosen experts: `choose` of crates/model/src/ffn/router.rs.

struct RouterParameters {
    uint rows;
    uint experts;
    uint top_k;
    uint softmax;    // 1: softmax over all experts, 0: sigmoid of each
    uint has_bias;   // whether `bias` is added for the choice (not for the weight)
    uint groups;     // a divisor of experts; 1 where the choice is not limited to groups
    uint kept;       // groups that stay
    uint normalise;  // whether the chosen weights are divided by their sum
    float scale;
};

// What stands where fewer than top_k experts were allowed.
static constant constexpr const uint NO_EXPERT = 0xFFFFFFFF;

// score + bias. A score may have underflowed to zero; then the biases decide, and they may be subnormals, which GPUs
// may take for zeros in a sum.
inline float plus(float score, float bias) {
    const bool bias_alone = as_type<uint>(score) == 0 && as_type<uint>(bias) << 1 != 0;
    return bias_alone ? bias : score + bias;
}

// The greatest of all threads' numbers, for all threads.
inline uint group_max(uint value, threadgroup uint* part, uint lane, uint simd, uint simds) {
    value = simd_max(value);
    // The call before may still be reading `part`.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (lane == 0) part[simd] = value;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return simd_max(lane < simds ? part[lane] : 0u);
}

// How many of `keys` come before the one at `at`: greater, or equal and earlier. As all differ in this, those that
// come before fewer than k others are the k greatest, found by all threads at once.
inline uint rank_of(threadgroup const uint* keys, uint count, uint at) {
    const uint key = keys[at];
    uint rank = 0;
    for (uint j = 0; j < count; j++) rank += keys[j] > key || (keys[j] == key && j < at) ? 1 : 0;
    return rank;
}

// The sum of the two greatest choices of a group (of the only one where there is one), as a key.
inline uint strength_of(threadgroup const uint* keys, uint size) {
    uint first = 0, second = 0;
    for (uint i = 0; i < size; i++) {
        if (keys[i] > first) {
            second = first;
            first = keys[i];
        } else {
            second = max(second, keys[i]);
        }
    }
    return size == 1 ? first : key_of(of_key(first) + of_key(second));
}

// A threadgroup takes a row; its threads are a multiple of 32. Threadgroup memory: `scores` and `keys` have a number
// an expert, `strengths` one a group, `chosen` one of top_k. Ids come out ascending, `broken` says whether a logit of
// the row was not finite.
kernel void route(device const float* logits [[buffer(0)]],
                  device const float* bias [[buffer(1)]],
                  device uint* ids [[buffer(2)]],
                  device float* weights [[buffer(3)]],
                  device uint* broken [[buffer(4)]],
                  constant RouterParameters& p [[buffer(5)]],
                  threadgroup float* scores [[threadgroup(0)]],
                  threadgroup uint* keys [[threadgroup(1)]],
                  threadgroup uint* strengths [[threadgroup(2)]],
                  threadgroup uint* chosen [[threadgroup(3)]],
                  uint group [[threadgroup_position_in_grid]],
                  uint groups [[threadgroups_per_grid]],
                  uint tid [[thread_index_in_threadgroup]],
                  uint threads [[threads_per_threadgroup]],
                  uint lane [[thread_index_in_simdgroup]],
                  uint simd [[simdgroup_index_in_threadgroup]],
                  uint simds [[simdgroups_per_threadgroup]]) {
    threadgroup uint part[32];
    const uint size = p.experts / p.groups;
    for (uint row = group; row < p.rows; row += groups) {
        device const float* in = logits + ulong(row) * p.experts;
        uint greatest = 0, damaged = 0;
        for (uint e = tid; e < p.experts; e += threads) {
            if (finite_bits(in[e])) {
                greatest = max(greatest, key_of(in[e]));
            } else {
                damaged = 1;
            }
        }
        const float most = of_key(group_max(greatest, part, lane, simd, simds));
        damaged = group_max(damaged, part, lane, simd, simds);
        for (uint e = tid; e < p.experts; e += threads) {
            scores[e] = p.softmax != 0 ? exp(in[e] - most) : 1.0f / (1.0f + exp(-in[e]));
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float sum = 1.0f;
        if (p.softmax != 0) {
            // One expert after the other, as the reference adds: a tree would now and then round two scores
            // differently and choose another expert. All threads do the same, so nothing has to be shared.
            sum = 0.0f;
            for (uint e = 0; e < p.experts; e++) {
                if (finite_bits(in[e])) sum += scores[e];
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        for (uint e = tid; e < p.experts; e += threads) {
            // A damaged logit weighs nothing and loses against all others.
            const bool sound = finite_bits(in[e]);
            const float score = sound ? scores[e] / sum : 0.0f;
            const float choice = p.has_bias != 0 ? plus(score, bias[e]) : score;
            scores[e] = score;
            keys[e] = sound ? key_of(choice) : ~uint(MINUS_INFINITY);
        }
        for (uint r = tid; r < p.top_k; r += threads) chosen[r] = NO_EXPERT;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (p.kept < p.groups) {
            for (uint g = tid; g < p.groups; g += threads) strengths[g] = strength_of(keys + g * size, size);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (uint g = tid; g < p.groups; g += threads) {
                if (rank_of(strengths, p.groups, g) >= p.kept) {
                    for (uint i = 0; i < size; i++) keys[g * size + i] = 0;
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        for (uint e = tid; e < p.experts; e += threads) {
            if (keys[e] != 0) {
                const uint rank = rank_of(keys, p.experts, e);
                if (rank < p.top_k) chosen[rank] = e;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        // The greatest first, as the reference adds.
        float total = 0.0f;
        for (uint r = 0; r < p.top_k && chosen[r] != NO_EXPERT; r++) total += scores[chosen[r]];
        for (uint r = tid; r < p.top_k; r += threads) {
            const uint expert = chosen[r];
            uint at = 0;
            for (uint s = 0; s < p.top_k; s++) at += chosen[s] < expert || (chosen[s] == expert && s < r) ? 1 : 0;
            float weight = expert == NO_EXPERT ? 0.0f : scores[expert];
            if (p.normalise != 0) weight /= total + 1e-20f;
            ids[ulong(row) * p.top_k + at] = expert;
            weights[ulong(row) * p.top_k + at] = weight * p.scale;
        }
        if (tid == 0) broken[row] = damaged;
        // The next row writes threadgroup memory again.
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}
