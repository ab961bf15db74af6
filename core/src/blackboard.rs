//! Boards on which the members of a group write their parts of small collective operations, each on one of its own for all
//! others to read.
//!
//! ```text
//!   line 0      told    1: messages, too, are wanted of whoever writes (owner writes, all read)
//!   line 1      ended   operations before this one have ended here     (owner writes, all read)
//!   line 2 + s  stamp | 6 words of payload                             operations whose number, times 13, is s, modulo the slots
//! ```
//! Operations that follow each other do not lie one behind the other, where there are 16 slots or more: processors that read one
//! line after the other fetch the next ones, too, and so take them from the owner, who has just asked for them to write the next
//! operation's part: a tenth of the time of a barrier of two.
//!
//! A stamp says which operation, what was called, and how many bytes there are; it is stored last, with release. A slot is
//! written anew when the operation in it has ended for every member, and so never under a reader. What is longer than a slot
//! lies in memory of its owner's that the others can read, and the slot says where: the stamp publishes it as well, and it
//! stays as it is for as long as the slot does.
//!
//! Its own parts a member reads from a private copy: a line that was written on one core and is read on another may go there as
//! a whole, and the owner, who looks at all parts of every operation, would have to fetch it back. So nobody else can change
//! what it takes for its own part, either.
//!
//! Who stops looking asks for messages first, by one side of a Dekker handshake: it sets *told*, fences, and looks once more.
//! A writer stores its stamp, fences before long, and reads *told*. So either the one sees the stamp or the other sees that it
//! has to send a message.

use crate::memory::Words;
use crate::sync::{AtomicU64, Ordering, fence};

/// Bytes of payload that a slot has room for.
pub const MOST_BYTES: usize = 48;
/// Words from one line to the next.
const LINE: usize = 8;
const TOLD: usize = 0;
const ENDED: usize = LINE;
const SLOTS: usize = 2 * LINE;
/// Slots, modulo their number, from one operation's to the next's: odd, so that each has its turn.
const STEP: u64 = 13;

/// Bits of a call's mark in a stamp, and of its length above.
const MARK_BITS: u32 = 19;
const LEN_BITS: u32 = 6;
/// In place of a length: the payload says where the part lies, and how long it is.
const ELSEWHERE: usize = (1 << LEN_BITS) - 1;

/// Bytes of a member's board with so many slots, a power of two.
#[must_use]
pub const fn board_bytes(slots: usize) -> u64 {
    ((SLOTS + slots * LINE) * 8) as u64
}

/// What a member has written for an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// What was called: 1 to 2^19 - 1.
    pub mark: u32,
    /// Bytes of payload, at most [`MOST_BYTES`] of an honest member, or [`Entry::ELSEWHERE`].
    pub len: usize,
}

impl Entry {
    /// The length of what lies elsewhere, as [`Blackboard::reference`] tells.
    pub const ELSEWHERE: usize = ELSEWHERE;

    fn stamp(self, operation: u64) -> u64 {
        (operation + 1) << (MARK_BITS + LEN_BITS) | (self.len as u64) << MARK_BITS | u64::from(self.mark)
    }

    /// What a stamp says of that operation, if it is of that one.
    #[inline(always)]
    fn parse(stamp: u64, operation: u64) -> Option<Entry> {
        const SHIFT: u32 = MARK_BITS + LEN_BITS;
        let of_it = stamp >> SHIFT == (operation + 1) & (u64::MAX >> SHIFT);
        of_it.then_some(Entry {
            mark: stamp as u32 & ((1 << MARK_BITS) - 1),
            len: (stamp >> MARK_BITS) as usize & ((1 << LEN_BITS) - 1),
        })
    }
}

/// The boards of a group, as one member has them.
#[derive(Debug)]
pub struct Blackboard<W> {
    boards: Box<[W]>,
    me: usize,
    /// Slots, a power of two, less one.
    mask: u64,
    /// What is in the slots of this member's board.
    own: Box<[AtomicU64]>,
}

impl<W: Words> Blackboard<W> {
    /// From the boards of all members, which are zero at first and of one length; `me` is this member's. `None` if they are
    /// no boards.
    #[must_use]
    pub fn new(boards: Box<[W]>, me: usize) -> Option<Self> {
        let words = boards.get(me)?.words();
        let slots = words.checked_sub(SLOTS)? / LINE;
        let sound = slots.is_power_of_two() && boards.iter().all(|board| board.words() == words);
        let own = (SLOTS..words).map(|_| AtomicU64::new(0));
        sound.then(|| Self { boards, me, mask: slots as u64 - 1, own: own.collect() })
    }

    /// Members of the group.
    #[inline(always)]
    #[must_use]
    pub fn members(&self) -> usize {
        self.boards.len()
    }

    /// This member.
    #[inline(always)]
    #[must_use]
    pub fn me(&self) -> usize {
        self.me
    }

    #[inline(always)]
    fn slot(&self, operation: u64) -> usize {
        SLOTS + (operation.wrapping_mul(STEP) & self.mask) as usize * LINE
    }

    /// A word of a slot of this member's.
    #[inline(always)]
    fn store(&self, index: usize, value: u64, order: Ordering) {
        self.own[index - SLOTS].store(value, order);
        self.boards[self.me].store(index, value, order);
    }

    /// A word of a slot of any member's.
    #[inline(always)]
    fn load(&self, member: usize, index: usize, order: Ordering) -> u64 {
        if member == self.me {
            self.own[index - SLOTS].load(order)
        } else {
            self.boards[member].load(index, order)
        }
    }

    /// Before which operation this member's slots are free: those of others that have ended less hold them.
    #[must_use]
    pub fn room(&self) -> u64 {
        self.ended_by_all().saturating_add(self.mask + 1)
    }

    /// Before which operation all have ended for every member, as they say.
    #[must_use]
    pub fn ended_by_all(&self) -> u64 {
        (0..self.members()).map(|member| self.ended(member)).min().unwrap_or(0)
    }

    /// This member is about to write its part of an operation: the others read the line of that slot last.
    #[inline]
    pub fn prepare(&self, operation: u64) {
        self.boards[self.me].prefetch_write(self.slot(operation));
    }

    /// Writes this member's part of an operation below [`room`](Self::room). Afterwards, whoever
    /// [wants to be told](Self::wanting) is sent it, too.
    ///
    /// # Panics
    /// If the payload has more than [`MOST_BYTES`].
    #[inline]
    pub fn write(&self, operation: u64, mark: u32, payload: &[u8]) {
        assert!(payload.len() <= MOST_BYTES, "a payload that no slot has room for");
        let slot = self.slot(operation);
        if let Ok(word) = payload.try_into() {
            self.store(slot + 1, u64::from_ne_bytes(word), Ordering::Relaxed);
        } else {
            for (at, bytes) in payload.chunks(8).enumerate() {
                let mut word = [0; 8];
                word[..bytes.len()].copy_from_slice(bytes);
                self.store(slot + 1 + at, u64::from_ne_bytes(word), Ordering::Relaxed);
            }
        }
        self.publish(operation, Entry { mark, len: payload.len() });
    }

    /// The same of a part that lies elsewhere, as it is from now on until the operation has ended for all: `offset` says where,
    /// in a way that the others understand, and `len` how many bytes.
    pub fn refer(&self, operation: u64, mark: u32, offset: u64, len: u64) {
        let slot = self.slot(operation);
        self.store(slot + 1, offset, Ordering::Relaxed);
        self.store(slot + 2, len, Ordering::Relaxed);
        self.publish(operation, Entry { mark, len: ELSEWHERE });
    }

    #[inline(always)]
    fn publish(&self, operation: u64, entry: Entry) {
        self.store(self.slot(operation), entry.stamp(operation), Ordering::Release);
    }

    /// The other members, by their bits, that do not look and want messages of what was written before this call. It waits
    /// until that has left this processor, which takes as long as the line takes to get here from those who look at it: what
    /// there is to do besides is done first.
    #[inline(always)]
    #[must_use]
    pub fn wanting(&self) -> u64 {
        // Partner: that in `ask`. Both sides fence: a barrier on all processors in `ask` alone would cost ten times as much,
        // as every second operation may go by messages, and ask.
        fence(Ordering::SeqCst);
        let wants =
            |member: usize| member != self.me && self.boards[member].load(TOLD, Ordering::Relaxed) != 0;
        (0..self.members()).fold(0, |bits, member| bits | u64::from(wants(member)) << member)
    }

    /// This member is about to look what the others have written for an operation.
    #[inline(always)]
    pub fn expect(&self, operation: u64) {
        let others = self.boards.iter().enumerate().filter(|(member, _)| *member != self.me);
        others.for_each(|(_, board)| board.prefetch(self.slot(operation)));
    }

    /// What a member has written for an operation, if it has.
    #[inline(always)]
    #[must_use]
    pub fn look(&self, member: usize, operation: u64) -> Option<Entry> {
        Entry::parse(self.load(member, self.slot(operation), Ordering::Acquire), operation)
    }

    /// The first word of the payload of what a member has written for an operation that has not ended here.
    #[inline(always)]
    #[must_use]
    pub fn word(&self, member: usize, operation: u64) -> u64 {
        self.load(member, self.slot(operation) + 1, Ordering::Relaxed)
    }

    /// Reads the payload of what a member has written for an operation that has not ended here.
    ///
    /// # Panics
    /// If `into` has more than [`MOST_BYTES`].
    #[inline]
    pub fn read(&self, member: usize, operation: u64, into: &mut [u8]) {
        assert!(into.len() <= MOST_BYTES, "more than a slot has");
        let slot = self.slot(operation);
        for (at, bytes) in into.chunks_mut(8).enumerate() {
            let word = self.load(member, slot + 1 + at, Ordering::Relaxed).to_ne_bytes();
            bytes.copy_from_slice(&word[..bytes.len()]);
        }
    }

    /// Where the part of a member lies, and how many bytes it has, as the member says, for an operation that has not ended
    /// here and whose entry says that it lies elsewhere.
    #[must_use]
    pub fn reference(&self, member: usize, operation: u64) -> (u64, u64) {
        let slot = self.slot(operation);
        (self.load(member, slot + 1, Ordering::Relaxed), self.load(member, slot + 2, Ordering::Relaxed))
    }

    /// Before which operation all have ended for a member, as it says.
    #[must_use]
    pub fn ended(&self, member: usize) -> u64 {
        self.boards[member].load(ENDED, Ordering::Acquire)
    }

    /// From now on messages are wanted, too, of what is written; what was written before is to be looked for once more.
    pub fn ask(&self) {
        self.boards[self.me].store(TOLD, 1, Ordering::Relaxed);
        // Partner: that in `wanting`.
        fence(Ordering::SeqCst);
    }

    /// No messages are wanted any more.
    #[inline]
    pub fn unask(&self) {
        let board = &self.boards[self.me];
        if board.load(TOLD, Ordering::Relaxed) != 0 {
            board.store(TOLD, 0, Ordering::Relaxed);
        }
    }

    /// All operations before this one have ended here: nothing of them is read any more.
    #[inline]
    pub fn end(&self, before: u64) {
        self.boards[self.me].store(ENDED, before, Ordering::Release);
    }
}

/// How far the callers of a group's operations are that have seen all parts of them, for whoever keeps the books of the group
/// and without their lock. Who takes an operation off the boards, under that lock, [says so](Self::upset) and then
/// [looks](Self::ended) what has been finished. Both are in one word, so that a caller has finished before that, and is known
/// to, or learns that its operation may have gone elsewhere. The books take nothing out of it: to look costs a load.
#[derive(Debug)]
pub struct Ledger {
    /// How often something happened that is not on the boards, above; below the number before which all operations have
    /// ended. 32 bits of either.
    word: AtomicU64,
}

impl Ledger {
    /// Of a group whose operations before this one have ended.
    #[must_use]
    pub fn new(first: u64) -> Ledger {
        Ledger { word: AtomicU64::new(u64::from(first as u32)) }
    }

    /// How often something happened that is not on the boards, of which 32 bits are kept.
    #[inline(always)]
    pub fn upsets(&self) -> u32 {
        (self.word.load(Ordering::Acquire) >> 32) as u32
    }

    /// Something happened that is not on the boards.
    pub fn upset(&self) {
        self.word.fetch_add(1 << 32, Ordering::AcqRel);
    }

    /// The caller of an operation, which was begun when so much had happened, has seen all of it. Whether that counts; if not,
    /// something happened, or one before it is not known here to have ended, and the books tell more.
    #[inline]
    pub fn finish(&self, operation: u64, upsets: u32) -> bool {
        let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
        let (old, new) = (Self::word(operation, upsets), Self::word(operation + 1, upsets));
        self.word.compare_exchange(old, new, success, failure).is_ok()
    }

    /// Before which operation all have ended, where the books know that those before `known` have.
    #[inline]
    pub fn ended(&self, known: u64) -> u64 {
        known + u64::from(Self::ahead(self.word.load(Ordering::Acquire), known))
    }

    /// The books know that all before this one have ended. Under their lock.
    #[inline]
    pub fn advance(&self, before: u64) {
        let mut word = self.word.load(Ordering::Relaxed);
        while word as u32 != before as u32 && Self::ahead(word, before) == 0 {
            let new = Self::word(before, (word >> 32) as u32);
            match self.word.compare_exchange_weak(word, new, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return,
                Err(other) => word = other,
            }
        }
    }

    #[inline(always)]
    fn word(operation: u64, upsets: u32) -> u64 {
        u64::from(upsets) << 32 | u64::from(operation as u32)
    }

    /// How many operations from `known` on have ended; fewer than 2^31 are under way.
    #[inline(always)]
    fn ahead(word: u64, known: u64) -> u32 {
        let ahead = (word as u32).wrapping_sub(known as u32);
        if ahead > u32::MAX / 2 { 0 } else { ahead }
    }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;
    use crate::memory::SharedWords;

    const TWO: usize = 2;

    fn boards(members: usize) -> Vec<Blackboard<SharedWords>> {
        let arena = crate::inprocess::Arena::new(members as u32, 1 << 12);
        let board = |rank: usize| {
            let memory = arena.slice(crate::ids::Rank(rank as u32), 0, board_bytes(TWO)).expect("inside");
            SharedWords::new(memory)
        };
        (0..members)
            .map(|me| Blackboard::new((0..members).map(board).collect(), me).expect("boards"))
            .collect()
    }

    #[test]
    fn what_one_writes_all_read() {
        let boards = boards(3);
        assert_eq!(boards[0].look(1, 0), None, "nothing is written at first");
        for len in 0..=MOST_BYTES {
            let payload: Vec<u8> = (0..len as u8).map(|byte| byte ^ 0x5a).collect();
            boards[1].write(len as u64, 7 + len as u32, &payload);
            for board in &boards {
                assert_eq!(board.look(1, len as u64), Some(Entry { mark: 7 + len as u32, len }));
                let mut read = vec![0; len];
                board.read(1, len as u64, &mut read);
                assert_eq!(read, payload);
                if let Ok(word) = payload[..].try_into() {
                    assert_eq!(board.word(1, len as u64), u64::from_ne_bytes(word));
                }
                assert_eq!((board.look(1, len as u64 + 2), board.look(0, len as u64)), (None, None));
            }
        }
    }

    #[test]
    fn what_lies_elsewhere_is_told_apart() {
        let boards = boards(2);
        boards[0].refer(0, 9, u64::MAX - 1, 1 << 33);
        assert_eq!(boards[1].look(0, 0), Some(Entry { mark: 9, len: Entry::ELSEWHERE }));
        assert_eq!(boards[1].reference(0, 0), (u64::MAX - 1, 1 << 33));
        const { assert!(Entry::ELSEWHERE > MOST_BYTES) };
    }

    #[test]
    fn what_a_member_takes_for_its_own_part_nobody_else_can_change() {
        let boards = boards(2);
        boards[0].write(0, 5, &7u64.to_ne_bytes());
        boards[0].refer(1, 6, 64, 100);
        let all = |board: &Blackboard<SharedWords>| {
            let mut bytes = [0; 8];
            board.read(0, 0, &mut bytes);
            (board.look(0, 0), board.word(0, 0), bytes, board.look(0, 1), board.reference(0, 1))
        };
        let before = all(&boards[0]);
        assert_eq!(before, all(&boards[1]));
        assert_eq!(before.1, 7);
        for word in boards[1].slot(0)..boards[1].slot(1) + LINE {
            boards[1].boards[0].store(word, 1, Ordering::Relaxed);
        }
        assert_eq!(before, all(&boards[0]), "it has a copy of its own");
        assert_eq!((boards[1].word(0, 0), boards[1].reference(0, 1)), (1, (1, 1)), "and only of its own");
    }

    #[test]
    fn what_was_finished_is_known_by_its_whole_number() {
        for first in [0, 7, u64::from(u32::MAX) - 1, u64::from(u32::MAX), 1 << 32, (1 << 40) - 1] {
            let ledger = Ledger::new(first);
            assert_eq!(ledger.ended(first), first);
            assert!(!ledger.finish(first + 1, ledger.upsets()), "one before it has not ended");
            for operation in first..first + 3 {
                assert!(ledger.finish(operation, ledger.upsets()));
                assert!(!ledger.finish(operation, ledger.upsets()), "only once");
                assert_eq!((ledger.ended(first), ledger.ended(operation)), (operation + 1, operation + 1));
            }
            // What ended otherwise is known to the books.
            ledger.advance(first + 2);
            assert_eq!(ledger.ended(first), first + 3, "they know less");
            ledger.upset();
            ledger.advance(first + 5);
            assert_eq!((ledger.ended(first + 5), ledger.upsets()), (first + 5, 1));
            assert_eq!(ledger.ended(first + 6), first + 6, "they know more");
            assert!(!ledger.finish(first + 5, 0), "something has happened");
            assert!(ledger.finish(first + 5, 1));
        }
    }

    #[test]
    fn each_operation_of_a_lap_has_a_slot_and_none_lies_beside_the_next() {
        for slots in [1, 2, 4, 8, 16, 32, 64_usize] {
            let arena = crate::inprocess::Arena::new(1, 1 << 14);
            let memory = arena.slice(crate::ids::Rank(0), 0, board_bytes(slots)).expect("inside");
            let board = Blackboard::new(Box::new([SharedWords::new(memory)]), 0).expect("boards");
            // Numbers do not begin anew when they are used up.
            for first in [0, 1, 7, u64::MAX - slots as u64] {
                let lap: Vec<usize> = (0..slots as u64).map(|n| board.slot(first.wrapping_add(n))).collect();
                let mut places = lap.clone();
                places.sort_unstable();
                let all: Vec<usize> = (0..slots).map(|slot| SLOTS + slot * LINE).collect();
                assert_eq!(places, all, "{slots} slots, from {first} on");
                let apart = |pair: &[usize]| pair[0].abs_diff(pair[1]) > 2 * LINE;
                assert!(slots < 16 || lap.windows(2).all(apart), "{slots} slots, from {first} on");
            }
        }
    }

    #[test]
    fn there_is_room_until_a_slot_is_used_anew() {
        let boards = boards(2);
        assert_eq!(boards[0].room(), TWO as u64);
        boards[1].end(5);
        assert_eq!(boards[0].room(), TWO as u64, "the own ones count, too");
        boards[0].end(3);
        assert_eq!((boards[0].room(), boards[1].room()), (3 + TWO as u64, 3 + TWO as u64));
    }

    #[test]
    fn messages_are_wanted_while_they_are_asked_for() {
        let boards = boards(2);
        assert_eq!(boards[0].wanting(), 0);
        boards[1].ask();
        assert_eq!((boards[0].wanting(), boards[1].wanting()), (0b10, 0), "its own wish is none");
        boards[1].unask();
        assert_eq!(boards[0].wanting(), 0);
    }

    #[test]
    fn boards_are_of_one_length_and_have_a_slot() {
        let arena = crate::inprocess::Arena::new(2, 1 << 12);
        let words = |bytes| SharedWords::new(arena.slice(crate::ids::Rank(0), 0, bytes).expect("inside"));
        assert!(Blackboard::new(Box::new([words(128), words(128)]), 0).is_none());
        assert!(Blackboard::new(Box::new([words(192), words(256)]), 0).is_none());
        assert!(Blackboard::new(Box::new([words(192)]), 1).is_none());
        assert!(Blackboard::new(Box::new([words(192)]), 0).is_some());
    }
}
