//! What has arrived for persistent collectives: a counter and a place for each neighbour in the tree, or two places for each
//! member where all send to all.

use super::Tree;
use super::call::Making;
use crate::cause::{names_ranks_of, parse_cause};
use crate::ends::on_end;
use crate::message::Message;
use bytes::{Buf, BufMut, Bytes};
use posthaste_core::context::Shared;
use posthaste_core::protocol::{Incoming, Protocol};
use posthaste_core::sync::lock;
use posthaste_core::{Fault, Handle, Rank, Scope};
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, Weak};
use std::task::Waker;

const NAME: &str = "posthaste.persistent";

/// Names a persistent collective of the job: its group, and the operation there in which its members met.
pub(super) type Key = (u64, u64);

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A child's contribution.
    Up = 0,
    /// The parent's result.
    Down = 1,
    /// A child has taken the result out of its place.
    Taken = 2,
    /// A neighbour has given up; the payload says in which of its uses, and why.
    Broken = 3,
    /// A member's part of an exchange between all.
    Part = 4,
    /// A neighbour has dropped it; the payload says how often it had used it.
    Left = 5,
}

/// Bytes of the info of a message.
const INFO: usize = 18;

/// The info of a message: the collective, what it is, and which child it is from.
pub(super) fn info_of(key: Key, kind: Kind, child: u8) -> [u8; INFO] {
    let mut info = [0; INFO];
    info[..8].copy_from_slice(&key.0.to_le_bytes());
    info[8..16].copy_from_slice(&key.1.to_le_bytes());
    (info[16], info[17]) = (kind as u8, child);
    info
}

fn parse(info: &[u8]) -> Option<(Key, Kind, usize)> {
    let info: &[u8; INFO] = info.try_into().ok()?;
    let key =
        (u64::from_le_bytes(info[..8].try_into().ok()?), u64::from_le_bytes(info[8..16].try_into().ok()?));
    let kind = match info[16] {
        0 => Kind::Up,
        1 => Kind::Down,
        2 => Kind::Taken,
        3 => Kind::Broken,
        4 => Kind::Part,
        5 => Kind::Left,
        _ => return None,
    };
    Some((key, kind, usize::from(info[17])))
}

/// Messages that have come, ever, and the payload of the last one.
#[derive(Debug, Default)]
pub(super) struct Slot {
    pub count: u64,
    pub bytes: Vec<u8>,
}

/// A member's parts of an exchange between all: how many have come, ever, and the payloads of the last two. It gives the
/// next one when it has got this rank's last one, and so before this rank has looked at its own last one.
#[derive(Debug, Default)]
pub(super) struct Pair {
    pub count: u64,
    bytes: [Vec<u8>; 2],
}

impl Pair {
    /// The part of that turn, if it has come. Turns count from 1.
    pub fn of(&self, turn: u64) -> Option<&[u8]> {
        (self.count >= turn).then(|| &self.bytes[(turn % 2) as usize][..])
    }
}

/// One persistent collective on this rank.
#[derive(Debug)]
pub(super) struct Inbox {
    tree: Tree,
    /// Where all send to all: the others.
    pub parts: BTreeMap<Rank, Pair>,
    members: Box<[Rank]>,
    len: usize,
    /// By child.
    pub up: Vec<Slot>,
    pub down: Slot,
    /// By child.
    pub taken: Vec<u64>,
    /// Neighbours that have dropped it, and how often each had used it.
    left: BTreeMap<Rank, u64>,
    /// From which use on it works no more, and why. Whoever says so has done its part of those before.
    broken: Option<(u64, Fault)>,
    pub waker: Option<Waker>,
}

impl Inbox {
    /// # Errors
    /// If there is no memory for it.
    pub fn new(tree: Tree, members: &[Rank], len: usize) -> Result<Inbox, Fault> {
        let slot = || Ok(Slot { count: 0, bytes: zeroed(len)? });
        Ok(Inbox {
            up: tree.children.iter().map(|_| slot()).collect::<Result<_, Fault>>()?,
            taken: vec![0; tree.children.len()],
            down: slot()?,
            parts: BTreeMap::new(),
            tree,
            members: members.into(),
            len,
            left: BTreeMap::new(),
            broken: None,
            waker: None,
        })
    }

    /// One of an exchange between all.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn of_all(members: &[Rank], me: Rank, len: usize) -> Result<Inbox, Fault> {
        let pair = || Ok(Pair { count: 0, bytes: [zeroed(len)?, zeroed(len)?] });
        let others = members.iter().filter(|rank| **rank != me);
        Ok(Inbox {
            parts: others.map(|rank| Ok((*rank, pair()?))).collect::<Result<_, Fault>>()?,
            len,
            ..Inbox::new(Tree::default(), members, 0)?
        })
    }

    /// It works no more from that use on.
    pub fn break_from(&mut self, turn: u64, fault: Fault) {
        if self.broken.is_none_or(|(first, _)| turn < first) {
            self.broken = Some((turn, fault));
        }
    }

    /// Why a use fails, if it does.
    pub fn failure(&self, turn: u64) -> Option<Fault> {
        self.broken.filter(|(first, _)| turn >= *first).map(|(_, fault)| fault)
    }

    /// Whether a neighbour has dropped it before its use of that number.
    pub fn is_left_before(&self, turn: u64, neighbour: Rank) -> bool {
        self.left.get(&neighbour).is_some_and(|turns| *turns < turn)
    }

    /// `None`: no honest neighbour sends that.
    fn deliver(
        &mut self,
        source: Rank,
        kind: Kind,
        child: usize,
        message: &Message<'_>,
        size: u32,
    ) -> Option<()> {
        let from_child = self.tree.children.get(child) == Some(&source);
        let from_parent = self.tree.parent.is_some_and(|(parent, _)| parent == source);
        let from_neighbour =
            || self.parts.contains_key(&source) || self.tree.neighbours().any(|rank| rank == source);
        match kind {
            Kind::Up if from_child => fill(&mut self.up[child], self.len, message)?,
            Kind::Down if from_parent => fill(&mut self.down, self.len, message)?,
            Kind::Taken if from_child && message.is_empty() => self.taken[child] += 1,
            Kind::Part => {
                let pair = self.parts.get_mut(&source).filter(|_| message.len() == self.len)?;
                pair.count += 1;
                message.copy_to(&mut pair.bytes[(pair.count % 2) as usize]);
            }
            Kind::Left if from_neighbour() => {
                let turns = take_turn(&mut message.to_bytes())?;
                self.left.insert(source, turns);
            }
            Kind::Broken if from_neighbour() => {
                let mut news = message.to_bytes();
                let turn = take_turn(&mut news)?;
                let cause = parse_cause(news).filter(|cause| names_ranks_of(size, *cause))?;
                self.break_from(turn, cause);
            }
            _ => return None,
        }
        Some(())
    }
}

/// The number of a use, before what else a payload says.
fn take_turn(payload: &mut Bytes) -> Option<u64> {
    payload.try_get_u64_le().ok()
}

/// So many bytes that are zero.
fn zeroed(len: usize) -> Result<Vec<u8>, Fault> {
    let mut bytes = Vec::new();
    let had = bytes.try_reserve_exact(len);
    had.map_err(|_| Fault::OutOfMemory("no memory for what comes of a persistent collective"))?;
    bytes.resize(len, 0);
    Ok(bytes)
}

fn fill(slot: &mut Slot, len: usize, message: &Message<'_>) -> Option<()> {
    if message.len() != len {
        return None;
    }
    message.copy_to(&mut slot.bytes);
    slot.count += 1;
    Some(())
}

/// All persistent collectives of a client.
#[derive(Debug, Default)]
pub(super) struct Board {
    pub inboxes: HashMap<Key, Inbox>,
    /// Of each group of which one was made, if it is not gone.
    made: HashMap<u64, Weak<Making>>,
    pub down: HashMap<Rank, Fault>,
    pub closed: bool,
}

impl Board {
    /// Who is to be woken; `None`: no honest rank sends that.
    fn deliver(
        &mut self,
        key: Key,
        source: Rank,
        kind: Kind,
        child: usize,
        message: &Message<'_>,
        size: u32,
    ) -> Option<Option<Waker>> {
        match self.inboxes.get_mut(&key) {
            Some(inbox) => inbox.deliver(source, kind, child, message, size).map(|()| inbox.waker.take()),
            // Whoever was started again is told of what an earlier incarnation had.
            None if matches!(kind, Kind::Broken | Kind::Left) => Some(None),
            // One that was dropped here is not missed, nor is one whose group is gone.
            None => {
                let made = self.made.get(&key.0).and_then(Weak::upgrade);
                made.is_none_or(|made| made.knows(key.1)).then_some(None)
            }
        }
    }

    /// One is made of a group.
    pub fn makes_one_of(&mut self, group: u64, making: &Arc<Making>) {
        if let Entry::Vacant(place) = self.made.entry(group) {
            place.insert(Arc::downgrade(making));
            self.made.retain(|_, making| making.strong_count() > 0);
        }
    }
}

pub(super) struct Registered {
    pub board: Arc<Mutex<Board>>,
    /// Weak, because the context owns the protocol.
    pub context: Weak<Shared>,
}

impl Registered {
    pub fn new(board: &Arc<Mutex<Board>>, handle: &Handle) -> Registered {
        Registered { board: board.clone(), context: Arc::downgrade(handle.shared_state()) }
    }
}

impl Protocol for Registered {
    fn name(&self) -> &str {
        NAME
    }

    fn overtakes_held(&self) -> bool {
        true
    }

    fn on_message(&self, scope: &mut Scope<'_>, message: Incoming<'_>) {
        let message = Message::new(message);
        let source = message.source();
        let size = scope.shape().ranks;
        let waker = parse(message.info()).and_then(|(key, kind, child)| {
            lock(&self.board).deliver(key, source, kind, child, &message, size)
        });
        match waker {
            Some(waker) => waker.into_iter().for_each(Waker::wake),
            None => {
                tracing::warn!(%source, "impossible message of a persistent collective; the peer is cut off");
                scope.cut_off(source);
            }
        }
    }

    fn on_peer_down(&self, rank: Rank, fault: Fault) {
        let Some(context) = self.context.upgrade() else { return };
        let board = self.board.clone();
        on_end(Handle::new(context), rank, fault, move |_, fault| gone(&board, rank, fault));
    }

    fn on_peer_up(&self, scope: &mut Scope<'_>, rank: Rank, _incarnation: u32) {
        // What tells of the death may still be on its way. Those to come may have the rank as a member.
        if self.context.upgrade().is_some_and(|context| Handle::new(context).me() == scope.me()) {
            gone(&self.board, rank, Fault::PeerLost(rank));
            lock(&self.board).down.remove(&rank);
        }
    }

    fn on_close(&self) {
        let mut board = lock(&self.board);
        board.closed = true;
        let wakers: Vec<Waker> = board.inboxes.values_mut().filter_map(|inbox| inbox.waker.take()).collect();
        drop(board);
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// A rank is gone. Who left in order had done its part, and is missed only by a neighbour that waits for more.
fn gone(board: &Mutex<Board>, rank: Rank, fault: Fault) {
    let mut wakers = Vec::new();
    {
        let mut board = lock(board);
        board.down.insert(rank, fault);
        for inbox in board.inboxes.values_mut().filter(|inbox| inbox.members.contains(&rank)) {
            if !matches!(fault, Fault::PeerClosed(_)) {
                inbox.break_from(0, fault);
            }
            wakers.extend(inbox.waker.take());
        }
    }
    wakers.into_iter().for_each(Waker::wake);
}

/// In which use it has ended, and why, as a payload.
pub(super) fn news_of(turn: u64, fault: Fault) -> Bytes {
    let mut bytes = bytes::BytesMut::new();
    bytes.put_u64_le(turn);
    crate::cause::put_cause(&mut bytes, fault);
    bytes.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_kept_of_groups_that_are_gone() {
        let mut board = Board::default();
        let world = Arc::default();
        for group in 1..1000 {
            let making = Arc::default();
            for _ in 0..2 {
                board.makes_one_of(0, &world);
                board.makes_one_of(group, &making);
            }
            assert!(board.made.contains_key(&0) && board.made.len() <= 3);
        }
    }
}
