//! The operations of a group.

use super::algorithm::Algorithm;
use super::call::Stage;
use super::call::{CollectiveError, InFlight};
use super::execution::Executor;
use super::executor::Call;
use super::group_state::Choice;
use super::layout::{CHUNK, EAGER, Layout, Lengths};
use super::plan::hash;
use super::reduce::{Combiner, Datum, Reduce};
use super::run::Input;
use super::schedule::{Kind, Schedule};
use super::spec::{Given, Spec, first_of, places, put_together, values_in};
use super::stage::{LENT_CHUNK, LENT_MARK, Lent, Outcome};
use super::wire;
use crate::group::Group;
use bytes::Bytes;
use posthaste_core::{Collective, Value};
use std::any::Any;
use std::sync::Arc;
use zerocopy::IntoBytes;

fn unit(_: Value) {}

fn vector<T: Datum>(value: Value) -> Vec<T> {
    values_in(value.as_bytes()).collect()
}

fn at_root<T: Datum>(value: Value) -> Option<Vec<T>> {
    match value {
        Value::Unit => None,
        value => Some(vector(value)),
    }
}

fn one<T: Datum>(value: Value) -> T {
    T::read_from_prefix(value.as_bytes()).map_or_else(|_| T::new_zeroed(), |(value, _)| value)
}

/// No vector has more.
const MOST_BYTES: usize = isize::MAX as usize;

fn sum_of(counts: &[usize]) -> usize {
    counts.iter().fold(0, |sum, count| sum.saturating_add(*count))
}

/// Collective operations. All members call the same ones in the same order; each call starts at once, before its future is
/// awaited, and several may be under way, on this group or on others, in any order of completion.
///
/// Where one cannot end well (a member is lost or leaves, or calls something else), it ends with the same error on every
/// member that has not finished it, and so does every later one on that group and on those that were split off it later.
///
/// Values are plain data, sent as they lie in memory: the machines of a job have one byte order. Ranks are those of the
/// group.
impl Group {
    /// The same group with a schedule of one's choice for all operations that are called on it; all members choose the
    /// same. An operation that the schedule does not offer is refused.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{Algorithm, Reduce};
    /// let ring = job.world().schedule(Algorithm::Ring);
    /// assert_eq!(ring.all_reduce(&[1, 2, 3], &Reduce::sum()).await?, [1, 2, 3]);
    /// // A ring has no barrier: what a schedule does not offer is refused.
    /// assert!(ring.barrier().await.is_err());
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn schedule(&self, schedule: Algorithm) -> Group {
        self.with_choice(Choice::Known(schedule))
    }

    /// The same with a schedule of one's own.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::collective::{Blocks, Kind, Place, Program, Route, Schedule};
    /// use std::sync::Arc;
    /// /// The root sends everything to everybody.
    /// #[derive(Debug)]
    /// struct Flat;
    /// impl Schedule for Flat {
    ///     fn name(&self) -> &str {
    ///         "flat"
    ///     }
    ///     fn program(&self, kind: Kind, place: &Place<'_>) -> Option<Program> {
    ///         let mut route = Route::default();
    ///         match (kind, place.rank == place.root) {
    ///             (Kind::Broadcast, true) => (0..place.size)
    ///                 .filter(|rank| *rank != place.root)
    ///                 .for_each(|rank| route.send(0, rank, Blocks::one(0))),
    ///             (Kind::Broadcast, false) => {
    ///                 route.receive(0, place.root, Blocks::one(0), posthaste::collective::Action::Store);
    ///             }
    ///             _ => return None,
    ///         }
    ///         Some(Program::new(1, route))
    ///     }
    /// }
    /// let flat = job.world().custom_schedule(Arc::new(Flat));
    /// assert_eq!(flat.broadcast(0, &[4, 2]).await?, [4, 2]);
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn custom_schedule(&self, schedule: Arc<dyn Schedule>) -> Group {
        self.with_choice(Choice::Custom(schedule))
    }

    /// The same group with an executor of one's own for all operations that are called on it: it decides in which order the
    /// messages of a schedule's program go out and are taken in. All go as messages then, those of members that share memory,
    /// too. All members do the same, or else [force a schedule](Self::schedule), as the others' operations may be other ones.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::collective::PhaseByPhase;
    /// use posthaste::{Algorithm, Reduce};
    /// use std::sync::Arc;
    /// // How long does a ring take without pipelining?
    /// let plain = job.world().schedule(Algorithm::Ring).custom_executor(Arc::new(PhaseByPhase));
    /// assert_eq!(plain.all_reduce(&[1.5, 2.0], &Reduce::sum()).await?, [1.5, 2.0]);
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn custom_executor(&self, executor: Arc<dyn Executor>) -> Group {
        self.with_executor(executor)
    }

    /// Waits until every member has called it.
    ///
    /// Unlike the job's own barrier, that of no group says that this rank has registered all its messages, not that of the world
    /// either.
    ///
    /// # Cancel safety
    /// See [`InFlight`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use std::sync::atomic::{AtomicBool, Ordering};
    /// let world = job.world();
    /// let ready = AtomicBool::new(false);
    /// let barrier = world.barrier(); // this rank has come, and goes on with something else
    /// ready.store(true, Ordering::Relaxed);
    /// barrier.await?; // all ranks have come
    /// assert!(ready.into_inner());
    /// # job.leave().await
    /// # }
    /// ```
    pub fn barrier(&self) -> InFlight<()> {
        if self.is_flat(0, None) {
            return self.begin_flat(Kind::Barrier, |_| Collective::Barrier, &[], None, unit);
        }
        self.begin(Spec::new(Kind::Barrier, |_| Collective::Barrier), unit)
    }

    /// Gives every member the values of the root. All give as many; only those of the root count.
    ///
    /// # Cancel safety
    /// See [`InFlight`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let world = job.world();
    /// // All give as many values; those of the root go to all.
    /// let mine = if world.rank() == 0 { [3.5, 4.5] } else { [0.0; 2] };
    /// assert_eq!(world.broadcast(0, &mine).await?, [3.5, 4.5]);
    /// # job.leave().await
    /// # }
    /// ```
    pub fn broadcast<T: Datum>(&self, root: usize, values: &[T]) -> InFlight<Vec<T>> {
        let mut spec = Spec::new(Kind::Broadcast, Collective::Broadcast);
        (spec.root, spec.bytes, spec.element) = (root, size_of_val(values), size_of::<T>());
        if root == self.rank() {
            spec.input = Given::New(values.as_bytes());
        }
        self.begin(spec, vector)
    }

    /// Gives every member the bytes of the root, which gets them back as they are. All give the same length.
    ///
    /// # Cancel safety
    /// See [`InFlight`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::Bytes;
    /// let world = job.world();
    /// let payload = (world.rank() == 0).then(|| Bytes::from(vec![7; 100_000]));
    /// let bytes = world.broadcast_bytes(0, 100_000, payload).await?;
    /// assert_eq!((bytes.len(), bytes[99_999]), (100_000, 7));
    /// # job.leave().await
    /// # }
    /// ```
    pub fn broadcast_bytes(&self, root: usize, len: usize, payload: Option<Bytes>) -> InFlight<Bytes> {
        let mut spec = Spec::new(Kind::Broadcast, Collective::Broadcast);
        (spec.root, spec.bytes) = (root, len);
        if len > MOST_BYTES {
            return self.fail(spec, "the payload of a broadcast", len, MOST_BYTES, Value::into_bytes);
        }
        if root == self.rank() {
            let payload = payload.unwrap_or_default();
            let given = payload.len();
            spec.input = Given::Owned(payload);
            if given != len {
                return self.fail(spec, "the payload of a broadcast", given, len, Value::into_bytes);
            }
        }
        self.begin(spec, Value::into_bytes)
    }

    /// Combines the values of all members, place by place, at the root; the others get `None`. All give as many.
    ///
    /// # Cancel safety
    /// See [`InFlight`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::Reduce;
    /// let world = job.world();
    /// let most = world.reduce(0, &[4.0, -1.0], &Reduce::max()).await?;
    /// match most {
    ///     Some(values) => assert_eq!(values, [4.0, -1.0]), // on rank 0
    ///     None => assert_ne!(world.rank(), 0),
    /// }
    /// # job.leave().await
    /// # }
    /// ```
    pub fn reduce<T: Datum>(
        &self,
        root: usize,
        values: &[T],
        operation: &Reduce<T>,
    ) -> InFlight<Option<Vec<T>>> {
        let mut spec = self.combining(Kind::Reduce, Collective::Reduce, values, operation.combiner());
        (spec.root, spec.bytes) = (root, size_of_val(values));
        self.begin(spec, at_root)
    }

    /// Combines the values of all members, place by place, and gives the result to all. All give as many.
    ///
    /// # Cancel safety
    /// See [`InFlight`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::Reduce;
    /// let world = job.world();
    /// let (mut low, mut high) = (vec![5, 6], vec![7, 8]);
    /// low = world.all_reduce(&low, &Reduce::min()).await?;
    /// // An operation of one's own: the longer row of trailing zeros wins.
    /// let zeros = Reduce::by(|a: i32, b: i32| if a.trailing_zeros() >= b.trailing_zeros() { a } else { b });
    /// high = world.all_reduce(&high, &zeros).await?;
    /// assert_eq!((low, high), (vec![5, 6], vec![7, 8]));
    /// # job.leave().await
    /// # }
    /// ```
    pub fn all_reduce<T: Datum>(&self, values: &[T], operation: &Reduce<T>) -> InFlight<Vec<T>> {
        self.reduce_to_all(values, operation, vector, put_together)
    }

    fn reduce_to_all<T: Datum, R>(
        &self,
        values: &[T],
        operation: &Reduce<T>,
        convert: fn(Value) -> R,
        typed: fn(Box<dyn Any + Send>) -> R,
    ) -> InFlight<R> {
        let combiner = operation.combiner();
        if self.is_flat(size_of_val(values), Some(&combiner)) {
            let bytes = values.as_bytes();
            return self.begin_flat(Kind::AllReduce, Collective::AllReduce, bytes, Some(combiner), convert);
        }
        let mut spec = self.combining(Kind::AllReduce, Collective::AllReduce, values, combiner);
        spec.bytes = size_of_val(values);
        self.begin_numbered(spec, convert, Some(typed)).1
    }

    /// The same for one value.
    ///
    /// # Cancel safety
    /// See [`InFlight`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::Reduce;
    /// let world = job.world();
    /// // Has anybody still something to do?
    /// let left = world.all_reduce_one(3_u64, &Reduce::sum()).await?;
    /// assert_eq!(left, 3 * world.size() as u64);
    /// # job.leave().await
    /// # }
    /// ```
    pub fn all_reduce_one<T: Datum>(&self, value: T, operation: &Reduce<T>) -> InFlight<T> {
        self.reduce_to_all(&[value], operation, one, first_of)
    }

    /// Combines the values of all members, place by place, and gives each member its block of the result. All give as
    /// many for each rank, by rank.
    ///
    /// # Cancel safety
    /// See [`InFlight`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::Reduce;
    /// let world = job.world();
    /// // Two values for each rank; every rank gets the sums of its own two.
    /// let values = vec![1_u64; 2 * world.size()];
    /// let sums = world.reduce_scatter(&values, &Reduce::sum()).await?;
    /// assert_eq!(sums, [world.size() as u64; 2]);
    /// # job.leave().await
    /// # }
    /// ```
    pub fn reduce_scatter<T: Datum>(&self, values: &[T], operation: &Reduce<T>) -> InFlight<Vec<T>> {
        let mut spec =
            self.combining(Kind::ReduceScatter, Collective::ReduceScatter, values, operation.combiner());
        spec.bytes = size_of_val(values) / self.size();
        if !values.len().is_multiple_of(self.size()) {
            let expected = values.len().next_multiple_of(self.size());
            return self.fail(spec, "the blocks of a reduce-scatter", values.len(), expected, vector);
        }
        self.begin_numbered(spec, vector, Some(put_together)).1
    }

    /// Gathers the values of all members, by rank, at the root; the others get `None`. All give as many.
    ///
    /// # Cancel safety
    /// See [`InFlight`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let world = job.world();
    /// let rows = world.gather(0, &[world.rank() as f64, 0.5]).await?;
    /// if let Some(rows) = rows {
    ///     // On rank 0: two values of each rank.
    ///     assert_eq!(rows.len(), 2 * world.size());
    ///     assert_eq!(rows[..2], [0.0, 0.5]);
    /// }
    /// # job.leave().await
    /// # }
    /// ```
    pub fn gather<T: Datum>(&self, root: usize, values: &[T]) -> InFlight<Option<Vec<T>>> {
        let mut spec = Spec::new(Kind::Gather, Collective::Gather);
        (spec.root, spec.bytes, spec.element) = (root, size_of_val(values), size_of::<T>());
        spec.input = Given::New(values.as_bytes());
        self.begin(spec, at_root)
    }

    /// Gathers the values of all members, by rank, and gives them to all. All give as many.
    ///
    /// # Cancel safety
    /// See [`InFlight`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let world = job.world();
    /// let ranks = world.all_gather(&[world.rank() as u32]).await?;
    /// assert!(ranks.into_iter().eq(0..world.size() as u32));
    /// # job.leave().await
    /// # }
    /// ```
    pub fn all_gather<T: Datum>(&self, values: &[T]) -> InFlight<Vec<T>> {
        self.numbered_all_gather(values).1
    }

    /// Gives each member its `len` of the root's values, which are as many for each rank, by rank. What the others give
    /// does not count.
    ///
    /// # Cancel safety
    /// See [`InFlight`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let world = job.world();
    /// // Two values for each rank; only those of the root count.
    /// let table: Vec<u32> = if world.rank() == 0 { (0..2 * world.size() as u32).collect() } else { Vec::new() };
    /// let mine = world.scatter(0, &table, 2).await?;
    /// assert_eq!(mine, [2 * world.rank() as u32, 2 * world.rank() as u32 + 1]);
    /// # job.leave().await
    /// # }
    /// ```
    pub fn scatter<T: Datum>(&self, root: usize, values: &[T], len: usize) -> InFlight<Vec<T>> {
        let mut spec = Spec::new(Kind::Scatter, Collective::Scatter);
        (spec.root, spec.bytes, spec.element) = (root, len.saturating_mul(size_of::<T>()), size_of::<T>());
        if spec.bytes > MOST_BYTES {
            return self.fail(spec, "a block of a scatter", len, MOST_BYTES / size_of::<T>(), vector);
        }
        if root == self.rank() {
            let expected = len.saturating_mul(self.size());
            if values.len() != expected {
                return self.fail(spec, "the blocks of a scatter", values.len(), expected, vector);
            }
            spec.input = Given::New(values.as_bytes());
        }
        self.begin(spec, vector)
    }

    /// Gives each member as many values of each member, both by rank.
    ///
    /// # Cancel safety
    /// See [`InFlight`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let world = job.world();
    /// // For rank `r` the pair of this rank's number and `r`.
    /// let give: Vec<[u32; 2]> = (0..world.size()).map(|to| [world.rank() as u32, to as u32]).collect();
    /// let got = world.all_to_all(&give).await?;
    /// assert!(got.iter().enumerate().all(|(from, pair)| *pair == [from as u32, world.rank() as u32]));
    /// # job.leave().await
    /// # }
    /// ```
    pub fn all_to_all<T: Datum>(&self, values: &[T]) -> InFlight<Vec<T>> {
        let mut spec = Spec::of::<T>(Kind::AllToAll, Collective::AllToAll);
        spec.bytes = size_of_val(values) / self.size();
        if !values.len().is_multiple_of(self.size()) {
            let expected = values.len().next_multiple_of(self.size());
            return self.fail(spec, "the blocks of an all-to-all", values.len(), expected, vector);
        }
        spec.input = Given::New(values.as_bytes());
        self.begin_numbered(spec, vector, Some(put_together)).1
    }

    /// The same with `counts[r]` values for rank `r`, and `awaited[r]` from it.
    ///
    /// # Cancel safety
    /// See [`InFlight`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let world = job.world();
    /// // One value for rank 0, two for rank 1, and so on; each rank knows how much comes from whom.
    /// let counts: Vec<usize> = (1..=world.size()).collect();
    /// let awaited = vec![world.rank() + 1; world.size()];
    /// let values = vec![9_u8; counts.iter().sum()];
    /// let got = world.all_to_all_v(&values, &counts, &awaited).await?;
    /// assert_eq!(got, vec![9; (world.rank() + 1) * world.size()]);
    /// # job.leave().await
    /// # }
    /// ```
    pub fn all_to_all_v<T: Datum>(
        &self,
        values: &[T],
        counts: &[usize],
        awaited: &[usize],
    ) -> InFlight<Vec<T>> {
        let mut spec = Spec::new(Kind::AllToAll, Collective::AllToAll);
        spec.element = size_of::<T>();
        let (me, size) = (self.rank(), self.size());
        for (what, len, expected) in [
            ("the counts of an all-to-all", counts.len(), size),
            ("the awaited counts of an all-to-all", awaited.len(), size),
            ("the values of an all-to-all", values.len(), sum_of(counts)),
        ] {
            if len != expected {
                return self.fail(spec, what, len, expected, vector);
            }
        }
        if counts[me] != awaited[me] {
            let what = "what a rank has for itself";
            return self.fail(spec, what, counts[me], awaited[me], vector);
        }
        if sum_of(awaited).saturating_mul(spec.element) > MOST_BYTES {
            let (what, most) = ("the awaited values of an all-to-all", MOST_BYTES / size_of::<T>().max(1));
            return self.fail(spec, what, sum_of(awaited), most, vector);
        }
        spec.input = Given::New(values.as_bytes());
        // Told apart from one whose blocks are all of one length.
        spec.bytes = usize::MAX;
        spec.tables = Some([places(counts, spec.element), places(awaited, spec.element)]);
        self.begin(spec, vector)
    }

    /// An [`all_gather`](Self::all_gather) and its number.
    pub(crate) fn numbered_all_gather<T: Datum>(&self, values: &[T]) -> (u64, InFlight<Vec<T>>) {
        let mut spec = Spec::of::<T>(Kind::AllGather, Collective::AllGather);
        spec.bytes = size_of_val(values);
        spec.input = Given::New(values.as_bytes());
        self.begin_numbered(spec, vector, Some(put_together))
    }

    fn combining<'v, T: Datum>(
        &self,
        kind: Kind,
        name: fn(u32) -> Collective,
        values: &'v [T],
        combiner: Combiner,
    ) -> Spec<'v> {
        let mut spec = Spec::of::<T>(kind, name);
        spec.input = Given::Kept(values.as_bytes());
        spec.combiner = Some(combiner);
        spec
    }

    fn begin<T>(&self, spec: Spec<'_>, convert: fn(Value) -> T) -> InFlight<T> {
        self.begin_numbered(spec, convert, None).1
    }

    /// Starts an operation.
    fn begin_numbered<T>(
        &self,
        spec: Spec<'_>,
        convert: fn(Value) -> T,
        typed: Option<fn(Box<dyn Any + Send>) -> T>,
    ) -> (u64, InFlight<T>) {
        let inner = self.inner();
        let executor = self.executor();
        if let (true, true, Some(typed)) = (self.is_plain(), inner.near, typed)
            && let Some((exchange, sink)) = spec.exchange(self.size())
        {
            return self.begin_staged(spec, exchange, sink, convert, typed);
        }
        let (choice, lends) = match self.choice() {
            Some(choice) => (choice.clone(), None),
            None => match spec.lends(self.size()).filter(|_| inner.near && executor.is_none()) {
                Some(bytes) => (Choice::Known(Algorithm::Pairwise), Some(bytes)),
                None => (Choice::Known(self.best(spec.kind, spec.bytes)), None),
            },
        };
        if spec.root >= self.size() {
            // As if nothing had been called: the others wait for this member's call, as for that of any who is late.
            let error = CollectiveError::UnknownRank { rank: spec.root, size: self.size() };
            return (u64::MAX, InFlight::refused(inner, error, convert));
        }
        // Code of the user's: before anything is begun.
        let own_chunk = executor.map(|executor| executor.chunk_bytes().max(EAGER));
        // Whoever only reads what the root lends needs no room for it.
        let own = lends.filter(|_| spec.kind != Kind::Broadcast || spec.root == self.rank());
        let (operation, plan, area) = match inner.hub.reserve(inner.at, spec.kind, spec.root, &choice, own) {
            Ok(reserved) => reserved,
            Err(unfit) => {
                let error = CollectiveError::unfit(unfit, &choice, spec.kind);
                return (u64::MAX, InFlight::refused(inner, error, convert));
            }
        };
        let element = spec.element.max(1);
        let lengths = |bytes: usize| match spec.kind {
            Kind::Barrier => Lengths::Same(0),
            kind if kind.has_block_per_rank() || plan.blocks == 1 => Lengths::Same(bytes),
            _ => Lengths::Split { elements: bytes / element, element },
        };
        let laid_down_at_once = lends.is_some() && spec.kind != Kind::Broadcast;
        let chunk = own_chunk.unwrap_or(if laid_down_at_once { LENT_CHUNK } else { CHUNK });
        let (outgoing, layout) = match &spec.tables {
            None => (None, Layout::new(lengths(spec.bytes), element, plan.blocks).cut(chunk)),
            Some([sent, awaited]) => {
                let (sent, awaited) = (sent.clone(), awaited.clone());
                let outgoing = Layout::new(Lengths::Table(sent), element, plan.blocks).cut(chunk);
                (Some(outgoing), Layout::new(Lengths::Table(awaited), element, plan.blocks).cut(chunk))
            }
        };
        let name = (spec.name)(u32::try_from(spec.bytes).unwrap_or(0));
        let operand = spec.combiner.as_ref().map_or(0, |combiner| u64::from(combiner.mark()));
        let lent = if lends.is_some() { LENT_MARK } else { 0 };
        // Members that cut messages otherwise would not understand each other's.
        let cut = own_chunk.filter(|bytes| *bytes != CHUNK).map_or(0, |bytes| hash(bytes.to_le_bytes()));
        let which = (plan.root as u64) << 32 | u64::from(plan.mark ^ lent ^ cut);
        let mark = wire::mark(plan.kind as u8, [spec.bytes as u64 ^ operand << 40, which]);
        let exchanged = area.filter(|_| laid_down_at_once).zip(typed).and_then(|(area, typed)| {
            let outcome = Outcome::default();
            Some((spec.lend(area, &plan, &layout, &outcome)?, (outcome, typed)))
        });
        let (input, result) = match exchanged {
            Some((input, result)) => (input, Some(result)),
            None => {
                let bytes = spec.input.into_bytes(&inner.hub.buffers);
                let lent = area.filter(|_| !laid_down_at_once).map(|area| Lent { area, exchange: None });
                (Input { bytes, outgoing, lent }, None)
            }
        };
        let call = Call {
            name,
            mark,
            layout,
            input,
            combiner: spec.combiner,
            plan,
            is_small: false,
            lends: lends.is_some(),
            share: None,
            executor: executor.cloned(),
        };
        let stage = Stage::start(&inner.hub, &inner.handle, inner.at, operation, call);
        (operation, InFlight::new(inner, stage, None, result, convert))
    }

    /// This rank cannot do its part: the others are told, because they cannot know.
    #[cold]
    fn fail<T>(
        &self,
        spec: Spec<'_>,
        what: &'static str,
        len: usize,
        expected: usize,
        convert: fn(Value) -> T,
    ) -> InFlight<T> {
        let inner = self.inner();
        let name = (spec.name)(u32::try_from(spec.bytes).unwrap_or(0));
        inner.hub.refuse(&inner.handle, inner.at, name);
        let error = CollectiveError::Length { what, len, expected };
        InFlight::refused(inner, error, convert)
    }
}
