//! Atomic operations, waiting on words, and puts that signal.

use crate::support::{case, here, is_payload, options, payload, run, run_as, soon};
use posthaste::{ContextId, Job, Message, Rank, Reduce, RegionKey, RmaError, Scope, WordUpdate};
use std::time::Duration;

case!(m_w02_words_are_changed_atomically_by_all_ranks_and_by_their_owner);
fn m_w02_words_are_changed_atomically_by_all_ranks_and_by_their_owner() {
    run(4, options(), async |job| {
        const EACH: u64 = 3000;
        let (me, size) = (job.rank(), job.size() as u64);
        let window = job.shmalloc::<u64>(8).await.unwrap();
        let bytes = window.bytes();
        assert_eq!(window.atomicity(), 8);
        // All of them, the owner of the words among them, draw numbers from one word and count in halves of another.
        let mut drawn = Vec::new();
        for n in 0..EACH {
            drawn.push(window.fetch_add(Rank(1), 3, 1).await.unwrap());
            bytes.words::<u32>().add(Rank(1), 32 + 4 * (n % 2), 1).await.unwrap();
            window.xor(Rank(1), 5, 1 << (me.0 * 16)).await.unwrap();
        }
        assert!(drawn.windows(2).all(|pair| pair[0] < pair[1]), "a word only grows");
        job.barrier().await.unwrap();
        let ours: u64 = drawn.iter().sum();
        let sums = job.all_gather(&ours.to_le_bytes()).await.unwrap();
        let sum: u64 = sums.iter().map(|sum| u64::from_le_bytes(sum[..].try_into().unwrap())).sum();
        let all = EACH * size;
        assert_eq!(sum, all * (all - 1) / 2, "every number was drawn once");
        assert_eq!(window.atomic_load(Rank(1), 3).await.unwrap(), all);
        let half = bytes.words::<u32>().load(Rank(1), 36).await.unwrap();
        assert_eq!(u64::from(half), all / 2);
        assert_eq!(window.get(Rank(1), 5).await.unwrap(), 0, "each bit was flipped an even number of times");
        job.barrier().await.unwrap();
        window.free().await.unwrap();
    });
}

case!(m_w02_each_operation_gives_the_old_value);
fn m_w02_each_operation_gives_the_old_value() {
    run(2, options(), async |job| {
        let window = job.shmalloc::<i64>(4).await.unwrap();
        let to = Rank(1 - job.rank().0);
        assert_eq!(window.fetch_add(to, 1, -5).await.unwrap(), 0);
        assert_eq!(window.swap(to, 1, 12).await.unwrap(), -5);
        assert_eq!(window.fetch_and(to, 1, 6).await.unwrap(), 12);
        assert_eq!(window.fetch_or(to, 1, 3).await.unwrap(), 4);
        assert_eq!(window.fetch_xor(to, 1, -1).await.unwrap(), 7);
        assert_eq!(window.compare_swap(to, 1, 7, 1).await.unwrap(), -8, "it is not what was expected");
        assert_eq!(window.compare_swap(to, 1, -8, i64::MAX).await.unwrap(), -8);
        window.add(to, 1, 1).await.unwrap();
        assert_eq!(window.atomic_load(to, 1).await.unwrap(), i64::MIN, "sums wrap around");
        window.atomic_store(to, 1, 0b1100).await.unwrap();
        window.and(to, 1, 0b0110).await.unwrap();
        window.or(to, 1, 0b0001).await.unwrap();
        window.xor(to, 1, 0b0011).await.unwrap();
        assert_eq!(window.get(to, 1).await.unwrap(), 0b0110);
        let words = window.bytes();
        let misaligned = RmaError::Misaligned { rank: to, offset: 12, len: 8 };
        assert_eq!(words.words::<u64>().add(to, 12, 1).await, Err(misaligned));
        assert_eq!(words.words::<u32>().fetch_add(to, 12, 0).await, Ok(0));
        let outside = RmaError::OutOfRange { rank: to, offset: 32, count: 8, len: 32 };
        assert_eq!(window.fetch_add(to, 4, 1).await, Err(outside));
        assert_eq!(window.add(Rank(2), 0, 1).await, Err(RmaError::UnknownRank { rank: Rank(2), size: 2 }));
        job.barrier().await.unwrap();
        let freed = window.clone();
        window.free().await.unwrap();
        assert!(matches!(freed.swap(to, 0, 1).await, Err(RmaError::NoSuchWindow(_))));
        job.barrier().await.unwrap();
    });
}

/// Updates of random words by a rank, the same whoever asks: (rank, index, value).
fn updates_of(me: u32, size: u32, words: usize, count: usize) -> impl Iterator<Item = (Rank, usize, u64)> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(u64::from(me) + 1);
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (Rank((state >> 40) as u32 % size), (state >> 20) as usize % words, state)
    })
    .take(count)
}

/// Updates many words by one call, by all ranks at once.
async fn many_updates(job: Job) {
    const WORDS: usize = 50;
    let (me, size) = (job.rank(), job.size() as u32);
    let window = job.shmalloc::<u64>(WORDS + 1).await.unwrap();
    // More than are under way at once, and more than a step; by all ranks at once.
    for (round, count) in [0, 1, 15, 16, 17, 300, 1000].into_iter().enumerate() {
        let kinds = [WordUpdate::Add, WordUpdate::Xor, WordUpdate::Or, WordUpdate::And];
        let update = kinds[round % kinds.len()];
        // What several ranks do to a word gives the same in any order, as all of them do the same kind.
        let mut expected = window.to_vec();
        job.barrier().await.unwrap();
        window.update_each(update, updates_of(me.0, size, WORDS, count)).await.unwrap();
        job.barrier().await.unwrap();
        for (rank, at, value) in (0..size).flat_map(|rank| updates_of(rank, size, WORDS, count)) {
            if rank == me {
                let word = &mut expected[at];
                *word = match update {
                    WordUpdate::Add => word.wrapping_add(value),
                    WordUpdate::Xor => *word ^ value,
                    WordUpdate::Or => *word | value,
                    _ => *word & value,
                };
            }
        }
        assert_eq!(window.to_vec(), expected, "{count} times {update:?}");
    }
    // Numbers that are drawn from one word come in the order of the call, and each once.
    job.barrier().await.unwrap();
    let drawn = window.fetch_each(WordUpdate::Add, (0..700).map(|_| (Rank(1), WORDS, 1))).await.unwrap();
    assert_eq!(drawn.len(), 700);
    let ours: u64 = drawn.iter().sum();
    let sum = job.world().all_reduce_one(ours, &Reduce::sum()).await.unwrap();
    let all = 700 * u64::from(size);
    assert_eq!(sum, all * (all - 1) / 2, "every number was drawn once");
    // Old values are in the places of their updates, whatever ranks those go to.
    let right = me.next(job.size());
    let places = (0..WORDS).map(|at| (if at % 2 == 0 { me } else { right }, at));
    let mut before = window.to_vec();
    for (at, word) in window.get_slice(right, 0, WORDS).await.unwrap().into_iter().enumerate() {
        if at % 2 == 1 {
            before[at] = word;
        }
    }
    job.barrier().await.unwrap();
    let swaps = places.clone().map(|(rank, at)| (rank, at, at as u64));
    assert_eq!(window.fetch_each(WordUpdate::Replace, swaps).await.unwrap(), before[..WORDS]);
    job.barrier().await.unwrap();
    assert_eq!(window.to_vec()[..WORDS], (0..WORDS as u64).collect::<Vec<_>>());
    job.barrier().await.unwrap();
    let halves = window.bytes();
    let halves = halves.words::<u32>();
    let counted = (0..600).map(|number| (Rank(0), 4 + 8 * (number % 10), 1));
    halves.update_each(WordUpdate::Add, counted).await.unwrap();
    let own = [(right, 40, 7), (right, 44, 9)];
    job.barrier().await.unwrap();
    if me == Rank(0) {
        let highs: Vec<u64> = window.to_vec()[..10].iter().map(|word| word >> 32).collect();
        assert_eq!(highs, [60 * u64::from(size); 10]);
    }
    job.barrier().await.unwrap();
    halves.update_each(WordUpdate::Replace, own).await.unwrap();
    job.barrier().await.unwrap();
    assert_eq!(window.load(5), Some(7 | 9 << 32));
    // The first that cannot be done ends it: nothing behind it is begun.
    let outside = RmaError::OutOfRange { rank: right, offset: 408, count: 8, len: 408 };
    let wrong = [(right, 1, 5), (right, WORDS + 1, 1), (right, 2, 5)];
    assert_eq!(window.update_each(WordUpdate::Replace, wrong).await, Err(outside));
    let unknown = RmaError::UnknownRank { rank: Rank(size), size };
    assert_eq!(window.fetch_each(WordUpdate::Add, [(Rank(size), 0, 1)]).await, Err(unknown));
    let misaligned = RmaError::Misaligned { rank: right, offset: 2, len: 4 };
    assert_eq!(halves.fetch_each(WordUpdate::Add, [(right, 2, 1)]).await, Err(misaligned));
    job.barrier().await.unwrap();
    assert_eq!(window.load(2).map(|word| word as u32), Some(2));
    let freed = window.clone();
    window.free().await.unwrap();
    let late = freed.update_each(WordUpdate::Add, [(right, 0, 1)]).await;
    assert!(matches!(late, Err(RmaError::NoSuchWindow(_))), "{late:?}");
    job.barrier().await.unwrap();
}

case!(m_w02_many_updates_by_one_call_do_what_single_ones_do);
fn m_w02_many_updates_by_one_call_do_what_single_ones_do() {
    run_as(here!(), 4, options(), many_updates);
}

case!(m_w02_many_updates_by_one_call_do_the_same_over_sends);
/// The words are mapped, and may nevertheless not be changed at once.
fn m_w02_many_updates_by_one_call_do_the_same_over_sends() {
    let over_send = options().env("POSTHASTE_OVERSEND", "always");
    run_as(here!(), 4, over_send, many_updates);
}

case!(m_w04_atomic_operations_keep_the_program_order_of_puts_gets_and_sends);
fn m_w04_atomic_operations_keep_the_program_order_of_puts_gets_and_sends() {
    for oversend in ["auto", "always"] {
        run(2, options().env("POSTHASTE_OVERSEND", oversend), async |job| {
            let window = job.shmalloc::<u64>(1 << 17).await.unwrap();
            let arrived = job.counter();
            let (count, own) = (arrived.clone(), window.clone());
            let message = job
                .register("look", move |m: Message, _: &mut Scope| {
                    let number = m.read::<u64>(0).unwrap();
                    assert!(own.load(0).unwrap() >= number, "the message overtook the operation");
                    count.add(1);
                })
                .unwrap();
            job.barrier().await.unwrap();
            if job.rank() == Rank(0) {
                let long = vec![7u64; 100_000];
                for number in 1..=300u64 {
                    // Nothing of this is awaited before the next is started.
                    let put = window.put_slice(Rank(1), 10, if number % 50 == 0 { &long } else { &[7; 3] });
                    let put = put.local().await.unwrap();
                    let (old, first, there) = tokio::join!(
                        biased;
                        window.fetch_add(Rank(1), 10, 1),
                        window.put(Rank(1), 10, 70),
                        window.fetch_add(Rank(1), 10, 1),
                    );
                    assert_eq!((old.unwrap(), there.unwrap()), (7, 70), "round {number}");
                    first.unwrap();
                    put.await.unwrap();
                    window.add(Rank(1), 0, 1).await.unwrap();
                    message.send(Rank(1), number.to_ne_bytes()).await.unwrap();
                }
                assert_eq!(window.get(Rank(1), 10).await.unwrap(), 71);
            } else {
                soon("the messages", arrived.reach(300)).await;
                assert_eq!(job.stats().panics, 0);
            }
            job.barrier().await.unwrap();
        });
    }
}

case!(m_d31_a_put_with_a_signal_is_there_when_its_signal_is);
fn m_d31_a_put_with_a_signal_is_there_when_its_signal_is() {
    for oversend in ["auto", "always"] {
        run(2, options().env("POSTHASTE_OVERSEND", oversend), async |job| {
            let (data, arrived) =
                (job.shmalloc::<u8>(1 << 20).await.unwrap(), job.shmalloc::<u32>(4).await.unwrap());
            let peer = Rank(1 - job.rank().0);
            let lens = [0usize, 1, 8, 100, 5000, 300_000];
            for round in 0..60u32 {
                let len = lens[round as usize % lens.len()];
                let seed = |rank: Rank| u64::from(round * 2 + rank.0);
                let bytes = payload(seed(job.rank()), len);
                let signal = match round % 2 {
                    0 => arrived.signal_add(1, round + 1),
                    _ => arrived.signal_set(1, round + 1),
                };
                data.put_signal(peer, 3, &bytes, signal).await.unwrap();
                let seen =
                    soon("the signal", arrived.wait_until(1, |value| value == round + 1)).await.unwrap();
                assert_eq!(seen, round + 1);
                let mut got = vec![0; len];
                data.load_slice(3, &mut got).unwrap();
                assert!(is_payload(seed(peer), &got), "{len} bytes in round {round}");
                assert!(arrived.store(1, 0));
                // Both have seen it before the next one comes.
                job.barrier().await.unwrap();
            }
            let outside = data.put_signal(peer, 1 << 20, &[1], arrived.signal_add(2, 1)).await;
            assert!(matches!(outside, Err(RmaError::OutOfRange { .. })));
            job.barrier().await.unwrap();
            let before = data.load(0);
            job.barrier().await.unwrap();
            let nowhere = data.put_signal(peer, 0, &[before.unwrap() ^ 1], arrived.signal_add(4, 1)).await;
            assert!(matches!(nowhere, Err(RmaError::OutOfRange { .. })));
            let bytes = job.shmalloc::<u8>(64).await.unwrap();
            let askew = bytes.words::<u32>().signal_add(5, 1);
            let nowhere = data.put_signal(peer, 0, &[before.unwrap() ^ 1], askew).await;
            assert!(matches!(nowhere, Err(RmaError::Misaligned { .. })));
            job.barrier().await.unwrap();
            assert_eq!(arrived.load(2), Some(0), "no signal of a put that was refused");
            assert_eq!(data.load(0), before, "and no data of one whose signal was");
            // A word of a region: of whom else, is refused.
            let flags = job.region(64).await.unwrap();
            let offsets = job.world().all_gather(&[flags.key().offset]).await.unwrap();
            let key = RegionKey { rank: peer, offset: offsets[peer.index()], ..flags.key() };
            let remote = job.remote_region(key).await.unwrap();
            let counted = remote.words::<u64>().signal_add(16, 5);
            data.put_signal(peer, 0, &[before.unwrap() ^ 1], counted).await.unwrap();
            assert_eq!(soon("the signal", flags.wait_until(16, |word: u64| word != 0)).await, Ok(5));
            assert_eq!(data.load(0), before.map(|before| before ^ 1));
            let own = job.rank();
            let error = data.put_signal(own, 0, &[1], counted).await.unwrap_err();
            assert_eq!(error, RmaError::SignalElsewhere { data: own, signal: peer });
            job.barrier().await.unwrap();
        });
    }
}

case!(m_d31_puts_with_signals_reach_regions_and_patterns_put_and_get_there_too);
fn m_d31_puts_with_signals_reach_regions_and_patterns_put_and_get_there_too() {
    for oversend in ["auto", "always"] {
        run(2, options().env("POSTHASTE_OVERSEND", oversend), async |job| {
            let peer = Rank(1 - job.rank().0);
            let (region, source, mirror) = (
                job.region(400_000).await.unwrap(),
                job.region(8000).await.unwrap(),
                job.region(8000).await.unwrap(),
            );
            let keys = job.world().all_gather(&[region.key()]).await.unwrap();
            let remote = job.remote_region(keys[peer.index()]).await.unwrap();
            assert_eq!(remote.owner(), peer);
            // Words 0 and 8 of the region count what came by calls, and by replays.
            for (round, len) in [1usize, 8, 5000, 300_000, 300_000, 300_000].into_iter().enumerate() {
                // One waits already as the other puts: a signal that is ahead is seen ahead.
                for putter in [Rank(0), Rank(1)] {
                    if job.rank() == putter {
                        let bytes = payload(round as u64, len);
                        let signal = remote.words::<u64>().signal_add(0, len as u64);
                        remote.put_signal(64, &bytes, signal).await.unwrap();
                    } else {
                        let come = region.wait_until(0, |come: u64| come == len as u64);
                        soon("the signal", come).await.unwrap();
                        let mut got = vec![0; len];
                        region.read(64, &mut got).unwrap();
                        assert!(is_payload(round as u64, &got), "{len} bytes");
                        region.write(0, &[0; 8]).unwrap();
                    }
                    job.barrier().await.unwrap();
                }
            }
            let pattern = job
                .record(|recorder| {
                    recorder.put_region(&remote, 1000, source.slice(0..8000))?;
                    recorder.get_region(&remote, 1000, mirror.slice(0..4000))?;
                    recorder.get_region(&remote, 5000, mirror.slice(4000..8000))
                })
                .await
                .unwrap();
            for round in 0..5 {
                source.write(0, &payload(100 + round, 8000)).unwrap();
                soon("a replay", pattern.replay()).await.unwrap();
                remote.words::<u64>().add(peer, 8, 1).await.unwrap();
                soon("the other's", region.wait_until(8, |rounds: u64| rounds > round)).await.unwrap();
                let mut got = vec![0; 8000];
                for read in [&mirror, &region] {
                    let at = if read.len() > 8000 { 1000 } else { 0 };
                    read.read(at, &mut got).unwrap();
                    assert!(is_payload(100 + round, &got), "round {round}");
                }
                job.barrier().await.unwrap();
            }
            let beyond = job.record(|recorder| recorder.put_region(&remote, 399_000, &source)).await;
            assert!(beyond.expect_err("it is too long").to_string().contains("outside the part"));
            // Whose word it is not, waits for nothing; nor is there half a word.
            let theirs = remote.words::<u64>().wait_until(0, |_| true).await;
            assert_eq!(theirs, Err(RmaError::NotTheOwner { rank: job.rank(), owner: peer }));
            let askew = region.wait_until(4, |_: u64| true).await;
            assert!(matches!(askew, Err(RmaError::Misaligned { offset: 4, len: 8, .. })), "{askew:?}");
            let nowhere = region.wait_until(400_000, |_: u32| true).await;
            assert!(matches!(nowhere, Err(RmaError::OutOfRange { .. })), "{nowhere:?}");
            job.barrier().await.unwrap();
        });
    }
}

case!(m_w04_a_word_of_a_windows_bytes_is_awaited);
fn m_w04_a_word_of_a_windows_bytes_is_awaited() {
    run(2, options(), async |job| {
        let peer = Rank(1 - job.rank().0);
        let window = job.shmalloc::<u8>(5000).await.unwrap();
        let words = window.words::<u32>();
        for round in 1..=200u32 {
            let bytes = [round as u8; 4000];
            window.put_signal(peer, 900, &bytes, words.signal_set(12, round)).await.unwrap();
            soon("the signal", words.wait_until(12, |last| last >= round)).await.unwrap();
            assert_eq!(window.load(900 + 3999), Some(round as u8), "the signal was ahead of its put");
            job.barrier().await.unwrap();
        }
        let askew = words.wait_until(13, |_| true).await;
        assert!(matches!(askew, Err(RmaError::Misaligned { offset: 13, len: 4, .. })), "{askew:?}");
        let nowhere = words.wait_until(5000, |_| true).await;
        assert!(matches!(nowhere, Err(RmaError::OutOfRange { .. })), "{nowhere:?}");
        let view = window.clone();
        let waits = async { view.words::<u32>().wait_until(16, |value| value != 0).await };
        let (end, freed) = tokio::join!(waits, window.free());
        freed.unwrap();
        assert!(matches!(end, Err(RmaError::NoSuchWindow(_))), "{end:?}");
    });
}

case!(error_a_signal_to_another_rank_than_its_data_is_refused);
fn error_a_signal_to_another_rank_than_its_data_is_refused() {
    run(3, options(), async |job| {
        let me = job.rank().0;
        let state = job.shmalloc::<u64>(1).await.unwrap();
        // Ranks 1 and 2 are 0 and 1 of their group.
        let team = job.world().split(Some(u32::from(me > 0)), 0).await.unwrap().unwrap();
        let data = team.shmalloc::<u64>(8).await.unwrap();
        let source = job.region(8).await.unwrap();
        if me > 0 {
            let [theirs, own] = [Rank(1), Rank(0)];
            let error = data.put_signal(own, 0, &[7], state.signal_add(0, 1)).await.unwrap_err();
            assert_eq!(error, RmaError::SignalElsewhere { data: Rank(1), signal: Rank(0) });
            let recorded =
                job.record(|r| r.put_signal(&data, theirs, 0, &source, state.signal_add(0, 1))).await;
            let told = RmaError::SignalElsewhere { data: Rank(2), signal: Rank(1) };
            let error = recorded.expect_err("it is refused").to_string();
            assert!(error.contains(&told.to_string()), "{error}");
        }
        job.barrier().await.unwrap();
        assert!(
            data.to_vec().iter().all(|word| *word == 0) && state.load(0) == Some(0),
            "something was done"
        );
        // A word of a region has a rank of the job; it is compared with whom the data goes to, whatever the group calls it.
        let flags = job.region(64).await.unwrap();
        let offsets = job.world().all_gather(&[flags.key().offset]).await.unwrap();
        if me > 0 {
            let (peer, place) = (Rank(3 - me), Rank(2 - me));
            let key = RegionKey { rank: peer, offset: offsets[peer.index()], ..flags.key() };
            let remote = job.remote_region(key).await.unwrap();
            let words = remote.words::<u64>();
            data.put_signal(place, 1, &[9], words.signal_add(8, 2)).await.unwrap();
            let step = job.record(|r| r.put_signal(&data, place, 2, &source, words.signal_add(8, 3))).await;
            step.unwrap().replay().await.unwrap();
            let error = data.put_signal(Rank(me - 1), 0, &[7], words.signal_add(8, 1)).await.unwrap_err();
            assert_eq!(error, RmaError::SignalElsewhere { data: Rank(me), signal: peer });
        }
        job.barrier().await.unwrap();
        let mut word = [0; 8];
        flags.read(8, &mut word).unwrap();
        let (signals, put) = if me > 0 { (5, 9) } else { (0, 0) };
        assert_eq!((u64::from_ne_bytes(word), data.load(1), data.load(0)), (signals, Some(put), Some(0)));
    });
}

case!(m_w02_who_waits_on_a_word_sleeps_and_is_woken_by_whoever_changes_it);
fn m_w02_who_waits_on_a_word_sleeps_and_is_woken_by_whoever_changes_it() {
    run(3, options(), async |job| {
        let window = job.shmalloc::<u64>(8).await.unwrap();
        let me = job.rank();
        // One at a time sleeps for long enough to have given up looking.
        for round in 0..6u64 {
            for sleeper in [Rank(0), Rank(1)] {
                job.barrier().await.unwrap();
                if me == sleeper {
                    let woken = window.wait_until(2, |value| value > round);
                    assert_eq!(soon("the word changes", woken).await.unwrap(), round + 1);
                } else if me == Rank(2) {
                    tokio::time::sleep(Duration::from_millis(30)).await;
                    match round {
                        0 => window.add(sleeper, 2, 1).await.unwrap(),
                        1 => window.atomic_store(sleeper, 2, round + 1).await.unwrap(),
                        2 => drop(window.compare_swap(sleeper, 2, round, round + 1).await.unwrap()),
                        3 => window.put_signal(sleeper, 4, &[9; 4], window.signal_add(2, 1)).await.unwrap(),
                        _ => window.put(sleeper, 2, round + 1).await.unwrap(),
                    }
                }
            }
        }
        // By the owner itself, in another task.
        let (waited, changed) = tokio::join!(window.wait_until(0, |value| value == 3), async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            window.add(me, 0, 3).await
        });
        assert_eq!((waited.unwrap(), changed), (3, Ok(())));
        job.barrier().await.unwrap();
        // A window that is freed has no words to wait on.
        let other = window.clone();
        let (waited, freed) = tokio::join!(other.wait_until(1, |value| value != 0), window.free());
        freed.unwrap();
        assert!(matches!(waited, Err(RmaError::NoSuchWindow(_))));
        job.barrier().await.unwrap();
    });
}

case!(m_w02_the_owner_of_a_context_waits_on_a_word);
fn m_w02_the_owner_of_a_context_waits_on_a_word() {
    run(2, options(), async |job| {
        let window = job.shmalloc::<u32>(2).await.unwrap();
        job.barrier().await.unwrap();
        let peer = Rank(1 - job.rank().0);
        if job.rank() == Rank(0) {
            let context = job.own_context(ContextId(0)).unwrap();
            for round in 1..=20u32 {
                let waited = window.wait_until_on(&context, 1, |value| value >= round);
                assert_eq!(soon("the word changes", waited).await.unwrap(), round);
                job.drive(&context, window.add(peer, 1, 1)).await.unwrap();
            }
            drop(context);
        } else {
            for round in 1..=20u32 {
                tokio::time::sleep(Duration::from_millis(u64::from(round % 5) * 4)).await;
                window.add(peer, 1, 1).await.unwrap();
                soon("the answer", window.wait_until(1, |value| value >= round)).await.unwrap();
            }
        }
        job.barrier().await.unwrap();
    });
}
