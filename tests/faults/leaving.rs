//! A rank that leaves in order while others still want something of it.

use crate::support::{case, here, options, run, run_as, sealed, soon, unseal, until};
use posthaste::{CallError, ContextId, Error, Fault, Job, Message, Rank, RmaError, Scope, SendError};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const CLOSED: Fault = Fault::PeerClosed(Rank(1));

case!(fault_a_rank_that_leaves_ends_every_pending_operation_with_peer_closed);
fn fault_a_rank_that_leaves_ends_every_pending_operation_with_peer_closed() {
    run(3, options().body_leaves().env("POSTHASTE_CREDITS", "4"), async |job| {
        let me = job.rank();
        let told: Arc<Mutex<Vec<Fault>>> = Arc::default();
        let faults = told.clone();
        job.on_error(move |fault| faults.lock().unwrap().push(fault));
        let never = job.service("never", |()| std::future::pending::<()>()).unwrap();
        let (credited, unread) = job.stream("credited").unwrap();
        let window = job.shmalloc::<u64>(3).await.unwrap();
        let heard = job.counter();
        let count = heard.clone();
        let word = job.register("word", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
        job.barrier().await.unwrap();
        if me == Rank(1) {
            // Rank 0 has everything under way, and rank 2 has said nothing.
            soon("rank 0", heard.reach(1)).await;
            drop(unread);
            job.leave().await.unwrap();
            return;
        }
        if me == Rank(0) {
            let mut pending = Vec::new();
            for number in 0..100 {
                let never = never.clone();
                pending.push(tokio::spawn(async move {
                    match never.call(Rank(1), ()).await {
                        Err(CallError::Fault(fault)) => fault,
                        other => panic!("call {number}: {other:?}"),
                    }
                }));
            }
            // Nobody reads the stream: four go, the others wait for credit.
            for number in 0..100 {
                let credited = credited.clone();
                pending.push(tokio::spawn(async move {
                    loop {
                        let len = [50, 5000, 300_000][number as usize % 3];
                        match credited.send(Rank(1), sealed(number, len)).await {
                            Ok(()) => {}
                            Err(SendError::Fault(fault)) => return fault,
                            Err(other) => panic!("send {number}: {other:?}"),
                        }
                    }
                }));
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
            assert!(pending.iter().all(|task| !task.is_finished()), "something ended too early");
            word.send(Rank(1), b"").await.unwrap();
            for (number, task) in pending.into_iter().enumerate() {
                assert_eq!(soon("a pending operation", task).await.unwrap(), CLOSED, "operation {number}");
            }
        } else {
            // Told although it waits for nothing.
            until("the report", || !told.lock().unwrap().is_empty()).await;
        }
        // And everything that is started later.
        assert_eq!(never.call(Rank(1), ()).await, Err(CallError::Fault(CLOSED)));
        assert_eq!(word.send(Rank(1), b"").await, Err(SendError::Fault(CLOSED)));
        assert_eq!(window.put(Rank(1), 0, 1).await, Err(RmaError::Fault(CLOSED)));
        assert_eq!(window.get(Rank(1), 0).await, Err(RmaError::Fault(CLOSED)));
        let flushed = job.flush(Rank(1)).await;
        assert!(matches!(flushed, Err(Error::Send(SendError::Fault(CLOSED)))), "{flushed:?}");
        until("the process's end", || job.stats().peers_lost >= 1 && !told.lock().unwrap().is_empty()).await;
        assert_eq!((told.lock().unwrap().as_slice(), job.stats().peers_lost), ([CLOSED].as_slice(), 1));
        // The others go on.
        let other = Rank(2 - me.0);
        window.put(other, me.index(), 7).await.unwrap();
        job.flush(other).await.unwrap();
        word.send(other, b"").await.unwrap();
        soon("the other", heard.reach(1)).await;
        assert_eq!(window.load(other.index()), Some(7));
        job.leave().await.unwrap();
    });
}

case!(fault_a_client_that_leaves_takes_no_other_client_of_its_rank_with_it);
fn fault_a_client_that_leaves_takes_no_other_client_of_its_rank_with_it() {
    run(2, options().clients(2), async |job| {
        let second = job.client(1).await.unwrap();
        let echo = job.service("echo", |number: u64| async move { number }).unwrap();
        let never = second.service("never", |()| std::future::pending::<()>()).unwrap();
        job.barrier().await.unwrap();
        second.barrier().await.unwrap();
        let other = Rank(1 - job.rank().0);
        if job.rank() == Rank(1) {
            // The other side waits for an answer by then, or asks too late: the same to it.
            second.leave().await.unwrap();
        } else {
            let end = soon("the call", never.call(other, ())).await;
            assert_eq!(end, Err(CallError::Fault(Fault::PeerClosed(other))));
            second.leave().await.unwrap();
        }
        for number in 0..200 {
            assert_eq!(soon("an answer", echo.call(other, number)).await, Ok(number));
        }
        assert_eq!(job.stats().peers_lost, 0);
        job.barrier().await.unwrap();
    });
}

case!(fault_what_the_other_contexts_of_a_rank_sent_before_it_left_arrives);
fn fault_what_the_other_contexts_of_a_rank_sent_before_it_left_arrives() {
    run(2, options().contexts(3).body_leaves(), async |job| {
        let count: Arc<AtomicU64> = Arc::default();
        let add = count.clone();
        let message = job
            .register("sealed", move |m: Message, _: &mut Scope| {
                assert!(unseal(&m.bytes()).is_some());
                add.fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
        let total: Arc<AtomicU64> = Arc::new(AtomicU64::new(u64::MAX));
        let told = total.clone();
        let last = job
            .register("last", move |m: Message, _: &mut Scope| {
                told.store(m.read(0).unwrap(), Ordering::Relaxed);
            })
            .unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(1) {
            let mut sent = 0;
            for number in 0..400u64 {
                let len = [40, 1500, 1800, 1000, 9000][number as usize % 5];
                // From contexts 1 and 2, to the same and to context 0; nobody waits for them.
                let from = ContextId(1 + number as u16 % 2);
                let through = message.through(job.context_handle(from).unwrap());
                let to = if number % 3 == 0 { from } else { ContextId(0) };
                let send = through.send(Rank(0), sealed(number, len)).to_context(to);
                sent += u64::from(send.try_send().is_ok());
            }
            last.send(Rank(0), sent.to_ne_bytes()).await.unwrap();
        } else {
            // Deaf for a while, so that much is still under way when the other rank leaves.
            std::thread::sleep(Duration::from_millis(300));
            let all = || count.load(Ordering::Relaxed) == total.load(Ordering::Relaxed);
            until("all messages", all).await;
        }
        job.leave().await.unwrap();
    });
}

case!(fault_what_is_begun_after_the_leave_ends_with_an_error);
fn fault_what_is_begun_after_the_leave_ends_with_an_error() {
    run(2, options().body_leaves(), async |job| {
        let window = job.shmalloc::<u64>(4).await.unwrap();
        let message = job.register("late", |_: Message, _: &mut Scope| {}).unwrap();
        let key = job.region(8).await.unwrap().key();
        job.barrier().await.unwrap();
        job.clone().leave().await.unwrap();
        let me = job.rank();
        let ended = |what: &str, error: Option<Error>| {
            let error = error.unwrap_or_else(|| panic!("{what} goes on"));
            assert_eq!(error.fault(), Some(Fault::Shutdown), "{what}: {error}");
        };
        ended("a send", message.send(me, "").await.err().map(Error::from));
        ended("a region", job.region(8).await.err());
        ended("memory of one's own", job.region_from(vec![0; 8]).err());
        ended("a peer's region", job.remote_region(key).await.err());
        ended("a group", job.collectives().subset(&[me]).await.err().map(Error::from));
        ended("a group on the fly", job.collectives().on_the_fly(&[me]).err().map(Error::from));
        ended("a fence", job.fence().await.err());
        ended("a view", window.through(job.handle()).await.err().map(Error::from));
        ended("a window", job.shmalloc::<u64>(1).await.err());
        ended("a barrier", job.barrier().await.err());
        ended("a put", window.put(me, 0, 1).await.err().map(Error::from));
        ended("a FIFO", job.fifo(posthaste::FifoOptions::default()).await.err());
        let registered = job.register("later", |_: Message, _: &mut Scope| {});
        assert!(matches!(registered, Err(posthaste::RegisterError::Closed)));
    });
}

case!(fault_a_client_that_is_left_by_two_of_its_clones_takes_no_other_one_with_it);
fn fault_a_client_that_is_left_by_two_of_its_clones_takes_no_other_one_with_it() {
    run(2, options().clients(2), async |job| {
        let second = job.client(1).await.unwrap();
        let echo = job.service("echo", |number: u64| async move { number }).unwrap();
        job.barrier().await.unwrap();
        second.barrier().await.unwrap();
        let (one, two) = tokio::join!(second.clone().leave(), second.clone().leave());
        one.and(two).unwrap();
        second.leave().await.unwrap();
        let other = Rank(1 - job.rank().0);
        for number in 0..20 {
            // Asleep between them: somebody has to ring.
            tokio::time::sleep(Duration::from_millis(20)).await;
            assert_eq!(soon("an answer", echo.call(other, number)).await, Ok(number));
        }
        assert_eq!(job.stats().peers_lost, 0);
        job.barrier().await.unwrap();
    });
}

/// The other rank's leave is known, and its process has ended.
async fn it_has_left(job: &Job) {
    soon("its leave", async {
        while job.stats().peers_lost == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    tokio::time::sleep(Duration::from_millis(300)).await;
}

/// Rank 1 sends so many messages of that length for a name that rank 0 registers when it has left, and its process has ended.
fn what_was_sent_for_a_name_to_come_counts(test: &str, messages: impl Fn(&Job) -> u64, len: usize) {
    run_as(test, 2, options().body_leaves(), async |job| {
        let messages = messages(&job);
        if job.rank() == Rank(1) {
            let late = job.register("late", |_: Message, _: &mut Scope| {}).unwrap();
            for number in 0..messages {
                late.send(Rank(0), sealed(number, len)).await.unwrap();
            }
            return job.leave().await.unwrap();
        }
        // Names that are not registered are refused behind a rank's first barrier.
        it_has_left(&job).await;
        let arrived = job.counter();
        let count = arrived.clone();
        let late = move |m: Message, _: &mut Scope| {
            assert_eq!(unseal(&m.bytes()), Some(count.value()));
            count.add(1);
        };
        let _late = job.register("late", late).unwrap();
        soon("what was sent", arrived.reach(messages)).await;
        job.leave().await.unwrap();
    });
}

case!(fault_what_a_rank_has_sent_for_a_name_to_come_counts_after_its_leave);
fn fault_what_a_rank_has_sent_for_a_name_to_come_counts_after_its_leave() {
    let test = here!();
    // The second is more than is set aside for a name that the receiver does not know yet: the device keeps it.
    what_was_sent_for_a_name_to_come_counts(test, |_| 2, 600_000);
}

case!(fault_all_that_a_rank_has_sent_for_a_name_to_come_counts_after_its_leave);
fn fault_all_that_a_rank_has_sent_for_a_name_to_come_counts_after_its_leave() {
    let test = here!();
    // More than is set aside, and over sockets little more: the kernel has room for it though nobody reads.
    let messages = |job: &Job| if job.caps_of(Rank(1 - job.rank().0)).mappable { 40 } else { 11 };
    what_was_sent_for_a_name_to_come_counts(test, messages, 100_000);
}

case!(fault_all_controls_that_a_rank_has_sent_for_a_name_to_come_count_after_its_leave);
fn fault_all_controls_that_a_rank_has_sent_for_a_name_to_come_count_after_its_leave() {
    // More than are kept for a name that the receiver does not know yet.
    const CONTROLS: u64 = 400;
    run(2, options().body_leaves(), async |job| {
        if job.rank() == Rank(1) {
            let late = job.register_control("late", |_, _, _| {}).unwrap();
            for number in 0..CONTROLS {
                late.send(Rank(0), u128::from(number).to_le_bytes()).await.unwrap();
            }
            return job.leave().await.unwrap();
        }
        it_has_left(&job).await;
        let arrived = job.counter();
        let count = arrived.clone();
        let late = move |_: Rank, payload: [u8; 16], _: &mut Scope| {
            assert_eq!(u128::from_le_bytes(payload), u128::from(count.value()));
            count.add(1);
        };
        let _late = job.register_control("late", late).unwrap();
        soon("what was sent", arrived.reach(CONTROLS)).await;
        assert_eq!(job.stats().panics, 0);
        job.leave().await.unwrap();
    });
}
