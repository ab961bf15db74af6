//! A counter that handlers add to and tasks wait for.

use posthaste_core::context::poll_until;
use posthaste_core::sync::lock;
use posthaste_core::{Face, Handle};
use slab::Slab;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

#[derive(Debug, Default)]
struct Inner {
    value: AtomicU64,
    waiting: AtomicUsize,
    waiters: Mutex<Slab<(u64, Option<Waker>)>>,
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
        self.inner.value.load(Ordering::Acquire)
    }

    /// Adds to the counter and wakes whom that concerns.
    #[inline]
    pub fn add(&self, count: u64) {
        // SeqCst twice, here and in `Reach`: either the adder sees the waiter or the waiter sees the value.
        let value = self.inner.value.fetch_add(count, Ordering::SeqCst) + count;
        if self.inner.waiting.load(Ordering::SeqCst) > 0 {
            self.wake(value);
        }
    }

    #[cold]
    fn wake(&self, value: u64) {
        // As a rule there is one, and waking it allocates nothing.
        let (mut first, mut more) = (None, Vec::new());
        for (_, (wanted, waker)) in lock(&self.inner.waiters).iter_mut() {
            if *wanted <= value
                && let Some(waker) = waker.take()
            {
                match first {
                    None => first = Some(waker),
                    Some(_) => more.push(waker),
                }
            }
        }
        first.into_iter().chain(more).for_each(Waker::wake);
    }

    /// Waits until the counter is at least `value`.
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
    #[inline]
    pub fn reach_on<'c, F: Face>(&'c self, face: &'c F, value: u64) -> Reach<'c, F> {
        Reach { counter: self, face, value, key: None }
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
                match key.and_then(|key| waiters.get_mut(key)) {
                    Some(place) => *place = entry,
                    None => *key = Some(waiters.insert(entry)),
                }
                counter.inner.waiting.store(waiters.len(), Ordering::SeqCst);
            },
        )
    }
}

impl<F: Face> Drop for Reach<'_, F> {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            let mut waiters = lock(&self.counter.inner.waiters);
            waiters.try_remove(key);
            self.counter.inner.waiting.store(waiters.len(), Ordering::SeqCst);
        }
    }
}
