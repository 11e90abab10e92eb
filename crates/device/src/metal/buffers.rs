//! Buffers by handle, for launchers.

use std::collections::BTreeMap;

use metaltail_kernels::{Buffer, ComputeError};

#[derive(Debug)]
struct Slot<B> {
    memory: B,
    /// By work that was recorded and has not ended.
    used: bool,
    /// When it is not used any more.
    freed: bool,
}

/// Memory by handle, and whether recorded work uses it. Handles are not given twice.
#[derive(Debug)]
pub struct Buffers<B> {
    device: &'static str,
    slots: BTreeMap<Buffer, Slot<B>>,
    next: u32,
}

impl<B> Buffers<B> {
    /// None yet. `device` is named in messages.
    pub fn new(device: &'static str) -> Buffers<B> {
        Buffers { device, slots: BTreeMap::new(), next: 0 }
    }

    fn refuse<T>(&self, message: String) -> Result<T, ComputeError> {
        Err(ComputeError::Device { device: self.device, message })
    }

    /// A handle for `memory`.
    ///
    /// # Errors
    /// No handle is left.
    pub fn insert(&mut self, memory: B) -> Result<Buffer, ComputeError> {
        let buffer = Buffer(self.next);
        let Some(next) = self.next.checked_add(1) else {
            return self.refuse("four billion buffers were made: open the device anew".into());
        };
        self.next = next;
        self.slots.insert(buffer, Slot { memory, used: false, freed: false });
        Ok(buffer)
    }

    fn slot(&self, buffer: Buffer) -> Result<&Slot<B>, ComputeError> {
        match self.slots.get(&buffer) {
            Some(slot) => Ok(slot),
            None => self.refuse(format!("there is no buffer {}, or it was released", buffer.0)),
        }
    }

    /// The memory, for kernels.
    ///
    /// # Errors
    /// A handle that was never given, or whose memory is gone.
    pub fn get(&self, buffer: Buffer) -> Result<&B, ComputeError> {
        Ok(&self.slot(buffer)?.memory)
    }

    /// The memory, for the host.
    ///
    /// # Errors
    /// As [`Buffers::get`]; memory in use.
    pub fn idle(&mut self, buffer: Buffer) -> Result<&mut B, ComputeError> {
        let slot = self.slot(buffer)?;
        if slot.freed {
            return self.refuse(format!("buffer {} was released", buffer.0));
        }
        if slot.used {
            return self
                .refuse(format!("buffer {} is in use by work that has not ended: wait first", buffer.0));
        }
        let slot = self.slots.get_mut(&buffer).map(|slot| &mut slot.memory);
        slot.ok_or(ComputeError::Device {
            device: self.device,
            message: format!("there is no buffer {}", buffer.0),
        })
    }

    /// Recorded work uses some buffers from now on.
    ///
    /// # Errors
    /// As [`Buffers::get`], or one that was freed; then none is used by it.
    pub fn begin_use(&mut self, buffers: &[Buffer]) -> Result<(), ComputeError> {
        for &buffer in buffers {
            if self.slot(buffer)?.freed {
                return self.refuse(format!("buffer {} was released", buffer.0));
            }
        }
        for buffer in buffers {
            if let Some(slot) = self.slots.get_mut(buffer) {
                slot.used = true;
            }
        }
        Ok(())
    }

    /// Frees memory, now or when all has ended.
    pub fn free(&mut self, buffer: Buffer) {
        match self.slots.get_mut(&buffer) {
            Some(slot) if slot.used => slot.freed = true,
            _ => drop(self.slots.remove(&buffer)),
        }
    }

    /// All work has ended: nothing is in use any more.
    pub fn end_all(&mut self) {
        self.slots.retain(|_, slot| !slot.freed);
        self.slots.values_mut().for_each(|slot| slot.used = false);
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_in_use_is_neither_touched_nor_freed() {
        let mut buffers = Buffers::new("test");
        let (a, b) = (buffers.insert('a').unwrap(), buffers.insert('b').unwrap());
        buffers.begin_use(&[a]).unwrap();
        let refused = buffers.idle(a).unwrap_err().to_string();
        assert!(refused.contains("wait first"), "{refused}");
        *buffers.idle(b).unwrap() = 'c';
        buffers.free(a);
        buffers.free(b);
        assert_eq!(buffers.get(a).unwrap(), &'a', "the device may still read it");
        assert!(buffers.begin_use(&[a]).is_err(), "released, though it lives");
        assert!(buffers.get(b).is_err());
        buffers.end_all();
        assert!(buffers.is_empty() && buffers.get(a).is_err());
        assert_ne!(buffers.insert('d').unwrap(), a, "a handle is not given twice");
    }

    #[test]
    fn what_is_refused_uses_nothing() {
        let mut buffers = Buffers::new("test");
        let a = buffers.insert('a').unwrap();
        assert!(buffers.begin_use(&[a, Buffer(7)]).is_err());
        assert!(buffers.idle(a).is_ok());
    }
}
