//! A counter that handlers add to and tasks wait for.

use posthaste_core::context::poll_until;
use posthaste_core::count::Count;
use posthaste_core::sync::lock;
use posthaste_core::{Face, Handle};
use slab::Slab;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

#[derive(Debug, Default)]
struct Inner {
    count: Count,
    /// Whoever is at the context is to look at the value, and has not yet.
    look_is_posted: AtomicBool,
    waiters: Mutex<Slab<(u64, Option<Waker>)>>,
}

impl Inner {
    /// Those who wait are others than before. With the lock.
    fn settle(&self, waiters: &Slab<(u64, Option<Waker>)>) {
        self.count.set_least(waiters.iter().map(|(_, (wanted, _))| *wanted).min());
    }

    /// The first add from elsewhere. Whether somebody waits who was not told of it before.
    #[cold]
    fn mix(&self) -> bool {
        let waiters = lock(&self.waiters);
        if self.count.is_mixed() {
            return false;
        }
        self.count.mix();
        self.settle(&waiters);
        !waiters.is_empty()
    }

    /// Wakes those for whom the value will do. Whether there were any.
    #[cold]
    fn wake(&self) -> bool {
        let mut waiters = lock(&self.waiters);
        // Under the lock: of two who add at once, the second to come here sees what both have added.
        let value = self.count.value();
        // As a rule there is one, and waking it allocates nothing.
        let (mut first, mut more) = (None, Vec::new());
        for (_, (wanted, waker)) in waiters.iter_mut() {
            if *wanted <= value
                && let Some(waker) = waker.take()
            {
                match first {
                    None => first = Some(waker),
                    Some(_) => more.push(waker),
                }
            }
        }
        drop(waiters);
        let some = first.is_some();
        first.into_iter().chain(more).for_each(Waker::wake);
        some
    }
}

/// Counts events, from handlers or anywhere, and lets tasks wait until it reaches a value. Waiting advances the
/// context, so that a wait which is about to end does not go through the scheduler. Cheap to clone.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// let arrived = job.counter();
/// let count = arrived.clone();
/// let ping = job.register("ping", move |_: posthaste::Message, _: &mut posthaste::Scope| count.add(1))?;
/// for _ in 0..10 {
///     ping.send(job.rank(), b"").await?;
/// }
/// arrived.reach(10).await;
/// assert_eq!(arrived.value(), 10);
/// # job.leave().await
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Counter {
    handle: Handle,
    inner: Arc<Inner>,
}

impl Counter {
    /// A counter at 0, whose waits advance the given context.
    #[must_use]
    pub fn new(handle: Handle) -> Self {
        Self { handle, inner: Arc::default() }
    }

    /// The value.
    #[inline]
    #[must_use]
    pub fn value(&self) -> u64 {
        self.inner.count.value()
    }

    /// Adds to the counter and wakes whom that concerns. A handler of the counter's own context, which is the job's first one
    /// unless it was made for another, needs no locked instruction for that until the counter reaches what a task sleeps for.
    /// Who adds from elsewhere pays for two, and from then on all do as long as a task sleeps.
    #[inline]
    pub fn add(&self, count: u64) {
        let inside = self.handle.is_advanced_here();
        if !inside || self.inner.count.add_inside(count) {
            self.add_slowly(count, inside);
        }
    }

    /// What an add takes besides that of a handler that wakes nobody, which is so little that it is worth being part of the
    /// handler. `inside`: it was added already.
    #[inline(never)]
    fn add_slowly(&self, count: u64, inside: bool) {
        let inner = &*self.inner;
        if inside {
            if inner.wake() {
                self.handle.woke_task();
            }
            return;
        }
        let somebody_waits = inner.count.add(count);
        if !inner.count.is_mixed() && inner.mix() {
            // A handler that adds now may not know of it.
            self.pass_through(&self.handle);
            inner.wake();
        } else if somebody_waits {
            inner.wake();
        }
    }

    /// Waits until the counter is at least `value`: for ever, if nobody adds so much. It is no operation of the job, and nothing of
    /// that ends it, nor its being left; `tokio::time::timeout` does.
    ///
    /// # Cancel safety
    /// Cancel safe: waiting changes nothing.
    #[inline]
    pub fn reach(&self, value: u64) -> Reach<'_, Handle> {
        self.reach_on(&self.handle, value)
    }

    /// The same, advancing another face's context meanwhile.
    ///
    /// # Cancel safety
    /// Cancel safe: waiting changes nothing.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{ContextId, Message, Scope};
    /// let done = job.counter();
    /// let count = done.clone();
    /// let step = job.register("step", move |_: Message, _: &mut Scope| count.add(1))?;
    /// let context = job.own_context(ContextId(0)).expect("nobody else owns it");
    /// for _ in 0..3 {
    ///     step.on(&context).send(job.rank(), "step").await?;
    /// }
    /// done.reach_on(&context, 3).await; // the owner's wait moves the context
    /// assert_eq!(done.value(), 3);
    /// drop(context);
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    pub fn reach_on<'c, F: Face>(&'c self, face: &'c F, value: u64) -> Reach<'c, F> {
        Reach { counter: self, face, value, key: None }
    }

    /// A waiter has ended.
    #[cold]
    fn forget(&self, key: usize) {
        let mut waiters = lock(&self.inner.waiters);
        let left = waiters.try_remove(key);
        self.inner.settle(&waiters);
        drop(waiters);
        // Not under the lock, as of `replace_waker`.
        drop(left);
    }

    /// Comes behind what handlers of the counter's context do now; see [`Count`].
    fn pass_through<F: Face>(&self, face: &F) {
        // Whoever owns the context gets to it through its own face only.
        let owned = face.owns() && Arc::ptr_eq(face.shared(), self.handle.shared_state());
        let passed = (owned && face.enter(|_| ()).is_ok()) || self.handle.enter(|_| ()).is_ok();
        // One look does for all who have begun to wait before it.
        if !passed && !self.inner.look_is_posted.swap(true, Ordering::AcqRel) {
            let inner = self.inner.clone();
            self.handle.post_run(move |_| {
                inner.look_is_posted.swap(false, Ordering::AcqRel);
                inner.wake();
            });
        }
        // What is added from outside by one who has not seen yet what the token brought is seen behind this.
        fence(Ordering::SeqCst);
    }
}

/// A wait for a counter.
///
/// # Cancel safety
/// Cancel safe: waiting changes nothing.
#[must_use = "a wait does nothing until it is awaited"]
#[derive(Debug)]
pub struct Reach<'c, F: Face> {
    counter: &'c Counter,
    face: &'c F,
    value: u64,
    /// Its place among the waiters, once it has one.
    key: Option<usize>,
}

impl<F: Face> Unpin for Reach<'_, F> {}

impl<F: Face> Future for Reach<'_, F> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        let (counter, value, key) = (this.counter, this.value, &mut this.key);
        poll_until(
            this.face,
            cx,
            || (counter.value() >= value).then_some(()),
            |waker| {
                let mut waiters = lock(&counter.inner.waiters);
                let entry = (value, Some(waker.clone()));
                if let Some(place) = key.and_then(|key| waiters.get_mut(key)) {
                    // Who adds knows since the first time that somebody waits, and comes by here.
                    let before = std::mem::replace(place, entry);
                    drop(waiters);
                    drop(before);
                    return;
                }
                *key = Some(waiters.insert(entry));
                counter.inner.settle(&waiters);
                drop(waiters);
                counter.pass_through(this.face);
            },
        )
    }
}

impl<F: Face> Drop for Reach<'_, F> {
    #[inline]
    fn drop(&mut self) {
        if let Some(key) = self.key {
            self.counter.forget(key);
        }
    }
}
