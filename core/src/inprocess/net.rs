//! What the ranks of a client share: their lanes, bells and lives.

use super::{Arena, Limits, locked};
use crate::descriptor::Info;
use crate::device::{Doorbell, PeerEvent, PeerNews};
use crate::error::Fault;
use crate::ids::{JobShape, ProtocolId, Rank};
use atomic_waker::AtomicWaker;
use bytes::Bytes;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

/// What became of a rank, as the others see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    Alive,
    Left,
    Dead,
}

impl Life {
    pub(super) fn from_word(word: u32) -> Life {
        match word {
            0 => Life::Alive,
            1 => Life::Left,
            _ => Life::Dead,
        }
    }

    pub(super) fn fault(self, rank: Rank) -> Option<Fault> {
        match self {
            Life::Alive => None,
            Life::Left => Some(Fault::PeerClosed(rank)),
            Life::Dead => Some(Fault::PeerLost(rank)),
        }
    }
}

/// A packet on its way.
#[derive(Debug)]
pub(super) struct Transit {
    /// The sender's.
    pub(super) incarnation: u32,
    pub(super) protocol: ProtocolId,
    pub(super) kind: u8,
    pub(super) cookie: u64,
    pub(super) info: Info,
    pub(super) bytes: Bytes,
}

/// What one endpoint has on its way to another.
#[derive(Debug, Default)]
pub(super) struct Lane {
    pub(super) packets: VecDeque<Transit>,
    /// The sender found the lane full and wants to know of room.
    pub(super) wanted: bool,
    /// The front was offered and is held by the receiver.
    pub(super) held: bool,
}

/// Where the packets for one endpoint arrive.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub(super) lanes: Mutex<BTreeMap<usize, Lane>>,
    pub(super) armed: AtomicBool,
    pub(super) armed_for_room: AtomicBool,
    /// A receiver made room in a lane that this endpoint had found full.
    pub(super) room_made: AtomicBool,
    pub(super) bell: Arc<Bell>,
}

impl Inbox {
    /// Rings after a write to memory that the endpoint's tasks may wait on.
    pub(super) fn rouse(&self) {
        // The write may be a plain store. Partner: the store in `arm`, before the last look at the memory.
        fence(Ordering::SeqCst);
        self.ring_if_armed();
    }

    pub(super) fn ring_if_armed(&self) {
        // SeqCst pairs with the store in `arm`: either the sleeper sees what was done before, or it is seen armed. It
        // stays armed until it is disarmed, because a ring may be in vain.
        if self.armed.load(Ordering::SeqCst) {
            self.bell.ring();
        }
    }
}

/// A flag and the waker of the driver that sleeps on it.
#[derive(Debug, Default)]
pub(super) struct Bell {
    pub(super) rung: AtomicBool,
    pub(super) sleeper: AtomicWaker,
}

impl Bell {
    pub(super) fn ring(&self) {
        // Release pairs with the acquire of `poll_ring`.
        self.rung.store(true, Ordering::Release);
        self.sleeper.wake();
    }
}

impl Doorbell for Bell {
    fn poll_ring(&self, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        self.sleeper.register(cx.waker());
        if self.rung.swap(false, Ordering::Acquire) { Poll::Ready(Ok(())) } else { Poll::Pending }
    }
}

/// What all ranks of one client share.
pub(super) struct Net {
    pub(super) shape: JobShape,
    pub(super) limits: Limits,
    pub(super) arena: Arena,
    pub(super) inboxes: Box<[Inbox]>,
    /// [`Life`] by rank.
    pub(super) lives: Box<[AtomicU32]>,
    /// How often each rank was started again.
    pub(super) incarnations: Box<[AtomicU32]>,
    /// Counts the ranks that died or left.
    pub(super) departures: AtomicU64,
    /// By rank: whom to tell, and who was told of already.
    pub(super) watchers: Box<[Mutex<Watcher>]>,
}

#[derive(Default)]
pub(super) struct Watcher {
    pub(super) news: Option<PeerNews>,
    pub(super) told: Vec<Rank>,
}

impl Net {
    pub(super) fn life(&self, rank: Rank) -> Life {
        self.lives.get(rank.index()).map_or(Life::Dead, |life| Life::from_word(life.load(Ordering::SeqCst)))
    }

    pub(super) fn incarnation(&self, rank: Rank) -> u32 {
        self.incarnations.get(rank.index()).map_or(0, |incarnation| incarnation.load(Ordering::SeqCst))
    }

    pub(super) fn restart(&self, rank: Rank) {
        for inbox in self.inboxes_of(rank) {
            locked(&inbox.lanes).clear();
            inbox.armed.store(false, Ordering::SeqCst);
        }
        let incarnation = self.incarnations[rank.index()].fetch_add(1, Ordering::SeqCst) + 1;
        self.lives[rank.index()].store(0, Ordering::SeqCst);
        *locked(&self.watchers[rank.index()]) = Watcher::default();
        for (to, watcher) in self.watchers.iter().enumerate().filter(|(to, _)| *to != rank.index()) {
            let news = {
                let mut watcher = locked(watcher);
                watcher.told.retain(|told| *told != rank);
                watcher.news.clone()
            };
            if let Some(news) = news {
                tracing::trace!(to, %rank, incarnation, "told of a restart");
                news(rank, PeerEvent::Up { incarnation });
            }
        }
    }

    pub(super) fn depart(&self, rank: Rank, life: Life) {
        if let Some(word) = self.lives.get(rank.index()) {
            // What ended stays ended: a rank that left cannot crash any more.
            if word.compare_exchange(0, life as u32, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                self.departures.fetch_add(1, Ordering::SeqCst);
                for inbox in &self.inboxes {
                    inbox.ring_if_armed();
                }
            }
        }
    }

    pub(super) fn inboxes_of(&self, rank: Rank) -> &[Inbox] {
        let contexts = usize::from(self.shape.contexts);
        &self.inboxes[rank.index() * contexts..(rank.index() + 1) * contexts]
    }

    /// Whether everything that `from` sent to `to` was delivered, but for what its receiver holds.
    pub(super) fn is_drained(&self, from: Rank, to: Rank) -> bool {
        let contexts = usize::from(self.shape.contexts);
        let sources = from.index() * contexts..(from.index() + 1) * contexts;
        self.inboxes_of(to).iter().all(|inbox| {
            locked(&inbox.lanes).range(sources.clone()).all(|(_, lane)| lane.held || lane.packets.is_empty())
        })
    }

    /// Tells `to` of the ranks that are gone, once everything they sent was delivered. Returns how many were told of,
    /// and whether some are still to come.
    pub(super) fn tell(&self, to: Rank) -> (usize, bool) {
        let mut told = 0;
        let mut to_come = false;
        for number in 0..self.shape.ranks {
            let rank = Rank(number);
            let incarnation = self.incarnation(rank);
            let Some(fault) = self.life(rank).fault(rank) else { continue };
            if rank == to {
                continue;
            }
            let drained = self.is_drained(rank, to);
            let news = {
                let mut watcher = locked(&self.watchers[to.index()]);
                if watcher.told.contains(&rank) {
                    continue;
                }
                match watcher.news.clone() {
                    Some(news) if drained => {
                        watcher.told.push(rank);
                        news
                    }
                    // It has left, and wants to hear of nobody.
                    None if self.life(to) == Life::Left => continue,
                    _ => {
                        to_come = true;
                        continue;
                    }
                }
            };
            news(rank, PeerEvent::Down { fault, incarnation, cause: None });
            told += 1;
        }
        (told, to_come)
    }
}
