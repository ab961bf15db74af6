//! Puts and gets over sends: the same as the device's own, forced by a setting.

use crate::support::{Options, is_payload, options, others, payload, run, run_as, soon};
use posthaste::{Fault, Job, Message, Rank, RegionKey, RmaError, Scope};
use std::sync::{Arc, OnceLock};

fn over_send() -> Options {
    options().env("POSTHASTE_OVERSEND", "always")
}

/// What each rank's memory and each get must be follows from the program alone; both variants check it.
async fn puts_and_gets(job: Job) {
    const PART: usize = 9 << 20;
    let window = job.shmalloc::<u8>(PART).await.unwrap();
    let words = job.shmalloc::<u64>(64).await.unwrap();
    let me = job.rank().index();
    for (n, len) in [0, 1, 7, 8, 65, 4096, 100_003, (4 << 20) + 1, 6_000_000].into_iter().enumerate() {
        for to in job.ranks() {
            // Every rank has a third of each part; the parts are put, changed in the middle, and read back at once.
            let first = me * (PART / 3);
            let len = len.min(PART / 3);
            let bytes = payload((n * 10 + me) as u64, len);
            let put = window.put_slice(to, first, &bytes).local().await.unwrap();
            let back = window.get_slice(to, first, len).await.unwrap();
            assert!(is_payload((n * 10 + me) as u64, &back), "{len} bytes of rank {to}");
            put.await.unwrap();
            if len > 100 {
                let middle = window.put_slice(to, first + 31, &[9; 5]).local().await.unwrap();
                assert_eq!(window.get_slice(to, first + 30, 7).await.unwrap()[1..6], [9; 5]);
                middle.await.unwrap();
            }
            words.put(to, me, n as u64 + 1).await.unwrap();
            assert_eq!(words.get(to, me).await.unwrap(), n as u64 + 1);
        }
    }
    job.barrier().await.unwrap();
    assert_eq!(words.to_vec()[..3], [9; 3]);
    job.barrier().await.unwrap();
    let outside = window.put_slice(Rank(1), PART - 1, &[1, 2]).await;
    assert!(matches!(outside, Err(RmaError::OutOfRange { .. })), "{outside:?}");
    job.barrier().await.unwrap();
    window.free().await.unwrap();
    words.free().await.unwrap();
}

#[test]
fn m_d13_puts_and_gets_are_the_same_natively() {
    run_as("shims::m_d13_puts_and_gets_are_the_same_natively", 3, options(), async |job| {
        puts_and_gets(job.clone()).await;
        assert_eq!(job.handle().stats().one_sided, 0, "memory that is mapped needs no descriptor");
    });
}

#[test]
fn m_d13_puts_and_gets_are_the_same_over_sends() {
    run_as("shims::m_d13_puts_and_gets_are_the_same_over_sends", 3, over_send(), async |job| {
        puts_and_gets(job.clone()).await;
        assert!(job.handle().stats().one_sided >= 3 * 9 * 4, "each is a message");
    });
}

#[test]
fn m_d13_what_is_put_over_sends_is_there_before_a_message_behind_it() {
    run(3, over_send(), async |job| {
        let window = Arc::new(job.shmalloc::<u64>(3 * 1000).await.unwrap());
        let arrived = job.counter();
        let (here, count) = (window.clone(), arrived.clone());
        let look = job
            .register("look", move |m: Message, _: &mut Scope| {
                let number = m.read::<u64>(0).unwrap();
                let at = m.source().index() * 1000 + number as usize % 1000;
                assert_eq!(here.load(at), Some(number), "from {}", m.source());
                count.add(1);
            })
            .unwrap();
        job.barrier().await.unwrap();
        let me = job.rank().index();
        for number in 0..3000u64 {
            for to in others(&job) {
                let put = window.put(to, me * 1000 + number as usize % 1000, number).local().await.unwrap();
                look.send(to, number.to_ne_bytes()).await.unwrap();
                if number % 100 == 99 {
                    put.await.unwrap();
                }
            }
        }
        soon("all messages", arrived.reach(6000)).await;
        job.barrier().await.unwrap();
    });
}

#[test]
fn m_d13_patterns_are_replayed_over_sends() {
    run(3, over_send(), async |job| {
        let window = job.shmalloc::<u8>(3 * 100_000).await.unwrap();
        let source = job.region(100_000).await.unwrap();
        let me = job.rank().index();
        let parts = [(0u64, 8u64), (8, 1), (16, 4096), (10_000, 60_001)];
        let pattern = job
            .record(|r| {
                for to in job.ranks() {
                    for (first, len) in parts {
                        window.record_put_from(r, to, me * 100_000 + first as usize, &source, first, len)?;
                    }
                }
                Ok::<(), RmaError>(())
            })
            .await
            .unwrap();
        for step in 0..50u64 {
            for (first, len) in parts {
                source.write(first as usize, &payload(step * 3 + me as u64, len as usize)).unwrap();
            }
            pattern.replay().await.unwrap();
            job.barrier().await.unwrap();
            let own = window.to_vec();
            for rank in 0..3 {
                for (first, len) in parts {
                    let bytes = &own[rank * 100_000 + first as usize..][..len as usize];
                    assert!(
                        is_payload(step * 3 + rank as u64, bytes),
                        "step {step}, rank {rank}, {len} bytes"
                    );
                }
            }
            job.barrier().await.unwrap();
        }
    });
}

#[test]
fn m_d13_memory_that_is_not_there_is_told_over_sends() {
    run(2, over_send(), async |job| {
        let key = Arc::new(OnceLock::new());
        let told = key.clone();
        let tell = job
            .register("key", move |m: Message, _: &mut Scope| {
                let word = |at| m.read::<u64>(at).unwrap();
                let _ = told.set(RegionKey { rank: m.source().0, offset: word(0), len: word(8) });
            })
            .unwrap();
        job.barrier().await.unwrap();
        let peer = Rank(1 - job.rank().0);
        let region = job.region(10_000).await.unwrap();
        let own = region.key();
        tell.send(peer, [own.offset.to_ne_bytes(), own.len.to_ne_bytes()].concat()).await.unwrap();
        job.barrier().await.unwrap();
        let key = *key.get().unwrap();
        let remote = job.remote_region(key).await.unwrap();
        remote.put(9_990, "0123456789").await.unwrap();
        job.barrier().await.unwrap();
        // Freed, or never given to anybody.
        drop(region);
        job.barrier().await.unwrap();
        let none = RmaError::Fault(Fault::NoSuchMemory(peer));
        assert_eq!(remote.put(0, vec![1; 5_000]).await, Err(none.clone()));
        assert_eq!(remote.get_into(0, vec![0; 5_000]).await, Err(none.clone()));
        let beyond = job.remote_region(RegionKey { offset: 1 << 20, ..key }).await.unwrap();
        assert_eq!(beyond.put(0, "x").await, Err(none));
        // Nothing else suffers from it.
        job.barrier().await.unwrap();
    });
}
