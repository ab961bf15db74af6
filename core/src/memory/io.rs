//! System calls that read into shared memory and write from it.

use super::SharedSlice;

impl SharedSlice {
    /// Reads once from a descriptor, straight into the start of the slice and at most to its end. Returns the number of
    /// bytes; 0 is the end of a stream, or an empty slice.
    ///
    /// # Errors
    /// As the system's `read`; nothing was read then.
    pub fn read_from(&self, from: impl std::os::fd::AsFd) -> std::io::Result<usize> {
        use std::os::fd::AsRawFd;
        // SAFETY: the kernel writes at most self.len bytes to the range, which is mapped for the rest of the process; to
        // this process its stores are those of another writer of shared memory.
        let count = unsafe { libc::read(from.as_fd().as_raw_fd(), self.base.cast(), self.len) };
        usize::try_from(count).map_err(|_| std::io::Error::last_os_error())
    }

    /// Writes `head` and then the slice to a descriptor, in one system call and straight from where they are. Returns how
    /// many bytes of both were written.
    ///
    /// # Errors
    /// As the system's `writev`; nothing was written then.
    pub fn write_behind(&self, head: &[u8], to: impl std::os::fd::AsFd) -> std::io::Result<usize> {
        use std::os::fd::AsRawFd;
        let parts = [
            libc::iovec { iov_base: head.as_ptr().cast_mut().cast(), iov_len: head.len() },
            libc::iovec { iov_base: self.base.cast(), iov_len: self.len },
        ];
        // SAFETY: the kernel reads both ranges, as long as they are, and writes to neither; the slice is mapped for the
        // rest of the process.
        let count = unsafe { libc::writev(to.as_fd().as_raw_fd(), parts.as_ptr(), 2) };
        usize::try_from(count).map_err(|_| std::io::Error::last_os_error())
    }
}

/// Reads once from a descriptor to behind what a vector holds, at most `limit` bytes and no more than its capacity has
/// room for. Returns the number of bytes; 0 is the end of a stream, or no room.
///
/// # Errors
/// As the system's `read`; nothing was read then.
pub fn read_behind(
    bytes: &mut Vec<u8>,
    limit: usize,
    from: impl std::os::fd::AsFd,
) -> std::io::Result<usize> {
    use std::os::fd::AsRawFd;
    let room = bytes.spare_capacity_mut();
    let asked = room.len().min(limit);
    // SAFETY: the kernel writes at most `asked` bytes to room that is there.
    let count = unsafe { libc::read(from.as_fd().as_raw_fd(), room.as_mut_ptr().cast(), asked) };
    let count = usize::try_from(count).map_err(|_| std::io::Error::last_os_error())?;
    // SAFETY: the kernel has written so many bytes behind the others, and they are within the capacity.
    unsafe { bytes.set_len(bytes.len() + count.min(asked)) };
    Ok(count)
}

/// Most slices that [`read_scattered`] reads to at once.
pub const MOST_PARTS: usize = 1024;

/// Reads once from a descriptor, straight into slices of shared memory, one behind the other, of which only the first
/// [`MOST_PARTS`] count. Returns the number of bytes; 0 is the end of a stream, or no room.
///
/// # Errors
/// As the system's `readv`; nothing was read then.
pub fn read_scattered(slices: &[SharedSlice], from: impl std::os::fd::AsFd) -> std::io::Result<usize> {
    use std::os::fd::AsRawFd;
    let part = |slice: &SharedSlice| libc::iovec { iov_base: slice.base.cast(), iov_len: slice.len };
    let parts: Vec<libc::iovec> = slices.iter().take(MOST_PARTS).map(part).collect();
    // SAFETY: the kernel writes to no more than the parts, each of which is mapped for the rest of the process; to this
    // process its stores are those of another writer of shared memory. There are at most MOST_PARTS of them.
    let count = unsafe { libc::readv(from.as_fd().as_raw_fd(), parts.as_ptr(), parts.len() as libc::c_int) };
    usize::try_from(count).map_err(|_| std::io::Error::last_os_error())
}
