//! The boundary to kernels: what is dispatched, in words that know no Metal.
//!
//! Whoever plans the work of a layer names a kernel, its arguments by index and the grid. What carries it out is an
//! [`Encoder`]: Metal's here, and in tests whatever runs the same kernels elsewhere. All that can be checked without
//! a device is checked by [`Dispatch::check`], since Metal itself checks little of it in a release.

use crate::error::MetalError;
use crate::limits::GroupLimits;

/// Bytes that an argument can be given without a buffer (`setBytes`).
pub const MOST_BYTES: usize = 4096;
/// Buffer arguments that a kernel can have.
pub const MOST_BUFFERS: u32 = 31;

/// An argument of a kernel, by its index.
#[derive(Debug)]
pub enum Argument<'a, B> {
    /// A buffer, from a byte on.
    Buffer {
        /// `[[buffer(index)]]`.
        index: u32,
        /// The buffer.
        buffer: &'a B,
        /// First byte of it.
        offset: usize,
    },
    /// Bytes, copied.
    Bytes {
        /// `[[buffer(index)]]`.
        index: u32,
        /// At most [`MOST_BYTES`] of them.
        bytes: &'a [u8],
    },
    /// Threadgroup memory.
    Threadgroup {
        /// `[[threadgroup(index)]]`.
        index: u32,
        /// Bytes.
        len: usize,
    },
}

/// A grid: threadgroups, and threads in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Threadgroups along x, y, z.
    pub groups: [u32; 3],
    /// Threads in a threadgroup along x, y, z.
    pub threads: [u32; 3],
}

/// One run of a kernel.
#[derive(Debug)]
pub struct Dispatch<'a, B> {
    /// The kernel's name in the source (its `host_name`).
    pub kernel: &'a str,
    /// Its arguments.
    pub arguments: &'a [Argument<'a, B>],
    /// The grid.
    pub shape: Shape,
}

/// What a compiled kernel can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelLimits {
    /// Threads in a threadgroup; fewer than the device's where the kernel needs many registers.
    pub threads: usize,
    /// Threads that go in step: a SIMD group.
    pub width: usize,
    /// Bytes of threadgroup memory that the kernel itself takes.
    pub memory: usize,
}

/// A dispatch that does not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a dispatch of {kernel} does not fit: {misfit}")]
pub struct DispatchError {
    /// The kernel.
    pub kernel: String,
    /// What is wrong.
    pub misfit: Misfit,
}

/// What does not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Misfit {
    /// An empty grid.
    #[error("it has no threads")]
    NoThreads,
    /// More threads in a threadgroup than the kernel takes.
    #[error("{wanted} threads in a threadgroup, and the kernel takes {limit}")]
    TooManyThreads {
        /// Threads.
        wanted: u64,
        /// The limit.
        limit: usize,
    },
    /// More threads along an axis than the device takes.
    #[error("{wanted} threads along axis {axis} of a threadgroup, and the device takes {limit}")]
    TooLong {
        /// 0, 1 or 2.
        axis: usize,
        /// Threads.
        wanted: u32,
        /// The limit.
        limit: usize,
    },
    /// Threads that are no whole SIMD groups.
    #[error("{wanted} threads in a threadgroup are no whole SIMD groups of {width}")]
    BrokenSimdGroup {
        /// Threads.
        wanted: u64,
        /// Threads of a SIMD group.
        width: usize,
    },
    /// More threadgroup memory than there is.
    #[error("{wanted} bytes of threadgroup memory, and there are {limit}")]
    TooMuchMemory {
        /// Bytes, the kernel's own included.
        wanted: usize,
        /// The limit.
        limit: usize,
    },
    /// Threadgroup memory that is no multiple of 16 bytes.
    #[error("{len} bytes of threadgroup memory are no multiple of 16")]
    OddMemory {
        /// Bytes.
        len: usize,
    },
    /// An index that no kernel can have.
    #[error("argument {index}: the highest is {}", MOST_BUFFERS - 1)]
    Index {
        /// The index.
        index: u32,
    },
    /// An index that is given twice.
    #[error("argument {index} is given twice")]
    Twice {
        /// The index.
        index: u32,
    },
    /// An offset that leaves the buffer, or is no multiple of 4.
    #[error("argument {index} begins at byte {offset} of {len}")]
    Offset {
        /// The index.
        index: u32,
        /// The offset.
        offset: usize,
        /// Bytes of the buffer.
        len: usize,
    },
    /// Bytes that are too many or none.
    #[error("argument {index} has {len} bytes: 1 to {MOST_BYTES} can be given without a buffer")]
    Bytes {
        /// The index.
        index: u32,
        /// Bytes.
        len: usize,
    },
}

impl<B> Dispatch<'_, B> {
    /// Whether it fits kernel and device. `len` tells the bytes of a buffer.
    ///
    /// # Errors
    /// The first thing that does not.
    pub fn check(
        &self,
        kernel: &KernelLimits,
        device: &GroupLimits,
        len: impl Fn(&B) -> usize,
    ) -> Result<(), DispatchError> {
        let misfit = |misfit| DispatchError { kernel: self.kernel.into(), misfit };
        self.check_shape(kernel, device).map_err(misfit)?;
        self.check_arguments(kernel, device, len).map_err(misfit)
    }

    fn check_shape(&self, kernel: &KernelLimits, device: &GroupLimits) -> Result<(), Misfit> {
        let Shape { groups, threads } = self.shape;
        if groups.contains(&0) || threads.contains(&0) {
            return Err(Misfit::NoThreads);
        }
        for (axis, (&wanted, &limit)) in threads.iter().zip(&device.threads).enumerate() {
            if wanted as usize > limit {
                return Err(Misfit::TooLong { axis, wanted, limit });
            }
        }
        let wanted = threads.iter().fold(1u64, |all, &n| all.saturating_mul(u64::from(n)));
        if wanted > kernel.threads as u64 {
            return Err(Misfit::TooManyThreads { wanted, limit: kernel.threads });
        }
        // Sums over a SIMD group count on all of its lanes.
        if !wanted.is_multiple_of(kernel.width.max(1) as u64) {
            return Err(Misfit::BrokenSimdGroup { wanted, width: kernel.width });
        }
        Ok(())
    }

    fn check_arguments(
        &self,
        kernel: &KernelLimits,
        device: &GroupLimits,
        len: impl Fn(&B) -> usize,
    ) -> Result<(), Misfit> {
        let (mut buffers, mut groups, mut memory) = (0u32, 0u32, kernel.memory);
        for argument in self.arguments {
            let (seen, index) = match *argument {
                Argument::Buffer { index, .. } | Argument::Bytes { index, .. } => (&mut buffers, index),
                Argument::Threadgroup { index, .. } => (&mut groups, index),
            };
            if index >= MOST_BUFFERS {
                return Err(Misfit::Index { index });
            }
            if *seen & 1 << index != 0 {
                return Err(Misfit::Twice { index });
            }
            *seen |= 1 << index;
            match *argument {
                Argument::Buffer { buffer, offset, .. } => {
                    let len = len(buffer);
                    if offset >= len || !offset.is_multiple_of(4) {
                        return Err(Misfit::Offset { index, offset, len });
                    }
                }
                Argument::Bytes { bytes, .. } => {
                    if bytes.is_empty() || bytes.len() > MOST_BYTES {
                        return Err(Misfit::Bytes { index, len: bytes.len() });
                    }
                }
                Argument::Threadgroup { len, .. } => {
                    if len == 0 || !len.is_multiple_of(16) {
                        return Err(Misfit::OddMemory { len });
                    }
                    memory = memory.saturating_add(len);
                }
            }
        }
        match memory > device.memory {
            true => Err(Misfit::TooMuchMemory { wanted: memory, limit: device.memory }),
            false => Ok(()),
        }
    }
}

impl Shape {
    /// A grid for kernels in which a SIMD group takes a row: rows along x, tiles along y, at most `simds` SIMD
    /// groups in a threadgroup (fewer where there are fewer rows or the kernel takes fewer threads). Such kernels
    /// loop over what the grid does not cover, so no axis needs more than `most_groups` threadgroups.
    ///
    /// Threadgroups as equal as can be: 9 rows at 8 SIMD groups are two groups of 5, not one of 8 and one of 1.
    pub fn rows(rows: usize, tiles: usize, simds: u32, kernel: &KernelLimits, most_groups: u32) -> Shape {
        let width = kernel.width.max(1);
        let fit = (kernel.threads / width).max(1);
        let most = (simds as usize).clamp(1, fit);
        let groups = rows.max(1).div_ceil(most);
        let each = rows.max(1).div_ceil(groups);
        let capped = |n: usize| n.clamp(1, most_groups.max(1) as usize) as u32;
        Shape { groups: [capped(groups), capped(tiles), 1], threads: [(each * width) as u32, 1, 1] }
    }
}

/// What carries dispatches out, in the order given but without waiting for one another.
pub trait Encoder {
    /// Its buffers.
    type Buffer;

    /// Adds a dispatch.
    ///
    /// # Errors
    /// A kernel that there is not, or a dispatch that does not fit it; nothing is added then.
    fn dispatch(&mut self, dispatch: &Dispatch<'_, Self::Buffer>) -> Result<(), MetalError>;

    /// What dispatches before wrote can be read by those after.
    fn barrier(&mut self);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KERNEL: KernelLimits = KernelLimits { threads: 512, width: 32, memory: 1024 };
    const DEVICE: GroupLimits = GroupLimits { threads: [1024, 1024, 64], memory: 32768 };

    fn shape(groups: [u32; 3], threads: [u32; 3]) -> Shape {
        Shape { groups, threads }
    }

    fn check(arguments: &[Argument<'_, usize>], shape: Shape) -> Result<(), Misfit> {
        let dispatch = Dispatch { kernel: "k", arguments, shape };
        dispatch.check(&KERNEL, &DEVICE, |&len| len).map_err(|error| error.misfit)
    }

    const FIT: Shape = Shape { groups: [1, 1, 1], threads: [32, 1, 1] };

    #[test]
    fn grids_that_a_device_cannot_run_are_refused() {
        assert_eq!(check(&[], FIT), Ok(()));
        assert_eq!(check(&[], shape([u32::MAX; 3], [512, 1, 1])), Ok(()));
        assert_eq!(check(&[], shape([1, 0, 1], [32, 1, 1])), Err(Misfit::NoThreads));
        assert_eq!(check(&[], shape([1, 1, 1], [32, 1, 0])), Err(Misfit::NoThreads));
        assert_eq!(
            check(&[], shape([1, 1, 1], [32, 32, 1])),
            Err(Misfit::TooManyThreads { wanted: 1024, limit: 512 })
        );
        let long = check(&[], shape([1, 1, 1], [4, 1, 65]));
        assert_eq!(long, Err(Misfit::TooLong { axis: 2, wanted: 65, limit: 64 }));
        assert_eq!(
            check(&[], shape([1, 1, 1], [48, 1, 1])),
            Err(Misfit::BrokenSimdGroup { wanted: 48, width: 32 })
        );
    }

    #[test]
    fn arguments_that_leave_their_buffer_or_come_twice_are_refused() {
        let (small, bytes) = (100usize, vec![0u8; MOST_BYTES + 1]);
        let buffer = |index, offset| Argument::Buffer { index, buffer: &small, offset };
        let given = |index, len: usize| Argument::Bytes { index, bytes: &bytes[..len] };
        assert_eq!(check(&[buffer(0, 0), buffer(1, 96), given(30, 4096), given(2, 1)], FIT), Ok(()));
        assert_eq!(check(&[buffer(31, 0)], FIT), Err(Misfit::Index { index: 31 }));
        assert_eq!(check(&[buffer(3, 0), given(3, 4)], FIT), Err(Misfit::Twice { index: 3 }));
        for offset in [100, 104, 2, usize::MAX] {
            assert_eq!(check(&[buffer(0, offset)], FIT), Err(Misfit::Offset { index: 0, offset, len: 100 }));
        }
        for len in [0, MOST_BYTES + 1] {
            assert_eq!(check(&[given(1, len)], FIT), Err(Misfit::Bytes { index: 1, len }));
        }
    }

    #[test]
    fn threadgroup_memory_counts_what_the_kernel_takes_itself() {
        let memory = |index, len| -> Argument<'static, usize> { Argument::Threadgroup { index, len } };
        assert_eq!(check(&[memory(0, 32768 - 1024)], FIT), Ok(()));
        let over = Err(Misfit::TooMuchMemory { wanted: 32784, limit: 32768 });
        assert_eq!(check(&[memory(0, 16384), memory(1, 15376)], FIT), over);
        assert_eq!(check(&[memory(0, 8)], FIT), Err(Misfit::OddMemory { len: 8 }));
        let small = 64usize;
        let buffer = Argument::Buffer { index: 0, buffer: &small, offset: 0 };
        assert_eq!(check(&[memory(0, 16), buffer], FIT), Ok(()), "indices of the two kinds are apart");
        let text = Dispatch { kernel: "down", arguments: &[memory(0, 8)], shape: FIT };
        let text = text.check(&KERNEL, &DEVICE, |&len| len).unwrap_err().to_string();
        assert_eq!(
            text,
            "a dispatch of down does not fit: 8 bytes of threadgroup memory are no multiple of 16"
        );
    }

    #[test]
    fn rows_are_shared_out_evenly() {
        let rows = |rows, simds| Shape::rows(rows, 3, simds, &KERNEL, 1 << 20);
        assert_eq!(rows(4096, 8), shape([512, 3, 1], [256, 1, 1]));
        assert_eq!(rows(9, 8), shape([2, 3, 1], [160, 1, 1]));
        assert_eq!(rows(1, 8), shape([1, 3, 1], [32, 1, 1]));
        assert_eq!(rows(0, 8), shape([1, 3, 1], [32, 1, 1]));
        assert_eq!(rows(4096, 64), shape([256, 3, 1], [512, 1, 1]), "the kernel takes 16 SIMD groups");
    }

    proptest! {
        #[test]
        fn a_grid_of_rows_always_fits_and_covers_them(
            rows in 0usize..200_000, tiles in 0usize..5000, simds in 0u32..40, threads in 32usize..1025
        ) {
            let kernel = KernelLimits { threads, ..KERNEL };
            let shape = Shape::rows(rows, tiles, simds, &kernel, u32::MAX);
            let dispatch = Dispatch::<usize> { kernel: "k", arguments: &[], shape };
            prop_assert_eq!(dispatch.check(&kernel, &DEVICE, |&len| len), Ok(()));
            let simd_groups = u64::from(shape.groups[0]) * u64::from(shape.threads[0] / 32);
            prop_assert!(simd_groups >= rows as u64 && u64::from(shape.groups[1]) >= tiles as u64);
            // Less than a threadgroup of SIMD groups has nothing to do.
            prop_assert!(simd_groups < rows.max(1) as u64 + u64::from(shape.groups[0]));
        }
    }
}
