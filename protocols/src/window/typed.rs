//! Puts and gets between layouts.

use super::{Element, Memory, Part, RemoteRegion, Stage, Window, send_to_rma};
use crate::datatype::{
    Datatype, Layout, MAX_PROGRAM, Machine, Request, SlicedMemory, Thresholds, TransferError, TypedError,
    checked, chunk, pack, put_chunk, redistribute_with,
};
use crate::operation::Pending;
use bytes::Bytes;
use posthaste_core::budget;
use posthaste_core::context::Face;
use posthaste_core::engine::{Payload, Rma, SendArgs, Sent, Wait};
use posthaste_core::exposed::is_exposed;
use posthaste_core::memory::SharedSlice;
use posthaste_core::slot::Value;
use posthaste_core::{Endpoint, Fault, Rank, RmaError, Scope};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use zerocopy::IntoBytes;

/// Bytes of one get that are asked for before answers come. As many keep their place in program order; the owner gathers them as
/// the requests come in.
const ASKED_AT_ONCE: u64 = 16 << 20;

/// Where the far layout of a put or a get lies: in a rank's part of a window, or in a region.
#[derive(Clone, Copy)]
struct There<'w> {
    memory: &'w Arc<Memory>,
    part: usize,
    rank: Rank,
}

impl<'w> There<'w> {
    fn part(&self) -> Result<&'w Part, RmaError> {
        self.memory.check(self.part, self.rank, 0, 0)
    }
}

/// A request for some of the bytes.
struct Asked {
    stage: Stage,
    first: u64,
    bytes: u64,
}

/// What a request carries.
enum Carried<'b> {
    Lent(&'b [u8]),
    Owned(Bytes),
}

impl Memory {
    /// Whether the incarnation of the rank that has the part still lives, as far as that is known. Owners look, too.
    fn is_current(&self, part: &Part) -> Result<(), RmaError> {
        let (rank, held, now) = (part.rank, part.incarnation, self.gates.incarnation_of(part.rank));
        if held < now { Err(Fault::StaleHandle { rank, held, now }.into()) } else { Ok(()) }
    }

    /// The key of a part that only its owner reaches while other memory of that rank's is mapped.
    fn beside_mapped(&self, part: &Part) -> Option<usize> {
        let beside =
            is_exposed(part.place) && self.device.caps().mappable && !self.gates.goes_over_send(part.rank);
        beside.then_some(part.remote)
    }

    /// Copies to mapped memory now, or packs; returns what is still to be done.
    #[inline]
    fn put_typed(
        self: &Arc<Self>,
        thresholds: &Thresholds,
        (part, to): (&Part, &Layout<'_>),
        (source, from): (&[u8], &Layout<'_>),
    ) -> Result<Putting, TypedError> {
        let aim = self.aim_within(part, 0, part.len);
        let copy = |target| redistribute_with(thresholds, target, to, source, from);
        match aim.and_then(|aim| aim.change(copy)) {
            Some(copied) => {
                copied?;
                Ok(Putting::Done)
            }
            None if self.waits_for_turn(part) => self.put_in_turn(part, to, source, from),
            None => Ok(Putting::Asked(self.pack(part, to, source, from)?)),
        }
    }

    /// Packs, and unpacks to mapped memory in its turn.
    #[cold]
    fn put_in_turn(
        self: &Arc<Self>,
        part: &Part,
        to: &Layout<'_>,
        source: &[u8],
        from: &Layout<'_>,
    ) -> Result<Putting, TypedError> {
        let all = checked((to, part.len), (from, source.len() as u64))?;
        let all = distinct(part.len.max(source.len() as u64), all)?;
        let packed = pack(&[], &mut Machine::new(from)?, source, all)?;
        let (mut machine, rank) = (Machine::new(to)?, part.rank);
        let unpack = move |target: SharedSlice| match machine.scatter(target, &packed[..]) {
            Ok(_) => Ok(Value::Unit),
            Err(_) => Err(Fault::NoSuchMemory(rank)),
        };
        Ok(Putting::InTurn(Box::new(self.in_turn(part, true, unpack))))
    }

    /// Packs for the owner of the memory, and asks it for everything: each request takes its place among the puts at once.
    #[cold]
    fn pack(
        self: &Arc<Self>,
        part: &Part,
        to: &Layout<'_>,
        source: &[u8],
        from: &Layout<'_>,
    ) -> Result<Asks, TypedError> {
        let all = distinct(part.len, checked((to, part.len), (from, source.len() as u64))?)?;
        self.is_current(part)?;
        let program = readable(to.datatype.to_bytes())?;
        let mut machine = Machine::new(from)?;
        let mut asks = VecDeque::new();
        // Bytes in one run need not be packed.
        let run = from.run().and_then(|run| source.get(run));
        let mut first = 0;
        while first < all {
            let most = put_chunk(to, program.len());
            let request = request(part, to, first, all.min(first.saturating_add(most)));
            let end = first + request.bytes;
            let (info, within) = request.put_info(&program);
            let lent = run.filter(|_| within).and_then(|run| run.get(first as usize..end as usize));
            let bytes = match lent {
                Some(bytes) => {
                    machine.skip(request.bytes);
                    Carried::Lent(bytes)
                }
                None => {
                    let head = if within { &[][..] } else { &program };
                    Carried::Owned(pack(head, &mut machine, source, request.bytes)?.into())
                }
            };
            asks.push_back(self.ask(part, info, bytes)?);
            first = end;
        }
        Ok(asks)
    }

    /// Asks for bytes of a layout; the request takes its place among the puts.
    fn ask_for(
        self: &Arc<Self>,
        part: &Part,
        (from, program): (&Layout<'_>, &Bytes),
        first: u64,
        bytes: u64,
    ) -> Result<Asked, RmaError> {
        let (info, within) = request(part, from, first, first + bytes).get_info(program);
        let payload = if within { Bytes::new() } else { program.clone() };
        Ok(Asked { stage: self.ask(part, info, Carried::Owned(payload))?, first, bytes })
    }

    /// Sends a request.
    fn ask(self: &Arc<Self>, part: &Part, info: Vec<u8>, carried: Carried<'_>) -> Result<Stage, RmaError> {
        let (rank, beside) = (part.rank, self.beside_mapped(part));
        // Not copied if it can go at once.
        let now = self.handle.enter(|engine| {
            let payload = match &carried {
                Carried::Lent(lent) => Payload::Borrowed(lent),
                Carried::Owned(bytes) => Payload::Owned(bytes.clone()),
            };
            self.ask_in(&mut engine.scope(), (rank, beside), &info, payload)
        });
        if let Ok(asked) = now {
            return asked.map(Stage::Pending);
        }
        let (memory, held) = (self.clone(), self.hold(part));
        let bytes = match carried {
            Carried::Lent(lent) => Bytes::copy_from_slice(lent),
            Carried::Owned(bytes) => bytes,
        };
        Ok(Stage::Posted(self.handle.post(move |scope: &mut Scope<'_>| {
            let asked = memory.ask_in(scope, (rank, beside), &info, Payload::Owned(bytes));
            drop(held);
            asked.map(Some)
        })))
    }

    fn ask_in(
        self: &Arc<Self>,
        scope: &mut Scope<'_>,
        (rank, beside): (Rank, Option<usize>),
        info: &[u8],
        payload: Payload<'_>,
    ) -> Result<Pending, RmaError> {
        self.still_there()?;
        let target = Endpoint::new(rank, self.handle.me().context);
        let ticket = scope.operation(Some(rank))?;
        let protocol = self.layouts.id();
        let args = SendArgs { target, protocol, cookie: ticket.to_word(), info, relaxed: false };
        let error = match scope.send(&args, payload, Wait::InTurn) {
            Ok(Sent::Done | Sent::Queued(_)) => {
                let asked = Pending::new(self.handle.clone(), ticket, None, None);
                if let Some(key) = beside {
                    // A message keeps no gate closed. A put of nothing behind it does, until it was handled, and so the message.
                    if let Some(last) = scope.rma(target, key, 0, Rma::Put(Payload::Borrowed(&[])))? {
                        scope.detach(last);
                    }
                }
                return Ok(asked);
            }
            // It takes no credit.
            Ok(Sent::Later(..) | Sent::Full(_)) => Fault::Busy(rank).into(),
            Err((error, _)) => send_to_rma(error),
        };
        scope.complete(ticket, Ok(Value::Unit));
        scope.detach(ticket);
        Err(error)
    }
}

/// Whether a layout of so many bytes can be one without overlaps in memory of that length, which is all that is packed.
fn distinct(len: u64, size: u64) -> Result<u64, TransferError> {
    if size <= len { Ok(size) } else { Err(TransferError::Overlapping { size, len }) }
}

/// A program, if its owner reads one that is so long.
fn readable(program: Vec<u8>) -> Result<Vec<u8>, TransferError> {
    let len = program.len();
    if len <= MAX_PROGRAM { Ok(program) } else { Err(TransferError::Program { len: len as u64 }) }
}

/// The request for bytes of a layout.
fn request(part: &Part, layout: &Layout<'_>, first: u64, end: u64) -> Request {
    Request {
        place: part.place,
        len: part.len,
        base: layout.base,
        count: layout.count,
        first,
        bytes: end - first,
        incarnation: part.incarnation,
    }
}

/// Requests of a put that were sent, or have their place in the queue; in order.
type Asks = VecDeque<Stage>;

/// A put between layouts that was begun.
enum Putting {
    Done,
    /// By its owner.
    Asked(Asks),
    /// Here, behind what is queued.
    InTurn(Box<Stage>),
}

impl<T: Element> Window<T> {
    /// Puts the elements of a layout to those of another one in a rank's part; both have the same elements, and shapes
    /// of their own. Bases of layouts are in bytes, from the beginning of the part and of `source`.
    ///
    /// Memory that is mapped is written straight from the source, other memory by its owner. It takes effect behind this rank's
    /// puts that were polled before it, and before those polled later. Concurrent accesses to words of 8 bytes see them whole
    /// where the blocks of both layouts are such words.
    ///
    /// # Cancel safety
    /// Dropped before it was polled, or while its task's budget was spent, nothing is done. Dropped later, the put is done all
    /// the same.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// use posthaste::datatype::{Datatype, Layout};
    /// let job = posthaste::solo().await?;
    /// let window = job.shmalloc::<f64>(100).await?; // a matrix of 10 × 10, row by row
    /// let column = Datatype::of::<f64>().vector(10, 1, 10)?;
    /// let values: Vec<f64> = (0..10).map(f64::from).collect();
    /// let packed = Datatype::of::<f64>();
    /// // Ten numbers become column 3.
    /// let to = Layout::new(&column, 1).at(3 * 8);
    /// window.put_typed(job.rank(), &to, &values, &Layout::new(&packed, 10)).await?;
    /// assert_eq!((window.load(43), window.load(44)), (Some(4.0), Some(0.0)));
    /// let back = window.get_typed(job.rank(), &to, vec![0.0; 10], &Layout::new(&packed, 10)).await?;
    /// assert_eq!(back, values);
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    pub fn put_typed<'w, 's, S: Element>(
        &'w self,
        rank: Rank,
        to: &Layout<'s>,
        source: &'s [S],
        from: &Layout<'s>,
    ) -> PutTyped<'w, 's> {
        self.put_typed_with(&Thresholds::default(), rank, to, source, from)
    }

    /// As [`put_typed`](Self::put_typed), straight or staged as these thresholds say where memory is mapped.
    ///
    /// # Cancel safety
    /// As for `put_typed`.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::datatype::{Datatype, Layout, Thresholds};
    /// let window = job.shmalloc::<u8>(16).await?;
    /// let every_fourth = Datatype::of::<u8>().vector(4, 1, 4)?;
    /// let every_other = Datatype::of::<u8>().vector(4, 1, 2)?;
    /// // Packed and unpacked again instead of byte by byte.
    /// let staged = Thresholds { granularity: 64, ..Thresholds::default() };
    /// let (to, from) = (Layout::new(&every_fourth, 1), Layout::new(&every_other, 1));
    /// window.put_typed_with(&staged, job.rank(), &to, &[1_u8, 0, 2, 0, 3, 0, 4], &from).await?;
    /// assert_eq!(window.to_vec(), [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0]);
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    pub fn put_typed_with<'w, 's, S: Element>(
        &'w self,
        thresholds: &Thresholds,
        rank: Rank,
        to: &Layout<'s>,
        source: &'s [S],
        from: &Layout<'s>,
    ) -> PutTyped<'w, 's> {
        PutTyped::new(self.there(rank), thresholds, to, source, from)
    }

    /// Gets the elements of a layout in a rank's part into those of another one, in a buffer that is given back; see
    /// [`put_typed`](Self::put_typed).
    ///
    /// It reads what this rank's puts that were polled before it have written, and nothing of those polled later. Of memory that
    /// is not mapped that holds for the first 16 MiB: what follows is asked for as answers come, and again where its owner has
    /// too many of them (`POSTHASTE_ANSWER_BYTES`).
    ///
    /// # Cancel safety
    /// Cancel safe; the buffer is dropped with the future.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::datatype::{Datatype, Layout};
    /// let matrix = job.shmalloc::<f32>(16).await?; // 4 × 4, row by row
    /// matrix.store_slice(0, &(0..16).map(|n| n as f32).collect::<Vec<_>>())?;
    /// let element = Datatype::of::<f32>();
    /// let column = element.vector(4, 1, 4)?;
    /// // Column 2 becomes a row.
    /// let from = Layout::new(&column, 1).at(2 * 4);
    /// let row = matrix.get_typed(job.rank(), &from, vec![0.0_f32; 4], &Layout::new(&element, 4)).await?;
    /// assert_eq!(row, [2.0, 6.0, 10.0, 14.0]);
    /// # job.leave().await
    /// # }
    /// ```
    pub fn get_typed<S: Element>(
        &self,
        rank: Rank,
        from: &Layout<'_>,
        into: Vec<S>,
        to: &Layout<'_>,
    ) -> GetTyped<'_, S> {
        self.get_typed_with(&Thresholds::default(), rank, from, into, to)
    }

    /// As [`get_typed`](Self::get_typed), straight or staged as these thresholds say where memory is mapped.
    ///
    /// # Cancel safety
    /// As for `get_typed`.
    pub fn get_typed_with<S: Element>(
        &self,
        thresholds: &Thresholds,
        rank: Rank,
        from: &Layout<'_>,
        into: Vec<S>,
        to: &Layout<'_>,
    ) -> GetTyped<'_, S> {
        GetTyped::new(self.there(rank), thresholds, from, into, to)
    }

    fn there(&self, rank: Rank) -> There<'_> {
        There { memory: &self.memory, part: rank.index(), rank }
    }
}

impl RemoteRegion {
    /// Puts the elements of a layout to those of another one in the region, as [`Window::put_typed`] does. Bases of layouts are
    /// in bytes, from the beginning of the region and of `source`.
    ///
    /// # Cancel safety
    /// As for [`Window::put_typed`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::datatype::{Datatype, Layout};
    /// let region = job.region(32).await?;
    /// let remote = job.remote_region(region.key()).await?; // as a peer opens it
    /// let packed = Datatype::of::<u16>();
    /// let every_other = packed.vector(4, 1, 2)?;
    /// // Behind a header of 16 bytes.
    /// let to = Layout::new(&every_other, 1).at(16);
    /// remote.put_typed(&to, &[1_u16, 2, 3, 4], &Layout::new(&packed, 4)).await?;
    /// let mut last = [0; 6];
    /// region.read(24, &mut last)?;
    /// assert_eq!(last, [[3_u16, 0, 4].map(u16::to_ne_bytes)].concat().concat()[..]);
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    pub fn put_typed<'w, 's, S: Element>(
        &'w self,
        to: &Layout<'s>,
        source: &'s [S],
        from: &Layout<'s>,
    ) -> PutTyped<'w, 's> {
        self.put_typed_with(&Thresholds::default(), to, source, from)
    }

    /// As [`put_typed`](Self::put_typed), straight or staged as these thresholds say where memory is mapped; see
    /// [`Window::put_typed_with`].
    ///
    /// # Cancel safety
    /// As for [`Window::put_typed`].
    #[inline]
    pub fn put_typed_with<'w, 's, S: Element>(
        &'w self,
        thresholds: &Thresholds,
        to: &Layout<'s>,
        source: &'s [S],
        from: &Layout<'s>,
    ) -> PutTyped<'w, 's> {
        PutTyped::new(self.there(), thresholds, to, source, from)
    }

    /// Gets the elements of a layout in the region into those of another one, in a buffer that is given back, as
    /// [`Window::get_typed`] does.
    ///
    /// # Cancel safety
    /// Cancel safe; the buffer is dropped with the future.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::datatype::{Datatype, Layout};
    /// // A matrix of 4 × 4, row by row, that its owner has already.
    /// let matrix = job.region_from((0..16).collect::<Vec<u8>>())?;
    /// let remote = job.remote_region(matrix.key()).await?; // as a peer opens it
    /// let element = Datatype::of::<u8>();
    /// let column = element.vector(4, 1, 4)?;
    /// let from = Layout::new(&column, 1).at(2);
    /// let row = remote.get_typed(&from, vec![0_u8; 4], &Layout::new(&element, 4)).await?;
    /// assert_eq!(row, [2, 6, 10, 14]);
    /// # job.leave().await
    /// # }
    /// ```
    pub fn get_typed<S: Element>(&self, from: &Layout<'_>, into: Vec<S>, to: &Layout<'_>) -> GetTyped<'_, S> {
        self.get_typed_with(&Thresholds::default(), from, into, to)
    }

    /// As [`get_typed`](Self::get_typed), straight or staged as these thresholds say where memory is mapped.
    ///
    /// # Cancel safety
    /// As for `get_typed`.
    pub fn get_typed_with<S: Element>(
        &self,
        thresholds: &Thresholds,
        from: &Layout<'_>,
        into: Vec<S>,
        to: &Layout<'_>,
    ) -> GetTyped<'_, S> {
        GetTyped::new(self.there(), thresholds, from, into, to)
    }

    fn there(&self) -> There<'_> {
        There { memory: &self.memory, part: 0, rank: self.owner() }
    }

    /// The region in segments of so many bytes, to be attached one at a time; `None` if it is not mapped here.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::datatype::Segments;
    /// let region = job.region(100).await?;
    /// region.write(64, b"second")?;
    /// let remote = job.remote_region(region.key()).await?;
    /// let mut segments = remote.segments(64).expect("this rank's own memory is mapped");
    /// let second = segments.attach(1).expect("100 bytes are two segments");
    /// assert_eq!((second.len(), second.to_vec().starts_with(b"second")), (36, true));
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn segments(&self, size: u64) -> Option<SlicedMemory> {
        self.memory.parts.first()?.mapped.map(|mapped| SlicedMemory::new(mapped, size))
    }
}

/// A put between layouts. Ready when the data is at the target.
///
/// # Cancel safety
/// See [`Window::put_typed`].
#[must_use = "a put does nothing until it is awaited"]
pub struct PutTyped<'w, 's> {
    there: There<'w>,
    step: PutStep<'s>,
}

/// What is to be done first.
struct Begin<'s> {
    thresholds: Thresholds,
    to: Layout<'s>,
    source: &'s [u8],
    from: Layout<'s>,
}

enum PutStep<'s> {
    Begin(Begin<'s>),
    Begun(Putting),
    /// Its result was given.
    Ended,
}

impl std::fmt::Debug for PutTyped<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PutTyped").field("rank", &self.there.rank).finish_non_exhaustive()
    }
}

impl Future for PutTyped<'_, '_> {
    type Output = Result<(), TypedError>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if let PutStep::Begin(Begin { thresholds, to, source, from }) = &this.step {
            ready!(budget::proceed(cx));
            let There { memory, .. } = this.there;
            let part = this.there.part().map_err(TypedError::from);
            let put = part.and_then(|part| memory.put_typed(thresholds, (part, to), (source, from)));
            let bytes = source.len();
            let begun = match put {
                Ok(begun) => begun,
                Err(error) => {
                    this.step = PutStep::Ended;
                    return Poll::Ready(Err(error));
                }
            };
            budget::spend_on(budget::MESSAGE, bytes);
            if matches!(begun, Putting::Done) {
                this.step = PutStep::Ended;
                return Poll::Ready(Ok(()));
            }
            this.step = PutStep::Begun(begun);
        }
        this.go_on(cx)
    }
}

impl<'w, 's> PutTyped<'w, 's> {
    #[inline]
    fn new<S: Element>(
        there: There<'w>,
        thresholds: &Thresholds,
        to: &Layout<'s>,
        source: &'s [S],
        from: &Layout<'s>,
    ) -> Self {
        let begin = Begin { thresholds: *thresholds, to: *to, source: source.as_bytes(), from: *from };
        PutTyped { there, step: PutStep::Begin(begin) }
    }

    #[cold]
    fn go_on(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), TypedError>> {
        let handle = &self.there.memory.handle;
        let PutStep::Begun(begun) = &mut self.step else {
            // Polled again after its end.
            return Poll::Ready(Err(RmaError::from(Fault::Shutdown).into()));
        };
        let result = match begun {
            Putting::Done => Ok(()),
            Putting::InTurn(stage) => ready!(stage.poll(handle, cx)).map(drop).map_err(TypedError::from),
            Putting::Asked(asks) => loop {
                let Some(first) = asks.front_mut() else { break Ok(()) };
                match ready!(first.poll(handle, cx)) {
                    Ok(_) => drop(asks.pop_front()),
                    Err(error) => break Err(error.into()),
                }
            },
        };
        self.step = PutStep::Ended;
        Poll::Ready(result)
    }
}

/// A layout that owns its datatype.
struct Place {
    datatype: Datatype,
    count: u64,
    base: u64,
}

impl Place {
    fn of(layout: &Layout<'_>) -> Place {
        let Layout { datatype, count, base } = *layout;
        Place { datatype: datatype.clone(), count, base }
    }

    fn layout(&self) -> Layout<'_> {
        Layout::new(&self.datatype, self.count).at(self.base)
    }
}

/// A get that asks its target.
struct Remote {
    /// Unpacks what comes.
    machine: Machine,
    program: Bytes,
    /// Requests that have not ended, in order.
    requests: VecDeque<Asked>,
    /// Bytes that were asked for.
    asked: u64,
    /// And have come.
    come: u64,
    all: u64,
}

impl Remote {
    /// Asks for more, if no more than may be is under way.
    fn ask(&mut self, there: There<'_>, from: &Layout<'_>) -> Result<(), RmaError> {
        while self.asked < self.all && (self.requests.is_empty() || self.asked - self.come < ASKED_AT_ONCE) {
            let (memory, part) = (there.memory, there.part()?);
            memory.is_current(part)?;
            let bytes = chunk(self.program.len()).min(self.all - self.asked);
            self.requests.push_back(memory.ask_for(part, (from, &self.program), self.asked, bytes)?);
            self.asked += bytes;
        }
        Ok(())
    }
}

/// A get between layouts. Ready with the buffer.
///
/// # Cancel safety
/// Cancel safe; the buffer is dropped with the future.
#[must_use = "a get does nothing until it is awaited"]
pub struct GetTyped<'w, S> {
    there: There<'w>,
    thresholds: Thresholds,
    from: Place,
    to: Place,
    buffer: Option<Vec<S>>,
    /// Made when the memory is not mapped, or something precedes.
    remote: Option<Box<Fetching>>,
}

/// How a get goes on that could not be done at once.
enum Fetching {
    /// Its target is asked.
    Remote(Remote),
    /// Packed here, behind what is queued, and unpacked by this.
    InTurn(Stage, Machine),
}

impl<S> Unpin for GetTyped<'_, S> {}

impl<S> std::fmt::Debug for GetTyped<'_, S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GetTyped").field("rank", &self.there.rank).finish_non_exhaustive()
    }
}

impl<'w, S: Element> GetTyped<'w, S> {
    fn new(
        there: There<'w>,
        thresholds: &Thresholds,
        from: &Layout<'_>,
        into: Vec<S>,
        to: &Layout<'_>,
    ) -> Self {
        let (from, to) = (Place::of(from), Place::of(to));
        GetTyped { there, thresholds: *thresholds, from, to, buffer: Some(into), remote: None }
    }

    /// Copies from mapped memory, or prepares to ask; true if all is done.
    fn start(&mut self, into: &mut [u8]) -> Result<bool, TypedError> {
        let (from, to) = (self.from.layout(), self.to.layout());
        let (memory, part) = (self.there.memory, self.there.part()?);
        let aim = memory.aim_within(part, 0, part.len);
        let copy = |source| redistribute_with(&self.thresholds, &mut *into, &to, source, &from);
        if let Some(copied) = aim.and_then(|aim| aim.reach(copy)) {
            copied?;
            return Ok(true);
        }
        let all = checked((&to, into.len() as u64), (&from, part.len))?;
        if memory.waits_for_turn(part) {
            let all = distinct(part.len.max(into.len() as u64), all)?;
            let (mut machine, rank) = (Machine::new(&from)?, part.rank);
            let packed = move |source: SharedSlice| {
                let packed = pack(&[], &mut machine, source, all).map_err(|_| Fault::NoSuchMemory(rank))?;
                Ok(Value::Bytes(packed.into()))
            };
            let stage = memory.in_turn(part, false, packed);
            self.remote = Some(Box::new(Fetching::InTurn(stage, Machine::new(&to)?)));
            return Ok(false);
        }
        let all = distinct(part.len, all)?;
        let program = readable(self.from.datatype.to_bytes())?.into();
        let (machine, requests) = (Machine::new(&to)?, VecDeque::new());
        let mut remote = Remote { machine, program, requests, asked: 0, come: 0, all };
        remote.ask(self.there, &from)?;
        self.remote = Some(Box::new(Fetching::Remote(remote)));
        Ok(all == 0)
    }

    fn go_on(&mut self, cx: &mut Context<'_>, into: &mut [u8]) -> Poll<Result<(), TypedError>> {
        let memory = self.there.memory;
        let remote = match self.remote.as_deref_mut() {
            None => return Poll::Ready(Ok(())),
            Some(Fetching::InTurn(stage, machine)) => {
                if let Some(packed) = ready!(stage.poll(&memory.handle, cx))? {
                    machine.scatter(&mut *into, packed.as_bytes())?;
                }
                return Poll::Ready(Ok(()));
            }
            Some(Fetching::Remote(remote)) => remote,
        };
        loop {
            let Some(first) = remote.requests.front_mut() else { return Poll::Ready(Ok(())) };
            let value = match ready!(first.stage.poll(&memory.handle, cx)) {
                Ok(value) => value,
                // Too many answers wait there for this rank as it is.
                Err(RmaError::Fault(Fault::Busy(_))) => {
                    let (first, bytes) = (first.first, first.bytes);
                    let part = self.there.part()?;
                    let again = memory.ask_for(part, (&self.from.layout(), &remote.program), first, bytes)?;
                    remote.requests[0] = again;
                    continue;
                }
                Err(error) => return Poll::Ready(Err(error.into())),
            };
            let bytes = value.as_ref().map_or(&[][..], Value::as_bytes);
            if bytes.len() as u64 != first.bytes {
                let There { part, rank, .. } = self.there;
                return Poll::Ready(Err(
                    RmaError::from(Fault::PeerCorrupt(memory.rank_of(part, rank))).into()
                ));
            }
            remote.machine.scatter(&mut *into, bytes)?;
            remote.come += first.bytes;
            remote.requests.pop_front();
            remote.ask(self.there, &self.from.layout())?;
        }
    }
}

impl<S: Element> Future for GetTyped<'_, S> {
    type Output = Result<Vec<S>, TypedError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let Some(mut buffer) = this.buffer.take() else {
            // Polled again after its end.
            return Poll::Ready(Err(RmaError::from(Fault::Shutdown).into()));
        };
        let into = buffer.as_mut_slice().as_mut_bytes();
        if this.remote.is_none() {
            if budget::proceed(cx).is_pending() {
                this.buffer = Some(buffer);
                return Poll::Pending;
            }
            budget::spend_on(budget::MESSAGE, into.len());
            if this.start(into)? {
                return Poll::Ready(Ok(buffer));
            }
        }
        match this.go_on(cx, into) {
            Poll::Ready(result) => Poll::Ready(result.map(|()| buffer)),
            Poll::Pending => {
                this.buffer = Some(buffer);
                Poll::Pending
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_its_owner_would_refuse_is_not_sent() {
        assert_eq!(readable(vec![0; MAX_PROGRAM]).map(|program| program.len()), Ok(MAX_PROGRAM));
        let error = readable(vec![0; MAX_PROGRAM + 1]).expect_err("one byte too many");
        assert_eq!(error, TransferError::Program { len: MAX_PROGRAM as u64 + 1 });
        assert!(error.to_string().contains(&MAX_PROGRAM.to_string()), "{error}");
    }
}
