//! Many-to-many (D19): a buffer of its own for each destination in one call; one buffer for all sources at the receiver.
//!
//! A stream is ⟨source, destination, connection id⟩ (D20). Its messages meet the receives that name the source on that
//! connection, each in its order. A message that comes before its receive is posted waits here and keeps its credit, so
//! that a slow receiver slows its senders. The id travels as the cookie of a message that is sent, so that one of a word is
//! what devices carry fastest, and as the info of a recorded one.

use super::{ManyError, Multisend, MultisendError};
use crate::ends::on_end;
use bytes::Bytes;
use posthaste_core::budget;
use posthaste_core::context::{Shared, poll_until};
use posthaste_core::device::Kept;
use posthaste_core::memory::Source;
use posthaste_core::protocol::{Credit, Flow, Incoming, Protocol};
use posthaste_core::sync::{lock, replace_waker};
use posthaste_core::{ConnectionId, Fault, Handle, Messager, ProtocolId, Rank, RegisterError, Scope};
use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

const NAME: &str = "posthaste.many";
/// For buffers of up to so many bytes nobody asks first whether there is memory.
const UNASKED: usize = 1 << 20;

/// What one source sends: where it goes in the receiver's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Who sends it.
    pub source: Rank,
    /// First byte in the buffer.
    pub offset: usize,
    /// Bytes of room; what is longer is cut off.
    pub len: usize,
}

/// What has come.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::{ConnectionManager, Part};
/// let many = job.many_to_many();
/// let connection = ConnectionManager::new(4).open().await;
/// let parts = [Part { source: job.rank(), offset: 0, len: 4 }];
/// let receive = many.receive(connection.id(), 4, &parts)?;
/// many.send(connection.id(), [(job.rank(), "longer than four".into())]).await?;
/// let received = receive.await?;
/// // What is longer than its part is cut off, and its length is told.
/// assert_eq!((&received.buffer[..], received.parts[0].clone()), (&b"long"[..], Ok(16)));
/// # job.leave().await
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// The buffer; what nobody sent is zero.
    pub buffer: Vec<u8>,
    /// For each part, in the order in which they were listed: how many bytes the source sent, which may be more or less
    /// than there was room for, or why nothing came.
    pub parts: Vec<Result<usize, Fault>>,
    asked: Vec<Part>,
}

impl Received {
    /// The buffer, if all that was asked for is in it: each source has sent as many bytes as its part has.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{ConnectionManager, ManyError, Part};
    /// let many = job.many_to_many();
    /// let connection = ConnectionManager::new(4).open().await;
    /// let parts = [Part { source: job.rank(), offset: 0, len: 4 }];
    /// for sent in ["four", "five!"] {
    ///     let receive = many.receive(connection.id(), 4, &parts)?;
    ///     many.send(connection.id(), [(job.rank(), sent.into())]).await?;
    ///     match receive.await?.into_whole() {
    ///         Ok(buffer) => assert_eq!(buffer, b"four"),
    ///         Err(error) => {
    ///             assert_eq!(error, ManyError::OtherLength { rank: job.rank(), len: 5, expected: 4 });
    ///         }
    ///     }
    /// }
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// For the first part, in the order in which they were listed, for which nothing came or that is longer or shorter.
    pub fn into_whole(self) -> Result<Vec<u8>, ManyError> {
        for (part, outcome) in self.asked.iter().zip(&self.parts) {
            let (rank, expected) = (part.source, part.len);
            match *outcome {
                Ok(len) if len == expected => {}
                Ok(len) => return Err(ManyError::OtherLength { rank, len, expected }),
                Err(fault) => return Err(ManyError::Missing { rank, fault }),
            }
        }
        Ok(self.buffer)
    }
}

/// A receive that was posted.
#[derive(Debug)]
struct Posted {
    parts: Vec<Part>,
    outcomes: Vec<Option<Result<usize, Fault>>>,
    buffer: Vec<u8>,
    missing: usize,
    /// What was longer than its part, in case the receive is taken back.
    cut: Vec<(usize, Vec<u8>)>,
    /// Parts that came from earlier incarnations, which are for no other receive.
    past: Vec<usize>,
    waker: Option<Waker>,
}

impl Posted {
    /// Whether a message of that source is still to come.
    fn part_of(&self, source: Rank) -> Option<usize> {
        let is_its = |part: &Part| part.source == source;
        // As a rule all ranks are named, in their order.
        let part = match self.parts.get(source.index()) {
            Some(part) if is_its(part) => source.index(),
            _ => self.parts.iter().position(is_its)?,
        };
        self.outcomes[part].is_none().then_some(part)
    }

    fn end(&mut self, part: usize, outcome: Result<usize, Fault>) -> Option<Waker> {
        self.outcomes[part] = Some(outcome);
        self.missing -= 1;
        if self.missing == 0 { self.waker.take() } else { None }
    }

    /// A source was started again: what has come of it so far is of an earlier incarnation.
    fn outlive(&mut self, source: Rank) {
        let came = |(number, part): (usize, &Part)| (part.source == source).then_some(number);
        self.past
            .extend(self.parts.iter().enumerate().filter_map(came).filter(|at| self.outcomes[*at].is_some()));
    }

    /// The messages that have come, and their sources.
    fn into_messages(mut self) -> Vec<(Rank, Vec<u8>)> {
        let mut messages = Vec::new();
        for (number, (part, outcome)) in self.parts.iter().zip(&self.outcomes).enumerate() {
            if let Some(Ok(len)) = outcome
                && !self.past.contains(&number)
            {
                let cut = self.cut.iter_mut().find(|(cut, _)| *cut == number);
                let whole = cut.map(|(_, whole)| std::mem::take(whole));
                let bytes = whole.unwrap_or_else(|| self.buffer[part.offset..part.offset + len].to_vec());
                messages.push((part.source, bytes));
            }
        }
        messages
    }
}

/// A message whose receive is still to be posted.
#[derive(Debug)]
struct Waiting {
    source: Rank,
    body: Held,
}

/// Where a message is until there is a receive for it.
#[derive(Debug)]
enum Held {
    /// Where it came to, with its credit.
    There(Kept, Credit),
    /// In a receive that was taken back.
    Here(Vec<u8>),
}

impl Held {
    fn source(&self) -> Source<'_> {
        match self {
            Held::There(body, _) => body.source(),
            Held::Here(bytes) => Source::Private(bytes),
        }
    }
}

/// The receives and the messages of a connection.
#[derive(Debug, Default)]
struct Line {
    posted: VecDeque<u64>,
    waiting: VecDeque<Waiting>,
}

#[derive(Debug, Default)]
struct State {
    lines: HashMap<u32, Line>,
    receives: HashMap<u64, Posted>,
    next: u64,
    down: HashMap<Rank, Fault>,
    closed: bool,
}

impl State {
    /// Puts a message into the first receive that waits for it.
    fn deliver(&mut self, connection: u32, source: Rank, body: Source<'_>) -> Option<Option<Waker>> {
        let State { lines, receives, .. } = self;
        let line = lines.get_mut(&connection)?;
        for &key in &line.posted {
            let Some(receive) = receives.get_mut(&key) else { continue };
            let Some(number) = receive.part_of(source) else { continue };
            let part = receive.parts[number];
            let len = part.len.min(body.len());
            let read = |target: &mut [u8]| match body {
                Source::Private(bytes) => target.copy_from_slice(&bytes[..target.len()]),
                Source::Shared(page) => page.read(target),
            };
            read(&mut receive.buffer[part.offset..part.offset + len]);
            if len < body.len() {
                let mut whole = vec![0; body.len()];
                read(&mut whole);
                receive.cut.push((number, whole));
            }
            let waker = receive.end(number, Ok(body.len()));
            if receive.missing == 0 {
                line.posted.retain(|other| *other != key);
                if line.posted.is_empty() && line.waiting.is_empty() {
                    lines.remove(&connection);
                }
            }
            return Some(waker);
        }
        None
    }

    /// A receive is not wanted any more: what has come for it is for those that were posted behind it, or waits for the next.
    fn take_back(&mut self, connection: u32, key: u64) -> Vec<Waker> {
        let posted = self.receives.remove(&key);
        if let Some(line) = self.lines.get_mut(&connection) {
            line.posted.retain(|other| *other != key);
        }
        let mut wakers = Vec::new();
        for (source, bytes) in posted.map(Posted::into_messages).unwrap_or_default() {
            match self.deliver(connection, source, Source::Private(&bytes)) {
                Some(waker) => wakers.extend(waker),
                // Ahead of what came later from the same source.
                None => {
                    let line = self.lines.entry(connection).or_default();
                    line.waiting.push_front(Waiting { source, body: Held::Here(bytes) });
                }
            }
        }
        if self.lines.get(&connection).is_some_and(|line| line.posted.is_empty() && line.waiting.is_empty()) {
            self.lines.remove(&connection);
        }
        wakers
    }
}

/// The cookie of a connection's messages: no ticket, whatever its id, so that nobody takes it for that of a request.
#[inline]
fn cookie_of(connection: ConnectionId) -> u64 {
    u64::from(connection.0) << 32
}

/// The connection that a message names, in one way or the other.
#[inline]
fn connection_of(message: &Incoming<'_>) -> Option<u32> {
    if !message.info.is_empty() {
        return <[u8; 4]>::try_from(message.info).map(u32::from_le_bytes).ok();
    }
    let connection = ConnectionId((message.cookie >> 32) as u32);
    (cookie_of(connection) == message.cookie).then_some(connection.0)
}

struct Registered {
    state: Arc<Mutex<State>>,
    /// Weak, because the context owns the protocol.
    context: Weak<Shared>,
}

/// A rank is gone: what was to come from it does not.
fn gone(state: &Mutex<State>, rank: Rank, fault: Fault) {
    let mut wakers = Vec::new();
    {
        let mut state = lock(state);
        state.down.insert(rank, fault);
        for receive in state.receives.values_mut() {
            if let Some(part) = receive.part_of(rank) {
                wakers.extend(receive.end(part, Err(fault)));
            }
        }
    }
    wakers.into_iter().for_each(Waker::wake);
}

impl Protocol for Registered {
    fn name(&self) -> &str {
        NAME
    }

    fn flow(&self) -> Flow {
        Flow::Credited
    }

    fn overtakes_held(&self) -> bool {
        true
    }

    // Connection ids.
    fn takes_requests(&self) -> bool {
        false
    }

    fn on_message(&self, scope: &mut Scope<'_>, message: Incoming<'_>) {
        let source = message.source.rank;
        let credit = message.credit();
        let Some(connection) = connection_of(&message) else {
            tracing::warn!(%source, "impossible many-to-many message; the peer is cut off");
            return scope.cut_off(source);
        };
        let delivered = {
            let mut state = lock(&self.state);
            let delivered = state.deliver(connection, source, message.body.source());
            if delivered.is_none() {
                let body = message.body.keep();
                let line = state.lines.entry(connection).or_default();
                line.waiting.push_back(Waiting { source, body: Held::There(body, credit) });
            }
            delivered
        };
        if let Some(waker) = delivered {
            scope.consumed(credit);
            waker.into_iter().for_each(Waker::wake);
        }
    }

    fn on_peer_down(&self, rank: Rank, fault: Fault) {
        let Some(context) = self.context.upgrade() else { return };
        let state = self.state.clone();
        on_end(Handle::new(context), rank, fault, move |_, fault| gone(&state, rank, fault));
    }

    fn on_peer_up(&self, scope: &mut Scope<'_>, rank: Rank, _incarnation: u32) {
        if self.context.upgrade().is_none_or(|context| context.me() != scope.me()) {
            return;
        }
        // What was to come from the earlier incarnation does not, and what it sent is not for receives to come.
        gone(&self.state, rank, Fault::PeerLost(rank));
        let mut state = lock(&self.state);
        state.down.remove(&rank);
        state.receives.values_mut().for_each(|receive| receive.outlive(rank));
        state.lines.retain(|_, line| {
            line.waiting.retain(|waiting| waiting.source != rank);
            !line.waiting.is_empty() || !line.posted.is_empty()
        });
    }

    fn on_close(&self) {
        let wakers: Vec<Waker> = {
            let mut state = lock(&self.state);
            state.closed = true;
            state.receives.values_mut().filter_map(|receive| receive.waker.take()).collect()
        };
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// Many-to-many sends and receives of a client. Cheap to clone.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::{Bytes, ConnectionManager, Part};
/// let many = job.many_to_many();
/// let connection = ConnectionManager::new(4).open().await; // the same on all ranks
/// // Eight bytes of every rank, in the order of the ranks.
/// let part = |source: posthaste::Rank| Part { source, offset: 8 * source.index(), len: 8 };
/// let parts: Vec<Part> = job.ranks().map(part).collect();
/// let receive = many.receive(connection.id(), 8 * job.size(), &parts)?;
/// let mine = Bytes::copy_from_slice(&[job.rank().0 as u8 + 1; 8]);
/// many.send(connection.id(), job.ranks().map(|rank| (rank, mine.clone()))).await?;
/// assert_eq!(receive.await?.into_whole()?[..8], [1; 8]);
/// # job.leave().await
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct ManyToMany {
    state: Arc<Mutex<State>>,
    handle: Handle,
    id: ProtocolId,
    ranks: u32,
}

impl ManyToMany {
    /// Registers many-to-many with a client; once per client, before it is opened.
    ///
    /// # Errors
    /// If it is registered already.
    pub fn new(messager: &dyn Messager) -> Result<ManyToMany, RegisterError> {
        let handle = messager.contexts().first().cloned().ok_or(RegisterError::Closed)?;
        let state = Arc::<Mutex<State>>::default();
        let id = messager.register(Arc::new(Registered {
            state: state.clone(),
            context: Arc::downgrade(handle.shared_state()),
        }))?;
        Ok(ManyToMany { state, handle, id, ranks: messager.peers().ranks })
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    pub(crate) fn id(&self) -> ProtocolId {
        self.id
    }

    /// Sends each rank a buffer of its own, in one call.
    ///
    /// # Errors
    /// Of the future: the ranks that could not be sent to; all others were.
    ///
    /// # Cancel safety
    /// See [`SendMany`].
    pub fn send(
        &self,
        connection: ConnectionId,
        messages: impl IntoIterator<Item = (Rank, Bytes)>,
    ) -> SendMany<'_> {
        let messages: Vec<(Rank, Bytes)> = messages.into_iter().collect();
        let rest = Multisend::new(&self.handle, self.id, cookie_of(connection), messages.len());
        SendMany { messages, rest }
    }

    /// Posts one buffer of `len` bytes for the next message of each of these sources on a connection. The future is ready
    /// when all have come, or their sources are gone: [`Received::into_whole`] tells which.
    ///
    /// # Errors
    /// If a part does not lie in the buffer, a source is named twice, or there is no memory for the buffer.
    pub fn receive(
        &self,
        connection: ConnectionId,
        len: usize,
        parts: &[Part],
    ) -> Result<ReceiveMany, ManyError> {
        self.check(len, parts)?;
        let buffer = zeros(len)?;
        let mut consumed = Vec::new();
        let key = {
            let mut state = lock(&self.state);
            if state.closed {
                return Err(Fault::Shutdown.into());
            }
            let key = state.next;
            state.next += 1;
            let receive = Posted {
                parts: parts.to_vec(),
                outcomes: vec![None; parts.len()],
                buffer,
                missing: parts.len(),
                cut: Vec::new(),
                past: Vec::new(),
                waker: None,
            };
            state.receives.insert(key, receive);
            state.lines.entry(connection.0).or_default().posted.push_back(key);
            // What came before it; the rest of the queue keeps its order.
            let line = state.lines.entry(connection.0).or_default();
            let mut waiting = std::mem::take(&mut line.waiting);
            let mut still = VecDeque::new();
            for message in waiting.drain(..) {
                match state.deliver(connection.0, message.source, message.body.source()) {
                    Some(_) => {
                        if let Held::There(_, credit) = message.body {
                            consumed.push(credit);
                        }
                    }
                    None => still.push_back(message),
                }
            }
            if !still.is_empty() {
                state.lines.entry(connection.0).or_default().waiting = still;
            }
            let State { receives, down, .. } = &mut *state;
            if let Some(receive) = receives.get_mut(&key) {
                for (rank, fault) in down.iter() {
                    if let Some(part) = receive.part_of(*rank) {
                        receive.end(part, Err(*fault));
                    }
                }
            }
            key
        };
        if !consumed.is_empty() {
            self.handle.post_run(move |scope| consumed.into_iter().for_each(|credit| scope.consumed(credit)));
        }
        Ok(ReceiveMany { many: self.clone(), connection: connection.0, key })
    }

    fn check(&self, len: usize, parts: &[Part]) -> Result<(), ManyError> {
        let mut ends: Vec<(usize, usize, usize)> = Vec::new();
        let mut sources = std::collections::HashSet::new();
        for (number, part) in parts.iter().enumerate() {
            let end = part.offset.checked_add(part.len).filter(|end| *end <= len);
            let end = end.ok_or(ManyError::BadPart { part: number, len })?;
            ends.push((part.offset, end, number));
            if part.source.0 >= self.ranks || !sources.insert(part.source) {
                return Err(ManyError::BadSource(part.source));
            }
        }
        ends.retain(|(start, end, _)| start < end);
        ends.sort_unstable();
        match ends.windows(2).find(|pair| pair[1].0 < pair[0].1) {
            Some(pair) => Err(ManyError::BadPart { part: pair[1].2, len }),
            None => Ok(()),
        }
    }
}

/// A buffer of so many bytes, if there is memory for it.
fn zeros(len: usize) -> Result<Vec<u8>, Fault> {
    // Memory that is fresh is zero: what is asked for here is given back untouched.
    let is_there = len <= UNASKED || std::hint::black_box(Vec::<u8>::new()).try_reserve_exact(len).is_ok();
    is_there.then(|| vec![0; len]).ok_or(Fault::OutOfMemory("no memory for what is to be received"))
}

/// Messages of a many-to-many send under way, as those of a [`Multisend`], but without info of one's own: theirs names the
/// connection. Ready when every source is reusable and every message is on its way, or failed.
///
/// # Cancel safety
/// As for a [`Multisend`].
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::{ConnectionManager, Part};
/// use std::time::Duration;
/// let many = job.many_to_many();
/// let connection = ConnectionManager::new(4).open().await;
/// let receive = many.receive(connection.id(), 4, &[Part { source: job.rank(), offset: 0, len: 4 }])?;
/// many.send(connection.id(), [(job.rank(), "four".into())]).deadline(Duration::from_secs(5)).await?;
/// assert_eq!(receive.await?.into_whole()?, b"four");
/// # job.leave().await
/// # }
/// ```
/// What else its messages say goes into their payloads:
/// ```compile_fail,E0599
/// # async fn say(job: posthaste::Job, connection: posthaste::ConnectionId) {
/// let _ = job.many_to_many().send(connection, [(job.rank(), "four".into())]).info(b"step 7").await;
/// # }
/// ```
#[must_use = "a multisend does nothing until it is awaited"]
#[derive(Debug)]
pub struct SendMany<'f> {
    /// Nothing of these was begun yet.
    messages: Vec<(Rank, Bytes)>,
    rest: Multisend<'f, Handle>,
}

impl SendMany<'_> {
    /// As [`Multisend::deadline`].
    pub fn deadline(self, after: Duration) -> Self {
        Self { rest: self.rest.deadline(after), ..self }
    }
}

impl Future for SendMany<'_> {
    type Output = Result<(), MultisendError>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let SendMany { messages, rest } = &mut *self;
        if !messages.is_empty() {
            ready!(budget::proceed(cx));
            if rest.send_each(std::mem::take(messages)) {
                return Poll::Ready(Ok(()));
            }
        }
        Pin::new(rest).poll(cx)
    }
}

/// A posted receive.
///
/// # Cancel safety
/// Dropping it takes the receive back: messages that have come for it, or would have, go to the next one. Those that have come go
/// there behind what the next one may have got from the same source already.
#[must_use = "dropped, it is taken back, and what has come for it is for the next receive"]
#[derive(Debug)]
pub struct ReceiveMany {
    many: ManyToMany,
    connection: u32,
    key: u64,
}

impl Future for ReceiveMany {
    type Output = Result<Received, Fault>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let (state, key) = (&self.many.state, self.key);
        let done = || {
            let mut state = lock(state);
            if state.receives.get(&key).is_some_and(|receive| receive.missing == 0) {
                let receive = state.receives.remove(&key)?;
                drop(state);
                let parts = receive.outcomes.into_iter().flatten().collect();
                return Some(Ok(Received { buffer: receive.buffer, parts, asked: receive.parts }));
            }
            (state.closed || !state.receives.contains_key(&key)).then_some(Err(Fault::Shutdown))
        };
        poll_until(&self.many.handle, cx, done, |waker| {
            let set = |receive: &mut Posted| replace_waker(&mut receive.waker, waker);
            let before = lock(state).receives.get_mut(&key).and_then(set);
            drop(before);
        })
    }
}

impl Drop for ReceiveMany {
    fn drop(&mut self) {
        let mut state = lock(&self.many.state);
        let own = state.receives.get_mut(&self.key).and_then(|receive| receive.waker.take());
        let wakers = state.take_back(self.connection, self.key);
        drop(state);
        drop(own);
        wakers.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_receive_gives_back_is_of_incarnations_that_are_there() {
        for comes_again in [false, true] {
            let mut state = State::default();
            let part = |source, offset| Part { source: Rank(source), offset, len: 4 };
            let receive = Posted {
                parts: vec![part(1, 0), part(2, 4), part(3, 8)],
                outcomes: vec![None; 3],
                buffer: vec![0; 12],
                missing: 3,
                cut: Vec::new(),
                past: Vec::new(),
                waker: None,
            };
            state.receives.insert(9, receive);
            state.lines.entry(5).or_default().posted.push_back(9);
            for (source, bytes) in [(1, b"word"), (2, b"text")] {
                assert!(state.deliver(5, Rank(source), Source::Private(bytes)).is_some());
            }
            if comes_again {
                state.receives.values_mut().for_each(|receive| receive.outlive(Rank(1)));
            }
            assert!(state.take_back(5, 9).is_empty());
            let waiting = state.lines.remove(&5).map(|line| line.waiting).unwrap_or_default();
            let mut sources: Vec<u32> = waiting.iter().map(|waiting| waiting.source.0).collect();
            sources.sort_unstable();
            assert_eq!(sources, if comes_again { vec![2] } else { vec![1, 2] });
        }
    }
}
