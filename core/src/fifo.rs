//! The injection FIFO: where descriptors wait that the device did not take at once.

use crate::descriptor::{Descriptor, SLOT_BYTES};
use crate::ids::Rank;
use zerocopy::{IntoBytes, TryFromBytes};

/// A slot: a descriptor, or up to 64 bytes of the message info of the descriptor before it.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Slot([u8; SLOT_BYTES]);

/// A circular buffer of 64-byte slots with a head, a tail and a free-space threshold (D30).
///
/// A context owns one per target it could not inject to, so that a slow target delays its own descriptors and
/// nobody else's. A descriptor with message info takes several slots; the info bytes follow it.
///
/// # Examples
/// ```
/// use posthaste_core::descriptor::Op;
/// use posthaste_core::{Descriptor, InjectionFifo, Rank};
///
/// let mut fifo = InjectionFifo::new(4);
/// let send = |rank| Descriptor { op: Op::Send, rank: Rank(rank), info_len: 80, ..Descriptor::default() };
/// assert!(fifo.push(&send(1), &[7; 80])); // three slots with its info
/// assert!(!fifo.push(&send(2), &[7; 80]), "there is one slot left");
/// fifo.set_threshold(4);
/// assert_eq!(fifo.pop().map(|descriptor| descriptor.rank), Some(Rank(1)));
/// assert!(fifo.was_crossed() && fifo.is_empty());
/// ```
#[derive(Debug)]
pub struct InjectionFifo {
    slots: Box<[Slot]>,
    /// Slots ever taken out.
    head: u64,
    /// Slots ever put in.
    tail: u64,
    threshold: usize,
    crossed: bool,
    /// There was less free space than the threshold, and has not been as much since.
    below: bool,
}

impl InjectionFifo {
    /// A FIFO with room for `capacity` slots, rounded up to a power of two of at least 4.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        let capacity = capacity.max(4).next_power_of_two();
        Self {
            slots: vec![Slot([0; SLOT_BYTES]); capacity].into_boxed_slice(),
            head: 0,
            tail: 0,
            threshold: 0,
            crossed: false,
            below: false,
        }
    }

    /// Room in slots.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Slots in use.
    #[must_use]
    pub fn len(&self) -> usize {
        (self.tail - self.head) as usize
    }

    /// Whether nothing waits.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// Whether not a single slot is free.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.free() == 0
    }

    /// Free slots.
    #[must_use]
    pub fn free(&self) -> usize {
        self.capacity() - self.len()
    }

    /// Slots ever taken out; grows for ever.
    #[must_use]
    pub fn head(&self) -> u64 {
        self.head
    }

    /// Slots ever put in; grows for ever.
    #[must_use]
    pub fn tail(&self) -> u64 {
        self.tail
    }

    /// Sets how many free slots count as "room again".
    pub fn set_threshold(&mut self, free_slots: usize) {
        let before = self.threshold;
        self.threshold = free_slots.min(self.capacity());
        self.below = self.free() < self.threshold || (self.below && self.threshold >= before);
    }

    /// Whether the free space has grown past the threshold since the last [`clear_crossed`](Self::clear_crossed).
    #[must_use]
    pub fn was_crossed(&self) -> bool {
        self.crossed
    }

    /// Clears the sticky flag.
    pub fn clear_crossed(&mut self) {
        self.crossed = false;
    }

    /// Doubles the capacity; positions and contents stay.
    pub fn grow(&mut self) {
        let old = std::mem::take(&mut self.slots);
        let mask = old.len() as u64 - 1;
        self.slots = vec![Slot([0; SLOT_BYTES]); old.len() * 2].into_boxed_slice();
        for position in self.head..self.tail {
            let at = self.at(position);
            self.slots[at] = old[(position & mask) as usize];
        }
    }

    /// Writes a changed descriptor back to the head (a partly done one keeps its cursor in it).
    pub fn set_front(&mut self, descriptor: &Descriptor) {
        if !self.is_empty() {
            let at = self.at(self.head);
            self.slots[at].0.copy_from_slice(descriptor.as_bytes());
        }
    }

    fn at(&self, position: u64) -> usize {
        position as usize & (self.slots.len() - 1)
    }

    /// Puts a descriptor and its info in at the tail; false (and nothing is changed) if they do not fit.
    #[must_use]
    pub fn push(&mut self, descriptor: &Descriptor, info: &[u8]) -> bool {
        debug_assert_eq!(descriptor.info_len as usize, info.len());
        let slots = descriptor.slots();
        if self.free() < slots {
            return false;
        }
        let first = self.at(self.tail);
        self.slots[first].0.copy_from_slice(descriptor.as_bytes());
        for (index, part) in info.chunks(SLOT_BYTES).enumerate() {
            let at = self.at(self.tail + 1 + index as u64);
            self.slots[at].0[..part.len()].copy_from_slice(part);
        }
        self.tail += slots as u64;
        self.below |= self.free() < self.threshold;
        true
    }

    /// The descriptor at the head.
    #[must_use]
    pub fn front(&self) -> Option<Descriptor> {
        if self.is_empty() {
            return None;
        }
        Descriptor::try_read_from_bytes(&self.slots[self.at(self.head)].0).ok()
    }

    /// Copies the info of the descriptor at the head; returns its length.
    pub fn front_info(&self, into: &mut [u8; crate::descriptor::MAX_INFO]) -> usize {
        let Some(front) = self.front() else { return 0 };
        let len = front.info_len as usize;
        for (index, part) in into[..len].chunks_mut(SLOT_BYTES).enumerate() {
            let slot = &self.slots[self.at(self.head + 1 + index as u64)];
            part.copy_from_slice(&slot.0[..part.len()]);
        }
        len
    }

    /// Where the last descriptor for that rank ends; `None`: there is none.
    #[must_use]
    pub fn end_of_last(&self, rank: Rank) -> Option<u64> {
        let (mut position, mut end) = (self.head, None);
        while position < self.tail {
            let descriptor = Descriptor::try_read_from_bytes(&self.slots[self.at(position)].0).ok()?;
            position += descriptor.slots() as u64;
            if descriptor.rank == rank {
                end = Some(position);
            }
        }
        end
    }

    /// Takes the descriptor at the head out.
    pub fn pop(&mut self) -> Option<Descriptor> {
        let front = self.front()?;
        self.head += front.slots() as u64;
        if self.free() >= self.threshold {
            self.crossed |= std::mem::take(&mut self.below);
        }
        Some(front)
    }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;
    use crate::descriptor::{MAX_INFO, Op};

    fn send(rank: u32, info_len: usize) -> Descriptor {
        Descriptor { op: Op::Send, rank: Rank(rank), info_len: info_len as u8, ..Descriptor::default() }
    }

    #[test]
    fn m_d30_circular_head_tail_empty_full_threshold() {
        let mut fifo = InjectionFifo::new(8);
        assert!(fifo.is_empty() && !fifo.is_full());
        fifo.set_threshold(5);
        for lap in 0..20u32 {
            for i in 0..8 {
                assert!(fifo.push(&send(lap * 8 + i, 0), &[]));
            }
            assert!(fifo.is_full());
            assert!(!fifo.push(&send(0, 0), &[]));
            for i in 0..8 {
                assert_eq!(fifo.was_crossed(), i >= 5);
                assert_eq!(fifo.pop().expect("full").rank, Rank(lap * 8 + i));
            }
            fifo.clear_crossed();
            assert_eq!((fifo.head(), fifo.tail()), (u64::from(lap + 1) * 8, u64::from(lap + 1) * 8));
        }
    }

    #[test]
    fn the_last_for_a_rank_is_found_behind_others_and_their_info() {
        let mut fifo = InjectionFifo::new(16);
        assert_eq!(fifo.end_of_last(Rank(1)), None);
        for (rank, info) in [(1, 80), (2, 0), (1, 10), (3, 112)] {
            assert!(fifo.push(&send(rank, info), &vec![9; info]));
        }
        assert_eq!([1, 2, 3, 4].map(|rank| fifo.end_of_last(Rank(rank))), [Some(6), Some(4), Some(9), None]);
        assert!(fifo.pop().is_some() && fifo.pop().is_some() && fifo.pop().is_some());
        assert_eq!([1, 2, 3].map(|rank| fifo.end_of_last(Rank(rank))), [None, None, Some(9)]);
    }

    #[test]
    fn the_threshold_is_crossed_though_there_is_more_room_since() {
        let mut fifo = InjectionFifo::new(16);
        fifo.set_threshold(8);
        (0..16).for_each(|rank| assert!(fifo.push(&send(rank, 0), &[])));
        fifo.grow();
        assert!(fifo.push(&send(16, 0), &[]) && !fifo.was_crossed());
        assert!(
            fifo.pop().is_some() && fifo.was_crossed(),
            "{} of {} are free",
            fifo.free(),
            fifo.capacity()
        );
        fifo.clear_crossed();
        assert!(fifo.pop().is_some() && !fifo.was_crossed(), "once");
    }

    #[test]
    fn message_info_of_every_length_follows_its_descriptor() {
        let mut fifo = InjectionFifo::new(4);
        for len in 0..=MAX_INFO {
            let info: Vec<u8> = (0..len).map(|i| (i + len) as u8).collect();
            assert!(fifo.push(&send(1, len), &info));
            let mut back = [0; MAX_INFO];
            assert_eq!(fifo.front_info(&mut back), len);
            assert_eq!(&back[..len], &info[..]);
            assert!(fifo.pop().is_some() && fifo.is_empty());
        }
    }
}
