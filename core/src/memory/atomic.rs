//! Atomic operations on words of shared memory: the same instructions whoever carries them out, so that those done by
//! a peer at once, by the owner on a peer's behalf, and by the owner for itself are atomic with respect to each other.

use super::SharedSlice;
use crate::slot::Value;
use std::sync::atomic::Ordering;

/// What an atomic operation does to its word. The number is what travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum AtomicOp {
    /// Nothing: the word is read.
    Load = 0,
    /// The operand takes its place. There is no old value: 0 is given for it.
    Store = 1,
    /// The operand takes its place, and the old value is wanted.
    Swap = 2,
    /// The operand is added, wrapping around.
    Add = 3,
    /// Bitwise and with the operand.
    And = 4,
    /// Bitwise or with the operand.
    Or = 5,
    /// Bitwise exclusive or with the operand.
    Xor = 6,
    /// The operand takes its place if it is the expected value.
    CompareSwap = 7,
}

impl AtomicOp {
    const ALL: [AtomicOp; 8] = [
        AtomicOp::Load,
        AtomicOp::Store,
        AtomicOp::Swap,
        AtomicOp::Add,
        AtomicOp::And,
        AtomicOp::Or,
        AtomicOp::Xor,
        AtomicOp::CompareSwap,
    ];

    /// The operation with that number.
    #[must_use]
    pub const fn from_number(number: u8) -> Option<AtomicOp> {
        if (number as usize) < Self::ALL.len() { Some(Self::ALL[number as usize]) } else { None }
    }
}

/// Length of a word that atomic operations work on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WordLen {
    /// 32 bits.
    Four,
    /// 64 bits.
    Eight,
}

impl WordLen {
    /// In bytes; words lie at multiples of it.
    #[inline(always)]
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            WordLen::Four => 4,
            WordLen::Eight => 8,
        }
    }

    /// A word's old value as what the operation ends with: little-endian, as long as the word.
    #[must_use]
    pub fn value(self, old: u64) -> Value {
        Value::copy(&old.to_le_bytes()[..self.bytes() as usize])
    }

    /// The length of so many bytes; `None` if no words are that long.
    #[must_use]
    pub const fn from_bytes(bytes: u64) -> Option<WordLen> {
        match bytes {
            4 => Some(WordLen::Four),
            8 => Some(WordLen::Eight),
            _ => None,
        }
    }
}

/// An atomic operation on a word. Of a word of 32 bits, the low halves of the values count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WordOp {
    /// What is done.
    pub op: AtomicOp,
    /// To how long a word.
    pub len: WordLen,
    /// With what; a load has none.
    pub operand: u64,
    /// What a compare-and-swap expects to find.
    pub expected: u64,
}

impl SharedSlice {
    /// Whether the slice is one aligned word of that length, which atomic operations can be carried out on.
    #[inline(always)]
    #[must_use]
    pub fn is_word(&self, len: WordLen) -> bool {
        match len {
            WordLen::Eight => self.whole_word().is_some(),
            WordLen::Four => self.whole_half().is_some(),
        }
    }

    /// Carries out an atomic operation on the slice, which is one word, and returns the old value. What this side wrote
    /// before is visible to whoever sees the result.
    ///
    /// `None`, and nothing was done, if the slice is no aligned word of that length.
    #[inline(always)]
    #[must_use]
    pub fn apply(&self, op: &WordOp) -> Option<u64> {
        macro_rules! on {
            ($word:expr, $operand:expr, $expected:expr) => {{
                let (word, operand) = ($word, $operand);
                match op.op {
                    AtomicOp::Load => word.load(Ordering::Acquire),
                    AtomicOp::Store => {
                        word.store(operand, Ordering::Release);
                        0
                    }
                    AtomicOp::Swap => word.swap(operand, Ordering::SeqCst),
                    AtomicOp::Add => word.fetch_add(operand, Ordering::SeqCst),
                    AtomicOp::And => word.fetch_and(operand, Ordering::SeqCst),
                    AtomicOp::Or => word.fetch_or(operand, Ordering::SeqCst),
                    AtomicOp::Xor => word.fetch_xor(operand, Ordering::SeqCst),
                    AtomicOp::CompareSwap => {
                        match word.compare_exchange($expected, operand, Ordering::SeqCst, Ordering::SeqCst) {
                            Ok(old) | Err(old) => old,
                        }
                    }
                }
            }};
        }
        match op.len {
            WordLen::Eight => Some(on!(self.whole_word()?, op.operand, op.expected)),
            WordLen::Four => Some(u64::from(on!(self.whole_half()?, op.operand as u32, op.expected as u32))),
        }
    }

    /// The same where nobody wants the old value. A bitwise operation is one instruction then: to get its old value takes
    /// a loop around a compare-and-swap, which asks for the word's line twice.
    #[inline(always)]
    #[must_use]
    pub fn apply_unread(&self, op: &WordOp) -> Option<()> {
        macro_rules! on {
            ($word:expr, $operand:expr) => {{
                let (word, operand) = ($word, $operand);
                match op.op {
                    AtomicOp::Add => _ = word.fetch_add(operand, Ordering::SeqCst),
                    AtomicOp::And => _ = word.fetch_and(operand, Ordering::SeqCst),
                    AtomicOp::Or => _ = word.fetch_or(operand, Ordering::SeqCst),
                    AtomicOp::Xor => _ = word.fetch_xor(operand, Ordering::SeqCst),
                    _ => _ = self.apply(op),
                }
            }};
        }
        match op.len {
            WordLen::Eight => on!(self.whole_word()?, op.operand),
            WordLen::Four => on!(self.whole_half()?, op.operand as u32),
        }
        Some(())
    }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;

    fn slice(words: &'static mut [u64]) -> SharedSlice {
        let len = words.len() as u64 * 8;
        let arena = crate::inprocess::Arena::new(1, 1 << 16);
        let memory = arena.slice(crate::ids::Rank(0), 0, len).expect("inside");
        words.iter().enumerate().for_each(|(at, word)| memory.write_u64(at * 8, *word));
        memory
    }

    #[test]
    fn numbers_name_operations() {
        for number in 0..=255 {
            assert_eq!(AtomicOp::from_number(number).map(|op| op as u8), (number < 8).then_some(number));
        }
    }

    #[test]
    fn halves_leave_their_neighbours_alone() {
        let memory = slice(Box::leak(Box::new([u64::MAX, 0])));
        let half = memory.slice(4, 4).expect("inside");
        let op = |op, operand| WordOp { op, len: WordLen::Four, operand, expected: u64::from(u32::MAX) };
        assert_eq!(half.apply(&op(AtomicOp::Add, 1)), Some(u64::from(u32::MAX)));
        assert_eq!(memory.read_u64(0).to_ne_bytes()[..4], [255; 4]);
        assert_eq!(half.apply(&op(AtomicOp::CompareSwap, 9)), Some(0), "not what was expected");
        assert_eq!(half.apply(&op(AtomicOp::Load, 0)), Some(0));
        assert_eq!(memory.read_u64(8), 0);
    }

    #[test]
    fn unread_operations_do_the_same() {
        for number in 0..8 {
            for len in [WordLen::Four, WordLen::Eight] {
                let op = AtomicOp::from_number(number).expect("a number");
                let op = WordOp { op, len, operand: 0x0ff0_1234_8765_4321, expected: 0x1122_3344_5566_7788 };
                let read = slice(Box::leak(Box::new([0x1122_3344_5566_7788; 2])));
                let unread = slice(Box::leak(Box::new([0x1122_3344_5566_7788; 2])));
                assert!(read.slice(8, len.bytes()).expect("inside").apply(&op).is_some());
                assert!(unread.slice(8, len.bytes()).expect("inside").apply_unread(&op).is_some());
                assert_eq!(read.read_u64(8), unread.read_u64(8), "{op:?}");
                assert_eq!(unread.slice(1, len.bytes()).expect("inside").apply_unread(&op), None);
            }
        }
    }

    #[test]
    fn what_is_no_word_is_left_alone() {
        let memory = slice(Box::leak(Box::new([5, 6])));
        let op = WordOp { op: AtomicOp::Swap, len: WordLen::Eight, operand: 1, expected: 0 };
        for (at, len) in [(4, 8), (1, 8), (0, 4), (0, 16), (0, 0)] {
            assert_eq!(memory.slice(at, len).expect("inside").apply(&op), None, "{at} {len}");
        }
        let half = WordOp { len: WordLen::Four, ..op };
        for (at, len) in [(2, 4), (1, 4), (0, 8), (0, 2)] {
            assert_eq!(memory.slice(at, len).expect("inside").apply(&half), None, "{at} {len}");
        }
        assert_eq!((memory.read_u64(0), memory.read_u64(8)), (5, 6));
        assert_eq!(memory.slice(8, 8).expect("inside").apply(&op), Some(6));
    }
}
