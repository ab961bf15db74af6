//! Waiting until peers have handled what was sent.

use crate::operation::Pending;
use futures::future::join_all;
use posthaste_core::context::Face;
use posthaste_core::{ContextId, Endpoint, Fault, Handle, Rank, SendError};

/// Awaits that everything this context did towards a rank before has taken effect there, on whichever of its contexts: puts are
/// visible, and inline handlers of earlier messages have run. A context there that nobody drives, as one whose owner does not look,
/// is waited for. Sends that are not ready yet, as they wait for credit or room, are not: a stream that nobody reads holds up no
/// flush.
///
/// # Errors
/// If the rank is unknown or gone.
///
/// # Cancel safety
/// Cancel safe: waiting changes nothing.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::{Message, Scope};
/// use posthaste::flush;
/// let seen = job.counter();
/// let count = seen.clone();
/// let note = job.register("note", move |_: Message, _: &mut Scope| count.add(1))?;
/// note.send(job.rank(), "on its way").await?;
/// flush::flush(job.handle(), job.rank()).await?; // its handler has run
/// assert_eq!(seen.value(), 1);
/// # job.leave().await
/// # }
/// ```
pub async fn flush<F: Face>(face: &F, rank: Rank) -> Result<(), SendError> {
    settle(face, Some(rank)).await?;
    let shared = face.shared();
    let (own, contexts) = (shared.me().context, shared.contexts());
    if contexts == 1 {
        return flush_queue(face, Endpoint::new(rank, own)).await;
    }
    let all = (0..contexts).map(|context| flush_queue(face, Endpoint::new(rank, ContextId(context))));
    worst(join_all(all).await)
}

/// Of several ends, the first that is neither well nor tells only that a peer is gone, whose operations have ended, too; or the
/// first that is not well.
fn worst(ended: Vec<Result<(), SendError>>) -> Result<(), SendError> {
    let goes_on = |end: &&Result<(), SendError>| matches!(end, Err(error) if !matches!(error, SendError::Fault(fault) if fault.peer().is_some()));
    let not_well = || ended.iter().find(|end| end.is_err());
    ended.iter().find(goes_on).or_else(not_well).cloned().unwrap_or(Ok(()))
}

/// Awaits that what does not wait in the order of the context has left its place: what is in FIFOs of their own, and replays
/// that need credit. `towards`: of one rank only, though in a FIFO that waits for what others have in front of it.
async fn settle<F: Face>(face: &F, towards: Option<Rank>) -> Result<(), SendError> {
    let handle = Handle::of(face);
    let begin = move |scope: &mut posthaste_core::Scope<'_>| {
        let pending = |ticket| Pending::new(handle.clone(), ticket, None);
        // The first have an owner before anything else can fail.
        let mut waiting: Vec<_> = scope.drain_fifos(None, towards)?.into_iter().map(pending).collect();
        waiting.extend(scope.settle_replays(towards)?.map(pending));
        Ok::<Vec<Pending>, SendError>(waiting)
    };
    let waiting = match face.enter(|engine| begin(&mut engine.scope())) {
        Ok(waiting) => waiting?,
        Err(_) => {
            let posted = face.post(begin);
            std::future::poll_fn(|cx| posted.poll(cx)).await?
        }
    };
    for mut waiting in waiting {
        std::future::poll_fn(|cx| waiting.poll(face, cx)).await?;
    }
    Ok(())
}

async fn flush_queue<F: Face>(face: &F, target: Endpoint) -> Result<(), SendError> {
    let handle = Handle::of(face);
    let begin = move |scope: &mut posthaste_core::Scope<'_>| {
        let handle = handle.clone();
        scope.flush(target).map(|ticket| ticket.map(|ticket| Pending::new(handle, ticket, None)))
    };
    let started = match face.enter(|engine| begin(&mut engine.scope())) {
        Ok(started) => started?,
        Err(_) => {
            let posted = face.post(begin);
            std::future::poll_fn(|cx| posted.poll(cx)).await?
        }
    };
    if let Some(mut pending) = started {
        std::future::poll_fn(|cx| pending.poll(face, cx)).await?;
    }
    Ok(())
}

/// Awaits the same towards every rank that this context did something to.
///
/// # Errors
/// The first failure, after all the others have ended.
///
/// # Cancel safety
/// Cancel safe: waiting changes nothing.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::{Message, Scope};
/// use posthaste::flush;
/// let seen = job.counter();
/// let count = seen.clone();
/// let note = job.register("note", move |_: Message, _: &mut Scope| count.add(1))?;
/// for rank in job.ranks() {
///     note.send(rank, "to everybody").await?;
/// }
/// flush::fence(job.handle()).await?; // all their handlers have run
/// assert_eq!(seen.value(), 1);
/// # job.leave().await
/// # }
/// ```
pub async fn fence<F: Face>(face: &F) -> Result<(), SendError> {
    if face.shared().is_closed() {
        return Err(Fault::Shutdown.into());
    }
    settle(face, None).await?;
    let list = |scope: &mut posthaste_core::Scope<'_>| scope.unflushed();
    let targets = match face.enter(|engine| list(&mut engine.scope())) {
        Ok(targets) => targets,
        Err(_) => {
            let posted = face.post(list);
            std::future::poll_fn(|cx| posted.poll(cx)).await
        }
    };
    worst(join_all(targets.into_iter().map(|target| flush_queue(face, target))).await)
}
