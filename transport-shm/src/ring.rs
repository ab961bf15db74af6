//! A queue in the memory of this process.

/// As `VecDeque`, of small values that are written field by field to where they stay. A call of its own to push one would be
/// handed the value in memory, and load it by more than a field at a time: such a load cannot be served from the stores
/// that the processor has not carried out yet, and waits for all of them. Behind a payload that was just copied for another
/// processor, those are a hundred lines.
#[derive(Debug)]
pub(crate) struct Ring<T> {
    /// As many as a power of two, or none.
    slots: Vec<T>,
    head: usize,
    len: usize,
}

impl<T: Copy + Default> Ring<T> {
    pub const fn new() -> Ring<T> {
        Ring { slots: Vec::new(), head: 0, len: 0 }
    }

    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    #[inline(always)]
    fn at(&self, place: usize) -> usize {
        (self.head + place) & (self.slots.len() - 1)
    }

    #[inline(always)]
    pub fn push_back(&mut self, value: T) {
        if self.len == self.slots.len() {
            self.grow();
        }
        let at = self.at(self.len);
        self.slots[at] = value;
        self.len += 1;
    }

    #[cold]
    #[inline(never)]
    fn grow(&mut self) {
        let room = (self.slots.len() * 2).max(4);
        let mut slots: Vec<T> = Vec::with_capacity(room);
        slots.extend(self.iter());
        slots.resize(room, T::default());
        (self.slots, self.head) = (slots, 0);
    }

    #[inline]
    pub fn front(&self) -> Option<&T> {
        if self.is_empty() { None } else { self.slots.get(self.head) }
    }

    #[inline]
    pub fn pop_front(&mut self) -> Option<T> {
        let value = *self.front()?;
        self.head = self.at(1);
        self.len -= 1;
        Some(value)
    }

    pub fn iter(&self) -> impl Iterator<Item = &T> {
        (0..self.len).map(|place| &self.slots[self.at(place)])
    }

    pub fn retain(&mut self, mut keep: impl FnMut(&T) -> bool) {
        for _ in 0..self.len {
            if let Some(value) = self.pop_front()
                && keep(&value)
            {
                self.push_back(value);
            }
        }
    }

    pub fn drain(&mut self) -> impl Iterator<Item = T> {
        std::iter::from_fn(|| self.pop_front())
    }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    #[test]
    fn it_does_what_the_library_s_does() {
        let mut state = 7u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % below
        };
        let (mut ring, mut model) = (Ring::new(), VecDeque::new());
        for number in 0..100_000u64 {
            match random(100) {
                0 => {
                    let least = random(2) * number;
                    ring.retain(|value| value % 3 != 0 || *value >= least);
                    model.retain(|value| value % 3 != 0 || *value >= least);
                }
                1 if random(50) == 0 => assert!(ring.drain().eq(model.drain(..))),
                // Rather more at first, and rather fewer then, in turn.
                some if some < if number / 5000 % 2 == 0 { 60 } else { 45 } => {
                    ring.push_back(number);
                    model.push_back(number);
                }
                _ => assert_eq!(ring.pop_front(), model.pop_front()),
            }
            assert_eq!((ring.front(), ring.len()), (model.front(), model.len()));
            assert_eq!(ring.is_empty(), model.is_empty());
            assert!(number % 100 != 0 || ring.iter().eq(model.iter()));
        }
    }
}
