//! What is known of the ranks themselves: that they were started again, have left, or are dead.

use super::{Hub, Known, Stage, Table, told_incarnation};
use crate::book::PeerAddress;
use posthaste_core::device::PeerEvent;
use posthaste_core::sync::{MutexGuard, lock};
use posthaste_core::{ContextId, Fault, LossCause, Rank};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

/// How long what a rank has sent may be on its way after others know of its death.
const LAST_WORDS: Duration = Duration::from_millis(20);

impl Hub {
    /// Somebody who knows has said that a rank was started again, and where it listens now.
    pub fn restarted(&self, rank: Rank, address: PeerAddress) {
        let event = PeerEvent::Up { incarnation: told_incarnation(address.incarnation) };
        {
            let mut table = lock(&self.table);
            let Some(known) = table.ranks.get_mut(rank.index()).filter(|_| rank != self.me) else { return };
            if known.restarted.is_some_and(|restarted| restarted >= address.incarnation) {
                return;
            }
            *known = Known { restarted: Some(address.incarnation), ..Known::default() };
            let shape = self.shape;
            table.stages.retain(|(_, index), _| shape.endpoint(*index).rank != rank);
            table.admitted.retain(|(_, other), _| *other != rank);
            table.unaware.retain(|(_, other)| *other != rank);
            // Under the lock: an attempt to connect that finds this address finds itself given up, too.
            self.book.enter(rank, address);
            if lock(&self.news).is_none() {
                table.news.push((rank, event));
                drop(table);
                return self.book.tell();
            }
        }
        self.book.tell();
        self.moved.notify_waiters();
        self.attempt_ended();
        self.tell(rank, event);
    }

    /// A port has given up what it had of earlier incarnations of the rank: from now on it talks to the latest.
    pub fn admit(&self, context: ContextId, rank: Rank, incarnation: u32) {
        let mut table = lock(&self.table);
        let restarted = table.ranks.get(rank.index()).and_then(|known| known.restarted);
        if let Some(restarted) = restarted.filter(|restarted| told_incarnation(*restarted) == incarnation) {
            table.admitted.insert((context, rank), restarted);
        }
        if table.unaware.contains(&(context, rank)) {
            drop(table);
            self.door(context).knock();
        }
    }

    /// Whether a connection is with the incarnation that a context talks to.
    pub fn is_current(&self, context: ContextId, rank: Rank, incarnation: u64) -> bool {
        let table = lock(&self.table);
        let restarted = table.ranks.get(rank.index()).and_then(|known| known.restarted);
        restarted.is_none_or(|restarted| restarted == incarnation) && table.admits(context, rank)
    }

    /// The incarnation of a rank that this side knows where to find, or would.
    pub fn incarnation_of(&self, rank: Rank) -> u64 {
        let restarted = lock(&self.table).ranks.get(rank.index()).and_then(|known| known.restarted);
        restarted.or_else(|| Some(self.book.get(rank)?.incarnation)).unwrap_or(0)
    }

    /// Somebody else knows that the rank is gone. With whom there is a connection, that tells it, and when; a leave is told to the
    /// contexts that have none.
    pub fn gone(&self, rank: Rank, fault: Fault, cause: LossCause) {
        let mut table = lock(&self.table);
        let left = matches!(fault, Fault::PeerClosed(_));
        let has_met = table.has_met(rank, self.shape);
        let is_connecting = table.is_connecting_to(rank, self.shape);
        let Some(known) = table.ranks.get_mut(rank.index()).filter(|_| rank != self.me) else { return };
        if has_met {
            // Contexts that have no connection with it hear of its leave, though nobody moves those that have one.
            if left && !known.told && !known.left {
                known.left = true;
                table.unaware.extend((0..self.shape.contexts).map(|of| (ContextId(of), rank)));
                drop(table);
                self.knock_unaware(rank);
            }
            return;
        }
        known.left |= left;
        // It may have accepted that, and sent something: the attempt tells.
        if !(left && is_connecting) {
            self.tell_end(table, rank, fault, cause);
        }
    }

    /// An incarnation of a rank is dead, and no connection with it is of use any more, whoever has yet to see that.
    fn is_dead(&self, rank: Rank, incarnation: u64) {
        let table = lock(&self.table);
        let Some(known) = table.ranks.get(rank.index()).filter(|_| rank != self.me) else { return };
        let is_another = known.restarted.is_some_and(|restarted| restarted != incarnation);
        if !is_another && !known.left {
            self.tell_end(table, rank, Fault::PeerLost(rank), LossCause::Exited);
        }
    }

    /// Tells of the end of what is known as the rank, unless that was told, or as soon as anybody wants to know.
    fn tell_end(&self, mut table: MutexGuard<'_, Table>, rank: Rank, fault: Fault, cause: LossCause) {
        let known = &mut table.ranks[rank.index()];
        if std::mem::replace(&mut known.told, true) {
            return;
        }
        let incarnation = told_incarnation(known.restarted.unwrap_or(0));
        let cause = Some(cause).filter(|_| matches!(fault, Fault::PeerLost(_)));
        let event = PeerEvent::Down { fault, incarnation, cause };
        table.unaware.retain(|(_, other)| *other != rank);
        if lock(&self.news).is_none() {
            // Nobody wants to know yet.
            table.news.push((rank, event));
            return;
        }
        drop(table);
        self.tell(rank, event);
    }

    /// Somebody has seen the rank's process end. Connections with it live on where a process that it forked holds them: what
    /// it has sent is let in for a moment, and then they are ended.
    pub fn died(self: &Arc<Self>, rank: Rank) {
        let (hub, incarnation) = (self.clone(), self.incarnation_of(rank));
        {
            let mut table = lock(&self.table);
            if let Some(known) = table.ranks.get_mut(rank.index()) {
                known.blamed.get_or_insert(LossCause::Exited);
            }
        }
        self.spawn(async move {
            tokio::time::sleep(LAST_WORDS).await;
            let streams: Vec<Arc<TcpStream>> = {
                let table = lock(&hub.table);
                let with_it = table.streams.iter().filter(|kept| kept.peer == (rank, incarnation));
                with_it.filter_map(|kept| kept.stream.upgrade()).collect()
            };
            for stream in streams {
                // One that is broken already needs no ending.
                let _ = socket2::SockRef::from(&*stream).set_linger(Some(Duration::ZERO));
                let _ = stream.shutdown(std::net::Shutdown::Both);
            }
            // Ports tell when they have seen that. A context that nobody moves must not keep it from the others.
            tokio::time::sleep(LAST_WORDS).await;
            hub.is_dead(rank, incarnation);
        });
        self.gone(rank, Fault::PeerLost(rank), LossCause::Exited);
    }

    /// A connection is about to be ended on this side, for that reason.
    #[cfg(all(unix, not(feature = "portable")))]
    pub fn blame(&self, number: u64, cause: LossCause) {
        let mut table = lock(&self.table);
        let Some((rank, incarnation)) =
            table.streams.iter().find(|kept| kept.number == number).map(|kept| kept.peer)
        else {
            return;
        };
        let known = &mut table.ranks[rank.index()];
        if known.restarted.is_none_or(|restarted| restarted == incarnation) {
            known.blamed.get_or_insert(cause);
        }
    }

    /// The engine has given a rank up: nothing of it is taken any more.
    pub fn fence(&self, context: ContextId, rank: Rank) {
        let mut table = lock(&self.table);
        if !table.admits(context, rank) {
            // It has given up an earlier incarnation.
            return;
        }
        table.ranks[rank.index()].told = true;
        let shape = self.shape;
        for ((_, index), stage) in &mut table.stages {
            if shape.endpoint(*index).rank == rank && stage.attempt().is_some() {
                *stage = Stage::Over;
            }
        }
        drop(table);
        self.attempt_ended();
    }
}
