// Copies of the kernels with one mistake each. The build script compiles them, the tests must find every one.

/// One mistake.
pub struct Planted {
    /// The kernel file.
    pub unit: &'static str,
    /// Kernels that are replaced.
    #[allow(dead_code, reason = "the build script compiles whatever the file has")]
    pub kernels: &'static [&'static str],
    /// Text of the file (or of what comes before it) that is there exactly once.
    pub passage: &'static str,
    /// What stands there instead.
    pub mistake: &'static str,
}

/// Put before the names of the kernels with mistake `number`.
pub fn prefix(number: usize) -> String {
    format!("planted{number}_")
}

const fn planted(
    unit: &'static str,
    kernels: &'static [&'static str],
    passage: &'static str,
    mistake: &'static str,
) -> Planted {
    Planted { unit, kernels, passage, mistake }
}

const MATMULS: &[&str] = &[
    "matmul_f32_1",
    "matmul_f32_4",
    "matmul_f32_8",
    "matmul_int8_1",
    "matmul_int8_4",
    "matmul_int8_8",
    "matmul_int4_1",
    "matmul_int4_4",
    "matmul_int4_8",
    "matmul_int4g_1",
    "matmul_int4g_4",
    "matmul_int4g_8",
    "matmul_fp8_1",
    "matmul_fp8_4",
    "matmul_fp8_8",
];

const EXPERTS: &[&str] = &["experts_gate_up_1", "experts_gate_up_4", "experts_down_1", "experts_down_4"];

const NORM: &[&str] = &["rms_norm"];
const ROPE: &[&str] = &["rope"];
const ROUTE: &[&str] = &["route"];

/// All of them.
pub const PLANTED: [Planted; 26] = [
    // Decoding: nibbles, signs, offsets, subnormals and NaN of fp8, bytes of a ragged end and of odd addresses.
    planted("matmul.metal", MATMULS, "nibbles >> (4 * i) & 15", "nibbles >> (4 * (i ^ 1)) & 15"),
    planted(
        "matmul.metal",
        MATMULS,
        "& 15) - 8.0f;\n    }\n    }\n    return e;",
        "& 15) - 7.0f;\n    }\n    }\n    return e;",
    ),
    planted("matmul.metal", MATMULS, "row[col / 2] >> (4 * (col & 1))", "row[col / 2] >> (4 * (~col & 1))"),
    planted("matmul.metal", MATMULS, "float(as_type<char>(row[col]))", "float(row[col])"),
    planted("matmul.metal", MATMULS, "* 0.001953125f", "* 0.00390625f"),
    planted("matmul.metal", MATMULS, "if ((code & 0x7F) == 0x7F)", "if (code == 0x7F)"),
    planted("matmul.metal", MATMULS, "uint(p[2]) << 16", "uint(p[1]) << 16"),
    // Scales: of another group, of another block of rows, forgotten.
    planted("matmul.metal", MATMULS, "col / m.span", "(col + STEP) / m.span"),
    planted("matmul.metal", MATMULS, "FORMAT == FP8 ? row / 128 : row", "FORMAT == FP8 ? row / 129 : row"),
    planted("matmul.metal", MATMULS, "scale_is_per_row(FORMAT) ? sum * scale : sum", "sum"),
    // Sums: one lane's alone, columns left out, rows left out behind the launch limit, a tile's last input.
    planted("matmul.metal", MATMULS, "simd_sum(sums.v[n])", "sums.v[n]"),
    planted(
        "matmul.metal",
        MATMULS,
        "col < m.cols; col += LANES * STEP",
        "col + STEP <= m.cols; col += LANES * STEP",
    ),
    planted("matmul.metal", MATMULS, "row < m.rows; row += groups.x * simds", "row < m.rows; row += m.rows"),
    planted("matmul.metal", MATMULS, "lane == 0 && first + n < p.inputs", "lane == 0"),
    // A SIMD operation that only some lanes reach.
    planted(
        "matmul.metal",
        MATMULS,
        "const float sum = simd_sum(sums.v[n]);",
        "float sum = 0.0f; if (lane < 16) sum = simd_sum(sums.v[n]);",
    ),
    planted("experts.metal", EXPERTS, "x / (1.0f + exp(-x))", "1.0f / (1.0f + exp(-x))"),
    planted("experts.metal", EXPERTS, "simd_sum(ups.v[n]) * up_scale", "simd_sum(ups.v[n]) * gate_scale"),
    planted(
        "experts.metal",
        EXPERTS,
        "const uint output = pairs[expert.first_pair + first + n].output;",
        "const uint output = pairs[expert.first_pair + n].output;",
    ),
    planted("experts.metal", EXPERTS, "inner[expert.inner_at + ulong(first + n)", "inner[ulong(first + n)"),
    // Barriers: none before the parts are read, none before they are written again.
    planted(
        "norm.metal",
        NORM,
        "if (lane == 0) part[simd] = sum;\n        threadgroup_barrier(mem_flags::mem_threadgroup);",
        "if (lane == 0) part[simd] = sum;",
    ),
    planted("norm.metal", NORM, "lane < simds ? part[lane] : 0.0f", "part[lane]"),
    planted(
        "rope.metal",
        ROPE,
        "staged[j] = a * c - b * s;\n            staged[half_dim + j] = b * c + a * s;\n        }\n        threadgroup_barrier(mem_flags::mem_threadgroup);\n        for (uint i = tid; i < p.dim; i += threads) at[i] = staged[i];",
        "at[j] = a * c - b * s;\n            at[half_dim + j] = b * c + a * s;\n        }",
    ),
    // Ties by the highest id, floats instead of keys, groups by their best expert alone.
    planted("router.metal", ROUTE, "keys[j] == key && j < at", "keys[j] == key && j > at"),
    planted(
        "router.metal",
        ROUTE,
        "rank += keys[j] > key || (keys[j] == key && j < at) ? 1 : 0",
        "rank += of_key(keys[j]) > of_key(key) || (keys[j] == key && j < at) ? 1 : 0",
    ),
    planted("router.metal", ROUTE, "size == 1 ? first : key_of(of_key(first) + of_key(second))", "first"),
    planted("router.metal", ROUTE, "sound ? key_of(choice) : ~uint(MINUS_INFINITY)", "key_of(choice)"),
];
