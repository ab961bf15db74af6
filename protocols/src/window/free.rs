//! The end of a window.

use super::{Element, Memory, Origin, Window, send_to_rma};
use crate::detach::Detaching;
use crate::exchange::AGAIN;
use crate::within::Alarm;
use posthaste_core::{Fault, Handle, RmaError, SendError};
use std::sync::Arc;

impl<T: Element> Window<T> {
    /// Frees the window: collective. Every rank ends its own operations first; the memory is reused only once every
    /// rank has come here or is proven dead. From now on every operation on it is refused. It waits for the operations of
    /// all contexts [through](Self::through) which the window was used; whoever owns one of these has to poll meanwhile. It does
    /// not wait until all contexts of the client know of a rank that is gone: the memory is reused behind that, so that what such
    /// a rank could reach stays taken for as long as the owner of some context does not look.
    ///
    /// # Errors
    /// If it was freed before, a rank is lost, was cut off ([`Fault::PeerCorrupt`]) and may yet live, or called something else,
    /// or this rank is closed. The window is freed here all the same, and the memory goes back once the others have released it,
    /// too; what a rank that was cut off may still write to, once that rank is gone.
    ///
    /// # Cancel safety
    /// Not cancel safe: a rank that gives up before it was polled leaves the others waiting. Dropped later it goes on in a task of
    /// the runtime, as the others wait for it; outside of a runtime it ends, and they wait until this rank leaves the job.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let window = job.shmalloc::<u64>(8).await?;
    /// let view = window.clone();
    /// window.free().await?; // all ranks call it
    /// assert!(view.put(job.rank(), 0, 1).await.is_err(), "the window is gone for all its clones");
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn free(self) -> Result<(), RmaError> {
        let Window { memory, origin, .. } = self;
        Detaching::new(End { memory, origin }.free()).await
    }
}

/// A window that is freed.
struct End {
    memory: Arc<Memory>,
    origin: Origin,
}

impl End {
    async fn free(self) -> Result<(), RmaError> {
        let contexts = self.memory.end().ok_or(RmaError::NoSuchWindow(self.memory.id))?;
        // Before the first wait: several windows may be freed at once, in the same order on all ranks.
        let freeing = match &self.origin {
            Origin::World(exchange, number) => Some(exchange.begin_free(*number)),
            Origin::Group(_) => None,
        };
        // Other threads may be amid something that they began through clones of it.
        self.memory.handle.vacate_gates().await;
        for handle in &contexts {
            self.settle(handle).await?;
        }
        let released = match (freeing, &self.origin) {
            (Some(freeing), _) => freeing.release().await.map_err(send_to_rma),
            (None, Origin::Group(origin)) => origin.release().await,
            (None, Origin::World(..)) => Ok(()),
        };
        let Memory { id, handle, .. } = &*self.memory;
        tracing::debug!(me = %handle.me(), window = %id, failed = released.is_err(), "window freed");
        released
    }

    /// Waits until what this rank did to others' parts through a context has taken effect, however long there is no memory to ask:
    /// the others wait for this rank, which must not say that it is done before it is.
    async fn settle(&self, handle: &Handle) -> Result<(), RmaError> {
        loop {
            let flushed = match &self.origin {
                Origin::World(..) => crate::flush::fence(handle).await,
                Origin::Group(origin) => origin.flush(handle).await,
            };
            match flushed {
                Ok(()) => return Ok(()),
                // A lost rank's operations have ended, too.
                Err(SendError::Fault(fault)) if fault.peer().is_some() => return Ok(()),
                Err(SendError::Fault(Fault::OutOfMemory(what))) => {
                    tracing::debug!(window = %self.memory.id, what, "a free waits for memory");
                    let alarm = Alarm::new(handle.deadline_after(AGAIN));
                    match alarm.ended(handle).await {
                        Fault::DeadlineExceeded => {}
                        // Not even for the alarm.
                        Fault::OutOfMemory(_) => tokio::time::sleep(AGAIN).await,
                        fault => return Err(fault.into()),
                    }
                }
                Err(error) => return Err(send_to_rma(error)),
            }
        }
    }
}
