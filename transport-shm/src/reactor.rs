//! Descriptors in the runtime's reactor.
#![allow(unsafe_code)]

use std::os::fd::OwnedFd;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Registers a descriptor that the result owns.
pub(crate) fn register(fd: OwnedFd) -> std::io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open as long as it lives, gives the same descriptor each time it is asked, and is
    // owned by the `AsyncFd`, which deregisters it before it is dropped.
    Ok(unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?)
}
