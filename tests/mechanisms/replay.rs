//! Recorded patterns.

use crate::support::{case, is_payload, options, payload, run};
use posthaste::Rank;

case!(m_d26_many_patterns_have_persistent_ids_and_are_replayed_in_any_order);
fn m_d26_many_patterns_have_persistent_ids_and_are_replayed_in_any_order() {
    run(2, options(), async |job| {
        let window = job.shmalloc::<u64>(1000).await.unwrap();
        let source = job.region(8).await.unwrap();
        let peer = Rank(1 - job.rank().0);
        let mut patterns = Vec::new();
        for place in 0..1000 {
            let pattern = job.record(|r| window.record_put(r, peer, place, &source)).await.unwrap();
            assert_eq!((pattern.messages(), pattern.bytes()), (1, 8));
            patterns.push(pattern);
        }
        let mut ids: Vec<_> = patterns.iter().map(|pattern| pattern.id()).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), 1000, "each has an id of its own");
        // Recording carries nothing out.
        job.barrier().await.unwrap();
        assert_eq!(window.to_vec(), [0; 1000]);
        job.barrier().await.unwrap();
        for step in 0..3000usize {
            let place = step * 7 % 1000;
            source.write(0, &(step as u64 + 1).to_ne_bytes()).unwrap();
            patterns[place].replay().await.unwrap();
        }
        job.barrier().await.unwrap();
        let mut expected = [0u64; 1000];
        for step in 0..3000usize {
            expected[step * 7 % 1000] = step as u64 + 1;
        }
        assert_eq!(window.to_vec(), expected);
        job.barrier().await.unwrap();
    });
}

case!(m_d28_a_replay_reads_the_payload_afresh);
fn m_d28_a_replay_reads_the_payload_afresh() {
    run(3, options(), async |job| {
        let window = job.shmalloc::<u8>(300_000).await.unwrap();
        let source = job.region(100_000).await.unwrap();
        let me = job.rank().index();
        // One pattern of puts to all ranks, of several lengths and from several places.
        let parts = [(0u64, 8u64), (8, 1), (16, 4096), (10_000, 60_001)];
        let pattern = job
            .record(|r| {
                for to in job.ranks() {
                    for (first, len) in parts {
                        window.record_put_from(r, to, me * 100_000 + first as usize, &source, first, len)?;
                    }
                }
                Ok(())
            })
            .await
            .unwrap();
        assert_eq!(pattern.messages(), 12);
        assert_eq!(pattern.bytes(), 3 * parts.iter().map(|part| part.1).sum::<u64>());
        for step in 0..50u64 {
            for (first, len) in parts {
                source.write(first as usize, &payload(step * 3 + me as u64, len as usize)).unwrap();
            }
            match step % 2 {
                0 => pattern.replay().await.unwrap(),
                // The earlier stage holds the replay's place in the order.
                _ => pattern.replay().local().await.unwrap().await.unwrap(),
            }
            job.barrier().await.unwrap();
            let own = window.to_vec();
            for rank in 0..3 {
                for (first, len) in parts {
                    let at = rank * 100_000 + first as usize;
                    let bytes = &own[at..at + len as usize];
                    assert!(
                        is_payload(step * 3 + rank as u64, bytes),
                        "step {step}, from rank {rank}, {len} bytes"
                    );
                }
            }
            job.barrier().await.unwrap();
        }
    });
}

case!(m_d26_a_pattern_of_a_freed_window_or_of_nothing_is_an_error);
fn m_d26_a_pattern_of_a_freed_window_or_of_nothing_is_an_error() {
    run(2, options(), async |job| {
        let window = job.shmalloc::<u64>(10).await.unwrap();
        let source = job.region(16).await.unwrap();
        let peer = Rank(1 - job.rank().0);
        let nothing = job.record(|_| Ok(())).await;
        assert!(nothing.is_err());
        let outside = job.record(|r| window.record_put(r, peer, 9, &source)).await;
        assert!(outside.is_err(), "16 bytes do not fit at element 9 of 10");
        let pattern = job.record(|r| window.record_put(r, peer, 8, &source)).await.unwrap();
        pattern.replay().await.unwrap();
        window.clone().free().await.unwrap();
        assert!(pattern.replay().await.is_err(), "the window is gone");
        job.barrier().await.unwrap();
    });
}
