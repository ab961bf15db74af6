//! The collective exchange beneath barriers and windows of the world.
//!
//! One internal protocol carries small blobs told apart by ⟨operation, round, source⟩. The barrier is the
//! dissemination barrier (Hensgen, Finkel and Manber 1988); the all-gather is Bruck's (1997).

use crate::handler::ActiveMessage;
use crate::message::Message;
use bytes::{BufMut, Bytes, BytesMut};
use posthaste_core::context::poll_until;
use posthaste_core::protocol::{Incoming, Protocol};
use posthaste_core::sync::lock;
use posthaste_core::{Fault, Handle, Messager, Rank, RegisterError, Scope, SendError};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Waker;

/// What a blob belongs to: the operation's number, its round, its sender.
type Key = (u64, u32, u32);

#[derive(Debug, Default)]
struct Board {
    arrived: HashMap<Key, Bytes>,
    down: BTreeMap<u32, Fault>,
    waiters: HashMap<Key, Waker>,
    closed: bool,
}

impl Board {
    fn wake(&mut self) -> HashMap<Key, Waker> {
        std::mem::take(&mut self.waiters)
    }
}

#[derive(Debug, Default)]
struct ExchangeProtocol {
    board: Mutex<Board>,
}

const NAME: &str = "posthaste.exchange";

impl Protocol for ExchangeProtocol {
    fn name(&self) -> &str {
        NAME
    }

    fn on_message(&self, _scope: &mut Scope<'_>, message: Incoming<'_>) {
        let message = Message::new(message);
        let (Some(operation), Some(round)) = (message.read::<u64>(0), message.read::<u32>(8)) else { return };
        let source = message.source().0;
        let blob = message.to_bytes().slice(12..);
        let mut board = lock(&self.board);
        board.arrived.insert((u64::from_le(operation), u32::from_le(round), source), blob);
        let waiters = board.wake();
        drop(board);
        waiters.into_values().for_each(Waker::wake);
    }

    fn on_peer_down(&self, rank: Rank, fault: Fault) {
        let mut board = lock(&self.board);
        board.down.insert(rank.0, fault);
        let waiters = board.wake();
        drop(board);
        waiters.into_values().for_each(Waker::wake);
    }

    fn on_close(&self) {
        let mut board = lock(&self.board);
        board.closed = true;
        let waiters = board.wake();
        drop(board);
        waiters.into_values().for_each(Waker::wake);
    }
}

/// Collective operations of all ranks of the job, each a round of small messages. All ranks must start them in the
/// same order.
#[derive(Clone, Debug)]
pub struct Exchange {
    protocol: Arc<ExchangeProtocol>,
    message: ActiveMessage,
    handle: Handle,
    rank: Rank,
    size: u32,
    next: Arc<AtomicU64>,
}

impl Exchange {
    /// Registers the exchange with a client; once per client.
    ///
    /// # Errors
    /// If it is registered already.
    pub fn new(messager: &dyn Messager) -> Result<Exchange, RegisterError> {
        let protocol = Arc::new(ExchangeProtocol::default());
        let handle = messager.contexts().first().cloned().ok_or(RegisterError::Closed)?;
        let id = messager.register(protocol.clone())?;
        Ok(Exchange {
            protocol,
            message: ActiveMessage::new(handle.clone(), id),
            rank: handle.me().rank,
            size: messager.peers().ranks,
            handle,
            next: Arc::default(),
        })
    }

    /// The number of the next operation.
    fn begin(&self) -> u64 {
        self.next.fetch_add(1, Ordering::AcqRel)
    }

    async fn send(&self, to: Rank, operation: u64, round: u32, blob: &[u8]) -> Result<(), SendError> {
        let mut payload = BytesMut::with_capacity(12 + blob.len());
        payload.put_u64_le(operation);
        payload.put_u32_le(round);
        payload.put_slice(blob);
        self.message.send(to, payload).await
    }

    /// Awaits the blob of a rank. A rank that is gone and sent none ends the wait with its fault; `any`: so does any
    /// other rank's end.
    async fn receive(&self, from: Rank, operation: u64, round: u32, any: bool) -> Result<Bytes, Fault> {
        let key = (operation, round, from.0);
        std::future::poll_fn(|cx| {
            poll_until(
                &self.handle,
                cx,
                || {
                    let mut board = lock(&self.protocol.board);
                    if let Some(blob) = board.arrived.remove(&key) {
                        return Some(Ok(blob));
                    }
                    if board.closed {
                        return Some(Err(Fault::Shutdown));
                    }
                    // A rank that left in order has taken part in everything up to its leave, so only its own
                    // absence matters; one that died will be missed by somebody.
                    let lost = board.down.values().find(|fault| any && matches!(fault, Fault::PeerLost(_)));
                    board.down.get(&from.0).or(lost).map(|fault| Err(*fault))
                },
                |waker| {
                    lock(&self.protocol.board).waiters.insert(key, waker.clone());
                },
            )
        })
        .await
    }

    /// Waits until every rank has got here.
    ///
    /// # Errors
    /// If a rank is lost or has left.
    ///
    /// # Cancel safety
    /// Not cancel safe: a rank that gives up leaves the others waiting until it leaves the job.
    pub async fn barrier(&self) -> Result<(), SendError> {
        self.declare_ready();
        let operation = self.begin();
        let mut round = 0;
        let mut distance = 1;
        while distance < self.size {
            let to = Rank((self.rank.0 + distance) % self.size);
            let from = Rank((self.rank.0 + self.size - distance) % self.size);
            self.send(to, operation, round, &[]).await?;
            self.receive(from, operation, round, true).await?;
            distance *= 2;
            round += 1;
        }
        Ok(())
    }

    /// Gathers one blob of equal length from every rank, by rank.
    ///
    /// # Errors
    /// If a rank is lost or has left, or sends a blob of another length.
    ///
    /// # Cancel safety
    /// Not cancel safe, as for [`barrier`](Self::barrier).
    pub async fn all_gather(&self, blob: &[u8]) -> Result<Vec<Bytes>, SendError> {
        self.declare_ready();
        let operation = self.begin();
        // Own blob first, then those of the ranks that follow, modulo the size.
        let mut gathered = BytesMut::from(blob);
        let mut round = 0;
        let mut distance = 1u32;
        while distance < self.size {
            let count = distance.min(self.size - distance) as usize;
            let to = Rank((self.rank.0 + self.size - distance) % self.size);
            let from = Rank((self.rank.0 + distance) % self.size);
            self.send(to, operation, round, &gathered[..count * blob.len()]).await?;
            let more = self.receive(from, operation, round, true).await?;
            if more.len() != count * blob.len() {
                return Err(Fault::PeerCorrupt(from).into());
            }
            gathered.extend_from_slice(&more);
            distance *= 2;
            round += 1;
        }
        let gathered = gathered.freeze();
        let size = self.size as usize;
        Ok((0..size)
            .map(|rank| {
                let place = (rank + size - self.rank.index()) % size;
                gathered.slice(place * blob.len()..(place + 1) * blob.len())
            })
            .collect())
    }

    /// Waits until every rank has got here or is gone for good: what is shared by all may be given up then.
    ///
    /// # Errors
    /// Only if this rank itself is closed.
    ///
    /// # Cancel safety
    /// Not cancel safe, as for [`barrier`](Self::barrier).
    pub async fn released_by_all(&self) -> Result<(), SendError> {
        let operation = self.begin();
        let others = || (0..self.size).map(Rank).filter(|rank| *rank != self.rank);
        for rank in others() {
            match self.send(rank, operation, 0, &[]).await {
                Ok(()) => {}
                Err(SendError::Fault(fault)) if fault.peer() == Some(rank) => {}
                Err(error) => return Err(error),
            }
        }
        for rank in others() {
            match self.receive(rank, operation, 0, false).await {
                Ok(_) => {}
                Err(fault) if fault.peer() == Some(rank) && !matches!(fault, Fault::PeerCorrupt(_)) => {}
                Err(fault) => return Err(fault.into()),
            }
        }
        Ok(())
    }

    fn declare_ready(&self) {
        self.handle.post_run(|scope| scope.declare_ready());
    }
}
