// The Metal source, file by file. The build script of the feature `msl-cpu` reads this file too.

/// What files need: comes first.
pub const COMMON: [(&str, &str); 2] = [
    ("matrix.metal", include_str!("../../kernels/metal/matrix.metal")),
    ("keys.metal", include_str!("../../kernels/metal/keys.metal")),
];

/// The kernels, in any order.
pub const FILES: [(&str, &str); 9] = [
    ("matmul.metal", include_str!("../../kernels/metal/matmul.metal")),
    ("experts.metal", include_str!("../../kernels/metal/experts.metal")),
    ("elementwise.metal", include_str!("../../kernels/metal/elementwise.metal")),
    ("norm.metal", include_str!("../../kernels/metal/norm.metal")),
    ("rope.metal", include_str!("../../kernels/metal/rope.metal")),
    ("router.metal", include_str!("../../kernels/metal/router.metal")),
    ("select.metal", include_str!("../../kernels/metal/select.metal")),
    ("attention.metal", include_str!("../../kernels/metal/attention.metal")),
    ("gemm.metal", include_str!("../../kernels/metal/gemm.metal")),
];

/// The files as one source for `newLibraryWithSource`, which finds no files beside it. `#line` gives the compiler's
/// messages their places.
pub fn joined(files: &[(&str, &str)]) -> String {
    files.iter().map(|(name, text)| format!("#line 1 \"{name}\"\n{text}\n")).collect()
}

/// All kernels as one source.
pub fn source() -> String {
    joined(&[&COMMON[..], &FILES[..]].concat())
}
