// Experts of one layer of one step: out = down(silu(gate x) * up x), as crates/kernels/src/experts.rs.
//
// Nothing is copied together: a table has the addresses of each expert's matrices where the cache keeps them (the
// host declares that memory resident once, docs/design/residency.md), and each matrix names its own format.

// As in src/metal/layout.rs: 160 bytes. Gate and up are inner x hidden, down is hidden x inner.
struct Expert {
    Matrix gate;
    Matrix up;
    Matrix down;
    ulong inner_at;    // where its intermediates begin, in floats: pairs x inner
    uint first_pair;   // of the table of pairs
    uint unused;
};

// A tile of at most N rows that chose the same expert.
struct Tile {
    uint expert;
    uint first;  // pair within the expert
    uint count;
};

struct Pair {
    uint input;   // row of the activations
    uint output;  // row of the outputs; no two pairs share one
};

struct ExpertParameters {
    uint tiles;
    uint hidden;
};

inline float silu(float x) { return x / (1.0f + exp(-x)); }

// inner[pair][row] = silu(gate[row] . x) * up[row] . x. The grid's x axis goes over rows, y over tiles.
template <uint N>
kernel void experts_gate_up(constant Expert* experts [[buffer(0)]],
                            constant Tile* tiles [[buffer(1)]],
                            constant Pair* pairs [[buffer(2)]],
                            device const float* x [[buffer(3)]],
                            device float* inner [[buffer(4)]],
                            constant ExpertParameters& p [[buffer(5)]],
                            uint2 group [[threadgroup_position_in_grid]],
                            uint2 groups [[threadgroups_per_grid]],
                            uint lane [[thread_index_in_simdgroup]],
                            uint simd [[simdgroup_index_in_threadgroup]],
                            uint simds [[simdgroups_per_threadgroup]]) {
    for (uint t = group.y; t < p.tiles; t += groups.y) {
        const uint first = tiles[t].first, count = tiles[t].count;
        constant Expert& expert = experts[tiles[t].expert];
        const Matrix gate = matrix_of(expert.gate), up = matrix_of(expert.up);
        Inputs<N> inputs;
        for (uint n = 0; n < N; n++) {
            const uint pair = expert.first_pair + first + min(n, count - 1);
            inputs.at[n] = ulong(pairs[pair].input) * p.hidden;
        }
        for (uint row = group.x * simds + simd; row < gate.rows; row += groups.x * simds) {
            const Sums<N> gates = lane_products_of<N>(gate, row, x, inputs, lane);
            const Sums<N> ups = lane_products_of<N>(up, row, x, inputs, lane);
            const float gate_scale = row_scale(gate, row), up_scale = row_scale(up, row);
            for (uint n = 0; n < N; n++) {
                const float g = simd_sum(gates.v[n]) * gate_scale;
                const float u = simd_sum(ups.v[n]) * up_scale;
                if (lane == 0 && n < count) {
                    inner[expert.inner_at + ulong(first + n) * gate.rows + row] = silu(g) * u;
                }
            }
        }
    }
}

// out[output row][row] = down[row] . inner[pair].
template <uint N>
kernel void experts_down(constant Expert* experts [[buffer(0)]],
                         constant Tile* tiles [[buffer(1)]],
                         constant Pair* pairs [[buffer(2)]],
                         device const float* inner [[buffer(3)]],
                         device float* out [[buffer(4)]],
                         constant ExpertParameters& p [[buffer(5)]],
                         uint2 group [[threadgroup_position_in_grid]],
                         uint2 groups [[threadgroups_per_grid]],
                         uint lane [[thread_index_in_simdgroup]],
                         uint simd [[simdgroup_index_in_threadgroup]],
                         uint simds [[simdgroups_per_threadgroup]]) {
    for (uint t = group.y; t < p.tiles; t += groups.y) {
        const uint first = tiles[t].first, count = tiles[t].count;
        constant Expert& expert = experts[tiles[t].expert];
        const Matrix down = matrix_of(expert.down);
        Inputs<N> inputs;
        for (uint n = 0; n < N; n++) {
            inputs.at[n] = expert.inner_at + ulong(first + min(n, count - 1)) * down.cols;
        }
        for (uint row = group.x * simds + simd; row < down.rows; row += groups.x * simds) {
            const Sums<N> sums = lane_products_of<N>(down, row, inner, inputs, lane);
            const float scale = row_scale(down, row);
            for (uint n = 0; n < N; n++) {
                const float sum = simd_sum(sums.v[n]) * scale;
                if (lane == 0 && n < count) {
                    const uint output = pairs[expert.first_pair + first + n].output;
                    out[ulong(output) * p.hidden + row] = sum;
                }
            }
        }
    }
}

struct SwigluParameters {
    uint count;
};

// out = silu(gate) * up, element by element: where a product for many inputs gave gate and up.
kernel void swiglu(device const float* gate [[buffer(0)]],
                   device const float* up [[buffer(1)]],
                   device float* out [[buffer(2)]],
                   constant SwigluParameters& p [[buffer(3)]],
                   uint at [[thread_position_in_grid]],
                   uint threads [[threads_per_grid]]) {
    for (ulong i = at; i < p.count; i += threads) out[i] = silu(gate[i]) * up[i];
}

#define EXPERTS(N)                                                                                          \
    template [[host_name("experts_gate_up_" #N)]] [[kernel]] decltype(experts_gate_up<N>) experts_gate_up<N>; \
    template [[host_name("experts_down_" #N)]] [[kernel]] decltype(experts_down<N>) experts_down<N>;
EXPERTS(1)
EXPERTS(4)
