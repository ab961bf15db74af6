//! The future of a collective operation.

use super::executor::{Begun, Call, Hub};
use super::flat::{Looking, fold_parts, leave};
use super::group_state::{Choice, MOST_UNDER_WAY};
use super::plan::Unfit;
use super::reduce::Combiner;
use super::stage::Outcome;
use crate::group::Inner;
use crate::operation::Pending;
use posthaste_core::context::{Face, Posted, poll_look};
use posthaste_core::sync::lock;
use posthaste_core::{Fault, Handle, Rank, Scope, Value};
use std::any::Any;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use thiserror::Error;

use super::schedule::Kind;

/// What is wrong with a list of members.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::{BadMembers, CollectiveError, Rank};
/// let twice = job.collectives().subset(&[job.rank(), job.rank()]).await;
/// assert!(matches!(twice, Err(CollectiveError::BadMembers(BadMembers::Twice(Rank(0))))));
/// # job.leave().await
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum BadMembers {
    /// There is nobody in it.
    #[error("is empty")]
    Nobody,
    /// The job has no such rank.
    #[error("names rank {rank}: the job has ranks 0 to {last}", last = .size - 1)]
    Unknown {
        /// The rank that was named.
        rank: Rank,
        /// Ranks of the job.
        size: usize,
    },
    /// A rank is in it more than once.
    #[error("names rank {0} twice")]
    Twice(Rank),
    /// The caller is not in it.
    #[error("does not name rank {0}, which asks for it: members alone do")]
    Without(Rank),
}

/// Whether a list is that of a group of a job of so many ranks, which this rank is in.
pub(crate) fn check_members(ranks: &[Rank], me: Rank, size: usize) -> Result<(), BadMembers> {
    let mut named = vec![false; size];
    for &rank in ranks {
        let named = named.get_mut(rank.index()).ok_or(BadMembers::Unknown { rank, size })?;
        if std::mem::replace(named, true) {
            return Err(BadMembers::Twice(rank));
        }
    }
    match named.get(me.index()) {
        Some(true) => Ok(()),
        _ if ranks.is_empty() => Err(BadMembers::Nobody),
        _ => Err(BadMembers::Without(me)),
    }
}

/// Why a collective operation was refused or failed.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::CollectiveError;
/// let world = job.world();
/// let error = world.broadcast(world.size(), &[1]).await.unwrap_err();
/// // What the caller did wrong is told before anything is sent; what peers did is a fault.
/// match error {
///     CollectiveError::Fault(fault) => panic!("a peer is gone: {fault}"),
///     refused => assert_eq!(refused, CollectiveError::UnknownRank { rank: 1, size: 1 }),
/// }
/// # job.leave().await
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// The group has no such rank. To the others that is as if this member had called nothing yet.
    #[error("the group has ranks 0 to {last}, and no rank {rank}", last = .size - 1)]
    UnknownRank {
        /// The rank that was named, as the group counts.
        rank: usize,
        /// Ranks of the group.
        size: usize,
    },
    /// The list of members is none of a group that this rank is in.
    #[error("the list of a group's members {0}")]
    BadMembers(#[from] BadMembers),
    /// A rank has as many groups as their numbers can tell apart. Where the others have that group nevertheless, as after a
    /// split, its operations end with [`Fault::OutOfMemory`].
    #[error("this rank has 65535 groups: drop those that are not used any more")]
    TooManyGroups,
    /// The schedule does not do that kind of operation. To the others that is as if this member had called nothing yet.
    #[error("the schedule {schedule:?} does not offer {kind:?}: force another, or none")]
    NotOffered {
        /// The schedule's name.
        schedule: String,
        /// What was called.
        kind: Kind,
    },
    /// The schedule's program for this rank could not be carried out. To the others that is as if this member had called
    /// nothing yet.
    #[error("the schedule {schedule:?} gives no sound program: {why}")]
    BadSchedule {
        /// The schedule's name.
        schedule: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// What was given has not the length that the operation needs. The others are told that this rank takes no part in it:
    /// theirs ends with [`Fault::CollectiveRefused`], as do all later ones of the group, here too.
    #[error("{what}: {len} values were given where {expected} are needed")]
    Length {
        /// What was given.
        what: &'static str,
        /// How many.
        len: usize,
        /// How many are needed.
        expected: usize,
    },
    /// As many operations of the group are under way on this rank as can be told apart. The others are not told: await some,
    /// and call it again.
    #[error(
        "{most} operations of the group are under way on this rank: await some of them, and call it again"
    )]
    TooManyUnderWay {
        /// How many there may be.
        most: usize,
    },
    /// The operation was started and ended with a fault.
    #[error(transparent)]
    Fault(#[from] Fault),
}

impl CollectiveError {
    /// Why an operation by that schedule was not started.
    pub(super) fn unfit(unfit: Unfit, choice: &Choice, kind: Kind) -> CollectiveError {
        let schedule = choice.schedule().name().to_owned();
        match unfit {
            Unfit::NotOffered => CollectiveError::NotOffered { schedule, kind },
            Unfit::Broken(why) => CollectiveError::BadSchedule { schedule, why },
            Unfit::TooMany => CollectiveError::TooManyUnderWay { most: MOST_UNDER_WAY },
        }
    }
}

/// A started operation whose ticket has an owner.
#[derive(Debug)]
pub(super) enum Started {
    Done(Value),
    Pending(Pending),
    Failed(Fault),
}

impl Started {
    pub(super) fn new(handle: &Handle, begun: Begun) -> Started {
        match begun {
            Begun::Ended(value) => Started::Done(value),
            Begun::Pending(ticket) => Started::Pending(Pending::new(handle.clone(), ticket, None)),
            Begun::Failed(fault) => Started::Failed(fault),
        }
    }
}

/// How far an operation is. What one on boards does not need lies elsewhere: its future is moved between two looks at them.
#[derive(Debug)]
pub(super) enum Stage {
    Refused(Box<CollectiveError>),
    /// It is on the boards of the group.
    Looking(Looking),
    Started(Box<Started>),
    Posted(Posted<Started>),
    Over,
}

/// A collective operation under way. It was started by the call that gave this, whether or not this is awaited; several
/// may be under way at once and are awaited in any order.
///
/// # Cancel safety
/// Dropping it detaches the operation: it goes on, so that the other ranks need not wait, and its result is lost.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::Reduce;
/// let world = job.world();
/// // Both are under way at once, and are awaited in any order.
/// let sum = world.all_reduce(&[2, 3], &Reduce::sum());
/// let all = world.all_gather(&[world.rank() as u64]);
/// assert_eq!(all.await?.len(), world.size());
/// assert_eq!(sum.await?, [2, 3]);
/// # job.leave().await
/// # }
/// ```
#[must_use = "the result of a collective operation is lost unless it is awaited"]
pub struct InFlight<T> {
    group: Arc<Inner>,
    stage: Stage,
    /// What combines the parts of all, if that is still to be done.
    fold: Option<Combiner>,
    convert: fn(Value) -> T,
    /// Where the result is if it was put together from what others have lent, and what it is.
    lent: Option<LentResult<T>>,
    /// Since when it looks in vain, at boards or for what others do on the same cores.
    since: Option<Duration>,
}

/// Where a result is that is no row of bytes, and how it is had.
pub(super) type LentResult<T> = (Outcome, fn(Box<dyn Any + Send>) -> T);

impl<T> std::fmt::Debug for InFlight<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InFlight").field("stage", &self.stage).finish_non_exhaustive()
    }
}

// Nothing in it is ever pinned.
impl<T> Unpin for InFlight<T> {}

impl Stage {
    /// Starts the operation of that number.
    pub(super) fn start(hub: &Arc<Hub>, handle: &Handle, at: usize, operation: u64, call: Call) -> Stage {
        let mut call = Some(call);
        let begin = |scope: &mut Scope<'_>, call: &mut Option<Call>| match call.take() {
            Some(call) => hub.start(scope, at, operation, call),
            None => Begun::Failed(Fault::Shutdown),
        };
        match handle.enter(|engine| begin(&mut engine.scope(), &mut call)) {
            Ok(begun) => Stage::Started(Box::new(Started::new(handle, begun))),
            Err(_) => {
                let (hub, owner) = (hub.clone(), handle.clone());
                Stage::Posted(handle.post(move |scope| {
                    let begun = match call {
                        Some(call) => hub.start(scope, at, operation, call),
                        None => Begun::Failed(Fault::Shutdown),
                    };
                    Started::new(&owner, begun)
                }))
            }
        }
    }
}

impl<T> InFlight<T> {
    #[inline]
    pub(super) fn new(
        group: &Arc<Inner>,
        stage: Stage,
        fold: Option<Combiner>,
        lent: Option<LentResult<T>>,
        convert: fn(Value) -> T,
    ) -> Self {
        Self { group: group.clone(), stage, fold, convert, lent, since: None }
    }

    /// One that was not started.
    pub(crate) fn refused(group: &Arc<Inner>, error: CollectiveError, convert: fn(Value) -> T) -> Self {
        Self::new(group, Stage::Refused(Box::new(error)), None, None, convert)
    }

    /// The result, if it was put together where others have laid it out.
    #[inline]
    fn put_together(&self) -> Option<T> {
        let (outcome, typed) = self.lent.as_ref()?;
        lock(outcome).take().map(typed)
    }

    fn result(&self, value: Value) -> T {
        if let Some(result) = self.put_together() {
            return result;
        }
        // Whoever gets it may keep it. If not, the next operation has it.
        let bytes = if let Value::Bytes(bytes) = &value { Some(bytes.clone()) } else { None };
        let result = self.converted(value);
        bytes.into_iter().for_each(|bytes| self.group.hub.buffers.keep(bytes));
        result
    }

    fn converted(&self, value: Value) -> T {
        match &self.fold {
            Some(combiner) => (self.convert)(fold_parts(&value, self.group.size(), combiner)),
            None => (self.convert)(value),
        }
    }
}

impl<T> Drop for InFlight<T> {
    #[inline]
    fn drop(&mut self) {
        if let Stage::Looking(looking) = &self.stage {
            looking.abandon(&self.group);
        }
    }
}

impl<T> Future for InFlight<T> {
    type Output = Result<T, CollectiveError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        loop {
            match &mut this.stage {
                Stage::Looking(looking) => {
                    let group = &this.group;
                    let seen = ready!(looking.poll(group, cx, &mut this.since));
                    if seen && looking.lies_elsewhere() {
                        if looking.put_together(group) && looking.finish(group) {
                            let result = this.put_together().map(Ok);
                            this.stage = Stage::Over;
                            return Poll::Ready(result.unwrap_or_else(|| Err(Fault::Shutdown.into())));
                        }
                    } else if seen {
                        let value = looking.value(group, this.fold.as_ref());
                        if looking.finish(group) {
                            this.stage = Stage::Over;
                            return Poll::Ready(Ok((this.convert)(value)));
                        }
                    }
                    this.stage = leave(group, looking.operation);
                    this.since = None;
                }
                Stage::Started(started) => {
                    let Started::Pending(pending) = &mut **started else { break };
                    let handle = &this.group.handle;
                    if this.lent.is_some() {
                        // All are about to do as much as this rank did: to sleep until the first of them has, and until the
                        // next, costs more than to let them.
                        let done = || pending.is_done().then_some(());
                        let _looked = ready!(poll_look(handle, cx, false, &mut this.since, done));
                        this.since = None;
                    }
                    let outcome = ready!(pending.poll(handle, cx));
                    this.stage = Stage::Over;
                    return Poll::Ready(
                        outcome.map(|value| this.result(value)).map_err(CollectiveError::from),
                    );
                }
                Stage::Posted(posted) => this.stage = Stage::Started(Box::new(ready!(posted.poll(cx)))),
                _ => break,
            }
        }
        Poll::Ready(match std::mem::replace(&mut this.stage, Stage::Over) {
            Stage::Started(started) => match *started {
                Started::Done(value) => Ok(this.result(value)),
                Started::Failed(fault) => Err(fault.into()),
                // It is waited for above.
                Started::Pending(_) => Err(Fault::Shutdown.into()),
            },
            Stage::Refused(error) => Err(*error),
            // It was ready before.
            _ => Err(Fault::Shutdown.into()),
        })
    }
}
