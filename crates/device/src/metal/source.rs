// The Metal source, file by file. The build script of the feature `msl-cpu` reads this file too.

/// What every file needs: comes first.
pub const COMMON: (&str, &str) = ("matrix.metal", include_str!("../../kernels/metal/matrix.metal"));

/// The kernels, in any order.
pub const FILES: [(&str, &str); 5] = [
    ("matmul.metal", include_str!("../../kernels/metal/matmul.metal")),
    ("experts.metal", include_str!("../../kernels/metal/experts.metal")),
    ("norm.metal", include_str!("../../kernels/metal/norm.metal")),
    ("rope.metal", include_str!("../../kernels/metal/rope.metal")),
    ("router.metal", include_str!("../../kernels/metal/router.metal")),
];

/// The files as one source for `newLibraryWithSource`, which finds no files beside it. `#line` gives the compiler's
/// messages their places.
pub fn joined(files: &[(&str, &str)]) -> String {
    files.iter().map(|(name, text)| format!("#line 1 \"{name}\"\n{text}\n")).collect()
}

/// All kernels as one source.
pub fn source() -> String {
    joined(&[&[COMMON], &FILES[..]].concat())
}
