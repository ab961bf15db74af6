//! This rank's own part of a window: read and written in place, without an operation.

use super::{Element, Window};
use posthaste_core::context::{Face, poll_memory};
use posthaste_core::memory::SharedSlice;
use posthaste_core::{Fault, Handle, Rank, RmaError};
use std::sync::atomic::{Ordering, fence};
use zerocopy::IntoBytes;

impl<T: Element> Window<T> {
    fn own(&self) -> Option<SharedSlice> {
        self.memory.parts.get(self.memory.own)?.mapped
    }

    /// This rank's own part as shared memory, for code that works on it in place; `None` if there is none, or the window was
    /// freed. It stays mapped when the window is freed, and is then somebody else's.
    ///
    /// Peers may write it at any time, so that there are copies and atomic words only;
    /// [`as_slice`](SharedSlice::as_slice) says under which conditions it can be a slice.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let window = job.shmalloc::<u64>(1000).await?;
    /// let memory = window.own_memory().expect("this rank has a part");
    /// memory.write_u64(8 * 5, 42);
    /// assert_eq!((window.load(5), memory.sum_words()), (Some(42), 42));
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn own_memory(&self) -> Option<SharedSlice> {
        self.own().filter(|_| self.memory.alive.load(Ordering::Relaxed))
    }

    /// Reads an element of this rank's own part; `None` if there is none, or the window was freed.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let window = job.shmalloc::<u32>(8).await?;
    /// window.put(job.rank(), 7, 9).await?;
    /// assert_eq!((window.load(7), window.load(8)), (Some(9), None));
    /// # job.leave().await
    /// # }
    /// ```
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
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let window = job.shmalloc::<u32>(8).await?;
    /// assert!(window.store(7, 9));
    /// assert!(!window.store(8, 9), "there is no such element");
    /// assert_eq!(window.get(job.rank(), 7).await?, 9);
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    #[must_use = "nothing was written if this is false"]
    pub fn store(&self, index: usize, value: T) -> bool {
        // Whoever frees the window waits for the end of this.
        let _amid = self.memory.gates.pass();
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
        let me = Rank(self.memory.own as u32);
        let (offset, bytes) = (Self::offset(index), Self::offset(count));
        let part = self.memory.check(me.index(), me, offset, bytes)?;
        part.mapped.and_then(|own| own.slice(offset, bytes)).ok_or(RmaError::Unreachable(me))
    }

    /// Copies consecutive elements of this rank's own part out. Words of 8 bytes are whole where up to 64 bytes are
    /// copied; more may be torn by a put at the same time.
    ///
    /// # Errors
    /// If they are out of range, or the window was freed. Nothing is copied then.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let window = job.shmalloc::<u16>(100).await?;
    /// window.put_slice(job.rank(), 98, &[3, 4]).await?;
    /// let mut last = [0; 3];
    /// window.load_slice(97, &mut last)?;
    /// assert_eq!(last, [0, 3, 4]);
    /// # job.leave().await
    /// # }
    /// ```
    pub fn load_slice(&self, index: usize, into: &mut [T]) -> Result<(), RmaError> {
        // Whoever frees the window waits for the end of this: what is given back is not to be touched, and so taken, again.
        let _amid = self.memory.gates.pass();
        self.own_slice(index, into.len())?.read(into.as_mut_bytes());
        Ok(())
    }

    /// Copies consecutive elements into this rank's own part; as whole as [`load_slice`](Self::load_slice) says.
    ///
    /// # Errors
    /// If they are out of range, or the window was freed. Nothing is copied then.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let window = job.shmalloc::<u16>(4).await?;
    /// window.store_slice(1, &[5, 6])?;
    /// assert!(window.store_slice(3, &[7, 8]).is_err(), "they do not fit");
    /// assert_eq!(window.to_vec(), [0, 5, 6, 0]);
    /// # job.leave().await
    /// # }
    /// ```
    pub fn store_slice(&self, index: usize, values: &[T]) -> Result<(), RmaError> {
        // Whoever frees the window waits for the end of this.
        let _amid = self.memory.gates.pass();
        self.own_slice(index, values.len())?.write(values.as_bytes());
        Ok(())
    }

    /// Copies this rank's own part. Of a window that was freed there is nothing to copy: it gives zeros. Where that may be,
    /// [`load_slice`](Self::load_slice) tells.
    #[must_use]
    pub fn to_vec(&self) -> Vec<T> {
        let mut values = vec![T::new_zeroed(); self.len(Rank(self.memory.own as u32))];
        // As in `load_slice`.
        let _amid = self.memory.gates.pass();
        if let Some(own) = self.own()
            && self.memory.alive.load(Ordering::Relaxed)
        {
            own.read(values.as_mut_bytes());
        }
        values
    }

    /// Waits until an element of this rank's own part satisfies a condition, such as `|value| value >= 5`, advancing the
    /// context meanwhile, and gives the value that does. What its writer wrote before is seen then.
    ///
    /// It looks for a short bounded time and then sleeps. Puts, signals and atomic operations wake it, wherever they come from;
    /// a [`store`](Window::store) of this rank's own is seen some milliseconds later at most. A value that is there for a moment
    /// only may be missed. Nobody tells it that a rank which was to write is gone.
    ///
    /// # Errors
    /// If there is no such element, the window is freed, or the job is left.
    ///
    /// # Cancel safety
    /// Cancel safe: waiting changes nothing.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let window = job.shmalloc::<u32>(1).await?;
    /// let (waited, added) = tokio::join!(window.wait_until(0, |value| value != 0), window.add(job.rank(), 0, 7));
    /// added?;
    /// assert_eq!(waited?, 7);
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn wait_until(&self, index: usize, condition: impl FnMut(T) -> bool) -> Result<T, RmaError> {
        self.wait_until_on(&self.memory.handle, index, condition).await
    }

    /// As [`wait_until`](Self::wait_until), by a face of any context of the client: whoever owns one waits so, or drives the
    /// wait, because a wait through a handle could not sleep.
    ///
    /// # Errors
    /// As for `wait_until`.
    ///
    /// # Cancel safety
    /// Cancel safe.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::ContextId;
    /// let window = job.shmalloc::<u32>(1).await?;
    /// let context = job.own_context(ContextId(0)).expect("nobody else owns it");
    /// // What goes through a handle, as puts do, gets on for certain while the owner drives.
    /// job.drive(&context, window.put(job.rank(), 0, 7)).await?;
    /// assert_eq!(window.wait_until_on(&context, 0, |value| value > 5).await?, 7);
    /// drop(context);
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn wait_until_on<F: Face>(
        &self,
        face: &F,
        index: usize,
        condition: impl FnMut(T) -> bool,
    ) -> Result<T, RmaError> {
        let slice = self.own_slice(index, 1)?;
        wait_until(face, &self.memory.handle, slice, || self.memory.freed(), condition).await
    }
}

/// Waits until a value in memory of this rank satisfies a condition, or that memory has come to an end.
pub(super) async fn wait_until<F: Face, T: Element>(
    face: &F,
    handle: &Handle,
    slice: SharedSlice,
    end: impl Fn() -> Option<RmaError>,
    mut condition: impl FnMut(T) -> bool,
) -> Result<T, RmaError> {
    let mut watched = None;
    let mut done = || {
        if let Some(error) = end() {
            return Some(Err(error));
        }
        let mut value = T::new_zeroed();
        slice.read(value.as_mut_bytes());
        if condition(value) {
            // Partner: whatever makes a signal visible after its data.
            fence(Ordering::Acquire);
            return Some(Ok(value));
        }
        (handle.is_closed() || face.shared().is_closed()).then(|| Err(Fault::Shutdown.into()))
    };
    std::future::poll_fn(|cx| poll_memory(face, cx, slice, &mut watched, &mut done)).await
}
