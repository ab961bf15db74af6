//! System calls that read into shared memory and write from it.

use super::SharedSlice;

impl SharedSlice {
    /// Reads once from a descriptor: straight into the slice, and what there is beyond its end into `behind`. Returns the
    /// number of bytes of both; 0 is the end of a stream, or no room.
    ///
    /// # Errors
    /// As the system's `readv`; nothing was read then.
    pub fn read_from(&self, behind: &mut [u8], from: impl std::os::fd::AsFd) -> std::io::Result<usize> {
        use std::os::fd::AsRawFd;
        let parts = [part(self), room(behind)];
        // SAFETY: the kernel writes to no more than the two ranges. The slice is mapped for the rest of the process, and to
        // this process stores to it are those of another writer of shared memory; `behind` is lent for the call.
        let count = unsafe { libc::readv(from.as_fd().as_raw_fd(), parts.as_ptr(), 2) };
        usize::try_from(count).map_err(|_| std::io::Error::last_os_error())
    }
}

/// Slices with their heads that [`write_headed`] takes at once.
pub const MOST_HEADED: usize = 8;

/// Writes slices to a descriptor, each behind its head, in one system call and straight from where they are: the first
/// [`MOST_HEADED`]. Returns how many bytes were written.
///
/// # Errors
/// As the system's `writev`; nothing was written then.
pub fn write_headed<'a>(
    frames: impl Iterator<Item = (&'a [u8], SharedSlice)>,
    to: impl std::os::fd::AsFd,
) -> std::io::Result<usize> {
    use std::os::fd::AsRawFd;
    let mut parts = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 2 * MOST_HEADED];
    let mut used = 0;
    for ((head, slice), pair) in frames.zip(parts.chunks_exact_mut(2)) {
        pair[0] = libc::iovec { iov_base: head.as_ptr().cast_mut().cast(), iov_len: head.len() };
        pair[1] = part(&slice);
        used += 2;
    }
    // SAFETY: the kernel reads the ranges, as long as they are, and writes to none; heads are lent for the call, and slices
    // are mapped for the rest of the process.
    let count = unsafe { libc::writev(to.as_fd().as_raw_fd(), parts.as_ptr(), used) };
    usize::try_from(count).map_err(|_| std::io::Error::last_os_error())
}

/// A slice, for the kernel.
fn part(slice: &SharedSlice) -> libc::iovec {
    libc::iovec { iov_base: slice.base.cast(), iov_len: slice.len }
}

/// Bytes that the kernel may write.
fn room(bytes: &mut [u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }
}

/// Reads once from a descriptor to behind what a vector holds, at most `limit` bytes, and what there is beyond these into
/// `behind`. Returns the number of bytes of both; 0 is the end of a stream, or no room. A vector that has no capacity for
/// the limit takes what it has room for, and `behind` nothing.
///
/// # Errors
/// As the system's `readv`; nothing was read then.
pub fn read_behind(
    bytes: &mut Vec<u8>,
    limit: usize,
    behind: &mut [u8],
    from: impl std::os::fd::AsFd,
) -> std::io::Result<usize> {
    use std::os::fd::AsRawFd;
    let spare = bytes.spare_capacity_mut();
    let asked = spare.len().min(limit);
    let behind = if asked == limit { behind } else { &mut [] };
    let parts = [libc::iovec { iov_base: spare.as_mut_ptr().cast(), iov_len: asked }, room(behind)];
    // SAFETY: the kernel writes at most `asked` bytes to room that is there, and no more to `behind` than it has.
    let count = unsafe { libc::readv(from.as_fd().as_raw_fd(), parts.as_ptr(), 2) };
    let count = usize::try_from(count).map_err(|_| std::io::Error::last_os_error())?;
    // SAFETY: the kernel has filled the parts in order, so that so many bytes behind the others are written, and they are
    // within the capacity.
    unsafe { bytes.set_len(bytes.len() + count.min(asked)) };
    Ok(count)
}

/// Most slices that [`read_scattered`] reads to at once.
pub const MOST_PARTS: usize = 1023;

/// Reads once from a descriptor, straight into slices of shared memory, one behind the other, of which only the first
/// [`MOST_PARTS`] count, and what there is beyond them into `behind`, unless there are more slices. Returns the number of
/// bytes of all; 0 is the end of a stream, or no room.
///
/// # Errors
/// As the system's `readv`; nothing was read then.
pub fn read_scattered(
    slices: &[SharedSlice],
    behind: &mut [u8],
    from: impl std::os::fd::AsFd,
) -> std::io::Result<usize> {
    use std::os::fd::AsRawFd;
    let behind = if slices.len() <= MOST_PARTS { behind } else { &mut [] };
    let last = std::iter::once(room(behind));
    let parts: Vec<libc::iovec> = slices.iter().take(MOST_PARTS).map(part).chain(last).collect();
    // SAFETY: the kernel writes to no more than the parts. The slices are mapped for the rest of the process, and to this
    // process stores to them are those of another writer of shared memory; `behind` is lent for the call. There are at
    // most 1024 parts, which is what the system takes.
    let count = unsafe { libc::readv(from.as_fd().as_raw_fd(), parts.as_ptr(), parts.len() as libc::c_int) };
    usize::try_from(count).map_err(|_| std::io::Error::last_os_error())
}
