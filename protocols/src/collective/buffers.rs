//! Buffers of long operations, kept for the next one: memory that goes back to the system is cleared by it, page by page,
//! before it is had again, which takes as long as an operation on it.

use bytes::Bytes;
use posthaste_core::sync::lock;
use std::sync::Mutex;

/// Shorter ones are not worth it.
const LEAST: usize = 64 << 10;
/// Bytes that are kept.
const MOST: usize = 8 << 20;

#[derive(Debug, Default)]
pub(super) struct Buffers(Mutex<Vec<Vec<u8>>>);

impl Buffers {
    /// A copy of some bytes, in a buffer that is kept if there is one that is long enough.
    pub fn copy(&self, bytes: &[u8]) -> Bytes {
        if bytes.len() < LEAST {
            return Bytes::copy_from_slice(bytes);
        }
        let mut kept = lock(&self.0);
        // Not one that is much too long: others may need it, and the one that takes it keeps it.
        let fits = |buffer: &Vec<u8>| (bytes.len()..=2 * bytes.len()).contains(&buffer.capacity());
        let found = kept.iter().position(fits).map(|at| kept.swap_remove(at));
        drop(kept);
        let mut buffer = found.unwrap_or_else(|| Vec::with_capacity(bytes.len()));
        buffer.clear();
        buffer.extend_from_slice(bytes);
        Bytes::from(buffer)
    }

    /// Keeps a buffer that nobody else has, instead of those that were kept longest.
    pub fn keep(&self, bytes: Bytes) {
        if bytes.len() < LEAST || bytes.len() > MOST || !bytes.is_unique() {
            return;
        }
        let mut kept = lock(&self.0);
        kept.push(Vec::from(bytes));
        while kept.iter().map(Vec::capacity).sum::<usize>() > MOST {
            drop(kept.remove(0));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_used_again_when_nobody_else_has_it() {
        let buffers = Buffers::default();
        let first = buffers.copy(&vec![1; LEAST]);
        let place = first.as_ptr();
        let other = first.clone();
        buffers.keep(first);
        assert!(lock(&buffers.0).is_empty(), "somebody may read it");
        buffers.keep(other);
        let second = buffers.copy(&vec![2; LEAST]);
        assert_eq!((second.as_ptr(), &second[..]), (place, &vec![2; LEAST][..]));
        assert!(lock(&buffers.0).is_empty());
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let buffers = Buffers::default();
        for len in [10, LEAST - 1, MOST + 1] {
            buffers.keep(Bytes::from(vec![0; len]));
        }
        assert!(lock(&buffers.0).is_empty());
        for _ in 0..100 {
            buffers.keep(Bytes::from(vec![0; MOST / 4]));
        }
        assert_eq!(lock(&buffers.0).len(), 4);
        buffers.keep(Bytes::from(vec![0; MOST]));
        assert_eq!(lock(&buffers.0).len(), 1);
        assert!(buffers.copy(&vec![0; LEAST]).len() == LEAST && lock(&buffers.0).len() == 1, "much too long");
    }
}
