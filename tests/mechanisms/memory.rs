//! Windows and regions.

use crate::support::{case, is_payload, options, payload, run, soon};
use futures::join;
use posthaste::datatype::{Datatype, Layout};
use posthaste::{Bytes, Message, Rank, RegionKey, RmaError, Scope, WordUpdate};
use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

case!(m_d12_a_put_to_a_window_has_two_stages_and_a_get_has_one);
fn m_d12_a_put_to_a_window_has_two_stages_and_a_get_has_one() {
    run(2, options(), async |job| {
        let window = job.shmalloc::<u8>(30 << 20).await.unwrap();
        let peer = Rank(1 - job.rank().0);
        let mut at = 0;
        for len in [0usize, 1, 7, 8, 9, 31, 32, 4096, 1 << 20, 20 << 20] {
            let mut bytes = payload(len as u64, len);
            // Done: the source is reusable. Acknowledged: the data is there, for the target and for a get.
            let acknowledged = match len % 2 {
                0 => window.put_slice(peer, at, &bytes).local().await.unwrap(),
                _ => window.put_bytes(peer, at, Bytes::from(bytes.clone())).local().await.unwrap(),
            };
            bytes.fill(0xee);
            acknowledged.await.unwrap();
            let back = window.get_slice(peer, at, len).await.unwrap();
            assert!(is_payload(len as u64, &back), "{len} bytes");
            let mut framed = vec![0xee; len + 20];
            window.get_to(peer, at, &mut framed[7..7 + len]).await.unwrap();
            assert!(is_payload(len as u64, &framed[7..7 + len]), "{len} bytes to a slice");
            assert!(
                framed[..7].iter().chain(&framed[7 + len..]).all(|byte| *byte == 0xee),
                "around {len} bytes"
            );
            // Unaligned places, too.
            at += len + 3;
        }
        job.barrier().await.unwrap();
        let own = window.to_vec();
        let mut at = 0;
        for len in [0usize, 1, 7, 8, 9, 31, 32, 4096, 1 << 20, 20 << 20] {
            assert!(is_payload(len as u64, &own[at..at + len]), "{len} bytes at the target");
            assert_eq!(&own[at + len..at + len + 3], [0, 0, 0], "behind {len} bytes");
            at += len + 3;
        }
        job.barrier().await.unwrap();
    });
}

case!(m_d12_a_get_changes_a_borrowed_slice_when_it_is_ready_and_only_once);
fn m_d12_a_get_changes_a_borrowed_slice_when_it_is_ready_and_only_once() {
    run(2, options(), async |job| {
        const WORDS: usize = 20_000;
        let window = job.shmalloc::<u64>(WORDS).await.unwrap();
        (0..WORDS).for_each(|at| assert!(window.store(at, at as u64)));
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            for count in [1, 100, WORDS] {
                let expected: Vec<u64> = (0..count as u64).collect();
                let mut slice = vec![u64::MAX; count];
                let first = {
                    let mut get = window.get_to(Rank(1), 0, &mut slice);
                    std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut get).poll(cx))).await
                };
                match first {
                    Poll::Ready(got) => assert!(got.is_ok() && slice == expected),
                    // It was dropped while it was under way.
                    Poll::Pending => assert_eq!(slice, vec![u64::MAX; count]),
                }
                let mut get = window.get_to(Rank(1), 0, &mut slice);
                (&mut get).await.unwrap();
                // Whoever polls once more gets nothing that came later.
                window.put(Rank(1), 0, 77).await.unwrap();
                (&mut get).await.unwrap();
                assert_eq!(slice, expected);
                window.put(Rank(1), 0, 0).await.unwrap();
            }
        }
        job.barrier().await.unwrap();
    });
}

case!(m_d12_regions_are_reached_by_the_key_that_their_owner_tells);
fn m_d12_regions_are_reached_by_the_key_that_their_owner_tells() {
    run(2, options(), async |job| {
        let keys = job.service("key", |key: RegionKey| async move { key }).unwrap();
        let region = job.region(1 << 20).await.unwrap();
        region.write(100, &payload(1, 5000)).unwrap();
        let peer = Rank(1 - job.rank().0);
        let blob = job.all_gather(&region.key().offset.to_le_bytes()).await.unwrap();
        let offset = u64::from_le_bytes(blob[peer.index()][..].try_into().unwrap());
        let key = RegionKey { rank: peer, offset, len: 1 << 20, incarnation: 0 };
        assert_eq!(keys.call(peer, key).await.unwrap(), key, "a key is plain data");
        let remote = job.remote_region(key).await.unwrap();
        assert!(is_payload(1, &remote.get_into(100, vec![0; 5000]).await.unwrap()));
        let mut some = [0; 5000];
        remote.get_to(100, &mut some).await.unwrap();
        assert!(is_payload(1, &some));
        let mut bytes = payload(2, 70_000);
        let put = remote.put_slice(200_001, &bytes[..40_000]).local().await.unwrap();
        let rest = remote.put_bytes(240_001, Bytes::copy_from_slice(&bytes[40_000..])).local().await.unwrap();
        bytes.fill(0xee);
        put.await.unwrap();
        rest.await.unwrap();
        job.barrier().await.unwrap();
        let mut own = vec![0; 70_000];
        region.read(200_001, &mut own).unwrap();
        assert!(is_payload(2, &own));
        job.barrier().await.unwrap();
    });
}

case!(m_d12_memory_that_its_owner_has_already_is_a_region_too);
fn m_d12_memory_that_its_owner_has_already_is_a_region_too() {
    run(2, options(), async |job| {
        let peer = Rank(1 - job.rank().0);
        let table = job.region_from(payload(job.rank().0.into(), 100_003)).unwrap();
        let key = table.key();
        let blob = job.all_gather(&key.offset.to_le_bytes()).await.unwrap();
        let offset = u64::from_le_bytes(blob[peer.index()][..].try_into().unwrap());
        let remote = job.remote_region(RegionKey { rank: peer, offset, ..key }).await.unwrap();
        // Gets of any length, and of the other side while it gets from here.
        assert!(is_payload(peer.0.into(), &remote.get_into(0, vec![0; 100_003]).await.unwrap()));
        for len in [0, 1, 8, 2048, 2049, 65_537] {
            let got = remote.get_into(3, vec![0; len]).await.unwrap();
            assert_eq!(got, payload(peer.0.into(), 100_003)[3..][..len]);
        }
        job.barrier().await.unwrap();
        // Puts: what is put before a get, or a message, is seen by it.
        let bytes = payload(7, 70_000);
        let first = remote.put_slice(30_001, &bytes[..40_000]);
        let rest = remote.put_bytes(70_001, Bytes::copy_from_slice(&bytes[40_000..]));
        let (first, rest, got) = tokio::join!(biased; first, rest, remote.get_into(30_001, vec![0; 70_000]));
        first.and(rest).unwrap();
        assert_eq!(got.unwrap(), bytes);
        // Words: additions of both ranks to each of both, while the owners add, too.
        let words = remote.words::<u64>();
        words.store(peer, 8, 0).await.unwrap();
        job.barrier().await.unwrap();
        let own = job.remote_region(key).await.unwrap();
        for _ in 0..500 {
            words.add(peer, 8, 1).await.unwrap();
            own.words::<u64>().fetch_add(job.rank(), 8, 1).await.unwrap();
            table.with(|bytes| {
                let count = u64::from_ne_bytes(bytes[8..16].try_into().unwrap()) + 1;
                bytes[8..16].copy_from_slice(&count.to_ne_bytes());
            });
        }
        let window = job.shmalloc::<u64>(1).await.unwrap();
        let source = job.region(8).await.unwrap();
        let signal = || remote.words::<u64>().signal_add(8, 1);
        let recorded = job.record(|r| r.put_signal(&window, Rank(0), 0, &source, signal())).await;
        assert!(recorded.is_err(), "no replay reaches it");
        let beyond = RegionKey { rank: peer, offset: u64::MAX - 3, len: 16, incarnation: 0 };
        let told = job.remote_region(beyond).await.unwrap_err();
        assert_eq!(told.fault(), Some(posthaste::Fault::NoSuchMemory(peer)));
        let theirs = words.fetch_add(job.rank(), 8, 1).await;
        assert_eq!(theirs, Err(RmaError::NotTheOwner { rank: job.rank(), owner: peer }));
        let halves = remote.words::<u32>();
        assert_eq!(halves.compare_swap(peer, 16, 1, 2).await.unwrap(), halves.load(peer, 16).await.unwrap());
        assert!(matches!(words.load(peer, 12).await, Err(RmaError::Misaligned { .. })));
        assert!(matches!(remote.put_slice(100_000, "four").await, Err(RmaError::OutOfRange { .. })));
        job.barrier().await.unwrap();
        assert_eq!(own.words::<u64>().load(job.rank(), 8).await.unwrap(), 1500);
        job.barrier().await.unwrap();
        // It is its owner's again at once; whoever comes later is told, and what is exposed then is not what he names.
        let bytes = table.into_inner();
        assert_eq!(bytes.len(), 100_003);
        assert_eq!(bytes[30_001..100_001], payload(7, 70_000));
        let other = job.region_from(vec![0_u8; 200_000]).unwrap();
        job.barrier().await.unwrap();
        let gone = RmaError::Fault(posthaste::Fault::NoSuchMemory(peer));
        assert_eq!(remote.put_slice(0, "late").await.unwrap_err(), gone);
        assert_eq!(remote.get_into(0, vec![0; 5000]).await.unwrap_err(), gone);
        assert_eq!(words.fetch_add(peer, 8, 1).await.unwrap_err(), gone);
        job.barrier().await.unwrap();
        assert_eq!(other.into_inner(), vec![0; 200_000]);
    });
}

case!(m_w01_a_window_has_a_length_for_each_rank_and_0_is_one);
fn m_w01_a_window_has_a_length_for_each_rank_and_0_is_one() {
    run(4, options(), async |job| {
        let mine = [0usize, 5, 0, 1000][job.rank().index()];
        let window = job.shmalloc::<u32>(mine).await.unwrap();
        for (rank, len) in [0usize, 5, 0, 1000].into_iter().enumerate() {
            assert_eq!(window.len(Rank(rank as u32)), len);
        }
        assert_eq!(window.atomicity(), 8);
        // Also those that have no part put and get.
        window.put(Rank(1), job.rank().index(), job.rank().0 + 10).await.unwrap();
        window.put(Rank(3), 996 + job.rank().index(), job.rank().0 + 20).await.unwrap();
        job.barrier().await.unwrap();
        assert_eq!(window.get_slice(Rank(1), 0, 5).await.unwrap(), [10, 11, 12, 13, 0]);
        assert_eq!(window.get_slice(Rank(3), 995, 5).await.unwrap(), [0, 20, 21, 22, 23]);
        job.barrier().await.unwrap();
        window.free().await.unwrap();
        // Freed memory comes back, and is zero.
        for _ in 0..20 {
            let again = job.shmalloc::<u64>(1 << 17).await.unwrap();
            assert_eq!(again.get(job.rank().next(4), 77).await.unwrap(), 0);
            job.barrier().await.unwrap();
            again.put(job.rank().next(4), 77, u64::MAX).await.unwrap();
            again.free().await.unwrap();
        }
    });
}

case!(m_w04_puts_gets_and_sends_to_one_target_take_effect_in_program_order);
fn m_w04_puts_gets_and_sends_to_one_target_take_effect_in_program_order() {
    run(2, options(), async |job| {
        let window = job.shmalloc::<u64>(1024).await.unwrap();
        let arrived = job.counter();
        let (count, own) = (arrived.clone(), window.clone());
        let message = job
            .register("look", move |m: Message, _: &mut Scope| {
                // What was put before the message was sent is there.
                let number = m.read::<u64>(0).unwrap();
                assert!(own.load(0).unwrap() >= number, "the message overtook the put");
                count.add(1);
            })
            .unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            for number in 1..=1000u64 {
                window.put(Rank(1), 0, number).await.unwrap();
                assert_eq!(window.get(Rank(1), 0).await.unwrap(), number);
                message.send(Rank(1), number.to_ne_bytes()).await.unwrap();
            }
        } else {
            soon("the messages", arrived.reach(1000)).await;
            assert_eq!((window.load(0), job.stats().panics), (Some(1000), 0));
        }
        job.barrier().await.unwrap();
    });
}

case!(m_w04_nothing_done_to_windows_passes_what_is_done_to_memory_that_is_not_mapped);
fn m_w04_nothing_done_to_windows_passes_what_is_done_to_memory_that_is_not_mapped() {
    /// Ways to write a word of rank 1's part of the window, each one of its own.
    const WAYS: usize = 7;
    const ROUNDS: u64 = 210;
    const LONG: usize = 150_000;
    run(2, options(), async |job| {
        let window = job.shmalloc::<u64>(WAYS + 1).await.unwrap();
        // How far the writer is, bytes that it has written, and how far the owner is.
        let table = job.region_from(vec![0_u8; 16 + LONG]).unwrap();
        let blob = job.all_gather(&table.key().offset.to_le_bytes()).await.unwrap();
        if job.rank() == Rank(0) {
            let offset = u64::from_le_bytes(blob[1][..].try_into().unwrap());
            let remote = job.remote_region(RegionKey { rank: Rank(1), offset, ..table.key() }).await.unwrap();
            let (to, source) = (Rank(1), job.region(8).await.unwrap());
            let recorded = job.record(|r| r.put(&window, to, 3, &source)).await.unwrap();
            let word = Datatype::of::<u64>();
            let byte = Datatype::of::<u8>();
            let (one, all) = (Layout::new(&word, 1), Layout::new(&byte, LONG as u64));
            let mut under_way = 0;
            for round in 1..=ROUNDS {
                let (number, long) = (round.to_ne_bytes(), vec![round as u8; LONG]);
                source.write(0, &number).unwrap();
                let (way, ended) = (round as usize % WAYS, Cell::new(false));
                let between_layouts = round % 2 == 0;
                let first = async {
                    if between_layouts {
                        remote.put_typed(&all.at(8), &long, &all).await.unwrap();
                    } else {
                        remote.put_slice(8, &long).await.unwrap();
                    }
                };
                let then = async {
                    if between_layouts {
                        remote.put_typed(&one, &[round], &one).await.unwrap();
                    } else {
                        remote.put_slice(0, &number).await.unwrap();
                    }
                    ended.set(true);
                };
                let direct = async {
                    under_way += u64::from(!ended.get());
                    match way {
                        0 => window.put(to, 0, round).await.unwrap(),
                        1 => window.put_slice(to, 1, &[round]).await.unwrap(),
                        2 => window.atomic_store(to, 2, round).await.unwrap(),
                        3 => recorded.replay().await.unwrap(),
                        4 => window.update_each(WordUpdate::Replace, [(to, 4, round)]).await.unwrap(),
                        5 => {
                            let signal = window.signal_set(5, round);
                            window.put_signal(to, WAYS, &[9], signal).await.unwrap();
                        }
                        _ => window.put_typed(to, &one.at(8 * 6), &[round], &one).await.unwrap(),
                    }
                };
                // Begun in this order, whichever is waited for.
                let got = async {
                    if between_layouts {
                        let told = remote.get_typed(&one.at(8 + LONG as u64), vec![0], &one);
                        return told.await.unwrap()[0];
                    }
                    let told = remote.get_into(8 + LONG, vec![0; 8]).await;
                    u64::from_ne_bytes(told.unwrap().try_into().unwrap())
                };
                let (told, ..) = join!(got, first, then, direct);
                assert!(told < round, "{way}: the owner had heard of {round} before a get that precedes it");
            }
            assert!(under_way > 0, "never was there anything to be passed");
        } else {
            let mut seen = 0;
            while seen < ROUNDS {
                // Nothing is taken in meanwhile.
                std::thread::sleep(Duration::from_micros(500));
                let told: Vec<u64> = (0..WAYS).map(|way| window.load(way).unwrap()).collect();
                table.with(|bytes| {
                    let written = u64::from_ne_bytes(bytes[..8].try_into().unwrap());
                    assert!(told.iter().all(|told| *told <= written), "{told:?} passed {written}");
                    let is_there = |byte: &u8| *byte == written as u8 || *byte == written as u8 + 1;
                    assert!(bytes[8..8 + LONG].iter().all(is_there), "a put passed one of the same memory");
                    seen = told.into_iter().max().unwrap();
                    bytes[8 + LONG..].copy_from_slice(&seen.to_ne_bytes());
                });
                tokio::task::yield_now().await;
            }
        }
        job.barrier().await.unwrap();
    });
}

case!(m_w01_a_ranks_own_part_is_copied_in_bulk);
fn m_w01_a_ranks_own_part_is_copied_in_bulk() {
    run(2, options(), async |job| {
        let (me, peer) = (job.rank(), Rank(1 - job.rank().0));
        let window = job.shmalloc::<u32>(2000 + me.index()).await.unwrap();
        let mine: Vec<u32> = (0..1500).map(|n| n * 3 + me.0).collect();
        window.store_slice(17, &mine).unwrap();
        job.barrier().await.unwrap();
        let theirs = window.get_slice(peer, 17, 1500).await.unwrap();
        assert!(theirs.iter().enumerate().all(|(n, value)| *value == n as u32 * 3 + peer.0));
        window.put_slice(peer, 1600, &mine[..300]).await.unwrap();
        job.barrier().await.unwrap();
        let mut back = [0; 300];
        window.load_slice(1600, &mut back).unwrap();
        assert_eq!(back[..], theirs[..300]);
        for count in [0, 1, 2, 3, 15, 16, 17, 1500] {
            let mut back = vec![0; count];
            window.load_slice(17, &mut back).unwrap();
            assert_eq!(back, mine[..count]);
        }
        // The end is inside, for nothing; what lies beyond is refused, and nothing is copied then.
        let len = 2000 + me.index();
        window.store_slice(len, &[]).unwrap();
        let outside = |index: usize, count: u64| {
            let (offset, len) = (index as u64 * 4, len as u64 * 4);
            Err(RmaError::OutOfRange { rank: me, offset, count: count * 4, len })
        };
        assert_eq!(window.store_slice(len - 1, &[9, 9]), outside(len - 1, 2));
        assert_eq!(window.load_slice(len + 1, &mut []), outside(len + 1, 0));
        let mut untouched = [7; 3];
        assert_eq!(window.load_slice(len - 2, &mut untouched), outside(len - 2, 3));
        assert_eq!((untouched, window.load(len - 1)), ([7; 3], Some(0)));
        assert!(window.load_slice(usize::MAX, &mut untouched).is_err());
        let freed = window.clone();
        window.free().await.unwrap();
        assert!(matches!(freed.load_slice(0, &mut untouched), Err(RmaError::NoSuchWindow(_))));
        assert!(matches!(freed.store_slice(0, &[1]), Err(RmaError::NoSuchWindow(_))));
        job.barrier().await.unwrap();
    });
}

case!(m_d12_a_put_goes_on_when_nobody_has_its_region_any_more);
/// A put goes on when its future is dropped, and so it does when nobody has the region any more; another region, whose entry
/// takes the place of that one's, is left alone.
fn m_d12_a_put_goes_on_when_nobody_has_its_region_any_more() {
    const PIECE: usize = 1 << 20;
    const PIECES: usize = 8;
    for oversend in ["auto", "always"] {
        run(2, options().env("POSTHASTE_OVERSEND", oversend), async |job| {
            let peer = Rank(1 - job.rank().0);
            let [region, spare] =
                [job.region(PIECES * PIECE).await.unwrap(), job.region(PIECES * PIECE).await.unwrap()];
            let keys = (region.key(), spare.key());
            let tell = job.service("keys", move |()| async move { keys }).unwrap();
            job.barrier().await.unwrap();
            let (theirs, other): (RegionKey, RegionKey) = tell.call(peer, ()).await.unwrap();
            for round in 1..=5u8 {
                let remote = job.remote_region(theirs).await.unwrap();
                for piece in 0..PIECES {
                    let put = remote.put_bytes(piece * PIECE, vec![round; PIECE]).local();
                    drop(soon("the earlier stage", put).await.unwrap());
                }
                drop(remote);
                let another = job.remote_region(other).await.unwrap();
                soon("the flush", job.flush(peer)).await.unwrap();
                drop(another);
                job.barrier().await.unwrap();
                for (memory, expected) in [(&region, round), (&spare, 0)] {
                    let mut bytes = vec![9; PIECES * PIECE];
                    memory.read(0, &mut bytes).unwrap();
                    assert!(bytes.iter().all(|byte| *byte == expected), "round {round}");
                }
                job.barrier().await.unwrap();
            }
        });
    }
}
