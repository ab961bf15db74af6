//! The progress token: who may touch a context's engine.
//!
//! The token is taken if it is free and never waited for. Whoever does not get it posts its work and is sure
//! that the work is done: either the holder sees the `WORK` bit when it releases, or the poster finds the token
//! free and does the work itself. One word holds both bits, so no fence and no second look is needed; the price
//! is one locked read-modify-write to take and one to release.
//!
//! ```text
//!                    try_take                      release (no WORK)
//!      0 ------------------------------> HELD ------------------------> 0
//!                                          |  ^
//!                     post: fetch_or(WORK) v  | release: clears WORK, runs the queue, tries again
//!                                     HELD|WORK
//! ```
//! # Bias
//! Where one thread alone uses a context (a `current_thread` runtime), even those two are too many. After that thread
//! took the token often enough in a row, the token is *biased* to it (Kawachiya et al. 2002, Dice et al. 2010): `HELD`
//! stays set for good, and the owner comes and goes by plain stores to `inside`. Another thread that wants the token
//! first takes the bias away: it clears `bias`, makes a barrier on the owner's behalf (`membarrier`), and looks at
//! `inside`. By the asymmetric Dekker handshake either it sees the owner inside, or the owner sees its bias gone; what
//! the revoker saw is left as a verdict under a mutex, so that the two agree on who holds the token now. A cell is
//! biased to the same thread for ever, and after each revocation it takes that thread longer to get the bias back.
#![allow(unsafe_code)]

use crate::sync::{AtomicU32, AtomicU64, LightFence, Mutex, Ordering, UnsafeCell, fence, lock, thread_id};
use std::collections::VecDeque;
use std::marker::PhantomData;

const HELD: u32 = 1;
const WORK: u32 = 2;

/// How many takes in a row make a thread the owner of the bias, at first.
pub const BIAS_AFTER: u32 = 64;
/// By how much more after each revocation.
const BIAS_BACKOFF: u32 = 16;

/// Makes a barrier on all threads of the process.
pub type HeavyFence = Box<dyn Fn() + Send + Sync>;

/// A value guarded by a progress token, with the queue of work that others posted for its holder.
///
/// # Examples
/// ```
/// use posthaste_core::token::TokenCell;
///
/// let cell = TokenCell::<Vec<u32>, u32>::new(Vec::new());
/// let mut guard = cell.try_take().expect("it is free");
/// guard.get().push(1);
/// // Others do not wait for the token: they leave their work to its holder.
/// assert!(cell.try_take().is_none());
/// assert!(cell.post(2).is_none());
/// guard.finish(|list, work| list.push(work));
/// assert_eq!(cell.try_take().map(|mut guard| guard.get().clone()), Some(vec![1, 2]));
/// ```
pub struct TokenCell<T, W> {
    state: AtomicU32,
    /// Written by the owner of the bias alone: it is using the value.
    inside: AtomicU32,
    /// The thread to which the token is biased now, or 0.
    bias: AtomicU64,
    queue: Mutex<VecDeque<W>>,
    verdict: Mutex<Verdict>,
    /// Guarded by the token, like the value.
    history: UnsafeCell<History>,
    heavy_fence: Option<HeavyFence>,
    /// The thread that has a guard of a token that is kept, or 0.
    adopted: AtomicU64,
    /// The thread on which whoever keeps the token lends it, or 0.
    lent: AtomicU64,
    value: UnsafeCell<T>,
}

impl<T, W> std::fmt::Debug for TokenCell<T, W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TokenCell")
    }
}

/// How a guard holds the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hold {
    /// By the bit.
    Plain,
    /// By the bias.
    Biased,
    /// It is kept beyond the guard.
    Kept,
}

/// What a revoker saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// The owner was inside: it goes on as an ordinary holder.
    OwnerHolds,
    /// The owner was not inside: the revoker has the token.
    Taken,
}

/// Who took the token lately.
struct History {
    last: u64,
    /// Takes in a row by `last`.
    row: u32,
    /// As many in a row give the bias.
    needed: u32,
    /// The only thread that may ever have the bias.
    owner: u64,
}

// SAFETY: the value is reached through a Guard only, and at most one Guard exists at a time: the HELD bit, taken with
// acquire and given back with release; or `inside` of the bias's owner, see `revoke`; or, while HELD is kept, `adopted`, which
// only the thread of whoever keeps it writes.
unsafe impl<T: Send, W: Send> Sync for TokenCell<T, W> {}
// SAFETY: it owns what it holds.
unsafe impl<T: Send, W: Send> Send for TokenCell<T, W> {}

/// The token: exclusive access to the value until it is released.
///
/// Dropping the guard does *not* run posted work; [`Guard::finish`] does. A guard that is dropped while work is
/// queued (a panic unwinds) hands the work on to the next holder.
pub struct Guard<'a, T, W> {
    cell: &'a TokenCell<T, W>,
    hold: Hold,
    /// A biased guard is that of its thread.
    thread: PhantomData<*const ()>,
}

impl<T, W> std::fmt::Debug for Guard<'_, T, W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guard").field("hold", &self.hold).finish_non_exhaustive()
    }
}

/// The owner's half of the handshake; its partner is the heavy fence of `revoke`.
const LIGHT: LightFence = LightFence::Compiler;

impl<T, W> TokenCell<T, W> {
    /// A free token that is never biased.
    pub fn new(value: T) -> Self {
        Self {
            state: AtomicU32::new(0),
            inside: AtomicU32::new(0),
            bias: AtomicU64::new(0),
            queue: Mutex::new(VecDeque::new()),
            verdict: Mutex::new(Verdict::Taken),
            history: UnsafeCell::new(History { last: 0, row: 0, needed: BIAS_AFTER, owner: 0 }),
            heavy_fence: None,
            adopted: AtomicU64::new(0),
            lent: AtomicU64::new(0),
            value: UnsafeCell::new(value),
        }
    }

    /// A free token that a thread gets for its own after it took it `after` times in a row.
    pub fn biased(value: T, after: u32, heavy_fence: HeavyFence) -> Self {
        let history = UnsafeCell::new(History { last: 0, row: 0, needed: after, owner: 0 });
        Self { history, heavy_fence: Some(heavy_fence), ..Self::new(value) }
    }

    /// Takes the token if it is free.
    #[inline]
    pub fn try_take(&self) -> Option<Guard<'_, T, W>> {
        let bias = self.bias.load(Ordering::Relaxed);
        if bias != 0 {
            let me = thread_id();
            if bias != me {
                return self.revoke();
            }
            if self.inside.load(Ordering::Relaxed) != 0 {
                // This thread is at it already, further up the stack.
                return None;
            }
            self.inside.store(1, Ordering::Relaxed);
            LIGHT.issue();
            if self.bias.load(Ordering::Relaxed) == me {
                return Some(Guard { cell: self, hold: Hold::Biased, thread: PhantomData });
            }
            // Revoked just now. A holder seen inside is one that may go on.
            return self.settle().then(|| Guard { cell: self, hold: Hold::Plain, thread: PhantomData });
        }
        self.take_free()
    }

    #[inline]
    fn take_free(&self) -> Option<Guard<'_, T, W>> {
        let state = self.state.load(Ordering::Relaxed);
        if state & HELD != 0 {
            return None;
        }
        // Acquire pairs with the release of `try_release`: the last holder's changes are seen.
        self.state
            .compare_exchange(state, state | HELD, Ordering::Acquire, Ordering::Relaxed)
            .ok()
            .map(|_| Guard { cell: self, hold: Hold::Plain, thread: PhantomData })
    }

    /// Takes the bias away from another thread. The token is the caller's if that thread is not inside.
    #[cold]
    fn revoke(&self) -> Option<Guard<'_, T, W>> {
        let mut verdict = lock(&self.verdict);
        if self.bias.load(Ordering::Acquire) == 0 {
            // Another thread was faster; the ordinary rules hold now.
            drop(verdict);
            return self.take_free();
        }
        self.bias.store(0, Ordering::Relaxed);
        // Partner: the light fences of `try_take` and `release_biased`. Either the owner sees its bias gone, or this
        // side sees it inside.
        fence(Ordering::SeqCst);
        if let Some(heavy_fence) = &self.heavy_fence {
            heavy_fence();
        }
        // Acquire pairs with the release in `release_biased`: the owner's changes are seen.
        if self.inside.load(Ordering::Acquire) == 0 {
            *verdict = Verdict::Taken;
            Some(Guard { cell: self, hold: Hold::Plain, thread: PhantomData })
        } else {
            *verdict = Verdict::OwnerHolds;
            None
        }
    }

    /// The owner of the bias has seen that it is gone; whether it holds the token nevertheless, as anybody does.
    #[cold]
    fn settle(&self) -> bool {
        // Waits for a revoker that is at its fence.
        let verdict = lock(&self.verdict);
        self.inside.store(0, Ordering::Relaxed);
        *verdict == Verdict::OwnerHolds
    }

    /// Posts work. If the token was free it is now the caller's, who must [`Guard::finish`] to get the work done.
    #[must_use = "a guard that comes back has to be finished, or the work waits for the next holder"]
    pub fn post(&self, work: W) -> Option<Guard<'_, T, W>> {
        lock(&self.queue).push_back(work);
        // Release publishes the queue entry to the holder that sees WORK; acquire in case the token is ours now.
        let before = self.state.fetch_or(WORK | HELD, Ordering::AcqRel);
        if before & HELD == 0 {
            return Some(Guard { cell: self, hold: Hold::Plain, thread: PhantomData });
        }
        // Partner: the fence of `grant_bias`. Either the bias is seen here, or the work is seen there.
        fence(Ordering::SeqCst);
        // The owner of a bias that is not inside would not look before it comes again: this caller does the work.
        if self.bias.load(Ordering::Relaxed) == 0 { None } else { self.try_take() }
    }

    /// The guard of a token that its holder keeps between calls (its last guard was [kept](Guard::keep)). `None` if the
    /// token is free, or there is such a guard already. Only the holder may call this.
    #[inline]
    pub(crate) fn adopt(&self) -> Option<Guard<'_, T, W>> {
        let is_kept = self.state.load(Ordering::Relaxed) & HELD != 0;
        // The holder's thread alone writes this: no locked instruction is needed.
        if !is_kept || self.adopted.load(Ordering::Relaxed) != 0 {
            return None;
        }
        self.adopted.store(thread_id(), Ordering::Relaxed);
        Some(Guard { cell: self, hold: Hold::Kept, thread: PhantomData })
    }

    /// Whether this thread has the guard of a token that is kept: what it posts, it does before it gives that up, or tells.
    pub(crate) fn is_adopted_here(&self) -> bool {
        self.adopted.load(Ordering::Relaxed) == thread_id()
    }

    /// The same for anybody on the thread on which the holder lends the token.
    #[cold]
    pub(crate) fn borrow(&self) -> Option<Guard<'_, T, W>> {
        let lent = self.lent.load(Ordering::Relaxed);
        if lent != 0 && lent == thread_id() { self.adopt() } else { None }
    }

    /// Lends the token to whoever asks for it on this thread, until that is dropped. Only the holder may call this.
    pub(crate) fn lend(&self) -> Lent<'_> {
        let before = self.lent.load(Ordering::Relaxed);
        self.lent.store(thread_id(), Ordering::Relaxed);
        Lent { lent: &self.lent, before, thread: PhantomData }
    }

    /// Whether somebody posted work that has not been taken up yet. Cheap: one relaxed load.
    #[inline]
    pub fn has_work(&self) -> bool {
        self.state.load(Ordering::Relaxed) & WORK != 0
    }
}

/// For as long as the holder of a token lends it.
pub(crate) struct Lent<'a> {
    lent: &'a AtomicU64,
    before: u64,
    thread: PhantomData<*const ()>,
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        self.lent.store(self.before, Ordering::Relaxed);
    }
}

impl<T, W> Guard<'_, T, W> {
    /// The guarded value.
    #[inline]
    pub fn get(&mut self) -> &mut T {
        // SAFETY: this guard is the only one, see `TokenCell`.
        self.cell.value.with_mut(|value| unsafe { &mut *value })
    }

    /// Takes up all posted work.
    #[inline]
    pub fn take_work(&mut self) -> VecDeque<W> {
        if !self.cell.has_work() {
            return VecDeque::new();
        }
        // The bit is cleared before the queue is read: work posted after that sets it again.
        self.cell.state.fetch_and(!WORK, Ordering::AcqRel);
        std::mem::take(&mut lock(&self.cell.queue))
    }

    /// Keeps the token beyond the guard, until somebody adopts it.
    #[inline]
    pub(crate) fn keep(self) {
        self.cell.adopted.store(0, Ordering::Relaxed);
        if self.hold == Hold::Biased {
            let mut verdict = lock(&self.cell.verdict);
            // From another thread's view the owner is an ordinary holder from now on, as after a revocation.
            self.cell.bias.store(0, Ordering::Relaxed);
            self.cell.inside.store(0, Ordering::Relaxed);
            *verdict = Verdict::OwnerHolds;
        }
        std::mem::forget(self);
    }

    /// A token that was kept so far is given back with this guard.
    pub(crate) fn give_up(mut self) -> Self {
        self.cell.adopted.store(0, Ordering::Relaxed);
        self.hold = Hold::Plain;
        self
    }

    /// Gives the token back unless work is queued; then the guard is returned.
    #[inline]
    fn try_release(self) -> Option<Self> {
        // Release pairs with the acquire of the next `try_take`.
        match self.cell.state.compare_exchange(HELD, 0, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => {
                std::mem::forget(self);
                None
            }
            Err(_) => Some(self),
        }
    }

    /// The owner of the bias leaves. A guard comes back if there is work, or if the bias is gone and the token with it
    /// must be given back as anybody does.
    #[inline(always)]
    fn release_biased(self) -> Option<Self> {
        let cell = self.cell;
        std::mem::forget(self);
        // Release pairs with the acquire in `revoke`.
        cell.inside.store(0, Ordering::Release);
        LIGHT.issue();
        if cell.bias.load(Ordering::Relaxed) == 0 {
            // Not `then_some`: a guard that is made is a guard that is dropped.
            return cell.settle().then(|| Guard { cell, hold: Hold::Plain, thread: PhantomData });
        }
        if cell.has_work() { cell.try_take() } else { None }
    }

    /// Counts the take; the bias is given to the thread if it has earned it.
    #[inline]
    fn grant_bias(&mut self) {
        if self.cell.heavy_fence.is_none() {
            return;
        }
        let me = thread_id();
        // SAFETY: this guard is the only one.
        let history = self.cell.history.with_mut(|history| unsafe { &mut *history });
        if history.last != me {
            (history.last, history.row) = (me, 0);
        }
        history.row += 1;
        if history.row < history.needed || (history.owner != 0 && history.owner != me) {
            history.row = history.row.min(history.needed);
            return;
        }
        history.owner = me;
        history.row = 0;
        history.needed = history.needed.saturating_mul(BIAS_BACKOFF);
        self.cell.inside.store(1, Ordering::Relaxed);
        // Release pairs with the acquire in `revoke`: whoever sees the bias sees its owner inside, and what it did before.
        self.cell.bias.store(me, Ordering::Release);
        // Partner: the fence of `post`.
        fence(Ordering::SeqCst);
        self.hold = Hold::Biased;
    }

    /// Runs posted work until there is none and gives the token back, unless it is kept.
    #[inline(always)]
    pub fn finish(self, run: impl FnMut(&mut T, W)) {
        if self.hold == Hold::Biased {
            if let Some(guard) = self.release_biased() {
                guard.finish_slowly(run);
            }
        } else {
            self.finish_slowly(run);
        }
    }

    #[inline(never)]
    fn finish_slowly(self, mut run: impl FnMut(&mut T, W)) {
        let mut guard = self;
        loop {
            for work in guard.take_work() {
                run(guard.get(), work);
            }
            if guard.hold == Hold::Kept {
                // Whose it is looks once more.
                return guard.keep();
            }
            if guard.hold == Hold::Plain {
                guard.grant_bias();
            }
            let left = if guard.hold == Hold::Biased { guard.release_biased() } else { guard.try_release() };
            match left {
                Some(held) => guard = held,
                None => return,
            }
        }
    }
}

impl<T, W> Drop for Guard<'_, T, W> {
    fn drop(&mut self) {
        if self.hold == Hold::Kept {
            // Whoever keeps the token has it still.
            self.cell.adopted.store(0, Ordering::Relaxed);
            return;
        }
        if self.hold == Hold::Biased {
            self.cell.inside.store(0, Ordering::Release);
            LIGHT.issue();
            if self.cell.bias.load(Ordering::Relaxed) != 0 || !self.cell.settle() {
                return;
            }
        }
        self.cell.state.fetch_and(!HELD, Ordering::Release);
    }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_loser_s_work_is_done_by_the_holder() {
        let cell: TokenCell<Vec<u32>, u32> = TokenCell::new(Vec::new());
        let guard = cell.try_take().expect("free");
        assert!(cell.try_take().is_none());
        assert!(cell.post(7).is_none());
        assert!(cell.has_work());
        guard.finish(|value, work| value.push(work));
        let mut guard = cell.post(8).expect("free again");
        assert_eq!(guard.get(), &[7]);
        guard.finish(|value, work| value.push(work));
        assert_eq!(cell.try_take().expect("free").get(), &[7, 8]);
    }

    #[test]
    fn many_threads_lose_nothing() {
        let cell = std::sync::Arc::new(TokenCell::<u64, u64>::new(0));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let cell = cell.clone();
                std::thread::spawn(move || {
                    for _ in 0..20_000 {
                        if let Some(mut guard) = cell.try_take() {
                            *guard.get() += 1;
                            guard.finish(|sum, work| *sum += work);
                        } else if let Some(guard) = cell.post(1) {
                            guard.finish(|sum, work| *sum += work);
                        }
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().expect("no panic");
        }
        assert_eq!(*cell.try_take().expect("free").get(), 80_000);
    }
}
