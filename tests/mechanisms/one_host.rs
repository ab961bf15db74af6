//! What shared memory alone can do.

use crate::support::lines::Lines;
use crate::support::{case, options, others, run, soon};
use posthaste::datatype::{Datatype, Layout};
use posthaste::{FifoOptions, Message, Messager, Rank, Scope};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

case!(m_d02_a_device_publishes_what_it_can_do);
fn m_d02_a_device_publishes_what_it_can_do() {
    run(2, options(), async |job| {
        let caps = job.caps();
        assert_eq!(caps.name, "shm");
        assert!(caps.native_put && caps.native_get && caps.mappable && caps.loans && caps.ordered);
        assert_eq!(caps.atomicity, 8);
        assert!(0 < caps.max_inline && caps.max_inline <= caps.max_eager && caps.fragment <= caps.max_eager);
        for device in job.messager().devices() {
            assert!(device.reaches(Rank(1)) && !device.reaches(Rank(2)));
        }
        // Messages about as long as the figures say arrive, and those of the length from which it asks for a place do ask.
        let arrived = job.counter();
        let count = arrived.clone();
        let message = job
            .register("by length", move |m: Message, _: &mut Scope| count.add(1 + m.len() as u64 * 10))
            .unwrap();
        let lengths = [caps.max_inline, caps.max_inline + 1, caps.max_eager, caps.max_eager + 1];
        let peer = Rank(1 - job.rank().0);
        for len in lengths {
            message.send(peer, vec![1; len]).await.unwrap();
        }
        let all = 4 + 10 * lengths.iter().sum::<usize>() as u64;
        soon("the messages", arrived.reach(all)).await;
        assert_eq!(arrived.value(), all);
        job.barrier().await.unwrap();
        assert!(caps.max_eager < caps.rendezvous && caps.rendezvous < usize::MAX, "{caps:?}");
        let asked = job.stats().rendezvous;
        message.send(peer, vec![1; caps.rendezvous - 1]).await.unwrap();
        assert_eq!(job.stats().rendezvous, asked, "one byte less does not");
        message.send(peer, vec![1; caps.rendezvous]).await.unwrap();
        assert_eq!(job.stats().rendezvous, asked + 1, "it asks");
        soon("the long ones", arrived.reach(all + 2 + 10 * (2 * caps.rendezvous as u64 - 1))).await;
        job.barrier().await.unwrap();
    });
}

case!(m_w05_a_put_on_one_host_is_one_copy_into_one_mapping);
fn m_w05_a_put_on_one_host_is_one_copy_into_one_mapping() {
    run(2, options(), async |job| {
        let window = job.shmalloc::<u64>(1024).await.unwrap();
        job.barrier().await.unwrap();
        // All of the arena is one mapping, made when the job was joined.
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let arenas = maps.lines().filter(|line| line.contains("posthaste")).count();
        assert_eq!(arenas, 1, "{maps}");
        let before = job.stats();
        for to in others(&job) {
            for number in 0..1000u64 {
                // Ready at once: no descriptor, no message, no help of the target.
                let mut put = std::pin::pin!(window.put(to, number as usize, number + 1));
                let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
                let ready = Future::poll(put.as_mut(), &mut cx);
                if ready.is_pending() {
                    // The task's budget was spent.
                    put.await.unwrap();
                }
            }
        }
        let after = job.stats();
        assert_eq!(after.one_sided, before.one_sided, "inline");
        assert_eq!(after.messages_sent, before.messages_sent);
        job.barrier().await.unwrap();
        assert_eq!(window.to_vec(), (1..=1024).map(|n| if n <= 1000 { n } else { 0 }).collect::<Vec<u64>>());
        job.barrier().await.unwrap();
    });
}

case!(m_w01_windows_are_freed_while_all_queues_are_full);
/// Over sockets the kernel keeps megabytes of messages, and each window would wait behind them for seconds.
fn m_w01_windows_are_freed_while_all_queues_are_full() {
    run(2, options().env("POSTHASTE_LANE_BYTES", "1024"), async |job| {
        let busy = job
            .register("busy", |_: Message, _: &mut Scope| {
                let until = Instant::now() + Duration::from_micros(10);
                while Instant::now() < until {
                    std::hint::spin_loop();
                }
            })
            .unwrap();
        let mut windows = Vec::new();
        for _ in 0..20 {
            windows.push(job.shmalloc::<u64>(8).await.unwrap());
        }
        job.barrier().await.unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        // More senders than places in the queue.
        let senders: Vec<_> = (0..600)
            .map(|_| {
                let (busy, stop, peer) = (busy.clone(), stop.clone(), Rank(1 - job.rank().0));
                tokio::spawn(async move {
                    while !stop.load(Ordering::Relaxed) {
                        busy.send(peer, [1; 100]).await.unwrap();
                    }
                })
            })
            .collect();
        for window in windows {
            soon("the free", window.free()).await.unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        for sender in senders {
            soon("the senders", sender).await.unwrap();
        }
        job.barrier().await.unwrap();
    });
}

case!(m_w05_whoever_puts_rings_who_sleeps_on_memory);
fn m_w05_whoever_puts_rings_who_sleeps_on_memory() {
    run(2, options(), async |job| {
        let (lines, _guard) = Lines::of_this_thread();
        // The first word is waited on; what was rung for is told in the second.
        let window = job.shmalloc::<u64>(64).await.unwrap();
        let source = job.region(8).await.unwrap();
        let peer = Rank(1 - job.rank().0);
        let pattern = job.record(|r| window.record_put(r, peer, 0, &source)).await.unwrap();
        let mut round = 0u64;
        let word = Datatype::of::<u64>();
        for way in 0..5 {
            // Whether the other one sleeps by then is its scheduler's business: once it does, it is rung.
            loop {
                round += 1;
                job.barrier().await.unwrap();
                if job.rank() == Rank(0) {
                    soon("the word", window.wait_until(0, |word| word == round)).await.unwrap();
                    let rung =
                        soon("the news", window.wait_until(1, |word| word >> 1 == round)).await.unwrap();
                    if rung & 1 == 1 {
                        break;
                    }
                    continue;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
                lines.take();
                match way {
                    0 => window.put(peer, 0, round).await.unwrap(),
                    1 => window.put_slice(peer, 0, &[round]).await.unwrap(),
                    2 => window.put_bytes(peer, 0, round.to_ne_bytes().to_vec().into()).await.unwrap(),
                    3 => {
                        let layout = Layout::new(&word, 1);
                        window.put_typed(peer, &layout, &[round], &layout).await.unwrap();
                    }
                    _ => {
                        source.write(0, &round.to_ne_bytes()).unwrap();
                        pattern.replay().await.unwrap();
                    }
                }
                let rung = lines.take().contains("bell rung");
                window.put(peer, 1, round << 1 | u64::from(rung)).await.unwrap();
                if rung {
                    break;
                }
            }
        }
        job.barrier().await.unwrap();
    });
}

case!(m_w02_words_of_a_long_put_through_a_fifo_are_whole);
fn m_w02_words_of_a_long_put_through_a_fifo_are_whole() {
    run(2, options(), async |job| {
        const LEN: usize = 256 << 10;
        let window = job.shmalloc::<u8>(LEN).await.unwrap();
        let done = job.shmalloc::<u32>(1).await.unwrap();
        if job.rank() == Rank(0) {
            let source = job.region(LEN).await.unwrap();
            let fifo = job.fifo(FifoOptions { quantum: 4096, ..FifoOptions::default() }).await.unwrap();
            // From within a word to within another: the parts that it goes in are none of the caller's business.
            let pattern =
                fifo.record(|r| r.put(&window, Rank(1), 3, source.slice(0..LEN - 8))).await.unwrap();
            for round in 0..200 {
                source.write(0, &vec![[0x11, 0xee][round % 2]; LEN]).unwrap();
                soon("a replay", pattern.replay()).await.unwrap();
            }
            done.atomic_store(Rank(1), 0, 1).await.unwrap();
        } else {
            let words = window.words::<u64>();
            let mut torn = Vec::new();
            while torn.is_empty() && done.load(0) == Some(0) {
                for at in (8..LEN as u64 - 8).step_by(8) {
                    let word = words.load(job.rank(), at).await.unwrap();
                    if word != word.rotate_left(8) {
                        torn.push((at, word));
                    }
                }
            }
            soon("the end", done.wait_until(0, |done| done == 1)).await.unwrap();
            assert_eq!(torn, [], "parts of words");
        }
        job.barrier().await.unwrap();
    });
}

case!(m_w02_concurrent_puts_and_gets_keep_aligned_words_whole);
/// Two ranks put to the same places of one of them at once, and get them meanwhile: any word is one of theirs, and none is made
/// of two.
fn m_w02_concurrent_puts_and_gets_keep_aligned_words_whole() {
    run(2, options(), async |job| {
        const LENS: [usize; 12] = [8, 12, 16, 31, 64, 72, 200, 1000, 4096, 20_000, 100_000, 400_000];
        const ROUNDS: usize = 400;
        // Every length from the beginning of a word, from within one, and from its middle.
        let mut end = 0;
        let places: Vec<_> = [0, 3, 4].into_iter().flat_map(|within| LENS.map(|len| (within, len))).collect();
        let places = places.into_iter().map(|(within, len)| {
            let start = end + within;
            end = (start + len).next_multiple_of(8);
            start..start + len
        });
        let places: Vec<_> = places.collect();
        let window = job.shmalloc::<u8>(end).await.unwrap();
        // Whether each has met what the other has put.
        let met = job.shmalloc::<u64>(2).await.unwrap();
        assert_eq!(window.atomicity(), 8);
        job.barrier().await.unwrap();
        let (me, mut buffer) = (job.rank().index(), vec![0; 400_008]);
        let sources = [[0x11, 0xee], [0x22, 0xdd]][me].map(|byte| vec![byte; 400_008]);
        let mut seen = [0u64; 256];
        let theirs = [[0x22, 0xdd], [0x11, 0xee]][me];
        let give_up = std::time::Instant::now() + std::time::Duration::from_secs(40);
        for round in 0.. {
            // One may be through with its rounds before the other gets a core.
            let both = [0, 1].map(|rank| met.load(rank)) == [Some(1); 2];
            if round >= ROUNDS && (both || std::time::Instant::now() > give_up) {
                break;
            }
            // The own end lies anywhere, too.
            let shift = round % 8;
            for place in &places {
                let source = &sources[round % 2][shift..shift + place.len()];
                window.put_slice(Rank(0), place.start, source).await.unwrap();
                let got = &mut buffer[shift..shift + place.len()];
                match (me, round % 3) {
                    (0, 0) => window.load_slice(place.start, got).unwrap(),
                    _ => window.get_to(Rank(0), place.start, got).await.unwrap(),
                }
                // Of words at the ends only a part was put.
                let first = (place.start.next_multiple_of(8) - place.start).min(got.len());
                for (at, word) in got[first..].as_chunks::<8>().0.iter().enumerate() {
                    assert_eq!(*word, [word[0]; 8], "word {at} of {place:?} in round {round}");
                    seen[usize::from(word[0])] += 1;
                }
            }
            if met.load(me) == Some(0) && theirs.iter().any(|byte| seen[*byte] > 0) {
                for rank in [Rank(0), Rank(1)] {
                    met.put(rank, me, 1).await.unwrap();
                }
            }
        }
        // Each has met what the other put.
        assert!(theirs.iter().any(|byte| seen[*byte] > 0), "they were not at it at the same time");
        job.barrier().await.unwrap();
    });
}

case!(m_w04_a_put_between_layouts_takes_its_turn_behind_what_is_queued);
/// A put between layouts is a copy of many pieces: where a replay waits for room before it, it waits, too, and so does what
/// comes behind it.
fn m_w04_a_put_between_layouts_takes_its_turn_behind_what_is_queued() {
    use futures::poll;
    use posthaste::datatype::{Datatype, Layout};
    // More than fits a lane whose reader is busy with something else.
    const MESSAGES: usize = 200_000;
    run(2, options(), async |job| {
        let window = job.shmalloc::<u64>(64).await.unwrap();
        let arrived = job.counter();
        let count = arrived.clone();
        let note = job.register("note", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
        let word = job.region(8).await.unwrap();
        word.write(0, &1u64.to_ne_bytes()).unwrap();
        let to = Rank(1);
        if job.rank() == Rank(0) {
            let pattern = job
                .record(|r| {
                    (0..MESSAGES).try_for_each(|_| r.send(&note, to, &word))?;
                    r.put(&window, to, 0, &word)
                })
                .await
                .unwrap();
            job.barrier().await.unwrap();
            let element = Datatype::of::<u64>();
            let strided = element.vector(8, 1, 2).unwrap();
            let (there, packed) = (Layout::new(&strided, 1), Layout::new(&element, 8));
            let mut replay = std::pin::pin!(pattern.replay());
            let mut put = std::pin::pin!(window.put_typed(to, &there, &[2u64; 8], &packed));
            let mut get = std::pin::pin!(window.get_typed(to, &there, vec![0u64; 8], &packed));
            let mut last = std::pin::pin!(window.put(to, 2, 3));
            let begun = (poll!(&mut replay), poll!(&mut put), poll!(&mut get), poll!(&mut last));
            assert!(begun.0.is_pending() && begun.1.is_pending(), "the reader sleeps");
            assert!(begun.2.is_pending() && begun.3.is_pending(), "and something precedes");
            let (replay, put, got, last) =
                soon("the operations", futures::future::join4(replay, put, get, last)).await;
            replay.unwrap();
            put.unwrap();
            last.unwrap();
            assert_eq!(got.unwrap(), [2; 8], "behind the put that precedes it, before the one that follows");
            assert_eq!(window.get_slice(to, 0, 4).await.unwrap(), [2, 0, 3, 0]);
            // Dropped once it has begun, it is done all the same; before that it is not. In a turn with a whole budget, lest it
            // not begin.
            tokio::task::yield_now().await;
            let mut replay = std::pin::pin!(pattern.replay());
            let never = window.put_typed(to, &there, &[9u64; 8], &packed);
            let mut begun = Box::pin(window.put_typed(to, &there.at(8), &[4u64; 8], &packed));
            assert!(poll!(&mut replay).is_pending() && poll!(&mut begun).is_pending());
            drop((never, begun));
            soon("the replay", replay).await.unwrap();
            assert_eq!(window.get_slice(to, 0, 5).await.unwrap(), [1, 4, 3, 4, 2]);
        } else {
            job.barrier().await.unwrap();
            for turn in 1..=2 {
                std::thread::sleep(std::time::Duration::from_millis(200));
                soon("the notes", arrived.reach(turn * MESSAGES as u64)).await;
            }
        }
        job.barrier().await.unwrap();
    });
}
