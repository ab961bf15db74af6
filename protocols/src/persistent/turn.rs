//! One member's side of a persistent collective, and its uses one after the other.

use super::board::{Inbox, Key, Kind, info_of, news_of};
use super::{Persistent, PersistentError, Tree};
use crate::detach::Detaching;
use crate::exchange::AGAIN;
use crate::handler::ActiveMessage;
use crate::pattern::Pattern;
use crate::window::Region;
use bytes::Bytes;
use posthaste_core::context::poll_until;
use posthaste_core::engine::PatternError;
use posthaste_core::sync::{lock, replace_waker};
use posthaste_core::{Fault, Rank, SendError};
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::Poll;

/// What all persistent collectives are.
#[derive(Debug)]
pub(super) struct Core {
    pub persistent: Persistent,
    pub key: Key,
    pub up: Option<Pattern>,
    pub down: Option<Pattern>,
    pub taken: Option<Pattern>,
    /// What the sections send.
    pub data: Region,
    pub tree: Tree,
    /// Neighbours besides those of the tree.
    pub others: Box<[Rank]>,
    turn: u64,
    broken: Option<Fault>,
    /// All members are ready for it.
    made: bool,
    /// A use has begun, and has not ended.
    amid: bool,
}

impl Drop for Core {
    fn drop(&mut self) {
        self.tell_of_drop();
        let inbox = lock(&self.persistent.board).inboxes.remove(&self.key);
        // Not under the lock: a waker may be left in it.
        drop(inbox);
        tracing::debug!(me = %self.persistent.handle.me(), key = ?self.key, "persistent collective dropped");
    }
}

impl Core {
    pub fn new(persistent: &Persistent, key: Key, data: Region, tree: Tree) -> Core {
        tracing::debug!(me = %persistent.handle.me(), ?key, "persistent collective made");
        let (persistent, others) = (persistent.clone(), Box::default());
        Core {
            persistent,
            key,
            up: None,
            down: None,
            taken: None,
            data,
            tree,
            others,
            turn: 0,
            broken: None,
            made: false,
            amid: false,
        }
    }

    /// From here on the others may use it.
    pub fn is_made(&mut self) {
        self.made = true;
    }

    /// Waits for what a neighbour sends in its use of that number, and takes what is asked for.
    async fn wait<R>(
        &self,
        from: Rank,
        turn: u64,
        mut take: impl FnMut(&Inbox) -> Option<R>,
    ) -> Result<R, Fault> {
        let (board, key) = (&self.persistent.board, self.key);
        let mut done = || {
            let board = lock(board);
            let Some(inbox) = board.inboxes.get(&key) else { return Some(Err(Fault::Shutdown)) };
            if let Some(fault) = inbox.failure(self.turn) {
                return Some(Err(fault));
            }
            if let Some(taken) = take(inbox) {
                return Some(Ok(taken));
            }
            if board.closed {
                return Some(Err(Fault::Shutdown));
            }
            let left = inbox.is_left_before(turn, from).then_some(Fault::GroupLeft(from));
            left.or_else(|| board.down.get(&from).copied()).map(Err)
        };
        std::future::poll_fn(|cx| {
            poll_until(&self.persistent.handle, cx, &mut done, |waker| {
                let set = |inbox: &mut Inbox| replace_waker(&mut inbox.waker, waker);
                let before = lock(board).inboxes.get_mut(&key).and_then(set);
                drop(before);
            })
        })
        .await
    }

    /// Replays a section; its data may be changed after that.
    async fn replay(section: Option<&Pattern>) -> Result<(), Fault> {
        let Some(section) = section else { return Ok(()) };
        match section.replay().local().await {
            // What becomes of it at its targets, they say themselves.
            Ok(_under_way) => Ok(()),
            Err(PatternError::Fault(fault)) => Err(fault),
            Err(_) => Err(Fault::Shutdown),
        }
    }

    fn write(&self, bytes: &[u8]) -> Result<(), Fault> {
        self.data.write(0, bytes).map_err(|_| Fault::Shutdown)
    }

    /// One use of a reduction; `add` combines a child's bytes into this rank's.
    pub async fn reduce(
        &mut self,
        own: &mut [u8],
        mut add: impl FnMut(&mut [u8], &[u8]),
    ) -> Result<(), Fault> {
        let me = self.persistent.handle.me().rank;
        let turn = self.next_turn()?;
        for (child, rank) in self.tree.children.iter().enumerate() {
            let mut arrived = |inbox: &Inbox| {
                let slot = &inbox.up[child];
                (slot.count >= turn).then(|| slot.bytes.clone())
            };
            let bytes = self.wait(*rank, turn, &mut arrived).await?;
            // It may be the user's.
            let added = catch_unwind(AssertUnwindSafe(|| add(own, &bytes)));
            added.map_err(|_| Fault::RemotePanicked(me))?;
        }
        self.write(own)?;
        if let Some((parent, _)) = self.tree.parent {
            Self::replay(self.up.as_ref()).await?;
            self.result(parent, turn, own).await?;
            self.write(own)?;
        }
        Self::replay(self.down.as_ref()).await
    }

    /// One use of a broadcast.
    pub async fn broadcast(&mut self, own: &mut [u8]) -> Result<(), Fault> {
        let turn = self.next_turn()?;
        if let Some((parent, _)) = self.tree.parent {
            self.result(parent, turn, own).await?;
            match Self::replay(self.taken.as_ref()).await {
                // It had its last use behind it, and nobody to wait for.
                Err(Fault::PeerClosed(_)) => {}
                taken => taken?,
            }
        }
        for (child, rank) in self.tree.children.iter().enumerate() {
            let taken = |inbox: &Inbox| (inbox.taken[child] + 1 >= turn).then_some(());
            self.wait(*rank, turn - 1, taken).await?;
        }
        self.write(own)?;
        Self::replay(self.down.as_ref()).await
    }

    /// One use of an exchange between all; `take` gets each member's part.
    pub async fn exchange(&mut self, give: &[u8], mut take: impl FnMut(Rank, &[u8])) -> Result<(), Fault> {
        let turn = self.next_turn()?;
        self.write(give)?;
        Self::replay(self.down.as_ref()).await?;
        for rank in &self.others {
            let part = |inbox: &Inbox| inbox.parts.get(rank)?.of(turn).map(|part| take(*rank, part));
            self.wait(*rank, turn, part).await?;
        }
        Ok(())
    }

    async fn result(&self, parent: Rank, turn: u64, own: &mut [u8]) -> Result<(), Fault> {
        let take = |inbox: &Inbox| {
            let there = inbox.down.count >= turn;
            there.then(|| own.copy_from_slice(&inbox.down.bytes))
        };
        self.wait(parent, turn, take).await
    }

    fn next_turn(&mut self) -> Result<u64, Fault> {
        self.turn += 1;
        self.amid = self.broken.is_none();
        self.broken.map_or(Ok(self.turn), Err)
    }

    /// It ends here: the neighbours learn of it, and theirs from them.
    pub async fn ended(&mut self, outcome: Result<(), Fault>) -> Result<(), PersistentError> {
        self.amid = false;
        let Err(fault) = outcome else { return Ok(()) };
        if let Some(news) = self.end(self.turn, fault) {
            // One who has no room for it now hears of it later: whoever waits here does not wait for that, too.
            let mut news = Detaching::new(news);
            let goes_on = tokio::runtime::Handle::try_current().is_ok();
            std::future::poll_fn(|cx| match Pin::new(&mut news).poll(cx) {
                Poll::Pending if goes_on => Poll::Ready(()),
                told => told,
            })
            .await;
        }
        Err(fault.into())
    }

    /// Nothing of it ends well from that use on; whoever has to be told is so by the future, if there is anybody.
    fn end(&mut self, turn: u64, fault: Fault) -> Option<impl Future<Output = ()> + Send + use<>> {
        if self.broken.replace(fault).is_some() {
            return None;
        }
        if let Some(inbox) = lock(&self.persistent.board).inboxes.get_mut(&self.key) {
            inbox.break_from(turn, fault);
        }
        Some(self.tell_neighbours(Kind::Broken, news_of(turn, fault)))
    }

    /// Tells all neighbours of its end.
    fn tell_neighbours(&self, kind: Kind, what: Bytes) -> impl Future<Output = ()> + Send + use<> {
        let info = info_of(self.key, kind, 0);
        let message = self.persistent.message.clone();
        let neighbours: Vec<Rank> = self.tree.neighbours().chain(self.others.iter().copied()).collect();
        async move {
            let told = neighbours.into_iter().map(|neighbour| tell(&message, neighbour, &info, &what));
            futures::future::join_all(told).await;
        }
    }

    /// Others may use it more often than this rank has. That they do not is the rule, and what tells them so is not waited for.
    fn tell_of_drop(&mut self) {
        let alone = self.others.is_empty() && self.tree.neighbours().next().is_none();
        if !self.made || self.broken.is_some() || alone {
            return;
        }
        let broken = {
            let board = lock(&self.persistent.board);
            if board.closed {
                return; // The departure tells it.
            }
            board.inboxes.get(&self.key).and_then(|inbox| inbox.failure(u64::MAX))
        };
        match broken {
            Some(fault) => {
                if let Some(news) = self.end(self.turn + 1, fault) {
                    spread(news);
                }
            }
            None => {
                let turns = Bytes::copy_from_slice(&self.turn.to_le_bytes());
                spread(self.tell_neighbours(Kind::Left, turns));
            }
        }
    }

    /// A use was given up amid: the others would wait for this rank, or take what it sends next for what it has not sent.
    fn give_up(&mut self) {
        self.amid = false;
        let left = Fault::GroupLeft(self.persistent.handle.me().rank);
        if let Some(news) = self.end(self.turn, left) {
            spread(news);
        }
    }
}

/// Tells the news, which nobody here waits for.
fn spread(news: impl Future<Output = ()> + Send + 'static) {
    match tokio::runtime::Handle::try_current() {
        Ok(runtime) => drop(runtime.spawn(news)),
        Err(error) => {
            tracing::warn!(%error, "a persistent collective was dropped outside of a runtime: others that use it wait");
        }
    }
}

/// Tells a neighbour that a collective has ended. Who is gone needs not be told.
async fn tell(message: &ActiveMessage, neighbour: Rank, info: &[u8], what: &Bytes) {
    while let Err(SendError::Fault(Fault::OutOfMemory(reason))) =
        message.send(neighbour, what.clone()).info(info).await
    {
        tracing::debug!(%neighbour, reason, "the end of a persistent collective is told later");
        tokio::time::sleep(AGAIN).await;
    }
}

/// One use of a collective: it ends for all if it is dropped before its end.
pub(super) struct Use<'c>(pub &'c mut Core);

impl Drop for Use<'_> {
    fn drop(&mut self) {
        if self.0.amid {
            self.0.give_up();
        }
    }
}
