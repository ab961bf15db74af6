//! This rank's own part of a window: read and written in place, without an operation.

use super::{Element, Window};
use posthaste_core::RmaError;
use posthaste_core::memory::SharedSlice;
use std::sync::atomic::Ordering;
use zerocopy::IntoBytes;

impl<T: Element> Window<T> {
    fn own(&self) -> Option<SharedSlice> {
        self.memory.parts.get(self.memory.handle.me().rank.index())?.mapped
    }

    /// Reads an element of this rank's own part; `None` if there is none, or the window was freed.
    #[inline]
    #[must_use]
    pub fn load(&self, index: usize) -> Option<T> {
        if !self.memory.alive.load(Ordering::Relaxed) {
            return None;
        }
        let slice = self.own()?.slice(Self::offset(index), size_of::<T>() as u64)?;
        let mut value = T::new_zeroed();
        slice.read(value.as_mut_bytes());
        Some(value)
    }

    /// Writes an element of this rank's own part; false if there is none, or the window was freed.
    #[inline]
    pub fn store(&self, index: usize, value: T) -> bool {
        let alive = self.memory.alive.load(Ordering::Relaxed);
        let slice = self.own().and_then(|own| own.slice(Self::offset(index), size_of::<T>() as u64));
        match slice {
            Some(slice) if alive => {
                slice.write(value.as_bytes());
                true
            }
            _ => false,
        }
    }

    /// The memory of `count` elements of this rank's own part.
    fn own_slice(&self, index: usize, count: usize) -> Result<SharedSlice, RmaError> {
        let me = self.memory.handle.me().rank;
        let (offset, bytes) = (Self::offset(index), Self::offset(count));
        let part = self.memory.check(me.index(), me, offset, bytes)?;
        part.mapped.and_then(|own| own.slice(offset, bytes)).ok_or(RmaError::Unreachable(me))
    }

    /// Copies consecutive elements of this rank's own part out. Words of 8 bytes are whole where up to 64 bytes are
    /// copied; more may be torn by a put at the same time.
    ///
    /// # Errors
    /// If they are out of range, or the window was freed. Nothing is copied then.
    pub fn load_slice(&self, index: usize, into: &mut [T]) -> Result<(), RmaError> {
        self.own_slice(index, into.len())?.read(into.as_mut_bytes());
        Ok(())
    }

    /// Copies consecutive elements into this rank's own part; as whole as [`load_slice`](Self::load_slice) says.
    ///
    /// # Errors
    /// If they are out of range, or the window was freed. Nothing is copied then.
    pub fn store_slice(&self, index: usize, values: &[T]) -> Result<(), RmaError> {
        self.own_slice(index, values.len())?.write(values.as_bytes());
        Ok(())
    }

    /// Copies this rank's own part.
    #[must_use]
    pub fn to_vec(&self) -> Vec<T> {
        let mut values = vec![T::new_zeroed(); self.len(self.memory.handle.me().rank)];
        if let Some(own) = self.own()
            && self.memory.alive.load(Ordering::Relaxed)
        {
            own.read(values.as_mut_bytes());
        }
        values
    }

    /// Waits until an element of this rank's own part satisfies a condition, advancing the context meanwhile.
    /// Whoever changes the element by a put does not wake this task: the wait polls, going through the scheduler.
    ///
    /// # Errors
    /// If there is no such element.
    ///
    /// # Cancel safety
    /// Cancel safe: waiting changes nothing.
    pub async fn wait_until(
        &self,
        index: usize,
        mut condition: impl FnMut(T) -> bool,
    ) -> Result<T, RmaError> {
        let me = self.memory.handle.me().rank;
        loop {
            for _ in 0..4096 {
                let Some(value) = self.load(index) else {
                    let len = self.memory.parts[me.index()].len;
                    let (offset, count) = (Self::offset(index), size_of::<T>() as u64);
                    return Err(RmaError::OutOfRange { rank: me, offset, count, len });
                };
                if condition(value) {
                    return Ok(value);
                }
                std::hint::spin_loop();
            }
            self.memory.handle.advance();
            tokio::task::yield_now().await;
        }
    }
}
