// Copies of the kernels with one mistake each. The build script compiles them, the tests must find every one.

/// Kernels of one file.
#[derive(Clone, Copy)]
pub struct Kind {
    /// The file.
    pub unit: &'static str,
    /// How the names of its kernels begin.
    #[allow(dead_code, reason = "only the tests run them; the build script compiles whatever the file has")]
    pub kernels: &'static str,
    /// How the claims about them begin.
    #[allow(dead_code, reason = "as above")]
    pub claims: &'static str,
}

/// One mistake.
pub struct Planted {
    /// Where.
    pub kind: Kind,
    /// Text of the file (or of what comes before it) that is there exactly once.
    pub passage: &'static str,
    /// What stands there instead.
    pub mistake: &'static str,
}

/// Put before the names of the kernels with mistake `number`.
pub fn prefix(number: usize) -> String {
    format!("planted{number}_")
}

const fn planted(kind: Kind, passage: &'static str, mistake: &'static str) -> Planted {
    Planted { kind, passage, mistake }
}

const fn kind(unit: &'static str, kernels: &'static str, claims: &'static str) -> Kind {
    Kind { unit, kernels, claims }
}

const MATMUL: Kind = kind("matmul.metal", "matmul_", "products");
const EXPERTS: Kind = kind("experts.metal", "experts_", "experts");
const SWIGLU: Kind = kind("experts.metal", "swiglu", "gates");
const NORM: Kind = kind("norm.metal", "rms_norm", "norms");
const LAYER: Kind = kind("norm.metal", "layer_norm", "layer norms");
const ADD: Kind = kind("elementwise.metal", "add", "sums");
const COPY: Kind = kind("elementwise.metal", "copy_rows", "copies");
const COMBINE: Kind = kind("elementwise.metal", "combine", "combinations");
const ROPE: Kind = kind("rope.metal", "rope", "rotations");
const ROUTE: Kind = kind("router.metal", "route", "routes");
const MLA: Kind = kind("attention.metal", "mla_", "attention");
const SELECT: Kind = kind("select.metal", "select_", "selections");
const GEMM: Kind = kind("gemm.metal", "gemm_", "prefill");

/// All of them.
pub const PLANTED: [Planted; 69] = [
    // Decoding: nibbles, signs, offsets, subnormals and NaN of fp8, bytes of a ragged end and of odd addresses.
    planted(MATMUL, "nibbles >> (4 * i) & 15", "nibbles >> (4 * (i ^ 1)) & 15"),
    planted(
        MATMUL,
        "& 15) - 8.0f;\n    }\n    }\n    return e;",
        "& 15) - 7.0f;\n    }\n    }\n    return e;",
    ),
    planted(MATMUL, "row[col / 2] >> (4 * (col & 1))", "row[col / 2] >> (4 * (~col & 1))"),
    planted(MATMUL, "float(as_type<char>(row[col]))", "float(row[col])"),
    planted(MATMUL, "* 0.001953125f", "* 0.00390625f"),
    planted(MATMUL, "if ((code & 0x7F) == 0x7F)", "if (code == 0x7F)"),
    planted(MATMUL, "uint(p[2]) << 16", "uint(p[1]) << 16"),
    // Scales: of another group, of another block of rows, forgotten.
    planted(MATMUL, "col / m.span", "(col + STEP) / m.span"),
    planted(MATMUL, "FORMAT == FP8 ? row / 128 : row", "FORMAT == FP8 ? row / 129 : row"),
    planted(MATMUL, "scale_is_per_row(FORMAT) ? sum * scale : sum", "sum"),
    // Sums: one lane's alone, columns left out, rows left out behind the launch limit, a tile's last input.
    planted(MATMUL, "simd_sum(sums.v[n])", "sums.v[n]"),
    planted(MATMUL, "col < m.cols; col += LANES * STEP", "col + STEP <= m.cols; col += LANES * STEP"),
    planted(MATMUL, "row < m.rows; row += groups.x * simds", "row < m.rows; row += m.rows"),
    planted(MATMUL, "lane == 0 && first + n < p.inputs", "lane == 0"),
    // A SIMD operation that only some lanes reach.
    planted(
        MATMUL,
        "const float sum = simd_sum(sums.v[n]);",
        "float sum = 0.0f; if (lane < 16) sum = simd_sum(sums.v[n]);",
    ),
    planted(EXPERTS, "x / (1.0f + exp(-x))", "1.0f / (1.0f + exp(-x))"),
    planted(EXPERTS, "simd_sum(ups.v[n]) * up_scale", "simd_sum(ups.v[n]) * gate_scale"),
    planted(
        EXPERTS,
        "const uint output = pairs[expert.first_pair + first + n].output;",
        "const uint output = pairs[expert.first_pair + n].output;",
    ),
    planted(EXPERTS, "inner[expert.inner_at + ulong(first + n)", "inner[ulong(first + n)"),
    // Barriers: none before the parts are read, none before they are written again.
    planted(
        NORM,
        "if (lane == 0) part[simd] = sum;\n    threadgroup_barrier(mem_flags::mem_threadgroup);",
        "if (lane == 0) part[simd] = sum;",
    ),
    planted(NORM, "lane < simds ? part[lane] : 0.0f", "part[lane]"),
    planted(
        LAYER,
        "    // The sum before may still be read from `part`.\n    threadgroup_barrier(mem_flags::mem_threadgroup);",
        "",
    ),
    // Strides of the other side, the mean of squares, a bias that is forgotten.
    planted(
        NORM,
        "p.to_stride;\n        float sum = 0.0f;\n        for (uint i = tid; i < p.width; i += threads) sum = fma",
        "p.from_stride;\n        float sum = 0.0f;\n        for (uint i = tid; i < p.width; i += threads) sum = fma",
    ),
    planted(
        LAYER,
        "p.to_stride;\n        float sum = 0.0f;\n        for (uint i = tid; i < p.width; i += threads) sum +=",
        "p.width;\n        float sum = 0.0f;\n        for (uint i = tid; i < p.width; i += threads) sum +=",
    ),
    planted(LAYER, "squares = fma(apart, apart, squares)", "squares = fma(in[i], in[i], squares)"),
    planted(LAYER, "* weight[i] + bias[i]", "* weight[i]"),
    planted(LAYER, "sqrt(variance + p.eps)", "sqrt(variance)"),
    planted(ADD, "to[i] += from[i]", "to[i] = from[i]"),
    planted(ADD, "i < p.count; i += threads", "i < p.count; i += p.count"),
    planted(COPY, "from + ulong(row) * p.from_stride", "from + ulong(row) * p.to_stride"),
    planted(COPY, "to + ulong(row) * p.to_stride", "to + ulong(row) * p.width"),
    planted(
        COPY,
        "i < p.width; i += groups.x * threads.x) out[i]",
        "i < p.to_stride; i += groups.x * threads.x) out[i]",
    ),
    // Experts of weight zero, another row's weights, the order of the sum, the shared expert.
    planted(COMBINE, "if ((as_type<uint>(weight) << 1) != 0) sum", "sum"),
    planted(COMBINE, "weights[row * p.top_k + k]", "weights[k]"),
    planted(COMBINE, "of_row[ulong(k) * p.width + i]", "of_row[ulong(p.top_k - 1 - k) * p.width + i]"),
    planted(
        COMBINE,
        "sum = fma(weight, of_row[ulong(k) * p.width + i], sum)",
        "x[ulong(row) * p.width + i] += weight * of_row[ulong(k) * p.width + i]",
    ),
    planted(COMBINE, "if (p.has_shared != 0) sum +=", "if (p.has_shared != 0) sum ="),
    planted(
        ROPE,
        "staged[j] = a * c - b * s;\n            staged[half_dim + j] = b * c + a * s;\n        }\n        threadgroup_barrier(mem_flags::mem_threadgroup);\n        for (uint i = tid; i < p.dim; i += threads) at[i] = staged[i];",
        "at[j] = a * c - b * s;\n            at[half_dim + j] = b * c + a * s;\n        }",
    ),
    planted(ROUTE, "bias_alone ? bias : score + bias", "score + bias"),
    // Ties by the highest id, floats instead of keys, groups by their best expert alone.
    planted(ROUTE, "keys[j] == key && j < at", "keys[j] == key && j > at"),
    planted(
        ROUTE,
        "rank += keys[j] > key || (keys[j] == key && j < at) ? 1 : 0",
        "rank += of_key(keys[j]) > of_key(key) || (keys[j] == key && j < at) ? 1 : 0",
    ),
    planted(ROUTE, "size == 1 ? first : key_of(of_key(first) + of_key(second))", "first"),
    planted(ROUTE, "sound ? key_of(choice) : ~uint(MINUS_INFINITY)", "key_of(choice)"),
    planted(SWIGLU, "i < p.count; i += threads", "i < p.count; i += p.count"),
    planted(SWIGLU, "silu(gate[i]) * up[i]", "gate[i] * silu(up[i])"),
    // Attention: the transposed product, what is listed, tiles of heads, the softmax, the shares of a mix.
    planted(
        MLA,
        "scale_is_per_row(FORMAT)) {\n            scale",
        "scale_is_per_row(FORMAT) && false) {\n            scale",
    ),
    planted(MLA, "min(uint(STEP), p.lora - col); i++) out[i]", "STEP; i++) out[i]"),
    planted(MLA, "inputs.at[n] + p.nope + i", "inputs.at[n] + i"),
    planted(MLA, "row.first == NO_LIST ? i : lists[row.first + i]", "i"),
    planted(MLA, "row.first == NO_LIST ? i : lists[row.first + i]", "row.first == NO_LIST ? i : lists[i]"),
    planted(MLA, "sum * p.scale", "sum"),
    planted(MLA, "if (lane == 0 && n < count) scores", "if (lane == 0) scores"),
    planted(MLA, "exp(at[i] - most)", "exp(at[i])"),
    planted(
        MLA,
        "if (lane == 0) part[simd] = sum;\n        threadgroup_barrier(mem_flags::mem_threadgroup);",
        "if (lane == 0) part[simd] = sum;",
    ),
    planted(MLA, "for (uint s = 1; s < SLICES; s++)", "for (uint s = 1; s < SLICES - 1; s++)"),
    planted(
        MLA,
        "            // The next block writes `part` again.\n            threadgroup_barrier(mem_flags::mem_threadgroup);",
        "",
    ),
    planted(MLA, "+ p.nope + v % p.value", "+ v % p.value"),
    // The choice of positions: signs, ties, a digit that is forgotten, the last place.
    planted(SELECT, "sum > 0.0f ? sum : 0.0f", "sum"),
    planted(SELECT, "shift == 24 || key >> (shift + 8) == last >> (shift + 8)", "true"),
    planted(SELECT, "rank < equals", "rank <= equals"),
    planted(SELECT, "equals_before += all_equal", "equals_before += all_taken"),
    planted(SELECT, "nan ? ~uint(MINUS_INFINITY) : key_of(score)", "key_of(score)"),
    planted(SELECT, "t < count ? select_key(of_row[t]) : 0", "select_key(of_row[min(t, count - 1)])"),
    // Prefill: columns past the end, inputs past the end, a quarter in the wrong place, barriers.
    planted(GEMM, "inside ? x[ulong(input) * m.cols + col + i] : 0.0f", "x[ulong(input) * m.cols + col + i]"),
    planted(GEMM, "input < p.inputs && at < m.rows", "at < m.rows"),
    planted(GEMM, "simd % 2 * 16", "simd / 2 * 16"),
    planted(GEMM, "TILE, ulong2(0, 0), true)", "TILE)"),
    planted(GEMM, "w.v[i] *= scale", "w.v[i] += 0.0f * scale"),
    planted(
        GEMM,
        "                // The products before may still be reading.\n                threadgroup_barrier(mem_flags::mem_threadgroup);",
        "",
    ),
];
