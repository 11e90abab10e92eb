//! Memory that only the accelerator itself knows: intermediates, and tables that kernels read.

use metaltail_kernels::{Buffer, ComputeError, View};

use super::launch::Launcher;
use super::layout::{floats, too_large};

/// What an intermediate is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// Queries with keys' weights applied.
    Absorbed,
    /// Scores of positions.
    Scores,
    /// Mixed latents.
    Mixed,
    /// Gated products of experts.
    Inner,
}

/// The smallest table, in bytes.
const TABLE: usize = 1 << 14;

/// Intermediates and tables.
///
/// An intermediate is used again by the next operation, behind a barrier. A table is written by the host, so it is
/// used again when all has ended.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    rooms: [Option<(Buffer, usize)>; 4],
    idle: Vec<(Buffer, usize)>,
    taken: Vec<(Buffer, usize)>,
    /// For tests: each operation has new memory, of the size that it needs, and intermediates begin as NaN.
    fresh: bool,
}

impl Scratch {
    /// Uses nothing again.
    pub(super) fn fresh() -> Scratch {
        Scratch { fresh: true, ..Scratch::default() }
    }

    /// Memory for some numbers of an intermediate.
    pub(super) fn room<L: Launcher>(
        &mut self,
        launcher: &mut L,
        room: Room,
        factors: [usize; 3],
    ) -> Result<View, ComputeError> {
        let numbers = factors.iter().try_fold(1usize, |product, factor| product.checked_mul(*factor));
        let bytes = numbers.and_then(|numbers| numbers.max(1).checked_mul(4));
        let bytes =
            bytes.ok_or_else(|| too_large("numbers of an intermediate", usize::MAX, usize::MAX / 4))?;
        let place = &mut self.rooms[room as usize];
        if let Some((buffer, size)) = *place
            && size >= bytes
            && !self.fresh
        {
            return Ok(buffer.view());
        }
        let buffer = launcher.allocate(bytes)?;
        if let Some((old, _)) = place.replace((buffer, bytes)) {
            launcher.free(old);
        }
        if self.fresh {
            launcher.write(buffer, 0, &floats(&vec![f32::NAN; bytes / 4]))?;
        }
        Ok(buffer.view())
    }

    /// A buffer that holds `bytes`, which nothing else uses.
    pub(super) fn table<L: Launcher>(
        &mut self,
        launcher: &mut L,
        bytes: &[u8],
    ) -> Result<Buffer, ComputeError> {
        let fitting = self.idle.iter().enumerate().filter(|(_, (_, size))| *size >= bytes.len());
        let fitting = fitting.min_by_key(|(_, (_, size))| *size).map(|(at, _)| at).filter(|_| !self.fresh);
        let (buffer, size) = match fitting {
            Some(at) => self.idle.swap_remove(at),
            None => {
                let size = match self.fresh {
                    true => bytes.len(),
                    false => bytes.len().max(TABLE).checked_next_power_of_two().unwrap_or(bytes.len()),
                };
                (launcher.allocate(size)?, size)
            }
        };
        self.taken.push((buffer, size));
        launcher.write(buffer, 0, bytes)?;
        Ok(buffer)
    }

    /// All has ended.
    pub(super) fn end_all<L: Launcher>(&mut self, launcher: &mut L) {
        match self.fresh {
            true => self.taken.drain(..).for_each(|(buffer, _)| launcher.free(buffer)),
            false => self.idle.append(&mut self.taken),
        }
    }
}
