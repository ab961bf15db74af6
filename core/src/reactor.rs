//! Descriptors in the runtime's reactor.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Registers a descriptor that the result owns, for reading.
///
/// # Errors
/// If there is no runtime with I/O, or it refuses the descriptor.
pub fn register(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    if tokio::runtime::Handle::try_current().is_err() {
        return Err(io::Error::other("not inside a Tokio runtime"));
    }
    // SAFETY: an `OwnedFd` is open as long as it lives, gives the same descriptor each time it is asked, and is
    // owned by the `AsyncFd`, which deregisters it before it is dropped.
    Ok(unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?)
}
