//! What a job of one shows.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

/// Whoever polls once more an operation that was done at once does nothing twice.
#[tokio::test]
async fn what_is_polled_once_more_is_done_once() {
    let job = crate::solo().await.expect("a job of one");
    let (me, window) = (job.rank(), job.shmalloc::<u64>(4).await.expect("memory"));
    let mut add = window.add(me, 0, 1);
    (&mut add).await.expect("it is added");
    assert_eq!(futures::poll!(&mut add), Poll::Ready(Ok(())));
    let mut ticket = window.fetch_add(me, 0, 1);
    assert_eq!((&mut ticket).await, Ok(1));
    // Its value was given.
    assert!(matches!(futures::poll!(&mut ticket), Poll::Ready(Err(_))));
    assert_eq!(window.load(0), Some(2));
    job.leave().await.expect("left");
}

/// Panics when it is cloned for the first time after it was armed.
struct Fuse(Arc<AtomicBool>);

impl Clone for Fuse {
    fn clone(&self) -> Self {
        assert!(!self.0.swap(false, Ordering::SeqCst), "it was armed");
        Fuse(self.0.clone())
    }
}

/// A spawned handler that cannot be cloned for a message loses that one alone.
#[tokio::test]
async fn a_handler_that_panics_when_it_is_cloned_keeps_its_place_for_others() {
    let job = crate::solo().await.expect("a job of one");
    let (armed, handled) = (Arc::new(AtomicBool::new(false)), job.counter());
    let (fuse, count) = (Fuse(armed.clone()), handled.clone());
    let note = job.register_spawned("note", 1, move |_: crate::OwnedMessage| {
        let (_fuse, count) = (&fuse, count.clone());
        async move { count.add(1) }
    });
    let note = note.expect("a handler");
    armed.store(true, Ordering::SeqCst);
    let all = async {
        // More than there is credit for.
        for _ in 0..3000 {
            note.send(job.rank(), "").await.expect("sent");
        }
        handled.reach(2999).await;
    };
    tokio::time::timeout(Duration::from_secs(60), all).await.expect("the others are handled");
    assert!(!armed.load(Ordering::SeqCst));
    job.leave().await.expect("left");
}
