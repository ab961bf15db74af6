//! A rank that is stopped and goes on.

use crate::support::{options, run, sealed, soon, unseal, wait_for};
use posthaste::launcher::Signal;
use posthaste::{CallError, Fault, Message, Rank, Scope};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

#[test]
fn fault_a_rank_stopped_for_three_seconds_loses_and_doubles_nothing() {
    let stop = options().during(|job| {
        for rank in 0..3 {
            wait_for(job, rank, "ready");
        }
        std::thread::sleep(Duration::from_millis(200));
        job.signal(1, Signal::STOP).unwrap();
        std::thread::sleep(Duration::from_secs(3));
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
            while Instant::now() < until {
                match echo.call_within(Rank(1), 7, Duration::from_millis(300)).await {
                    Ok(number) => assert_eq!(number, 7),
                    Err(error) => {
                        assert_eq!(error, CallError::Fault(Fault::DeadlineExceeded));
                        late += 1;
                    }
                }
                // The other rank answers all the time.
                assert_eq!(soon("the other rank", echo.call(Rank(2 - me.0), 8)).await, Ok(8));
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            assert!(late >= 3, "{late} calls met their deadline while the rank was stopped");
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
