//! Multisend between processes: one call, many destinations.

use crate::support::{case, is_payload, options, payload, run, soon};
use posthaste::{ConnectionManager, Job, Message, Part, Rank, Scope};
use std::sync::{Arc, Mutex};

case!(m_d18_one_call_gives_every_listed_rank_the_same_payload_and_no_other);
fn m_d18_one_call_gives_every_listed_rank_the_same_payload_and_no_other() {
    run(6, options(), async |job| {
        const LENS: [usize; 5] = [0, 8, 1000, 100_000, 5 << 20];
        let arrived = job.counter();
        let (count, me) = (arrived.clone(), job.rank().0);
        let next = Arc::new(Mutex::new([0; 6]));
        let news = job
            .register("news", move |m: Message<'_>, _: &mut Scope<'_>| {
                let source = m.source().index();
                let mut next = next.lock().unwrap();
                let turn: usize = next[source];
                next[source] += 1;
                assert_eq!(m.info(), [turn as u8, source as u8]);
                assert_eq!(m.len(), LENS[turn]);
                assert!(is_payload((turn * 10 + source) as u64, &m.bytes()), "turn {turn} of {source}");
                count.add(1);
            })
            .unwrap();
        job.barrier().await.unwrap();
        // Everybody to all but rank 3, itself among them.
        for (turn, len) in LENS.into_iter().enumerate() {
            let targets = job.ranks().filter(|rank| rank.0 != 3);
            let bytes = payload((turn * 10) as u64 + u64::from(me), len);
            let sent = news.multicast(targets, bytes).info(&[turn as u8, me as u8]);
            soon("the multicast", sent).await.unwrap();
        }
        let awaited = if me == 3 { 0 } else { 6 * LENS.len() as u64 };
        soon("the messages", arrived.reach(awaited)).await;
        job.barrier().await.unwrap();
        assert_eq!((arrived.value(), job.stats().panics), (awaited, 0));
    });
}

case!(m_d18_words_reach_every_rank_in_order_though_lanes_fill_up);
fn m_d18_words_reach_every_rank_in_order_though_lanes_fill_up() {
    run(5, options(), async |job| {
        const COUNT: u64 = 20_000;
        let arrived = job.counter();
        let count = arrived.clone();
        let next = Arc::new(Mutex::new(0));
        let tick = job
            .register("tick", move |m: Message<'_>, _: &mut Scope<'_>| {
                let mut next = next.lock().unwrap();
                assert_eq!(m.read::<u64>(0), Some(*next), "out of order");
                assert!(m.info().is_empty() && m.source() == Rank(0));
                *next += 1;
                count.add(1);
            })
            .unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            let others = [1, 2, 3, 4].map(Rank);
            for number in 0..COUNT {
                soon("a multicast", tick.multicast(others, number.to_ne_bytes())).await.unwrap();
            }
        } else {
            soon("the words", arrived.reach(COUNT)).await;
        }
        job.barrier().await.unwrap();
        assert_eq!(job.stats().panics, 0);
    });
}

case!(m_d19_a_buffer_for_each_destination_and_one_for_all_sources);
fn m_d19_a_buffer_for_each_destination_and_one_for_all_sources() {
    run(5, options(), async |job| {
        let (me, many) = (job.rank().0, job.many_to_many());
        let manager = ConnectionManager::new(4);
        let connection = manager.open().await;
        job.barrier().await.unwrap();
        let len = |from: u32, to: u32| ((from * 5 + to * 3) % 7) as usize * 30_011;
        for turn in 0..3u64 {
            let seed = |from: u32, to: u32| turn * 100 + u64::from(from * 10 + to);
            let mut parts = Vec::new();
            let mut end = 0;
            for source in (0..5).rev() {
                parts.push(Part { source: Rank(source), offset: end, len: len(source, me) });
                end += len(source, me);
            }
            let receive = many.receive(connection.id(), end, &parts).unwrap();
            let messages = (0..5).map(|to| (Rank(to), payload(seed(me, to), len(me, to)).into()));
            soon("the sends", many.send(connection.id(), messages)).await.unwrap();
            let received = soon("the buffer", receive).await.unwrap();
            for (part, outcome) in parts.iter().zip(&received.parts) {
                assert_eq!(*outcome, Ok(part.len));
                let bytes = &received.buffer[part.offset..part.offset + part.len];
                assert!(is_payload(seed(part.source.0, me), bytes), "turn {turn} from {}", part.source);
            }
        }
        job.barrier().await.unwrap();
    });
}

/// Some of them are single packets, in whose way those before them stand; a recorded one comes the other way.
async fn lengths_in_one_call(job: Job) {
    const LENS: [usize; 8] = [8, 1 << 20, 8, 0, 60, 4 << 10, 1 << 20, 8];
    let (me, many) = (job.rank().0, job.many_to_many());
    let source = job.region(8).await.unwrap();
    let manager = ConnectionManager::new(2);
    let (_first, connection) = (manager.open().await, manager.open().await);
    job.barrier().await.unwrap();
    for turn in 0..10u64 {
        let seed =
            |number: usize, from: u32, to: u32| turn * 1000 + number as u64 * 100 + u64::from(from * 10 + to);
        let messages = LENS.iter().enumerate().flat_map(|(number, len)| {
            (0..3).map(move |to| (Rank(to), payload(seed(number, me, to), *len).into()))
        });
        let (sent, received) =
            futures::join!(soon("the sends", many.send(connection.id(), messages)), async {
                for (number, len) in LENS.into_iter().enumerate() {
                    let part =
                        |source: u32| Part { source: Rank(source), offset: source as usize * len, len };
                    let receive = many.receive(connection.id(), 3 * len, &[2, 0, 1].map(part)).unwrap();
                    let buffer = soon("a buffer", receive).await.unwrap().into_whole().unwrap();
                    for (from, bytes) in buffer.chunks(len.max(1)).enumerate() {
                        assert!(
                            is_payload(seed(number, from as u32, me), bytes),
                            "message {number} of turn {turn}"
                        );
                    }
                }
                let part = |source: u32| Part { source: Rank(source), offset: 8 * source as usize, len: 8 };
                let receive = many.receive(connection.id(), 24, &[0, 1, 2].map(part)).unwrap();
                source.write(0, &(turn + u64::from(me)).to_ne_bytes()).unwrap();
                let to_all = (0..3).map(|to| (Rank(to), source.slice(0..8)));
                let pattern = many.send_recording(connection.id(), to_all).await.unwrap();
                let buffer = soon("what was recorded", receive).await.unwrap().into_whole().unwrap();
                assert_eq!(buffer, [turn, turn + 1, turn + 2].map(u64::to_ne_bytes).concat());
                pattern
            });
        sent.unwrap();
        drop(received);
    }
    job.barrier().await.unwrap();
    assert_eq!(job.stats().panics, 0);
}

case!(m_d19_buffers_of_all_lengths_go_in_one_call_and_stay_in_order);
fn m_d19_buffers_of_all_lengths_go_in_one_call_and_stay_in_order() {
    run(3, options(), async |job| lengths_in_one_call(job).await);
}

case!(m_d19_buffers_of_all_lengths_go_in_one_call_over_sockets);
fn m_d19_buffers_of_all_lengths_go_in_one_call_over_sockets() {
    run(3, options().over_tcp(), async |job| lengths_in_one_call(job).await);
}

case!(m_d20_streams_of_a_pair_are_told_apart_by_their_connection);
fn m_d20_streams_of_a_pair_are_told_apart_by_their_connection() {
    run(2, options(), async |job| {
        let many = job.many_to_many();
        let manager = ConnectionManager::new(8);
        let connections: Vec<_> = (0..8).map(|_| manager.try_open().unwrap()).collect();
        let other = job.rank().next(2);
        // Sent in one order, received in the other.
        for (number, connection) in connections.iter().enumerate() {
            let message = payload(number as u64, 100 * number);
            soon("a send", many.send(connection.id(), [(other, message.into())])).await.unwrap();
        }
        for (number, connection) in connections.iter().enumerate().rev() {
            let len = 100 * number;
            let receive = many.receive(connection.id(), len, &[Part { source: other, offset: 0, len }]);
            let received = soon("a stream", receive.unwrap()).await.unwrap();
            assert!(is_payload(number as u64, &received.buffer), "connection {number}");
        }
        job.barrier().await.unwrap();
    });
}

case!(m_d21_a_call_waits_for_an_id_while_all_are_in_use);
fn m_d21_a_call_waits_for_an_id_while_all_are_in_use() {
    run(2, options(), async |job| {
        let (many, other) = (job.many_to_many(), job.rank().next(2));
        let manager = ConnectionManager::new(2);
        job.barrier().await.unwrap();
        // Twelve exchanges over two ids: each waits for one that is free.
        let exchange = async |number: u64| {
            let connection = manager.open().await;
            let receive =
                many.receive(connection.id(), 8, &[Part { source: other, offset: 0, len: 8 }]).unwrap();
            let message = number.to_ne_bytes().to_vec().into();
            many.send(connection.id(), [(other, message)]).await.unwrap();
            let received = receive.await.unwrap();
            tokio::task::yield_now().await;
            (connection.id().0, u64::from_ne_bytes(received.buffer.try_into().unwrap()))
        };
        let (a, b) = (manager.try_open().unwrap(), manager.try_open().unwrap());
        assert!(manager.try_open().is_none());
        let waiting = exchange(0);
        let release = async {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            drop(a);
        };
        let ((id, got), ()) = soon("the first", async { futures::join!(waiting, release) }).await;
        assert_eq!((id, got), (0, 0));
        drop(b);
        for number in 1..12 {
            assert_eq!(soon("an exchange", exchange(number)).await, (0, number));
        }
        job.barrier().await.unwrap();
    });
}

case!(m_d19_a_receive_that_is_taken_back_loses_nothing);
fn m_d19_a_receive_that_is_taken_back_loses_nothing() {
    run(3, options(), async |job| {
        let (me, many) = (job.rank(), job.many_to_many());
        let connection = ConnectionManager::new(1).open().await;
        let id = connection.id();
        let are_there = job.counter();
        let count = are_there.clone();
        let sent = job.register("sent", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
        let parts = [1, 2].map(|source| Part { source: Rank(source), offset: 4 * source as usize, len: 4 });
        job.barrier().await.unwrap();
        if me == Rank(0) {
            // Rank 1 sends twice at once; rank 2 when rank 0 has given up twice.
            let first = many.receive(id, 12, &parts).unwrap();
            soon("what rank 1 sends", are_there.reach(1)).await;
            drop(first);
            let second = many.receive(id, 12, &parts).unwrap();
            let third = many.receive(id, 8, &parts[..1]).unwrap();
            // What it has is for none that has got the one behind it.
            drop(second);
            let received = soon("what rank 1 sent", third).await.unwrap();
            assert_eq!((&received.buffer[4..], &received.parts[..]), (&b"next"[..], &[Ok(4)][..]));
            let fourth = many.receive(id, 12, &parts).unwrap();
            job.barrier().await.unwrap();
            let received = soon("the rest", fourth).await.unwrap();
            assert_eq!(
                (&received.buffer[..], &received.parts[..]),
                (&b"\0\0\0\0longtwo\0"[..], &[Ok(15), Ok(3)][..])
            );
            // What was longer than the part that it had come into is whole where there is room.
            let whole = [Part { source: Rank(1), offset: 0, len: 15 }];
            let cut = many.receive(id, 4, &[Part { source: Rank(1), offset: 0, len: 4 }]).unwrap();
            job.barrier().await.unwrap();
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            drop(cut);
            let received = soon("the whole", many.receive(id, 15, &whole).unwrap()).await.unwrap();
            assert_eq!(&received.buffer, b"longer than one");
        } else {
            let one = |bytes: &'static [u8]| [(Rank(0), posthaste::Bytes::from_static(bytes))];
            if me == Rank(1) {
                many.send(id, one(b"longer than one")).await.unwrap();
                many.send(id, one(b"next")).await.unwrap();
                sent.send(Rank(0), b"").await.unwrap();
            }
            job.barrier().await.unwrap();
            if me == Rank(2) {
                many.send(id, one(b"two")).await.unwrap();
            }
            job.barrier().await.unwrap();
            if me == Rank(1) {
                many.send(id, one(b"longer than one")).await.unwrap();
            }
        }
        job.barrier().await.unwrap();
    });
}
