//! Windows of groups, and what holds for all windows.

use crate::support::{Transport, case, is_payload, options, own_file, payload, run, soon, transport, until};
use futures::StreamExt;
use futures::future::poll_immediate;
use posthaste::components::core::context::drive;
use posthaste::{Bytes, ContextId, Message, Rank, RmaError, Scope, WordUpdate};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

case!(m_w01_a_group_makes_a_new_one_that_owns_a_window_of_its_members_alone);
fn m_w01_a_group_makes_a_new_one_that_owns_a_window_of_its_members_alone() {
    run(4, options(), async |job| {
        // Ranks 3, 1 and 2, in this order; rank 0 takes no part and knows of nothing.
        let members = [Rank(3), Rank(1), Rank(2)];
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            return job.barrier().await.unwrap();
        }
        let group = job.collectives().subset(&members).await.unwrap();
        let lens = [100usize, 0, 7];
        let window = group.shmalloc::<u32>(lens[group.rank()]).await.unwrap();
        let own = window.group().unwrap();
        assert!(own.members() == members && own.id() != group.id(), "a new group of the same members");
        for (rank, len) in lens.into_iter().enumerate() {
            assert_eq!(window.len(Rank(rank as u32)), len);
            assert_eq!(window.rank_of(members[rank]), Some(Rank(rank as u32)));
        }
        assert_eq!((window.rank_of(Rank(0)), window.atomicity()), (None, 8));
        // Who has no part puts and gets, too; ranks are those of the group.
        let me = group.rank();
        window.put(Rank(0), 10 + me, 7 + me as u32).await.unwrap();
        window.add(Rank(2), 3, 1).await.unwrap();
        own.barrier().await.unwrap();
        assert_eq!(window.get_slice(Rank(0), 9, 5).await.unwrap(), [0, 7, 8, 9, 0]);
        assert_eq!(window.atomic_load(Rank(2), 3).await.unwrap(), 3);
        assert_eq!(window.load(10), [Some(7), None, None][me]);
        assert_eq!(window.store(6, 1), lens[me] > 6);
        let outside = RmaError::OutOfRange { rank: Rank(1), offset: 0, count: 4, len: 0 };
        assert_eq!(window.put(Rank(1), 0, 1).await, Err(outside));
        let unknown = RmaError::UnknownRank { rank: Rank(3), size: 3 };
        assert_eq!(window.get(Rank(3), 0).await.map(|_: u32| ()), Err(unknown));
        own.barrier().await.unwrap();
        // The group outlives its window, and may go before it.
        let freed = window.clone();
        drop(group);
        window.free().await.unwrap();
        assert!(matches!(freed.get(Rank(0), 0).await, Err(RmaError::NoSuchWindow(_))));
        // What is freed comes back as zeros, again and again.
        let group = freed.group().unwrap();
        for _ in 0..20 {
            let again = group.shmalloc::<u64>(1 << 17).await.unwrap();
            let right = Rank((me as u32 + 1) % 3);
            assert_eq!(again.get(right, 77).await.unwrap(), 0);
            group.barrier().await.unwrap();
            again.put(right, 77, u64::MAX).await.unwrap();
            again.free().await.unwrap();
        }
        job.barrier().await.unwrap();
    });
}

case!(m_w01_groups_that_overlap_make_windows_at_the_same_time);
fn m_w01_groups_that_overlap_make_windows_at_the_same_time() {
    run(4, options(), async |job| {
        let me = job.rank();
        let world = job.world();
        let half = world.split(Some(me.0 / 2), 0).await.unwrap().unwrap();
        let ends = world.split(Some(u32::from(me.0 == 1 || me.0 == 2)), 3 - me.0).await.unwrap().unwrap();
        for round in 0..30u64 {
            let (wide, near, far) =
                tokio::join!(world.shmalloc::<u64>(8), half.shmalloc::<u64>(4), ends.shmalloc::<u64>(2));
            let (wide, near, far) = (wide.unwrap(), near.unwrap(), far.unwrap());
            let (right, other) = (me.next(4), Rank(1 - half.rank() as u32));
            let opposite = Rank(1 - ends.rank() as u32);
            wide.put(right, 1, round + 1).await.unwrap();
            near.put(other, 1, round + 2).await.unwrap();
            far.put(opposite, 1, round + 3).await.unwrap();
            assert_eq!(wide.get(right, 1).await.unwrap(), round + 1);
            assert_eq!(near.get(other, 1).await.unwrap(), round + 2);
            assert_eq!(far.get(opposite, 1).await.unwrap(), round + 3);
            // Freed in another order on each rank: groups do not wait for each other.
            let (a, b, c) = match me.0 % 2 {
                0 => tokio::join!(wide.free(), near.free(), far.free()),
                _ => {
                    let (c, b, a) = tokio::join!(far.free(), near.free(), wide.free());
                    (a, b, c)
                }
            };
            a.and(b).and(c).unwrap();
        }
        job.barrier().await.unwrap();
    });
}

case!(m_w02_a_thread_of_the_owner_sees_words_of_short_puts_whole);
/// However the ranks reach each other: puts of up to 4 KiB keep words whole for whoever looks at them on another thread.
fn m_w02_a_thread_of_the_owner_sees_words_of_short_puts_whole() {
    run(2, options().workers(2), async |job| {
        const LENS: [usize; 8] = [1, 2, 3, 8, 33, 100, 511, 512];
        let window = Arc::new(job.shmalloc::<u64>(LENS.iter().sum()).await.unwrap());
        // Whether all is put, and whether all was seen.
        let done = Arc::new(job.shmalloc::<u64>(2).await.unwrap());
        let odd = job.shmalloc::<u8>(8).await.unwrap();
        assert_eq!(window.atomicity(), 8);
        if job.rank() == Rank(0) {
            job.barrier().await.unwrap();
            let values = [0x1111_1111_1111_1111, 0xeeee_eeee_eeee_eeee].map(|value: u64| [value; 512]);
            // More than sockets take at once, and bytes between the words: what comes ends anywhere within a word.
            let end = std::time::Instant::now() + std::time::Duration::from_secs(30);
            for batch in 0.. {
                let seen = done.get(Rank(1), 1).await.unwrap() == 1;
                if batch >= 60 && (seen || std::time::Instant::now() > end) {
                    break;
                }
                let mut puts = futures::stream::FuturesUnordered::new();
                for round in 0..64usize {
                    let mut first = 0;
                    for len in LENS {
                        let mut put = window.put_slice(Rank(1), first, &values[round % 2][..len]);
                        match futures::poll!(&mut put) {
                            Poll::Ready(result) => result.unwrap(),
                            Poll::Pending => puts.push(put),
                        }
                        first += len;
                    }
                    drop(odd.put_slice(Rank(1), 0, &[1; 7][..1 + round % 7]).local().await.unwrap());
                }
                while let Some(put) = puts.next().await {
                    put.unwrap();
                }
            }
            done.put(Rank(1), 0, 1).await.unwrap();
        } else {
            let (looking, stop) = (window.clone(), Arc::new(AtomicBool::new(false)));
            let (stops, tells) = (stop.clone(), done.clone());
            let looks = std::thread::spawn(move || {
                let (mut words, mut seen) = (vec![0u64; LENS.iter().sum()], [0u64; 256]);
                while !stops.load(Ordering::Relaxed) {
                    looking.load_slice(0, &mut words).unwrap();
                    for (at, word) in words.iter().enumerate() {
                        assert_eq!(*word, word.rotate_left(8), "word {at}");
                        seen[*word as usize & 0xff] += 1;
                    }
                    if seen[0x11] > 0 && seen[0xee] > 0 {
                        assert!(tells.store(1, 1), "an element of its own");
                    }
                }
                seen
            });
            job.barrier().await.unwrap();
            soon("the end", done.wait_until(0, |done| done == 1)).await.unwrap();
            stop.store(true, Ordering::Relaxed);
            let seen = looks.join().unwrap();
            assert!(seen[0x11] > 0 && seen[0xee] > 0, "it has looked amid the puts");
        }
        job.barrier().await.unwrap();
    });
}

case!(m_w03_offsets_are_in_bytes_and_an_ended_put_does_not_read_its_source);
fn m_w03_offsets_are_in_bytes_and_an_ended_put_does_not_read_its_source() {
    run(2, options(), async |job| {
        let world = job.world();
        let window = world.shmalloc::<u8>(1 << 20).await.unwrap();
        let words = job.shmalloc::<u64>(4).await.unwrap();
        let peer = Rank(1 - job.rank().0);
        // Words by index, their bytes by offset: the same memory.
        words.put(peer, 1, 0x0807_0605_0403_0201).await.unwrap();
        assert_eq!(words.bytes().get_slice(peer, 7, 10).await.unwrap(), [0, 1, 2, 3, 4, 5, 6, 7, 8, 0]);
        words.bytes().put(peer, 15, 0xff).await.unwrap();
        assert_eq!(words.get(peer, 1).await.unwrap(), 0xff07_0605_0403_0201);
        for len in [1usize, 8, 33, 5000, 700_000] {
            let mut bytes = payload(len as u64, len);
            let started = window.put_slice(peer, 5, &bytes).local().await.unwrap();
            bytes.fill(0);
            started.await.unwrap();
            // A get is there when it is ready.
            assert!(is_payload(len as u64, &window.get_slice(peer, 5, len).await.unwrap()), "{len} bytes");
            job.barrier().await.unwrap();
            let mut own = vec![0; len];
            window.load_slice(5, &mut own).unwrap();
            assert!(is_payload(len as u64, &own), "{len} bytes at the target");
            job.barrier().await.unwrap();
        }
        words.free().await.unwrap();
        window.free().await.unwrap();
    });
}

case!(m_w04_in_a_groups_window_too_puts_gets_and_sends_keep_their_order);
fn m_w04_in_a_groups_window_too_puts_gets_and_sends_keep_their_order() {
    for oversend in ["auto", "always"] {
        run(3, options().env("POSTHASTE_OVERSEND", oversend), async |job| {
            let group = job.collectives().subset(&[Rank(2), Rank(0), Rank(1)]).await.unwrap();
            let window = group.shmalloc::<u64>(200_000).await.unwrap();
            let arrived = job.counter();
            let (count, own) = (arrived.clone(), window.clone());
            let look = job
                .register("look", move |m: Message, _: &mut Scope| {
                    let number = m.read::<u64>(0).unwrap();
                    assert!(own.load(5).unwrap() >= number, "the message overtook the put");
                    count.add(1);
                })
                .unwrap();
            job.barrier().await.unwrap();
            if group.rank() == 1 {
                // The first of the group is rank 2 of the job.
                let (target, first) = (group.to_job(0).unwrap(), Rank(0));
                for number in 1..=400u64 {
                    let long = vec![number; if number % 100 == 0 { 150_000 } else { 3 }];
                    // The order in which they are polled is that of the program.
                    let (a, b, c, seen) = tokio::join!(
                        biased;
                        window.put_slice(first, 5, &long),
                        window.put(first, 6, 1),
                        window.put(first, 6, number + 10),
                        window.get_slice(first, 5, 3),
                    );
                    a.and(b).and(c).unwrap();
                    assert_eq!(seen.unwrap(), [number, number + 10, number]);
                    look.send(target, number.to_ne_bytes()).await.unwrap();
                }
                job.flush(target).await.unwrap();
            } else if group.rank() == 0 {
                soon("the messages", arrived.reach(400)).await;
                assert_eq!(job.stats().panics, 0);
            }
            job.barrier().await.unwrap();
            window.free().await.unwrap();
        });
    }
}

case!(m_w04_random_operations_that_are_under_way_at_once_keep_the_program_order);
/// Random operations on one target, begun one behind the other without waiting, against a model that does them in that order.
fn m_w04_random_operations_that_are_under_way_at_once_keep_the_program_order() {
    use futures::FutureExt;
    use futures::future::{LocalBoxFuture, join_all};
    use posthaste::datatype::{Datatype, Layout};
    const WORDS: usize = 60_000;
    for oversend in ["auto", "always"] {
        run(2, options().workers(2).env("POSTHASTE_OVERSEND", oversend), async |job| {
            let window = job.shmalloc::<u64>(WORDS).await.unwrap();
            let busy = Arc::new(job.shmalloc::<u64>(1).await.unwrap());
            if job.rank() == Rank(0) {
                let stop = Arc::new(AtomicBool::new(false));
                let beside = tokio::spawn(keep_busy(busy, Rank(1), stop.clone()));
                let (to, element) = (Rank(1), Datatype::of::<u64>());
                let mut model = vec![0u64; WORDS];
                for seed in 0..150u64 {
                    let mut random = random(seed);
                    let mut sources = Vec::new();
                    let mut plan = Vec::new();
                    for step in 0..24 {
                        let longest = [1, 3, 700, 40_000][random(4) as usize];
                        let len = 1 + random(longest) as usize;
                        // Most of them meet in one place.
                        let places = (WORDS - len) as u64 + 1;
                        let near = random(2) == 0;
                        let at = random(if near { places.min(8) } else { places });
                        let signal = random(WORDS as u64) as usize;
                        plan.push((random(7), at as usize, len, signal));
                        sources.push(vec![seed << 32 | step; len]);
                    }
                    let mut under_way: Vec<LocalBoxFuture<'_, ()>> = Vec::new();
                    for ((what, at, len, signal), source) in plan.into_iter().zip(&sources) {
                        let window = &window;
                        under_way.push(match what {
                            0 => {
                                model[at] = source[0];
                                async move { window.put(to, at, source[0]).await.unwrap() }.boxed_local()
                            }
                            1 => {
                                model[at..at + len].copy_from_slice(source);
                                async move { window.put_slice(to, at, source).await.unwrap() }.boxed_local()
                            }
                            2 => {
                                // Every other word of those from here on.
                                let count = (len / 2).max(1).min((WORDS - at).div_ceil(2));
                                for word in 0..count {
                                    model[at + 2 * word] = source[0];
                                }
                                let (element, source) = (&element, &source[..1]);
                                async move {
                                    let strided = element.vector(count as u64, 1, 2).unwrap();
                                    let values = vec![source[0]; count];
                                    let to_layout = Layout::new(&strided, 1).at(8 * at as u64);
                                    let from = Layout::new(element, count as u64);
                                    let put = match count % 2 {
                                        0 => window.put_typed(to, &to_layout, &values, &from),
                                        _ => {
                                            let owned = values.iter().flat_map(|value| value.to_ne_bytes());
                                            window.put_typed_bytes(to, &to_layout, owned.collect(), &from)
                                        }
                                    };
                                    put.await.unwrap();
                                }
                                .boxed_local()
                            }
                            6 => {
                                model[at..at + len].copy_from_slice(source);
                                model[signal] = source[0];
                                async move {
                                    let signal = window.signal_set(signal, source[0]);
                                    window.put_signal(to, at, source, signal).await.unwrap();
                                }
                                .boxed_local()
                            }
                            3 => {
                                let before = std::mem::replace(&mut model[at], source[0]);
                                async move {
                                    assert_eq!(
                                        window.swap(to, at, source[0]).await.unwrap(),
                                        before,
                                        "seed {seed}"
                                    );
                                }
                                .boxed_local()
                            }
                            4 => {
                                // Every other word, into a buffer of its own.
                                let count = (len / 2).max(1).min((WORDS - at).div_ceil(2));
                                let expected: Vec<u64> =
                                    (0..count).map(|word| model[at + 2 * word]).collect();
                                let element = &element;
                                async move {
                                    let strided = element.vector(count as u64, 1, 2).unwrap();
                                    let from = Layout::new(&strided, 1).at(8 * at as u64);
                                    let packed = Layout::new(element, count as u64);
                                    let got =
                                        window.get_typed(to, &from, vec![0; count], &packed).await.unwrap();
                                    assert!(got == expected, "seed {seed}: {count} every other at {at}");
                                }
                                .boxed_local()
                            }
                            _ => {
                                let expected = model[at..at + len].to_vec();
                                async move {
                                    let got = window.get_slice(to, at, len).await.unwrap();
                                    assert!(got == expected, "seed {seed}: {len} words at {at}");
                                }
                                .boxed_local()
                            }
                        });
                    }
                    join_all(under_way).await;
                }
                stop.store(true, Ordering::Relaxed);
                beside.await.unwrap();
                assert_eq!(window.get_slice(to, 0, WORDS).await.unwrap(), model);
            }
            job.barrier().await.unwrap();
        });
    }
}

/// Another task at the context.
pub async fn keep_busy(window: Arc<posthaste::Window<u64>>, to: Rank, stop: Arc<AtomicBool>) {
    for round in 0.. {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        window.put(to, 0, round).await.unwrap();
        assert_eq!(window.get(to, 0).await.unwrap(), round);
    }
}

case!(m_w04_nothing_that_is_begun_behind_a_put_with_a_signal_passes_the_signal);
/// Also while another task is at the context, which then begins both for the one that puts.
fn m_w04_nothing_that_is_begun_behind_a_put_with_a_signal_passes_the_signal() {
    for oversend in ["auto", "always"] {
        run(2, options().workers(2).env("POSTHASTE_OVERSEND", oversend), async |job| {
            let (data, flags) =
                (job.shmalloc::<u64>(8).await.unwrap(), job.shmalloc::<u64>(2).await.unwrap());
            let (flags, busy) = (Arc::new(flags), Arc::new(job.shmalloc::<u64>(1).await.unwrap()));
            let (own, count) = (flags.clone(), job.counter());
            let counted = count.clone();
            let look = job
                .register("look", move |m: Message, _: &mut Scope| {
                    let number = m.read::<u64>(0).unwrap();
                    assert!(own.load(1).unwrap() >= number, "the message has passed the signal");
                    counted.add(1);
                })
                .unwrap();
            job.barrier().await.unwrap();
            const ROUNDS: u64 = 2000;
            if job.rank() == Rank(0) {
                let to = Rank(1);
                let stop = Arc::new(AtomicBool::new(false));
                let beside = tokio::spawn(keep_busy(busy, to, stop.clone()));
                for round in 1..=ROUNDS {
                    let values = [round; 3];
                    // The order in which they are polled is that of the program.
                    let first = data.put_signal(to, 0, &values, flags.signal_set(0, 2 * round));
                    let (first, second) = tokio::join!(biased; first, flags.put(to, 0, 2 * round + 1));
                    first.and(second).unwrap();
                    assert_eq!(
                        flags.get(to, 0).await.unwrap(),
                        2 * round + 1,
                        "the put has passed the signal"
                    );
                    let first = data.put_signal(to, 4, &values, flags.signal_set(1, round));
                    let (first, second) = tokio::join!(biased; first, look.send(to, round.to_ne_bytes()));
                    first.unwrap();
                    second.unwrap();
                }
                stop.store(true, Ordering::Relaxed);
                beside.await.unwrap();
            } else {
                soon("all messages", count.reach(ROUNDS)).await;
            }
            job.barrier().await.unwrap();
        });
    }
}

case!(m_w04_no_put_passes_a_long_one_between_layouts);
/// Typed puts that are many messages, and what is put behind them while those are on their way.
fn m_w04_no_put_passes_a_long_one_between_layouts() {
    use posthaste::datatype::{Datatype, Layout};
    const COUNT: usize = 700_000;
    for oversend in ["auto", "always"] {
        // One message of a protocol with credit at a time.
        let options = options().env("POSTHASTE_OVERSEND", oversend).env("POSTHASTE_CREDITS", "1");
        run(2, options, async |job| {
            let window = job.shmalloc::<u64>(2 * COUNT).await.unwrap();
            if job.rank() == Rank(0) {
                let (to, element) = (Rank(1), Datatype::of::<u64>());
                let strided = element.vector(COUNT as u64, 1, 2).unwrap();
                let (to_layout, from) = (Layout::new(&strided, 1), Layout::new(&element, COUNT as u64));
                let last = 2 * COUNT - 2;
                for round in 1..=4u64 {
                    let (values, start) = (vec![round; COUNT], vec![100 + round; 4]);
                    let long = window.put_typed(to, &to_layout, &values, &from);
                    let [end, middle] = [last, last / 2].map(|at| window.put(to, at, 10 + round));
                    let start = window.put_slice(to, 0, &start);
                    // The order in which they are polled is that of the program.
                    let (long, end, middle, start) = tokio::join!(biased; long, end, middle, start);
                    long.unwrap();
                    end.and(middle).and(start).unwrap();
                    for (at, value) in
                        [(last, 10 + round), (last / 2, 10 + round), (0, 100 + round), (4, round)]
                    {
                        assert_eq!(window.get(to, at).await.unwrap(), value, "{at}");
                    }
                    // One that nobody waits for goes on, and keeps its place. In a turn with a whole budget, lest it not begin.
                    tokio::task::yield_now().await;
                    let values = vec![1000 + round; COUNT];
                    let mut dropped = Box::pin(window.put_typed(to, &to_layout, &values, &from));
                    assert!(!matches!(futures::poll!(dropped.as_mut()), std::task::Poll::Ready(Err(_))));
                    drop(dropped);
                    window.put(to, last, 0).await.unwrap();
                    for (at, value) in [(last, 0), (last - 2, 1000 + round), (0, 1000 + round)] {
                        assert_eq!(window.get(to, at).await.unwrap(), value, "{at}");
                    }
                }
            }
            job.barrier().await.unwrap();
        });
    }
}

case!(m_w04_nothing_that_changes_memory_passes_a_long_get);
/// What changes memory by whatever way takes its turn behind a long get, which may be asked for in many parts.
fn m_w04_nothing_that_changes_memory_passes_a_long_get() {
    use posthaste::datatype::{Datatype, Layout};
    // 24 MiB; of those behind the first half every other word is put by one message in several parts.
    const COUNT: usize = 3 << 20;
    const LONG: usize = COUNT / 2 - 100;
    for oversend in ["auto", "always"] {
        run(2, options().env("POSTHASTE_OVERSEND", oversend), async |job| {
            let window = job.shmalloc::<u64>(COUNT).await.unwrap();
            if job.rank() == Rank(0) {
                let (to, element) = (Rank(1), Datatype::of::<u64>());
                let strided = [2, LONG / 2].map(|count| element.vector(count as u64, 1, 2).unwrap());
                let packed = [2, LONG as u64 / 2].map(|count| Layout::new(&element, count));
                let few = Layout::new(&strided[0], 1).at(8 * (COUNT as u64 - 3));
                let many = Layout::new(&strided[1], 1).at(8 * (COUNT as u64 / 2));
                for round in 1..=3u64 {
                    let old = window.get_slice(to, 0, COUNT);
                    let (two, values) = ([round; 2], vec![round; LONG / 2]);
                    let short = window.put_typed(to, &few, &two, &packed[0]);
                    let long = window.put_typed(to, &many, &values, &packed[1]);
                    let put = window.put(to, COUNT - 10, round);
                    let add = window.fetch_add(to, COUNT - 20, 1);
                    let updates = (0..3).map(|at| (to, COUNT - 30 + at, round));
                    let each = window.update_each(WordUpdate::Replace, updates);
                    let (old, short, long, put, add, each) =
                        tokio::join!(biased; old, short, long, put, add, each);
                    short.and(long).unwrap();
                    put.and(each).unwrap();
                    assert_eq!(add.unwrap(), round - 1);
                    let wrong = old.unwrap().iter().position(|word| ![0, round - 1].contains(word));
                    assert_eq!(wrong, None, "round {round}: what came behind the get is in it");
                }
            }
            job.barrier().await.unwrap();
        });
    }
}

case!(m_w04_no_put_passes_a_long_get_between_layouts);
/// Typed gets that are many messages, and what is put behind them while those are on their way.
fn m_w04_no_put_passes_a_long_get_between_layouts() {
    use posthaste::datatype::{Datatype, Layout};
    const COUNT: usize = 700_000;
    for (oversend, answers) in [("auto", "256M"), ("always", "256M"), ("always", "200k")] {
        let options = options().env("POSTHASTE_OVERSEND", oversend).env("POSTHASTE_ANSWER_BYTES", answers);
        run(2, options, async |job| {
            let has_room = std::env::var("POSTHASTE_ANSWER_BYTES").unwrap() == "256M";
            let window = job.shmalloc::<u64>(2 * COUNT).await.unwrap();
            if job.rank() == Rank(0) {
                let (to, element) = (Rank(1), Datatype::of::<u64>());
                let strided = element.vector(COUNT as u64, 1, 2).unwrap();
                let (from, packed) = (Layout::new(&strided, 1), Layout::new(&element, COUNT as u64));
                let last = 2 * COUNT - 2;
                let mut expected = vec![0u64; COUNT];
                for round in 1..=3u64 {
                    let gets = (0..3).map(|_| window.get_typed(to, &from, vec![7; COUNT], &packed));
                    let gets = futures::future::join_all(gets);
                    let [end, middle] = [last, COUNT].map(|at| window.put(to, at, round));
                    let added = window.fetch_add(to, 0, 1);
                    let (got, end, middle, added) = futures::join!(gets, end, middle, added);
                    end.and(middle).unwrap();
                    assert_eq!(added, Ok(round - 1));
                    for got in got {
                        let got = got.unwrap();
                        // An owner that has no room for its answers does not say when it reads.
                        if has_room {
                            assert!(got == expected, "{round}: {:?}", (got[0], got[COUNT - 1]));
                        }
                    }
                    (expected[0], expected[COUNT - 1]) = (round, round);
                    expected[COUNT / 2] = round;
                }
                let got = window.get_typed(to, &from, vec![7; COUNT], &packed).await.unwrap();
                assert!(got == expected);
            }
            job.barrier().await.unwrap();
        });
    }
}

case!(m_w04_a_replay_that_waits_for_its_context_is_not_passed_by_a_put);
/// A replay that another thread starts, because that is at the context now, is not passed by what its task does behind it.
fn m_w04_a_replay_that_waits_for_its_context_is_not_passed_by_a_put() {
    run(2, options().workers(2), async |job| {
        let window = job.shmalloc::<u64>(1).await.unwrap();
        let source = job.region(8).await.unwrap();
        source.write(0, &1u64.to_ne_bytes()).unwrap();
        let (amid, peer) = (job.counter(), Rank(1));
        let count = amid.clone();
        let busy = job
            .register("busy", move |_: Message, _: &mut Scope| {
                count.add(1);
                std::thread::sleep(std::time::Duration::from_millis(60));
            })
            .unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            let pattern = job.record(|r| r.put(&window, peer, 0, &source)).await.unwrap();
            let (sender, me) = (busy.clone(), job.rank());
            let (mut waited, mut round, began) = (0, 0, std::time::Instant::now());
            // Whoever is at the context may be through before this task is let run again.
            while round < 10 || (waited == 0 && began.elapsed().as_secs() < 30) {
                round += 1;
                let sender = sender.clone();
                let sent = tokio::spawn(async move { sender.send(me, "sleep").await });
                // Without a turn at the context.
                while amid.value() < round {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                    tokio::task::yield_now().await;
                }
                let mut replay = Box::pin(pattern.replay().into_future());
                waited += u32::from(poll_immediate(&mut replay).await.is_none());
                window.put(peer, 0, 2).await.unwrap();
                let _ = futures::poll!(&mut replay);
                assert_eq!(soon("a get", window.get(peer, 0)).await, Ok(2), "round {round}");
                soon("the sending", sent).await.unwrap().unwrap();
            }
            assert!(waited > 0, "somebody was at the context");
        }
        job.barrier().await.unwrap();
    });
}

case!(m_w04_a_put_between_layouts_waits_for_no_message_that_is_held);
/// A typed put that is a message does not wait behind one that has to wait for its name, as no other put does.
fn m_w04_a_put_between_layouts_waits_for_no_message_that_is_held() {
    use posthaste::datatype::{Datatype, Layout};
    for oversend in ["auto", "always"] {
        run(2, options().env("POSTHASTE_OVERSEND", oversend), async |job| {
            let window = job.shmalloc::<u64>(4).await.unwrap();
            let seen = job.counter();
            let count = seen.clone();
            let register = || job.register("late", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
            if job.rank() == Rank(0) {
                let (to, element) = (Rank(1), Datatype::of::<u64>());
                let pair = element.vector(2, 1, 2).unwrap();
                register().send(to, "held").await.unwrap();
                let (to_layout, from) = (Layout::new(&pair, 1), Layout::new(&element, 2));
                let typed = window.put_typed(to, &to_layout, &[1u64, 1], &from);
                let (typed, plain) = tokio::join!(biased; typed, window.put(to, 0, 2));
                typed.and(plain.map_err(Into::into)).unwrap();
                window.put(to, 3, 1).await.unwrap();
            } else {
                soon("the last put", window.wait_until(3, |word| word == 1)).await.unwrap();
                assert_eq!((window.load(0), window.load(2)), (Some(2), Some(1)));
                let _late = register();
                soon("the held message", seen.reach(1)).await;
            }
            job.barrier().await.unwrap();
        });
    }
}

fn random(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move |below| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below.max(1)
    }
}

/// Bytes of the process's own memory, which windows are not.
fn private_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

case!(m_w06_a_put_goes_straight_from_the_socket_to_its_window);
fn m_w06_a_put_goes_straight_from_the_socket_to_its_window() {
    run(2, options(), async |job| {
        const LEN: usize = 64 << 20;
        let group = job.collectives().subset(&[Rank(1), Rank(0)]).await.unwrap();
        let window = group.shmalloc::<u8>(LEN).await.unwrap();
        let peer = Rank(1 - group.rank() as u32);
        if group.rank() == 0 {
            let bytes = Bytes::from(payload(9, LEN));
            window.put_bytes(peer, 0, bytes).await.unwrap();
            job.barrier().await.unwrap();
        } else {
            let before = private_bytes();
            let mut most = before;
            // Looked at while the bytes come in: they are nowhere but in their place.
            let barrier = job.barrier();
            let mut barrier = std::pin::pin!(barrier);
            while tokio::time::timeout(std::time::Duration::from_millis(1), &mut barrier).await.is_err() {
                most = most.max(private_bytes());
            }
            assert!(most < before + (LEN as u64) / 4, "{} bytes besides the window", most - before);
            assert!(is_payload(9, &window.to_vec()), "what has come");
        }
        if transport() == Transport::Shm {
            assert!(job.caps().mappable, "here it is a copy of the sender's");
        }
        window.free().await.unwrap();
    });
}

case!(a_put_that_waits_for_its_context_is_not_passed_by_a_later_one);
fn a_put_that_waits_for_its_context_is_not_passed_by_a_later_one() {
    // Names a file, which tells the busy peer to go on.
    const GO: &str = "POSTHASTE_TEST_GO";
    let go = own_file("put-waits");
    // A narrow lane: what a busy peer does not take waits here.
    let narrow = options().contexts(2).env("POSTHASTE_LANE_BYTES", "1024").env(GO, go.to_str().unwrap());
    run(2, narrow, async |job| {
        const SENDS: u64 = 200;
        let (arrived, peer) = (job.counter(), Rank(1));
        let count = arrived.clone();
        let message = job
            .register("busy", move |_: Message, _: &mut Scope| {
                let told = || std::path::Path::new(&std::env::var(GO).unwrap()).exists();
                while count.value() == 0 && !told() {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
                count.add(1);
            })
            .unwrap();
        let window = job.shmalloc::<u64>(4).await.unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            let context = job.own_context(ContextId(1)).expect("free");
            let source = job.region(8).await.unwrap();
            let pattern = job.record(|r| window.record_put(r, peer, 0, &source)).await.unwrap();
            let through = window.through(job.context_handle(ContextId(1)).unwrap());
            let through = drive(&context, through).await.unwrap();
            let mut queued = Vec::new();
            for number in 0..SENDS {
                let mut send = Box::pin(message.send(peer, number.to_ne_bytes()));
                match tokio::task::unconstrained(poll_immediate(&mut send)).await {
                    Some(sent) => sent.unwrap(),
                    None => queued.push(send),
                }
            }
            // Behind the messages, so that no put is done at once until it is.
            let mut replay = Box::pin(pattern.replay().into_future());
            let replayed = poll_immediate(&mut replay).await;
            until("the replay is begun", || job.stats().replays == 1).await;
            // The context is not driven now: the first waits for it, and the second comes when nothing is queued any more.
            let mut first = Box::pin(through.put(peer, 1, 1));
            assert!(poll_immediate(&mut first).await.is_none(), "nothing was queued");
            std::fs::write(std::env::var(GO).unwrap(), "go").unwrap();
            for send in queued {
                soon("the sends", send).await.unwrap();
            }
            if replayed.is_none() {
                soon("the replay", replay).await.unwrap();
            }
            let mut second = Box::pin(through.put(peer, 1, 2));
            assert!(poll_immediate(&mut second).await.is_none(), "it has passed the first");
            let both = drive(&context, async { futures::future::join(first, second).await });
            let (first, second) = soon("the puts", both).await;
            first.and(second).unwrap();
            assert_eq!(soon("a get", drive(&context, through.get(peer, 1))).await, Ok(2));
        } else {
            soon("all messages", arrived.reach(SENDS)).await;
        }
        job.barrier().await.unwrap();
        assert_eq!(window.load(1), Some(if job.rank() == peer { 2 } else { 0 }));
        window.free().await.unwrap();
    });
    std::fs::remove_file(go).unwrap();
}

case!(m_w01_a_ranks_own_part_is_a_slice_while_nobody_else_uses_it);
fn m_w01_a_ranks_own_part_is_a_slice_while_nobody_else_uses_it() {
    run(3, options(), async |job| {
        const LEN: usize = 1000;
        let (me, right) = (job.rank(), job.rank().next(job.size()));
        let window = job.shmalloc::<u64>(LEN).await.unwrap();
        let value = |rank: Rank, at: usize| u64::from(rank.0) << 32 | at as u64;
        let memory = window.own_memory().unwrap();
        // SAFETY: until the barrier nobody but this rank uses its part, and the slice is not used behind that.
        let own = unsafe { memory.as_slice::<u64>() }.unwrap();
        assert_eq!(*own, [0; LEN]);
        own.iter_mut().enumerate().for_each(|(at, word)| *word = value(me, at));
        job.barrier().await.unwrap();
        let theirs = window.get_slice(right, 0, LEN).await.unwrap();
        assert!(theirs.into_iter().eq((0..LEN).map(|at| value(right, at))));
        job.barrier().await.unwrap();
        window.put_slice(right, 3, &[7, 8, 9]).await.unwrap();
        job.barrier().await.unwrap();
        // SAFETY: all puts have ended before the barrier, and nothing else is done to the window until it is freed.
        let own = unsafe { memory.as_slice::<u64>() }.unwrap();
        assert_eq!(
            (&own[..3], &own[3..6], own[6]),
            (&[0, 1, 2].map(|at| value(me, at))[..], &[7, 8, 9][..], value(me, 6))
        );
        // Elements that do not fit whole are left out, and what is not aligned for them is none.
        let part = memory.slice(8, 20).unwrap();
        // SAFETY: as above; the other slice is not used any more.
        let (words, halves) =
            unsafe { (part.as_slice::<u64>().map(|words| words.len()), part.as_slice::<u32>()) };
        assert_eq!((words, halves.map(|halves| halves.len())), (Some(2), Some(5)));
        let odd = memory.slice(3, 40).unwrap();
        // SAFETY: nothing is made of memory that is not aligned.
        assert!(unsafe { odd.as_slice::<u16>() }.is_none());
        job.barrier().await.unwrap();
    });
}
