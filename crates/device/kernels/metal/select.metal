// The positions worth attending to: scores and choice of crates/model/src/attention/indexer.rs (DSA).

struct SelectParameters {
    uint rows;
    uint heads;
    uint dim;
    uint top_k;
    uint span;        // scores of a row, from one to the next; the most positions of a row
    float per_head;   // 1 / sqrt(dim)
    float over_heads; // 1 / sqrt(heads)
};

// scores[row][t] = sum over heads of weight * max(query . key[t] * per_head, 0) * over_heads, for t below counts[row].
// A SIMD group takes a position, the y axis goes over rows.
kernel void select_scores(device const float* queries [[buffer(0)]],
                          device const float* weights [[buffer(1)]],
                          device const float* keys [[buffer(2)]],
                          constant uint* counts [[buffer(3)]],
                          device float* scores [[buffer(4)]],
                          constant SelectParameters& p [[buffer(5)]],
                          uint2 group [[threadgroup_position_in_grid]],
                          uint2 groups [[threadgroups_per_grid]],
                          uint lane [[thread_index_in_simdgroup]],
                          uint simd [[simdgroup_index_in_threadgroup]],
                          uint simds [[simdgroups_per_threadgroup]]) {
    for (uint row = group.y; row < p.rows; row += groups.y) {
        for (uint t = group.x * simds + simd; t < counts[row]; t += groups.x * simds) {
            device const float* key = keys + ulong(t) * p.dim;
            float score = 0.0f;
            for (uint head = 0; head < p.heads; head++) {
                device const float* query = queries + (ulong(row) * p.heads + head) * p.dim;
                float sum = 0.0f;
                for (uint col = lane; col < p.dim; col += LANES) sum = fma(query[col], key[col], sum);
                sum = simd_sum(sum) * p.per_head;
                // A NaN is no more than zero, as in the reference.
                const float term = weights[row * p.heads + head] * p.over_heads * (sum > 0.0f ? sum : 0.0f);
                // Without a zero to begin with, a sum of zeros keeps their sign, as in the reference.
                score = head == 0 ? term : score + term;
            }
            if (lane == 0) scores[ulong(row) * p.span + t] = score;
        }
    }
}

// A NaN counts as lowest; by bits, since fast math takes none to exist.
inline uint select_key(float score) {
    const bool nan = (as_type<uint>(score) & 0x7FFFFFFF) > 0x7F800000;
    return nan ? ~uint(MINUS_INFINITY) : key_of(score);
}

// The sum of `value` over all threads before this one, and over all of them in `all`.
inline uint group_prefix(uint value, threadgroup uint* part, uint lane, uint simd, uint simds, thread uint& all) {
    const uint before = simd_prefix_exclusive_sum(value);
    // The call before may still be reading `part`.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (lane == LANES - 1) part[simd] = before + value;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint of_simd = lane < simds ? part[lane] : 0;
    const uint earlier = simd_sum(lane < simd ? of_simd : 0u);
    all = simd_sum(of_simd);
    return earlier + before;
}

// The top_k positions of highest score, ascending; of equal scores the lowest positions. A threadgroup of 256 takes a
// row. Four digits of eight bits, the highest first, find the key of the last position chosen, whatever the count.
kernel void select_top(device const float* scores [[buffer(0)]],
                       constant uint* counts [[buffer(1)]],
                       device uint* chosen [[buffer(2)]],
                       constant SelectParameters& p [[buffer(3)]],
                       uint group [[threadgroup_position_in_grid]],
                       uint groups [[threadgroups_per_grid]],
                       uint tid [[thread_index_in_threadgroup]],
                       uint threads [[threads_per_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]],
                       uint simd [[simdgroup_index_in_threadgroup]],
                       uint simds [[simdgroups_per_threadgroup]]) {
    threadgroup atomic_uint buckets[256];
    threadgroup uint part[32];
    threadgroup uint found[2];
    for (uint row = group; row < p.rows; row += groups) {
        device const float* of_row = scores + ulong(row) * p.span;
        const uint count = counts[row];
        // The last key chosen, and how many of its equals are.
        uint last = 0, equals = min(p.top_k, count);
        for (uint shift = 32; shift > 0;) {
            shift -= 8;
            for (uint b = tid; b < 256; b += threads) atomic_store_explicit(&buckets[b], 0u, memory_order_relaxed);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (uint t = tid; t < count; t += threads) {
                const uint key = select_key(of_row[t]);
                // Of the digits found so far, all must agree.
                if (shift == 24 || key >> (shift + 8) == last >> (shift + 8)) {
                    atomic_fetch_add_explicit(&buckets[key >> shift & 255], 1u, memory_order_relaxed);
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (tid == 0) {
                uint wanted = equals, digit = 255;
                for (; digit > 0; digit--) {
                    const uint here = atomic_load_explicit(&buckets[digit], memory_order_relaxed);
                    if (here >= wanted) break;
                    wanted -= here;
                }
                found[0] = digit;
                found[1] = wanted;
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            last |= found[0] << shift;
            equals = found[1];
        }
        uint equals_before = 0, chosen_before = 0;
        for (uint from = 0; from < count; from += threads) {
            const uint t = from + tid;
            // Behind the last position a key that none has.
            const uint key = t < count ? select_key(of_row[t]) : 0;
            const bool is_equal = key == last;
            uint all_equal, all_taken;
            const uint rank = equals_before + group_prefix(is_equal ? 1 : 0, part, lane, simd, simds, all_equal);
            const bool take = key > last || (is_equal && rank < equals);
            const uint at = chosen_before + group_prefix(take ? 1 : 0, part, lane, simd, simds, all_taken);
            if (take) chosen[ulong(row) * p.top_k + at] = t;
            equals_before += all_equal;
            chosen_before += all_taken;
        }
        // The next row writes threadgroup memory again.
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}
