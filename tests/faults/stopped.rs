//! A rank that is stopped and goes on.

use crate::support::{case, options, run, sealed, soon, unseal, wait_for};
use bytes::Bytes;
use posthaste::launcher::Signal;
use posthaste::{CallError, Fault, Liveness, Message, Rank, Reduce, Scope, SendError};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

case!(fault_a_rank_stopped_for_three_seconds_loses_and_doubles_nothing);
fn fault_a_rank_stopped_for_three_seconds_loses_and_doubles_nothing() {
    let stop = options().during(|job| {
        for rank in 0..3 {
            wait_for(job, rank, "ready");
        }
        std::thread::sleep(Duration::from_millis(200));
        job.signal(1, Signal::STOP).unwrap();
        std::thread::sleep(Duration::from_secs(3));
        // However late it was stopped.
        [0, 2].iter().for_each(|rank| wait_for(job, *rank, "three were late"));
        job.signal(1, Signal::CONT).unwrap();
    });
    run(3, stop, async |job| {
        let me = job.rank();
        let wrong: Arc<Mutex<Vec<String>>> = Arc::default();
        let (received, count) = (job.counter(), Arc::new([const { AtomicU64::new(0) }; 3]));
        let (log, add, next) = (wrong.clone(), received.clone(), count.clone());
        let message = job
            .register("numbered", move |m: Message, _: &mut Scope| {
                let expected = next[m.source().index()].fetch_add(1, Ordering::Relaxed);
                let seal = unseal(&m.bytes());
                if seal != Some(expected) {
                    log.lock()
                        .unwrap()
                        .push(format!("{seal:?} instead of {expected} from rank {}", m.source()));
                }
                add.add(1);
            })
            .unwrap();
        let echo = job.service("echo", |number: u64| async move { number }).unwrap();
        job.barrier().await.unwrap();
        println!("ready");
        let until = Instant::now() + Duration::from_millis(4500);
        let mut senders = Vec::new();
        for to in job.ranks().filter(|to| *to != me) {
            let message = message.clone();
            senders.push(tokio::spawn(async move {
                let mut number = 0u64;
                while Instant::now() < until {
                    let len = [16, 16, 2500, 30_000][number as usize % 4];
                    message.send(to, sealed(number, len)).await.unwrap();
                    number += 1;
                    tokio::time::sleep(Duration::from_micros(200)).await;
                }
                (to, number)
            }));
        }
        let mut late = 0;
        if me != Rank(1) {
            while Instant::now() < until || late < 3 {
                match echo.call_within(Rank(1), 7, Duration::from_millis(300)).await {
                    Ok(number) => assert_eq!(number, 7),
                    Err(error) => {
                        assert_eq!(error, CallError::Fault(Fault::DeadlineExceeded));
                        late += 1;
                        if late == 3 {
                            println!("three were late");
                        }
                    }
                }
                // The other rank answers all the time.
                assert_eq!(soon("the other rank", echo.call(Rank(2 - me.0), 8)).await, Ok(8));
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        let mut sent = [0u8; 24];
        for sender in senders {
            let (to, number) = soon("a sender", sender).await.unwrap();
            sent[to.index() * 8..][..8].copy_from_slice(&number.to_le_bytes());
        }
        job.fence().await.unwrap();
        let all = soon("the others", job.all_gather(&sent)).await.unwrap();
        for (source, sent) in all.iter().enumerate() {
            let sent = u64::from_le_bytes(sent[me.index() * 8..][..8].try_into().unwrap());
            assert_eq!(count[source].load(Ordering::Relaxed), sent, "messages from rank {source}");
        }
        assert_eq!(*wrong.lock().unwrap(), Vec::<String>::new());
        assert_eq!((job.stats().peers_lost, job.stats().panics), (0, 0));
        job.barrier().await.unwrap();
    });
}

case!(fault_a_stopped_rank_is_told_of_and_what_waits_for_it_meets_its_deadline);
/// Whoever waits for a stopped rank is told of it, once, and when it goes on; operations of all kinds towards it meet their
/// deadlines meanwhile; and afterwards all is as if nothing had been. The stopped rank itself takes nobody for stalled.
fn fault_a_stopped_rank_is_told_of_and_what_waits_for_it_meets_its_deadline() {
    let stop = options().during(|job| {
        for rank in 0..3 {
            wait_for(job, rank, "ready");
        }
        job.signal(1, Signal::STOP).unwrap();
        for rank in [0, 2] {
            wait_for(job, rank, "late");
        }
        job.signal(1, Signal::CONT).unwrap();
    });
    run(3, stop, async |job| {
        let me = job.rank();
        let short = Duration::from_millis(150);
        let events: Arc<Mutex<Vec<Liveness>>> = Arc::default();
        let log = events.clone();
        job.on_peer_stalled(Duration::from_millis(1500), move |event| log.lock().unwrap().push(event));
        let told = |event| events.lock().unwrap().contains(&event);
        let received = job.counter();
        let add = received.clone();
        let news = job.register("news", move |_: Message, _: &mut Scope| add.add(1)).unwrap();
        let echo = job.service("echo", |number: u64| async move { number }).unwrap();
        let window = job.shmalloc::<u64>(4).await.unwrap();
        job.barrier().await.unwrap();
        println!("ready");
        let mut sent = 0u64;
        if me == Rank(1) {
            // It waits for others while it is stopped.
            for number in 0.. {
                assert_eq!(echo.call(Rank(0), number).await, Ok(number));
                if window.load(0) == Some(2) {
                    break;
                }
            }
        } else {
            let expired = Fault::DeadlineExceeded;
            while !told(Liveness::PeerStalled(Rank(1))) {
                let answer = job.within(short, echo.call(Rank(1), 7)).await;
                assert!(answer == Ok(7) || answer == Err(CallError::Fault(expired)), "{answer:?}");
            }
            assert_eq!(
                job.within(short, job.flush(Rank(1))).await.map_err(|e| e.to_string()),
                Err(expired.to_string())
            );
            let world = job.collectives().world();
            assert_eq!(job.within(short, world.barrier()).await, Err(expired.into()));
            let summed = world.all_reduce_one(1u64, &Reduce::sum());
            assert_eq!(job.within(short, summed).await.map(|_| ()), Err(expired.into()));
            let written = window.wait_until(3, |word| word == 1);
            assert_eq!(job.within(short, written).await, Err(expired.into()));
            let (put, get) = (window.put(Rank(1), me.index() + 1, 9), window.get(Rank(1), 1));
            if job.caps_of(Rank(1)).mappable {
                // Over shared memory nobody is needed for these.
                soon("a put", put).await.unwrap();
                soon("a get", get).await.unwrap();
            } else {
                let (put, got) = (job.within(short, put).await, job.within(short, get).await);
                assert_eq!((put, got), (Err(expired.into()), Err(expired.into())));
            }
            // Until there is no credit for the one that is stopped, and on to the other.
            let all = [Rank(1), Rank(2 - me.0)];
            let failed = loop {
                sent += 1;
                let payload = Bytes::from(vec![1; 8 << 10]);
                if let Err(error) = news.multicast(all, payload).deadline(Duration::from_secs(1)).await {
                    break error;
                }
            };
            assert_eq!(failed.failed, [(Rank(1), SendError::Fault(expired))]);
            println!("late");
            assert_eq!(soon("the stopped rank", echo.call(Rank(1), 8)).await, Ok(8));
            while !told(Liveness::PeerResumed(Rank(1))) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            // The one that was late may or may not have got there.
            window.add(Rank(1), 0, 1).await.unwrap();
        }
        // What met its deadline is done by all in the end.
        let world = job.collectives().world();
        if me == Rank(1) {
            soon("the barrier", world.barrier()).await.unwrap();
            assert_eq!(soon("the sum", world.all_reduce_one(1u64, &Reduce::sum())).await.unwrap(), 3);
        }
        job.fence().await.unwrap();
        let all = soon("the others", job.all_gather(&sent.to_le_bytes())).await.unwrap();
        let to_me: u64 = (all.iter().enumerate())
            .filter(|(rank, _)| *rank != me.index())
            .map(|(_, sent)| u64::from_le_bytes(sent[..].try_into().unwrap()))
            .sum();
        let least = to_me - if me == Rank(1) { 2 } else { 0 };
        assert!((least..=to_me).contains(&received.value()), "{} of {to_me}", received.value());
        let events = events.lock().unwrap().clone();
        if me == Rank(1) {
            assert_eq!(events, [], "it was stopped itself");
        } else {
            // On a busy machine others may be kept from their cores for as long; of the stopped one all is known.
            let (stalled, resumed) = (Liveness::PeerStalled(Rank(1)), Liveness::PeerResumed(Rank(1)));
            let of_it: Vec<_> =
                events.into_iter().filter(|event| [stalled, resumed].contains(event)).collect();
            assert!(
                !of_it.is_empty() && of_it.chunks(2).all(|pair| *pair == [stalled, resumed]),
                "{of_it:?}"
            );
        }
        assert_eq!((job.stats().peers_lost, job.stats().panics), (0, 0));
        job.barrier().await.unwrap();
    });
}

case!(fault_a_rank_that_is_met_for_the_first_time_is_not_kept_waiting_by_one_that_is_stopped);
fn fault_a_rank_that_is_met_for_the_first_time_is_not_kept_waiting_by_one_that_is_stopped() {
    let stop = options().workers(2).during(|job| {
        // All of them: what the others' end of the barrier needs may not have left the one that is past it.
        for rank in 0..4 {
            wait_for(job, rank, "ready");
        }
        job.signal(1, Signal::STOP).unwrap();
        wait_for(job, 0, "done");
        job.signal(1, Signal::CONT).unwrap();
    });
    run(4, stop, async |job| {
        let (stopped, other) = (Rank(1), Rank(3));
        let received = job.counter();
        let add = received.clone();
        let news = job
            .register("news", move |m: Message, _: &mut Scope| {
                // Slower than who sends: its lane is full now and then.
                std::thread::sleep(Duration::from_millis(if m.len() == 1024 { 2 } else { 0 }));
                add.add(1);
            })
            .unwrap();
        job.barrier().await.unwrap();
        println!("ready");
        if job.rank() == Rank(0) {
            // Until it is stopped, and there is no room any more.
            let flood = {
                let news = news.clone();
                async move {
                    let mut sent = 0u64;
                    while tokio::time::timeout(Duration::from_millis(300), news.send(stopped, vec![1; 900]))
                        .await
                        .is_ok()
                    {
                        sent += 1;
                    }
                    sent
                }
            };
            flood.await;
            let waits = tokio::spawn({
                let news = news.clone();
                async move { news.send(stopped, vec![1; 900]).await }
            });
            tokio::time::sleep(Duration::from_millis(50)).await;
            let others = (0..64).map(|_| news.send(other, vec![2; 1024]));
            soon("a rank that is not stopped", futures::future::try_join_all(others)).await.unwrap();
            println!("done");
            soon("the one that was", waits).await.unwrap().unwrap();
        }
        if job.rank() == other {
            soon("what was sent to it", received.reach(64)).await;
        }
        job.fence().await.unwrap();
        job.barrier().await.unwrap();
    });
}
