//! Huge pages: what the kernel does for each small page of fresh memory takes longer than to copy what goes there, and a
//! processor remembers the places of few of them.

use super::SharedSlice;

/// Where memory is to begin, and of which it is to be a multiple, to lie in huge pages, in bytes. Where they have another size
/// there are none.
pub const HUGE_PAGE: u64 = 2 << 20;

/// From this many bytes on fresh private memory is asked for in huge pages.
#[cfg(any(target_os = "linux", test))]
pub(super) const HUGE_MIN: usize = 4 << 20;

impl SharedSlice {
    /// Has the kernel put fresh memory into huge pages at once, as far as whole ones lie in it; their memory is taken then,
    /// and reads as zero. All processes reach it by them that map the file so that huge pages begin at the same places in file
    /// and mapping. Where the kernel cannot, or has none left, nothing is lost. Unlike huge pages at each fault, for memory of
    /// files this needs no setting of the system.
    #[cfg(target_os = "linux")]
    pub fn settle_in_huge_pages(&self) {
        let huge = HUGE_PAGE as usize;
        let first = self.base.align_offset(huge);
        let blocks = self.len.saturating_sub(first) / huge;
        if blocks == 0 {
            return;
        }
        let page = rustix::param::page_size();
        // SAFETY: all of the range is inside the slice, which is mapped for the rest of the process. Neither advice changes
        // what is stored there.
        let advise = |at: usize, len: usize, advice| unsafe {
            match libc::madvise(self.base.add(first + at).cast(), len, advice) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        };
        // The kernel makes a huge page of what there is, be it a single small one.
        let begun = (0..blocks).try_for_each(|block| advise(block * huge, page, libc::MADV_POPULATE_READ));
        let settled = begun.and_then(|()| advise(0, blocks * huge, MADV_COLLAPSE));
        if let Err(error) = settled {
            tracing::trace!(%error, "no huge pages");
        }
    }

    /// There are none.
    #[cfg(not(target_os = "linux"))]
    pub fn settle_in_huge_pages(&self) {}
}

/// Since Linux 6.1; not every C library names it.
#[cfg(target_os = "linux")]
const MADV_COLLAPSE: libc::c_int = 25;

/// All the room of a vector that has just been made is going to be filled. Long ones are asked for in huge pages. A hint.
pub(crate) fn expect_all_of(bytes: &mut Vec<u8>) {
    #[cfg(target_os = "linux")]
    if bytes.capacity() - bytes.len() >= HUGE_MIN {
        let page = rustix::param::page_size();
        // From the first page on, even if something else begins it: a mapping of which a part only is advised becomes two, and
        // cannot grow as one any more.
        let first = bytes.as_ptr() as usize / page * page;
        let end = (bytes.as_ptr() as usize + bytes.capacity()).next_multiple_of(page);
        // SAFETY: the pages are mapped, as the vector has bytes of each, and the advice changes nothing that is stored there.
        let advised =
            unsafe { rustix::mm::madvise(first as *mut _, end - first, rustix::mm::Advice::LinuxHugepage) };
        if let Err(error) = advised {
            tracing::trace!(%error, "no huge pages");
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = bytes;
}
