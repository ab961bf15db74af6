//! The face of a context that one task or thread owns.

use super::{Face, Handle, Shared};
use crate::engine::Engine;
use crate::stats::Stats;
use crate::sync::Arc;
use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::Duration;

/// The face that is owned by one task or thread: `Send`, not `Sync`. It holds the progress token for as long as it
/// lives, so that no operation of it needs a locked instruction. Handles of the same context go on to work: what
/// they want done is posted to this one's owner, who must keep polling futures of the context (or
/// [`Context::advance`]); what the owner [`drive`](super::drive)s gets to the engine through handles itself.
///
/// # Examples
/// ```
/// # use posthaste_core::inprocess::InProcessFabric;
/// # use posthaste_core::messager::ClientParts;
/// # use posthaste_core::sysdep::Personality;
/// # use posthaste_core::{Client, ClientId, JobShape, LinuxSysdep, Messager, Rank};
/// # use std::sync::Arc;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let shape = JobShape { ranks: 1, clients: 1, contexts: 1 };
/// # let client = Client::new(ClientParts {
/// #     id: ClientId(0),
/// #     devices: vec![InProcessFabric::new(shape).device(ClientId(0), Rank(0))],
/// #     sysdep: Arc::new(LinuxSysdep::new(Personality::one_node(Rank(0), shape), None)),
/// #     config: Default::default(),
/// #     spin: None,
/// #     driver_thread: false,
/// # })?;
/// # client.open().await?;
/// use posthaste_core::Context;
///
/// let handle = &client.contexts()[0];
/// let context = Context::new(handle).expect("nobody else owns it");
/// assert!(handle.is_owned() && Context::new(handle).is_none());
/// // What others post is done when the owner looks.
/// let done = Arc::new(std::sync::atomic::AtomicBool::new(false));
/// let tell = done.clone();
/// std::thread::spawn({
///     let handle = handle.clone();
///     move || handle.post_run(move |_| tell.store(true, std::sync::atomic::Ordering::Relaxed))
/// });
/// while !done.load(std::sync::atomic::Ordering::Relaxed) {
///     context.advance();
/// }
/// drop(context); // the driver moves the context again
/// assert!(!handle.is_owned());
/// # client.close().await;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Context {
    handle: Handle,
    /// `Send`, not `Sync`.
    one_thread: PhantomData<Cell<()>>,
}

impl Context {
    /// Takes the token for good; `None` if another owned context has it, or a handler of this one asks.
    ///
    /// The driver of the context stops driving: the owner's futures do that now. Whoever holds the token for a moment, as an
    /// operation of another thread or a handler that runs there, is waited for; `None` after ten seconds of that.
    #[must_use]
    pub fn new(handle: &Handle) -> Option<Context> {
        // A handle's operation or the driver may hold the token for a moment, or for long if their thread is not let run; an
        // owned context holds it for good, and a handler that asks would wait for itself.
        for look in 0..110_000 {
            if let Some(guard) = handle.shared.cell.try_take() {
                guard.keep();
                handle.shared.owned.store(true, Ordering::Release);
                tracing::debug!(me = %handle.shared.me, "context owned");
                return Some(Context { handle: handle.clone(), one_thread: PhantomData });
            }
            if handle.shared.owned.load(Ordering::Acquire) || handle.shared.is_advanced_here() {
                return None;
            }
            if look < 10_000 {
                handle.shared.sysdep.yield_now();
            } else {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        tracing::warn!(me = %handle.shared.me, "a context cannot be owned: something holds its token for ten seconds");
        None
    }

    /// Moves everything that can move. Returns the number of events.
    pub fn advance(&self) -> usize {
        self.enter(|engine| self.handle.shared.advance(engine)).unwrap_or(0)
    }

    /// What the context has done so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.enter(|engine| *engine.stats()).unwrap_or_default()
    }

    /// A face of the same context that works from anywhere.
    #[must_use]
    pub fn handle(&self) -> &Handle {
        &self.handle
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        tracing::debug!(me = %self.handle.shared.me, "context given back");
        self.handle.shared.owned.store(false, Ordering::Release);
        if let Some(guard) = self.handle.shared.cell.adopt() {
            self.handle.shared.leave(guard.give_up());
        }
        self.handle.shared.driver.wake();
        self.handle.retire();
    }
}

/// The owner has come out.
struct Told<'s>(&'s Shared);

impl Drop for Told<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.tell_owner();
    }
}

impl Face for Context {
    fn shared(&self) -> &Arc<Shared> {
        &self.handle.shared
    }

    #[inline]
    fn enter<R, F: FnOnce(&mut Engine) -> R>(&self, f: F) -> Result<R, F> {
        // Dropped last, also when something panics.
        let _told;
        let Some(mut guard) = self.handle.shared.cell.adopt() else { return Err(f) };
        _told = Told(&self.handle.shared);
        // Partner: whoever has posted something that forbids what is to be done here, in `done_or_idle`.
        let _sitting = self.handle.shared.seat.take(self.handle.shared.light);
        // Nothing is done before what was posted earlier, and nothing that was posted meanwhile waits for the next time.
        if self.handle.shared.cell.has_work() {
            self.handle.shared.run_posted(&mut guard);
        }
        let result = f(guard.get());
        if self.handle.shared.cell.has_work() {
            self.handle.shared.run_posted(&mut guard);
        }
        if guard.get().sleeps_too_deep() {
            self.handle.shared.wake_deep_sleeper(guard.get());
        }
        guard.keep();
        Ok(result)
    }

    fn owns(&self) -> bool {
        true
    }

    fn sleep(&self, waker: &Waker) -> bool {
        let shared = &self.handle.shared;
        // First where to be woken, then the promise to be: a ring in between finds the waker.
        shared.parking.park(waker);
        let now = shared.now_ms();
        self.enter(|engine| {
            // A ring takes the promise of another one with it.
            if shared.rung.swap(false, Ordering::AcqRel) {
                engine.disarm();
            }
            if engine.next_expiry().is_some() {
                engine.expire(now);
            }
            // Who is armed already may have been told of nothing since.
            let armed = if engine.is_armed() { !engine.look_at_memory() } else { engine.arm(now) };
            shared.set_watching(engine.is_watching());
            let at = engine.next_expiry().unwrap_or(u64::MAX);
            if shared.timer_at.swap(at, Ordering::Relaxed) > at {
                shared.driver.wake();
            }
            armed
        })
        .unwrap_or(true)
    }
}
