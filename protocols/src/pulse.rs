//! Noticing peers that live and do not get on: stopped, swapped out, or held up by a task that never yields.
//!
//! Whoever waits for a peer sends it a control, which gets past everything else and is answered from inside `advance`. While
//! nobody waits nothing is sent. The answer frees nothing and ends nothing: only a proven exit does.

use posthaste_core::control::{CONTROL_BYTES, ControlHandler};
use posthaste_core::engine::ControlSent;
use posthaste_core::{Client, ControlId, Endpoint, Face, Handle, Messager, Rank, RegisterError, Scope};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::runtime;
use tokio::task::AbortHandle;

const NAME: &str = "posthaste pulse";
const QUESTION: [u8; CONTROL_BYTES] = [1; CONTROL_BYTES];
const ANSWER: [u8; CONTROL_BYTES] = [2; CONTROL_BYTES];
/// Looks in the time after which a peer counts as stalled.
const LOOKS: u32 = 4;
/// Looks are not closer to each other.
const SHORTEST: Duration = Duration::from_millis(5);
/// Half the milliseconds until the second question; each further one is three times as late.
const AGAIN: u64 = 1000;

/// A peer stops getting on, or gets on again. It lives in either case.
///
/// # Examples
/// ```
/// use posthaste_protocols::Liveness;
/// use std::collections::BTreeSet;
///
/// // Who of the peers is stalled now, from what one was told.
/// let events = [Liveness::PeerStalled(posthaste::Rank(3)), Liveness::PeerResumed(posthaste::Rank(3))];
/// let mut stalled = BTreeSet::new();
/// for event in events {
///     match event {
///         Liveness::PeerStalled(rank) => stalled.insert(rank),
///         Liveness::PeerResumed(rank) => stalled.remove(&rank),
///         _ => false, // events that are added later
///     };
/// }
/// assert!(stalled.is_empty());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Liveness {
    /// Something waits for the peer, which has not answered for the time that was asked for: it is stopped, its runtime
    /// does not get to it, or it has not joined yet. What waits for it goes on to wait.
    PeerStalled(Rank),
    /// The peer has answered since.
    PeerResumed(Rank),
}

/// Who is told.
type Handler = Arc<dyn Fn(Liveness) + Send + Sync>;

/// What a context has asked one peer.
#[derive(Clone, Copy, Debug)]
struct Asked {
    /// Of this incarnation.
    incarnation: u32,
    /// When that began to be unanswered, in milliseconds of the context's clock.
    since: u64,
    /// When to ask once more, if there is no answer by then: whoever was asked may have had no room for it.
    again: u64,
    answered: bool,
    /// It counts as stalled.
    stalled: bool,
}

/// What all contexts have asked.
#[derive(Debug, Default)]
struct Board {
    /// Whose it is: of those who wanted to be told, the latest.
    watch: u64,
    /// By context, then by rank.
    asked: Vec<Vec<Option<Asked>>>,
    /// By rank: for how many contexts it is stalled.
    stalled: Vec<u32>,
}

impl Board {
    /// An answer has come.
    fn answered(&mut self, here: usize, rank: Rank) {
        let of_context = self.asked.get_mut(here);
        if let Some(Some(asked)) = of_context.and_then(|ranks| ranks.get_mut(rank.index())) {
            asked.answered = true;
        }
    }

    /// Another wants to be told from now on. Returns its number.
    fn renew(&mut self, contexts: usize, ranks: usize) -> u64 {
        self.asked = vec![vec![None; ranks]; contexts];
        self.stalled = vec![0; ranks];
        self.watch += 1;
        self.watch
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Watches over the peers of a client, if it is asked to. Cheap to clone.
#[derive(Clone)]
pub struct Pulse {
    contexts: Arc<[Handle]>,
    ranks: usize,
    board: Arc<Mutex<Board>>,
    tasks: Arc<Mutex<Vec<AbortHandle>>>,
    runtime: runtime::Handle,
}

impl std::fmt::Debug for Pulse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pulse").field("board", &self.board).finish_non_exhaustive()
    }
}

impl Pulse {
    /// Answers for this rank from now on, and can watch over others. To be made before the client is opened.
    ///
    /// # Errors
    /// If the client is closed.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub fn new(client: &Client) -> Result<Pulse, RegisterError> {
        let board: Arc<Mutex<Board>> = Arc::default();
        let heard = board.clone();
        let handler: ControlHandler = Arc::new(move |scope, source, payload| {
            if payload == ANSWER {
                lock(&heard).answered(scope.me().context.index(), source.rank);
            } else {
                // Whoever gets no answer asks once more.
                let _ = scope.control(source, ControlId::of(NAME), ANSWER, false);
            }
        });
        client.register_control(NAME, handler)?;
        Ok(Pulse {
            contexts: client.contexts().into(),
            ranks: client.peers().ranks as usize,
            board,
            tasks: Arc::default(),
            runtime: runtime::Handle::current(),
        })
    }

    /// Watches over nobody any more.
    pub fn stop(&self) {
        lock(&self.tasks).drain(..).for_each(|task| task.abort());
    }

    /// From now on this is told of peers that are waited for and do not answer for so long, rather than whoever was told
    /// before. Runs in a task of the runtime in which this was made; a panic is caught and traced.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use std::sync::atomic::{AtomicU32, Ordering};
    /// use std::sync::Arc;
    /// use std::time::Duration;
    /// let stalls = Arc::new(AtomicU32::new(0));
    /// let count = stalls.clone();
    /// job.on_peer_stalled(Duration::from_millis(50), move |_| {
    ///     count.fetch_add(1, Ordering::Relaxed);
    /// });
    /// job.barrier().await?;
    /// assert_eq!(stalls.load(Ordering::Relaxed), 0, "this rank answers itself");
    /// # job.leave().await
    /// # }
    /// ```
    pub fn watch(&self, after: Duration, handler: impl Fn(Liveness) + Send + Sync + 'static) {
        let handler: Handler = Arc::new(handler);
        let mut tasks = lock(&self.tasks);
        tasks.drain(..).for_each(|task| task.abort());
        let number = lock(&self.board).renew(self.contexts.len(), self.ranks);
        for context in &*self.contexts {
            let watch = Watch {
                context: context.clone(),
                number,
                board: self.board.clone(),
                after: u64::try_from(after.as_millis()).unwrap_or(u64::MAX).max(1),
                pause: (after / LOOKS).max(SHORTEST),
                handler: handler.clone(),
            };
            tasks.push(self.runtime.spawn(watch.keep()).abort_handle());
        }
    }
}

/// The watch of one context.
struct Watch {
    context: Handle,
    number: u64,
    board: Arc<Mutex<Board>>,
    /// In milliseconds.
    after: u64,
    pause: Duration,
    handler: Handler,
}

impl Watch {
    /// Until the context is closed.
    async fn keep(self) {
        let mut last = self.context.now_ms();
        while !self.context.is_closed() {
            tokio::time::sleep(self.pause).await;
            let now = self.context.now_ms();
            // Who was held up itself cannot tell that others were: all answers may have come meanwhile.
            let held_up = now - last > 2 * self.pause.as_millis() as u64 + 1;
            last = now;
            let (board, number) = (self.board.clone(), self.number);
            let times = Times { now, after: self.after, held_up };
            let look = move |scope: &mut Scope<'_>| match &mut *lock(&board) {
                board if board.watch == number => look(scope, board, times),
                // Its tasks were to end.
                _ => Vec::new(),
            };
            let events = match self.context.enter(|engine| look.clone()(&mut engine.scope())) {
                Ok(events) => events,
                Err(_) => {
                    let posted = self.context.post(look);
                    std::future::poll_fn(|cx| posted.poll(cx)).await
                }
            };
            for event in events {
                tracing::debug!(me = %self.context.me(), ?event, "liveness");
                if catch_unwind(AssertUnwindSafe(|| (self.handler)(event))).is_err() {
                    tracing::error!("the handler of stalled peers panicked");
                }
            }
        }
    }
}

#[derive(Clone, Copy)]
struct Times {
    now: u64,
    after: u64,
    held_up: bool,
}

/// Says what has come of earlier questions, and asks whoever is waited for.
fn look(scope: &mut Scope<'_>, board: &mut Board, times: Times) -> Vec<Liveness> {
    let Times { now, after, held_up } = times;
    let here = scope.me().context;
    let Board { asked, stalled, .. } = board;
    let Some(ranks) = asked.get_mut(here.index()) else { return Vec::new() };
    let mut awaited = vec![false; ranks.len()];
    for rank in scope.awaited() {
        awaited[rank.index()] = true;
    }
    let mut events = Vec::new();
    for (place, rank) in (0..).map(Rank).enumerate().take(ranks.len()) {
        let (entry, count) = (&mut ranks[place], &mut stalled[place]);
        let is_gone = scope.fault_of(rank).is_some();
        let incarnation = scope.incarnation_of(rank);
        if let Some(old) = *entry {
            // That it is gone is told elsewhere, and what nobody waits for any more does not count.
            let over = is_gone || old.incarnation != incarnation || !(old.stalled || awaited[place]);
            if old.answered || over {
                *entry = None;
                *count -= u32::from(old.stalled);
                if old.stalled && old.answered && !is_gone && *count == 0 {
                    events.push(Liveness::PeerResumed(rank));
                }
            }
        }
        if is_gone || !(awaited[place] || entry.is_some()) {
            continue;
        }
        let new = Asked { incarnation, since: now, again: now, answered: false, stalled: false };
        let asked = entry.get_or_insert(new);
        if held_up {
            asked.since = now;
        } else if !asked.stalled && now - asked.since >= after {
            asked.stalled = true;
            *count += 1;
            if *count == 1 {
                events.push(Liveness::PeerStalled(rank));
            }
        }
        if now < asked.again {
            continue;
        }
        let sent = scope.control(Endpoint::new(rank, here), ControlId::of(NAME), QUESTION, false);
        if matches!(sent, Ok(ControlSent::Done)) {
            asked.again = now + 2 * (now - asked.since).max(AGAIN);
        }
    }
    events
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::first_of;
    use posthaste_core::{Fault, Value};

    #[test]
    fn only_who_is_waited_for_and_does_not_answer_in_time_counts_as_stalled() {
        use Liveness::{PeerResumed, PeerStalled};
        let client = first_of(3, 1);
        let handle = &client.contexts()[0];
        let mut board = Board::default();
        assert_eq!(board.renew(1, 3), 1);
        let mut at = |now, held_up| {
            let times = Times { now, after: 400, held_up };
            let looked = handle.enter(|engine| look(&mut engine.scope(), &mut board, times));
            let looked = looked.unwrap_or_else(|_| unreachable!("nobody else is there"));
            let asked = [0, 1, 2].map(|rank| board.asked[0][rank].is_some());
            // Rank 1 answers what it was asked until then at these times.
            if [2000, 3100].contains(&now) {
                board.answered(0, Rank(1));
            }
            (looked, asked)
        };
        let operation = |peer| {
            let begun = handle.enter(|engine| engine.scope().operation(peer));
            begun.unwrap_or_else(|_| unreachable!("nobody else is there")).expect("it is open")
        };
        let end = |ticket, outcome| {
            let ended = handle.enter(|engine| engine.scope().complete(ticket, outcome));
            assert!(matches!(ended, Ok(true)));
        };
        assert_eq!(at(0, false), (vec![], [false; 3]), "nobody waits");
        let ticket = operation(Some(Rank(1)));
        assert_eq!(at(1000, false), (vec![], [false, true, false]));
        assert_eq!(at(1399, false), (vec![], [false, true, false]));
        assert_eq!(at(1400, false), (vec![PeerStalled(Rank(1))], [false, true, false]));
        assert_eq!(at(2000, false), (vec![], [false, true, false]), "told once");
        end(ticket, Ok(Value::Unit));
        assert_eq!(at(2100, false), (vec![PeerResumed(Rank(1))], [false; 3]));

        // Whoever was held up itself waits anew.
        let ticket = operation(Some(Rank(1)));
        assert_eq!(at(2500, false), (vec![], [false, true, false]));
        assert_eq!(at(3000, true), (vec![], [false, true, false]));
        assert_eq!(at(3100, false), (vec![], [false, true, false]));
        // It has answered in time, and is asked again.
        assert_eq!(at(3450, false), (vec![], [false, true, false]));
        assert_eq!(at(3500, false), (vec![], [false, true, false]));
        assert_eq!(at(3850, false), (vec![PeerStalled(Rank(1))], [false, true, false]));

        // Of operations that name nobody, all are meant.
        let of_all = operation(None);
        assert_eq!(at(4000, false), (vec![], [false, true, true]));
        let down = posthaste_core::device::PeerEvent::down(Fault::PeerLost(Rank(1)));
        handle.post_work(posthaste_core::engine::Work::Peer(Rank(1), down));
        assert!(matches!(handle.slots().take(ticket), Some(Err(Fault::PeerLost(Rank(1))))));
        assert_eq!(at(4100, false), (vec![], [false, false, true]), "the lost are not asked");
        assert_eq!(at(4400, false), (vec![PeerStalled(Rank(2))], [false, false, true]));
        end(of_all, Ok(Value::Unit));
        // It was told of, so it is asked until it answers.
        assert_eq!(at(9000, false), (vec![], [false, false, true]));
    }

    #[test]
    fn a_peer_that_several_contexts_wait_for_is_told_once() {
        use Liveness::{PeerResumed, PeerStalled};
        let client = first_of(3, 2);
        let contexts = client.contexts();
        let mut board = Board::default();
        board.renew(2, 3);
        let entered = "nobody else is there";
        let tickets: Vec<_> = (contexts.iter())
            .map(|context| {
                context.enter(|engine| engine.scope().operation(Some(Rank(1)))).ok().expect(entered)
            })
            .collect();
        let at = |board: &mut Board, context: usize, now| {
            let times = Times { now, after: 400, held_up: false };
            contexts[context].enter(|engine| look(&mut engine.scope(), board, times)).ok().expect(entered)
        };
        for (now, told) in [(0, None), (400, Some(PeerStalled(Rank(1))))] {
            assert_eq!(at(&mut board, 0, now), Vec::from_iter(told));
            assert_eq!(at(&mut board, 1, now), []);
        }
        board.answered(1, Rank(1));
        for (context, ticket) in contexts.iter().zip(tickets) {
            let end = |engine: &mut posthaste_core::engine::Engine| {
                engine.scope().complete(ticket.expect("it is open"), Ok(Value::Unit))
            };
            assert!(context.enter(end).ok().expect(entered));
        }
        assert_eq!(at(&mut board, 1, 500), [], "the other one has not heard of it");
        board.answered(0, Rank(1));
        assert_eq!(at(&mut board, 0, 600), [PeerResumed(Rank(1))]);

        // What nobody waits for any more does not count.
        let ticket = contexts[0].enter(|engine| engine.scope().operation(Some(Rank(1)))).ok().expect(entered);
        assert_eq!(at(&mut board, 0, 1000), []);
        contexts[0].enter(|engine| engine.scope().complete(ticket.expect("open"), Ok(Value::Unit))).ok();
        assert_eq!(at(&mut board, 0, 1600), []);
        assert!(board.asked[0][1].is_none() && board.stalled == [0; 3]);
    }
}
