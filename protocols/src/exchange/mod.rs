//! The collective operations beneath barriers and windows of the world.
//!
//! One internal protocol carries small blobs told apart by ⟨operation, round, source⟩ that also say what was called.
//! The barrier is the dissemination barrier (Hensgen, Finkel and Manber 1988), the all-gather is Bruck's (1997), and a
//! window is freed by telling everybody.
//!
//! A rank whose operation cannot end well (somebody died, left, or called something else) tells its neighbours, they
//! tell theirs, and every operation from that one on ends on every rank with that error. So none waits for a rank that
//! has given up; which of two ranks still finished the operation itself depends on how far each was.

mod board;
mod custody;
mod drained;
mod notice;
mod record;
#[cfg(test)]
mod simulation;

use crate::buffer::Buffer;
use crate::ends::on_end;
use crate::handler::ActiveMessage;
use crate::message::Message;
pub(crate) use board::reaches_nothing;
use board::{Board, Effects, MAX_STORED};
use bytes::{Bytes, BytesMut};
pub(crate) use custody::Key;
use custody::Never;
use notice::Outlet;
pub(crate) use notice::{AGAIN, Again};
use posthaste_core::context::poll_until;
use posthaste_core::device::Allocation;
use posthaste_core::protocol::{Incoming, Protocol};
use posthaste_core::sync::lock;
use posthaste_core::{
    Collective, ContextId, Device, Fault, Handle, Messager, Rank, RegisterError, Scope, SendError, WindowId,
};
use record::{Record, bare_part};
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::task::Poll;

/// What a rank tells of its part of a window: where it is and how long.
pub(crate) const PART_BYTES: usize = 16;

const NAME: &str = "posthaste.exchange";

struct ExchangeProtocol {
    board: Mutex<Board>,
    outlet: OnceLock<Outlet>,
    /// Who knows whether a window of a group is never made here any more.
    never: OnceLock<Never>,
}

impl ExchangeProtocol {
    fn board(&self) -> MutexGuard<'_, Board> {
        lock(&self.board)
    }
}

/// The protocol as it is registered.
struct Registered(Arc<ExchangeProtocol>);

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
        let mut effects = Effects::default();
        match Record::parse(&message.bytes(), || message.to_bytes()) {
            Some(record) => self.0.board().on_record(source, record, &mut effects),
            None => effects.corrupt = true,
        }
        self.0.apply_in(scope, Some(source), effects);
    }

    fn on_peer_down(&self, rank: Rank, fault: Fault) {
        let protocol = self.0.clone();
        let Some(context) = self.0.outlet.get().and_then(|outlet| outlet.context.upgrade()) else { return };
        on_end(Handle::new(context), rank, fault, move |scope, fault| {
            let mut effects = Effects::default();
            protocol.board().peer_down(rank, fault, &mut effects);
            protocol.apply_in(scope, None, effects);
        });
    }

    fn on_peer_drained(&self, context: ContextId, rank: Rank, incarnation: u32) {
        // In whichever context: memory that waits for the last of them goes back here.
        let mut effects = Effects::default();
        self.0.board().drained(context, rank, incarnation, &mut effects);
        self.0.apply(effects);
    }

    fn on_peer_up(&self, scope: &mut Scope<'_>, rank: Rank, incarnation: u32) {
        // What tells of the death may still be on its way.
        if self.0.outlet.get().is_some_and(|outlet| outlet.is_of(scope.me())) {
            let mut effects = Effects::default();
            let mut board = self.0.board();
            board.peer_down(rank, Fault::PeerLost(rank), &mut effects);
            board.peer_up(rank, incarnation);
            drop(board);
            self.0.apply_in(scope, None, effects);
        }
    }

    fn on_close(&self) {
        let mut effects = Effects::default();
        self.0.board().close(&mut effects);
        self.0.apply(effects);
    }
}

/// Collective operations of all ranks of the job, each a round of small messages. All ranks must call the same ones in
/// the same order; where they do not, they are told [`Fault::CollectiveMismatch`].
#[derive(Clone)]
pub struct Exchange {
    protocol: Arc<ExchangeProtocol>,
    message: ActiveMessage,
    handle: Handle,
    rank: Rank,
    size: u32,
}

impl std::fmt::Debug for Exchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exchange").field("rank", &self.rank).field("size", &self.size).finish_non_exhaustive()
    }
}

/// An operation in the hands of its caller.
struct Operation<'e> {
    exchange: &'e Exchange,
    number: u64,
    call: Collective,
}

impl Drop for Operation<'_> {
    fn drop(&mut self) {
        let left = self.exchange.protocol.board().end(self.number);
        drop(left);
    }
}

impl Exchange {
    /// Registers the exchange with a client; once per client, before it is opened.
    ///
    /// # Errors
    /// If it is registered already.
    pub fn new(messager: &dyn Messager) -> Result<Exchange, RegisterError> {
        let handle = messager.contexts().first().cloned().ok_or(RegisterError::Closed)?;
        let (rank, shape) = (handle.me().rank, messager.peers());
        let board = Mutex::new(Board::new(rank, shape));
        let (outlet, never) = (OnceLock::new(), OnceLock::new());
        let protocol = Arc::new(ExchangeProtocol { board, outlet, never });
        let id = messager.register(Arc::new(Registered(protocol.clone())))?;
        let context = Arc::downgrade(handle.shared_state());
        // Set once: this protocol was made here.
        let _set = protocol.outlet.set(Outlet { context, id });
        let message = ActiveMessage::new(handle.clone(), id);
        Ok(Exchange { protocol, message, handle, rank, size: shape.ranks })
    }

    /// This rank was started again, and the others' operations are not for it: all of its own end with that error.
    pub fn outlive(&self, cause: Fault) {
        self.protocol.board().outlive(cause);
    }

    /// Changes the board and does what follows from it.
    fn with_board<R>(&self, change: impl FnOnce(&mut Board, &mut Effects) -> R) -> R {
        let mut effects = Effects::default();
        let result = change(&mut self.protocol.board(), &mut effects);
        self.protocol.apply(effects);
        result
    }

    /// This rank.
    pub(crate) fn rank(&self) -> Rank {
        self.rank
    }

    fn begin(&self, call: Collective) -> Result<Operation<'_>, Fault> {
        let number = self.with_board(|board, effects| board.begin(call, effects))?;
        Ok(Operation { exchange: self, number, call })
    }

    /// Waits until every rank has got here.
    ///
    /// # Errors
    /// If a rank is lost or has left, or called something else.
    ///
    /// # Cancel safety
    /// Not cancel safe: a rank that gives up leaves the others waiting until it leaves the job.
    pub async fn barrier(&self) -> Result<(), SendError> {
        let operation = self.begin(Collective::Barrier)?;
        operation.fail_all(operation.barrier().await)
    }

    /// Gathers one blob of equal length from every rank, by rank.
    ///
    /// # Errors
    /// If a rank is lost or has left, or called something else, which a blob of another length is, too.
    ///
    /// # Cancel safety
    /// Not cancel safe, as for [`barrier`](Self::barrier).
    pub async fn all_gather(&self, blob: &[u8]) -> Result<Vec<Bytes>, SendError> {
        // Half of what is kept of a rank that is ahead, which may be two operations.
        let max = (MAX_STORED / 2) as u64 / u64::from(self.size);
        let bytes = u32::try_from(blob.len()).ok().filter(|len| u64::from(*len) <= max);
        let bytes = bytes.ok_or(SendError::TooLong { len: blob.len() as u64, max })?;
        let operation = self.begin(Collective::AllGather(bytes))?;
        operation.fail_all(operation.gather(blob).await)
    }

    /// Starts to make a window; its number is the same on all ranks.
    ///
    /// # Errors
    /// If it cannot be made any more.
    pub(crate) fn begin_window(&self) -> Result<Making<'_>, Fault> {
        Ok(Making { operation: self.begin(Collective::Shmalloc)?, made: false })
    }

    /// Starts to free a window: from here on the operation has its number.
    pub(crate) fn begin_free(&self, window: u64) -> Freeing<'_> {
        let call = Collective::Free(WindowId(window as u32));
        Freeing { exchange: self, window, operation: self.begin(call) }
    }
}

/// A window that is being freed.
pub(crate) struct Freeing<'e> {
    exchange: &'e Exchange,
    window: u64,
    operation: Result<Operation<'e>, Fault>,
}

impl Freeing<'_> {
    /// Releases the window, on which this rank has no operation any more, and waits until all ranks have done so. The
    /// memory of this rank's part goes back then, or later if this ends with an error or a rank is gone.
    pub async fn release(self) -> Result<(), SendError> {
        let Freeing { exchange, window, operation } = self;
        let operation = match operation {
            Ok(operation) => operation,
            Err(fault) => {
                exchange.protocol.notify_others(Record::release(window).freeze());
                exchange.with_board(|board, effects| board.release(window, false, effects));
                return Err(fault.into());
            }
        };
        let releasing = Releasing { exchange, window };
        exchange.with_board(|board, effects| board.release(window, true, effects));
        let part = Record::part(operation.call, operation.number, 0, &[]);
        exchange.protocol.notify_others(part.freeze());
        let waited = operation
            .wait(|board| match board.is_released(window) {
                true => Some(Ok(())),
                false => board.failure(operation.number).map(Err),
            })
            .await;
        drop(releasing);
        operation.fail_all(waited.map_err(SendError::from))
    }
}

/// A window that is being made. Dropped before it is made, it counts as released by this rank.
pub(crate) struct Making<'e> {
    operation: Operation<'e>,
    made: bool,
}

impl Making<'_> {
    /// The window's number.
    pub fn number(&self) -> u64 {
        self.operation.number
    }

    /// Tells all ranks of this rank's part, and hears of theirs. From the first message on, others may reach it.
    pub async fn exchange(
        &self,
        part: [u8; PART_BYTES],
        own: Option<(Arc<dyn Device>, Allocation)>,
    ) -> Result<Vec<Bytes>, SendError> {
        let Operation { exchange, number, .. } = self.operation;
        exchange.protocol.board().track(number, own);
        self.operation.fail_all(self.operation.gather(&part).await)
    }

    /// This rank has the window, until it frees it.
    pub fn made(mut self) -> u64 {
        self.made = true;
        self.operation.number
    }

    /// No rank makes the window after all: each of them has seen why.
    pub fn give_up(mut self) {
        self.made = true;
        let Operation { exchange, number, .. } = self.operation;
        let unused = exchange.protocol.board().forget(number);
        unused.give_back();
    }
}

impl Drop for Making<'_> {
    fn drop(&mut self) {
        if !self.made {
            let Operation { exchange, number, .. } = self.operation;
            exchange.protocol.notify_others(Record::release(number).freeze());
            exchange.with_board(|board, effects| board.release(number, false, effects));
        }
    }
}

/// A wait for the release of a window by all. Its end, by whatever cause, gives the memory back or leaves that to the
/// release of the last rank.
struct Releasing<'e> {
    exchange: &'e Exchange,
    window: u64,
}

impl Drop for Releasing<'_> {
    fn drop(&mut self) {
        self.exchange.with_board(|board, effects| board.release(self.window, false, effects));
    }
}

impl Operation<'_> {
    /// An operation that failed here ends for all, and so do all later ones.
    fn fail_all<R>(&self, result: Result<R, SendError>) -> Result<R, SendError> {
        let cause = match &result {
            Ok(_) | Err(SendError::Fault(Fault::Shutdown)) => return result,
            Err(SendError::Fault(fault)) => *fault,
            Err(_) => Fault::OutOfMemory("a collective operation's message is too long"),
        };
        self.exchange.with_board(|board, effects| board.break_from(self.number, u64::MAX, cause, effects));
        if matches!(cause, Fault::CollectiveMismatch { .. }) && self.call != Collective::Shmalloc {
            // Whoever tried to make a window of that number hears that this rank has none.
            self.exchange.protocol.notify_others(Record::release(self.number).freeze());
        }
        result
    }

    async fn barrier(&self) -> Result<(), SendError> {
        let Exchange { rank, size, .. } = *self.exchange;
        let (mut round, mut distance) = (0, 1);
        while distance < size {
            self.send(Rank((rank.0 + distance) % size), round, &[]).await?;
            self.receive(Rank((rank.0 + size - distance) % size), round).await?;
            (round, distance) = (round + 1, distance * 2);
        }
        Ok(())
    }

    async fn gather(&self, blob: &[u8]) -> Result<Vec<Bytes>, SendError> {
        let Exchange { rank, size, .. } = *self.exchange;
        // Own blob first, then those of the ranks that follow, modulo the size.
        let mut gathered = BytesMut::from(blob);
        let (mut round, mut distance) = (0, 1u32);
        while distance < size {
            let count = distance.min(size - distance) as usize;
            let to = Rank((rank.0 + size - distance) % size);
            self.send(to, round, &gathered[..count * blob.len()]).await?;
            let from = Rank((rank.0 + distance) % size);
            let more = self.receive(from, round).await?;
            if more.len() != count * blob.len() {
                return Err(Fault::PeerCorrupt(from).into());
            }
            gathered.extend_from_slice(&more);
            (round, distance) = (round + 1, distance * 2);
        }
        let gathered = gathered.freeze();
        let size = size as usize;
        Ok((0..size)
            .map(|other| {
                let place = (other + size - rank.index()) % size;
                gathered.slice(place * blob.len()..(place + 1) * blob.len())
            })
            .collect())
    }

    /// Sends this rank's part of a round. A target that is slow does not keep the news of a failure away.
    async fn send(&self, to: Rank, round: u32, blob: &[u8]) -> Result<(), SendError> {
        let record = match blob {
            [] => Buffer::copy(&bare_part(self.call, self.number, round)),
            blob => Record::part(self.call, self.number, round, blob).into(),
        };
        let mut send = std::pin::pin!(self.exchange.message.send(to, record));
        std::future::poll_fn(|cx| {
            if let Poll::Ready(sent) = send.as_mut().poll(cx) {
                return Poll::Ready(sent);
            }
            let mut board = self.exchange.protocol.board();
            let before = board.wait(self.number, cx.waker());
            let failure = board.failure(self.number);
            drop(board);
            drop(before);
            failure.map_or(Poll::Pending, |fault| Poll::Ready(Err(fault.into())))
        })
        .await
    }

    /// Awaits the part of a rank.
    async fn receive(&self, from: Rank, round: u32) -> Result<Bytes, Fault> {
        self.wait(|board| board.take(self.number, round, from)).await
    }

    async fn wait<R>(&self, mut done: impl FnMut(&mut Board) -> Option<R>) -> R {
        let Exchange { protocol, handle, .. } = self.exchange;
        std::future::poll_fn(|cx| {
            poll_until(
                handle,
                cx,
                || done(&mut protocol.board()),
                |waker| {
                    let before = protocol.board().wait(self.number, waker);
                    drop(before);
                },
            )
        })
        .await
    }
}
