//! The doorbell: a pipe whose write ends the peers hold, and what a sleeping endpoint shows to them.

use posthaste_core::device::Doorbell;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use tokio::io::unix::AsyncFd;

/// The read end of this rank's pipe.
pub(crate) struct Bell {
    pipe: OwnedFd,
    /// On the runtime of the one context that there is.
    own: OnceLock<AsyncFd<OwnedFd>>,
}

/// The pipe, on the runtime of one of those who read it.
pub(crate) type Ear = AsyncFd<OwnedFd>;

impl Bell {
    pub fn new(pipe: OwnedFd) -> Self {
        Self { pipe, own: OnceLock::new() }
    }

    /// Registers with the current runtime, for one context that polls it itself.
    pub fn start(&self) -> std::io::Result<()> {
        if self.own.get().is_none() {
            // Of two that start it at once one is enough.
            let _ = self.own.set(self.listen()?);
        }
        Ok(())
    }

    /// Registers with the current runtime.
    pub fn listen(&self) -> std::io::Result<Ear> {
        posthaste_core::reactor::register(self.pipe.try_clone()?)
    }
}

fn poll_pipe(pipe: &Ear, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
    loop {
        let mut ready = ready!(pipe.poll_read_ready(cx))?;
        let mut bytes = [0u8; 64];
        match rustix::io::read(pipe.get_ref(), &mut bytes) {
            Ok(0) => return Poll::Ready(Err(ErrorKind::UnexpectedEof.into())),
            Ok(count) => {
                // Fewer than asked for: the pipe is empty, and the next ring is a new edge.
                if count < bytes.len() {
                    ready.clear_ready();
                }
                return Poll::Ready(Ok(()));
            }
            // Another one that reads it was first.
            Err(rustix::io::Errno::AGAIN) => ready.clear_ready(),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Poll::Ready(Err(error.into())),
        }
    }
}

/// The bell of a rank with one context: the driver sleeps on the pipe itself.
pub(crate) struct OwnBell(pub Arc<Bell>);

impl Doorbell for OwnBell {
    fn poll_ring(&self, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match self.0.own.get() {
            Some(pipe) => poll_pipe(pipe, cx),
            None => Poll::Pending,
        }
    }
}

/// The bell of one of several contexts, passed on by tasks that read the pipe for all.
#[derive(Default)]
pub(crate) struct SharedBell {
    rung: AtomicBool,
    waker: posthaste_core::sync::AtomicWaker,
}

impl SharedBell {
    pub fn ring(&self) {
        self.rung.store(true, Ordering::Release);
        self.waker.wake();
    }
}

impl Doorbell for SharedBell {
    fn poll_ring(&self, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        if !self.rung.swap(false, Ordering::AcqRel) {
            self.waker.register(cx.waker());
            if !self.rung.swap(false, Ordering::AcqRel) {
                return Poll::Pending;
            }
        }
        Poll::Ready(Ok(()))
    }
}

/// Passes rings of the pipe on to all contexts, for ever. Every open client has one who does, in a runtime of its own: a ring
/// is passed on by whichever of them reads it.
pub(crate) async fn pass_on(pipe: Ear, contexts: Vec<Arc<SharedBell>>) {
    loop {
        if let Err(error) = std::future::poll_fn(|cx| poll_pipe(&pipe, cx)).await {
            tracing::warn!(%error, "doorbell broken");
            return;
        }
        for context in &contexts {
            context.ring();
        }
    }
}

/// Rings a peer. A full pipe has rung already; a broken one has nobody to wake.
pub(crate) fn ring(pipe: impl AsFd) {
    loop {
        match rustix::io::write(pipe.as_fd(), &[1]) {
            Err(rustix::io::Errno::INTR) => {}
            _ => return,
        }
    }
}
