//! Counters that handlers of their context and other threads add to while tasks sleep.

use posthaste::{Message, Scope};
use std::time::Duration;

const STEPS: u64 = 300;

/// Each step waits for what both a handler and a thread of its own add, in a task that has gone to sleep by then or is about
/// to; none of the waits may be forgotten, whoever comes last.
async fn added_by_both(first_from_outside: u64) {
    let job = posthaste::solo().await.expect("a job of one");
    let counter = job.counter();
    let count = counter.clone();
    let add =
        job.register("add", move |_: Message, _: &mut Scope| count.add(1)).expect("nobody else has the name");
    let (go, wanted) = std::sync::mpsc::channel::<()>();
    let outside = counter.clone();
    let thread = std::thread::spawn(move || wanted.iter().for_each(|()| outside.add(1)));
    let mut expected = 0;
    for step in 0..STEPS {
        let mixed = step >= first_from_outside;
        expected += 1 + u64::from(mixed);
        let waiter = {
            let counter = counter.clone();
            tokio::spawn(async move { counter.reach(expected).await })
        };
        if step % 3 > 0 {
            // It sleeps, or has just looked.
            tokio::time::sleep(Duration::from_micros(step % 7 * 20)).await;
        }
        if mixed {
            go.send(()).expect("the thread lives");
        }
        add.send(job.rank(), b"").await.expect("this rank lives");
        tokio::time::timeout(Duration::from_secs(60), waiter).await.expect("it is woken").expect("no panic");
        assert_eq!(counter.value(), expected);
    }
    drop(go);
    thread.join().expect("no panic");
    // Who waits for something far off is not woken, nor forgotten, by what comes before it.
    let far = counter.reach(expected + 100);
    let mut far = std::pin::pin!(far);
    for _ in 0..99 {
        add.send(job.rank(), b"").await.expect("this rank lives");
    }
    assert!(tokio::time::timeout(Duration::from_millis(20), &mut far).await.is_err());
    counter.add(1);
    tokio::time::timeout(Duration::from_secs(60), far).await.expect("it is woken");
    job.leave().await.expect("it leaves");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waits_end_whoever_adds_last() {
    added_by_both(0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_add_from_outside_is_noticed_by_who_waits_already() {
    for first in [1, 7, 50, STEPS] {
        added_by_both(first).await;
    }
}
