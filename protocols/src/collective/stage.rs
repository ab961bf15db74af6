//! Long operations of members that share memory: each lays its input where the others read it.
//!
//! ```text
//!   call -> input laid into this rank's stage -> the others are told where their blocks are     16 bytes each
//!                                                  each combines its block, straight out of all others' stages,
//!           result put together out of all    <-   lays it into its own, and tells them        16 bytes each
//! ```
//! So every byte is written once and read once, and an operation has two steps of everybody, however many members there
//! are. What is lent to others stays as it is until their boards say that the operation has ended for them. A member that
//! has no room in its stage asks whether its parts may come as messages; nobody else need know.
//!
//! A broadcast is lent by its root alone, chunk by chunk, so that the others copy one while it lays down the next; it has ended
//! for the root when they have been told of the last. A root without room asks, too, and looks again when all have answered:
//! they have done with what it lent before.

use super::group_state::GroupState;
use super::layout::EAGER;
use super::near::Near;
use crate::window::WindowHome;
use posthaste_core::memory::SharedSlice;
use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// Vectors of fewer bytes go as messages.
pub(super) const LEAST_LENT: usize = 16 << 10;
/// The same for an allreduce of two.
pub(super) const LEAST_OF_TWO: usize = 192 << 10;
/// The same for a broadcast, whose receivers else have to say that they are there, and how many bytes it has at most: so many that
/// there is room for two behind the stages of shorter ones. Longer ones go from rank to rank.
pub(super) const LEAST_BROADCAST: usize = EAGER + 1;
pub(super) const MOST_BROADCAST: usize = (MOST_STAGED / AT_ONCE / 2) as usize;
/// Bytes that a member reads to combine a vector out of the stages of all, instead of a part of it for all.
pub(super) const MOST_COMBINED: usize = 64 << 10;
/// Bytes of a block that one message tells of.
pub(super) const LENT_CHUNK: usize = 1 << 20;
/// Tells these operations apart from others by the same schedule.
pub(super) const LENT_MARK: u32 = 0x6c65_6e74;
/// Bytes of a group's stages on one rank, together, unless the settings say otherwise.
pub(super) const MOST_STAGED: u64 = 32 << 20;
/// Bytes of a stage, so that several short operations are under way at once.
const LEAST_STAGE: u64 = 32 << 10;
/// Operations whose inputs a stage has room for: of one that is read still, and of the next.
const AT_ONCE: u64 = 2;
/// Areas begin at a multiple of this, which keeps them out of each other's lines.
const ALIGN: u64 = 4096;
/// Operations after which memory that was refused is asked for again.
const PATIENCE: u64 = 256;

/// Where a block lies in its rank's memory, as a message tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reference {
    pub offset: u64,
    pub len: u32,
}

/// Part of a stage: the input of one operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Area {
    pub memory: SharedSlice,
    /// Where it begins in this rank's memory.
    pub offset: u64,
}

#[derive(Debug)]
struct Stage {
    memory: SharedSlice,
    offset: u64,
    /// What is in use, oldest first, and the operation that uses it.
    used: VecDeque<(u64, Range<u64>)>,
}

impl Stage {
    /// Room for an operation; those before `ended` need theirs no more.
    fn take(&mut self, operation: u64, len: u64, ended: u64) -> Option<Area> {
        while self.used.front().is_some_and(|(user, _)| *user < ended) {
            self.used.pop_front();
        }
        self.take_free(operation, len)
    }

    /// The same, but for what has ended meanwhile.
    fn take_free(&mut self, operation: u64, len: u64) -> Option<Area> {
        let (room, whole) = (len.next_multiple_of(ALIGN), self.memory.len() as u64);
        let last = self.used.back().map_or(0, |(_, last)| last.end);
        // Where there is room for two and no more, neither lies in the middle.
        let starts = if 3 * room > whole { [0, whole / 2] } else { [last, 0] };
        let is_free = |start: &u64| {
            let end = start + room;
            end <= whole && self.used.iter().all(|(_, used)| used.end <= *start || end <= used.start)
        };
        let start = starts.into_iter().find(is_free)?;
        let memory = self.memory.slice(start, len)?;
        self.used.push_back((operation, start..start + room));
        Some(Area { memory, offset: self.offset + start })
    }
}

/// The stages of a group.
#[derive(Debug, Default)]
pub(super) struct Stages {
    /// That of the longest operation so far. The ones before it stay with whoever reads them.
    current: Option<Stage>,
    /// Bytes of all.
    bytes: u64,
    /// There was no memory: until which operation none is asked for.
    refused_until: u64,
}

impl GroupState {
    /// Room in this rank's stage for the input of an operation, if it looks at the others' boards, by which it hears that they
    /// have read it.
    pub fn stage(&mut self, home: &WindowHome, operation: u64, len: usize, most: u64) -> Option<Area> {
        if self.broken.is_some() || !self.down.is_empty() {
            return None;
        }
        let key = super::near::key_of(self.membership.id);
        let Near { stages, boards, .. } = &mut self.near;
        let boards = boards.as_ref()?;
        let len = len as u64;
        if let Some(stage) = &mut stages.current {
            // To ask how far the others are is to look at a line of each.
            let free = stage.take_free(operation, len);
            let free = free.or_else(|| stage.take(operation, len, boards.board.ended_by_all()));
            if free.is_some() {
                return free;
            }
        }
        let wanted = AT_ONCE * len.next_multiple_of(ALIGN);
        let has = stages.current.as_ref().map_or(0, |stage| stage.memory.len() as u64);
        let most = most.saturating_sub(stages.bytes);
        if wanted <= has || wanted > most || operation < stages.refused_until {
            return None;
        }
        // One that is larger than it has to be serves operations that get longer and longer, too.
        let ample = wanted.next_power_of_two().max(LEAST_STAGE);
        let Some((own, memory)) =
            [ample, wanted].into_iter().filter(|len| *len <= most).find_map(|len| home.lend(len))
        else {
            stages.refused_until = operation + PATIENCE;
            return None;
        };
        let offset = own.1.offset;
        home.exchange().hold_more(key, own);
        stages.bytes += memory.len() as u64;
        stages.current.insert(Stage { memory, offset, used: VecDeque::new() }).take(operation, len, 0)
    }
}

/// Where the values of a result are put together.
pub(crate) trait Sink: Send {
    /// The next values.
    fn shared(&mut self, part: SharedSlice);
    /// The next values.
    fn private(&mut self, part: &[u8]);
    /// All of them, as a vector of their type.
    fn finish(self: Box<Self>) -> Box<dyn Any + Send>;
}

/// A result that is there before its operation has ended.
pub(crate) type Outcome = Arc<Mutex<Option<Box<dyn Any + Send>>>>;

/// What a rank has lent to others in an operation.
pub(crate) struct Lent {
    pub area: Area,
    /// What it makes of theirs; `None`: they have nothing for it.
    pub exchange: Option<Exchanged>,
}

/// What a rank makes of what others have lent to it.
pub(crate) struct Exchanged {
    /// Its own block, where that is not in the area.
    pub own: Vec<u8>,
    pub sink: Box<dyn Sink>,
    pub outcome: Outcome,
}

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lent").field("area", &self.area).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use posthaste_core::Rank;
    use posthaste_core::inprocess::Arena;

    #[test]
    fn an_area_is_used_again_when_its_operation_has_ended_for_all() {
        let arena = Arena::new(1, 1 << 20);
        let memory = arena.slice(Rank(0), 1 << 16, 8 * ALIGN).unwrap();
        let mut stage = Stage { memory, offset: 1 << 16, used: VecDeque::new() };
        let mut take = |operation, len, ended| Some(stage.take(operation, len, ended)?.offset - (1 << 16));
        assert_eq!(take(0, 8 * ALIGN + 1, 0), None);
        assert_eq!(take(0, 2 * ALIGN, 0), Some(0));
        assert_eq!(take(1, 2 * ALIGN - 5, 0), Some(2 * ALIGN));
        assert_eq!(take(2, 2 * ALIGN, 0), Some(4 * ALIGN));
        assert_eq!((take(3, 1, 1), take(3, 2 * ALIGN, 1)), (Some(6 * ALIGN), Some(0)));
        assert_eq!((take(4, 2 * ALIGN, 1), take(4, ALIGN, 1)), (None, None), "operation 1 is read");
        assert_eq!((take(5, 2 * ALIGN, 4), take(6, 2 * ALIGN, 4)), (Some(0), Some(2 * ALIGN)));
        // Of the longest there is room for two, wherever shorter ones lay before.
        assert_eq!((take(7, ALIGN, 7), take(8, ALIGN, 7)), (Some(0), Some(ALIGN)));
        for operation in 9..20 {
            let place = (operation % 2) * 4 * ALIGN;
            assert_eq!(take(operation, 4 * ALIGN, operation - 1), Some(place), "{operation}");
        }
    }
}
