//! Puts that say on a word of the target's that they have arrived.

use super::atomic::Access;
use super::memory::Aim;
use super::{Element, Memory, Part, Put, PutSlice, Window, Word, Words};
use crate::operation::{Pending, Way};
use posthaste_core::budget;
use posthaste_core::context::{Face, Posted};
use posthaste_core::engine::{Payload, Rma};
use posthaste_core::memory::{AtomicOp, WordOp};
use posthaste_core::{Endpoint, Handle, Rank, RmaError, Scope};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

/// What a put does to a word of its target's part when the data is there; see [`Window::put_signal`].
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// let (data, state) = (job.shmalloc::<u8>(100).await?, job.shmalloc::<u32>(2).await?);
/// let right = job.rank().next(job.size());
/// // One word counts what has come, another one says what was the last.
/// data.put_signal(right, 0, b"first", state.signal_add(0, 1)).await?;
/// data.put_signal(right, 5, b"second", state.signal_set(1, 77)).await?;
/// state.wait_until(1, |last| last == 77).await?;
/// assert_eq!((state.load(0), data.load(5)), (Some(1), Some(b's')));
/// # job.leave().await
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Signal<'w> {
    memory: &'w Arc<Memory>,
    /// The only part of a region.
    only: Option<Rank>,
    offset: u64,
    op: WordOp,
}

impl<'w> Signal<'w> {
    /// What it is on, and what is done there.
    pub(crate) fn parts(&self) -> (&'w Arc<Memory>, WordOp) {
        (self.memory, self.op)
    }

    /// The word's part of the memory, and its offset there.
    ///
    /// # Errors
    /// If the word is not there.
    #[inline]
    pub(crate) fn place(&self, rank: Rank) -> Result<(&'w Part, u64), RmaError> {
        let part = self.memory.check_word(self.part(rank), rank, self.offset, self.op.len.bytes())?;
        Ok((part, self.offset))
    }

    #[inline(always)]
    fn part(&self, rank: Rank) -> usize {
        // A region has one part. Whose it is has been compared by ranks of the job; this one is of the data's window.
        if self.only.is_some() { 0 } else { rank.index() }
    }

    /// Asks for the word's line, at which the other side looks as a rule: it comes while the data are put. Asked for when
    /// this side's wait ended, it would have been fetched back by now.
    #[inline(always)]
    fn ask_for(&self, rank: Rank) {
        self.memory.prefetch_write(self.part(rank), self.offset);
    }

    /// Where it goes, if that is mapped.
    #[inline(always)]
    fn aim(&self, rank: Rank) -> Option<Aim<'w>> {
        self.memory.aim_at_word(self.part(rank), self.offset, self.op.len)
    }

    /// Refuses to go to another rank of the job than data in that memory.
    #[inline(always)]
    pub(crate) fn goes_with(&self, data: &Arc<Memory>, rank: Rank) -> Result<(), RmaError> {
        if Arc::ptr_eq(data, self.memory) { Ok(()) } else { self.check_rank(data, rank) }
    }

    #[inline]
    fn check_rank(&self, data: &Memory, rank: Rank) -> Result<(), RmaError> {
        let of = |memory: &Memory| memory.job_rank_of(rank);
        match (of(data), self.only.or_else(|| of(self.memory))) {
            (Some(data), Some(signal)) if data != signal => Err(RmaError::SignalElsewhere { data, signal }),
            _ => Ok(()),
        }
    }

    fn access(&self, rank: Rank) -> Access<'w> {
        Access::new(self.memory, self.part(rank), rank, self.offset, self.op)
    }
}

/// Signals on words of a window, or of a region, whose owner then is the only rank that they can go to.
impl<'w, W: Word> Words<'w, W> {
    /// A signal that adds to the word at that offset in bytes.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let window = job.shmalloc::<u8>(64).await?;
    /// // Data and the count of its bytes in one window.
    /// let words = window.words::<u64>();
    /// window.put_signal(job.rank(), 8, b"seven b", words.signal_add(0, 7)).await?;
    /// assert_eq!(words.load(job.rank(), 0).await?, 7);
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn signal_add(&self, offset: u64, value: W) -> Signal<'w> {
        self.signal(offset, AtomicOp::Add, value)
    }

    /// A signal that sets the word at that offset in bytes.
    #[must_use]
    pub fn signal_set(&self, offset: u64, value: W) -> Signal<'w> {
        self.signal(offset, AtomicOp::Store, value)
    }

    fn signal(&self, offset: u64, op: AtomicOp, value: W) -> Signal<'w> {
        let operand = value.to_bits();
        let op = WordOp { op, len: W::LEN, operand, expected: operand };
        Signal { memory: self.memory(), only: self.only(), offset, op }
    }
}

impl<T: Word> Window<T> {
    /// A signal that adds to an element.
    #[must_use]
    pub fn signal_add(&self, index: usize, value: T) -> Signal<'_> {
        self.elements().signal_add(Self::offset(index), value)
    }

    /// A signal that sets an element.
    #[must_use]
    pub fn signal_set(&self, index: usize, value: T) -> Signal<'_> {
        self.elements().signal_set(Self::offset(index), value)
    }
}

impl<T: Element> Window<T> {
    /// Puts consecutive elements and then shows on a word of the same rank, of this window or of another one, that they
    /// are there: whoever sees the word changed, as by [`wait_until`](Window::wait_until), sees the elements. Awaiting it
    /// means that both are done. It is the mechanism of reception counters: the target counts what has come and runs
    /// nothing. The elements are borrowed as long as the future lives.
    ///
    /// # Cancel safety
    /// Dropped before it has started, nothing is put. That is by the first poll, unless its task has used up its turn
    /// ([`tokio::task::coop`]). Dropped later, both go on; but where data and word are reached through different contexts, the signal
    /// is given only if the data had arrived by then.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (data, arrived) = (job.shmalloc::<f32>(100).await?, job.shmalloc::<u64>(1).await?);
    /// let right = job.rank().next(job.size());
    /// data.put_signal(right, 10, &[1.5, 2.5], arrived.signal_add(0, 1)).await?;
    /// arrived.wait_until(0, |count| count == 1).await?; // what the left neighbour has put here
    /// assert_eq!(data.load(11), Some(2.5));
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    pub fn put_signal<'w, 's>(
        &'w self,
        rank: Rank,
        index: usize,
        values: &'s [T],
        signal: Signal<'w>,
    ) -> PutSignal<'w, 's> {
        PutSignal::new(rank, self.put_slice(rank, index, values), signal)
    }
}

/// A put with a signal. Ready when both are done at the target.
///
/// # Cancel safety
/// See [`Window::put_signal`].
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// let (data, ready) = (job.shmalloc::<u64>(4).await?, job.shmalloc::<u32>(1).await?);
/// let put = data.put_signal(job.rank(), 0, &[1, 2, 3], ready.signal_set(0, 1));
/// let (put, seen) = tokio::join!(put, ready.wait_until(0, |flag| flag == 1));
/// put?;
/// seen?;
/// assert_eq!(data.to_vec(), [1, 2, 3, 0]);
/// # job.leave().await
/// # }
/// ```
#[must_use = "a put does nothing until it is awaited"]
pub struct PutSignal<'w, 's> {
    rank: Rank,
    data: PutSlice<'w, 's>,
    signal: Signal<'w>,
    way: Way<Slow<'w>>,
}

/// What has not ended.
enum Slow<'w> {
    /// Both were begun together, so that nothing begun behind them comes between: they go through one context, in which the one
    /// cannot overtake the other.
    Begun(Posted<Result<Both, RmaError>>),
    Together(Both),
    /// One after the other has ended: the data, if they are not put yet, go through another context than the signal.
    Apart(Option<Put<'w>>, Access<'w>),
}

/// A put and the signal behind it; none of what has ended.
type Both = [Option<Pending>; 2];

impl std::fmt::Debug for PutSignal<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PutSignal").field("data", &self.data).field("signal", &self.signal).finish()
    }
}

impl Future for PutSignal<'_, '_> {
    type Output = Result<(), RmaError>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Way::Fresh = self.way {
            // As a rule nothing stands in the way of either.
            ready!(budget::proceed(cx));
            if let Err(error) = self.signal.goes_with(self.data.memory(), self.rank) {
                self.way = Way::Done;
                return Poll::Ready(Err(error));
            }
            // Of a signal that cannot be given the data is not put.
            let put = match self.signal.aim(self.rank) {
                None => false,
                Some(signal) => {
                    let put = self.data.try_at_once();
                    if put && signal.signal(&self.signal.op).is_some() {
                        self.way = Way::Done;
                        budget::spend_on(2 * budget::ACCESS, self.data.len());
                        return Poll::Ready(Ok(()));
                    }
                    put
                }
            };
            if let Err(error) = self.go_slowly(put) {
                self.way = Way::Done;
                return Poll::Ready(Err(error));
            }
        }
        self.poll_slowly(cx)
    }
}

impl<'w, 's> PutSignal<'w, 's> {
    #[inline]
    pub(super) fn new(rank: Rank, data: PutSlice<'w, 's>, signal: Signal<'w>) -> Self {
        signal.ask_for(rank);
        PutSignal { rank, data, signal, way: Way::Fresh }
    }
}

impl PutSignal<'_, '_> {
    #[cold]
    fn go_slowly(&mut self, is_put: bool) -> Result<(), RmaError> {
        self.signal.place(self.rank)?;
        let slow = if !is_put && self.data.goes_with(self.signal.memory) {
            budget::spend_on(2 * budget::MESSAGE, self.data.len());
            Slow::Begun(self.begin()?)
        } else {
            let put = (!is_put).then(|| self.data.general());
            Slow::Apart(put, self.signal.access(self.rank))
        };
        self.way = Way::Slow(Box::new(slow));
        Ok(())
    }

    /// Begins both.
    fn begin(&self) -> Result<Posted<Result<Both, RmaError>>, RmaError> {
        let (data, flags, op) = (self.data.memory().clone(), self.signal.memory.clone(), self.signal.op);
        let (part, offset) = self.data.place()?;
        let (word, word_offset) = self.signal.place(self.rank)?;
        let held = (data.hold(part), flags.hold(word));
        let aim = |part: &Part| (Endpoint::new(part.rank, data.handle.me().context), part.remote);
        let ((to, remote), (word_to, word_remote)) = (aim(part), aim(word));
        let (bytes, len) = (self.data.copied().into_bytes(), self.data.len() as u64);
        let handle = data.handle.clone();
        Ok(self.data.memory().handle.post(move |scope: &mut Scope<'_>| {
            data.still_there()?;
            flags.still_there()?;
            let pending = |ticket| Pending::new(handle.clone(), ticket, None);
            let put = scope.rma(to, remote, offset, Rma::Put(Payload::Owned(bytes)))?;
            let put = put.map(|ticket| pending(ticket).moving(len));
            // Of data that could not be put there is no signal.
            let signal = scope.rma(word_to, word_remote, word_offset, Rma::Update(op))?.map(pending);
            drop(held);
            Ok([put, signal])
        }))
    }

    #[inline(never)]
    fn poll_slowly(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), RmaError>> {
        let Way::Slow(slow) = &mut self.way else { return Poll::Ready(Ok(())) };
        let outcome = ready!(slow.poll(&self.data.memory().handle, cx));
        self.way = Way::Done;
        Poll::Ready(outcome)
    }
}

impl Slow<'_> {
    fn poll(&mut self, handle: &Handle, cx: &mut Context<'_>) -> Poll<Result<(), RmaError>> {
        if let Slow::Begun(posted) = self {
            let both = ready!(posted.poll(cx))?;
            *self = Slow::Together(both);
        }
        match self {
            Slow::Begun(_) => Poll::Pending,
            Slow::Together(both) => {
                for part in both {
                    if let Some(pending) = part {
                        let outcome = ready!(pending.poll(handle, cx));
                        *part = None;
                        outcome?;
                    }
                }
                Poll::Ready(Ok(()))
            }
            Slow::Apart(put, signal) => {
                if let Some(data) = put {
                    ready!(Pin::new(data).poll(cx)?);
                    *put = None;
                }
                signal.poll(cx, false).map_ok(|_| ())
            }
        }
    }
}
