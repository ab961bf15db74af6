//! Multisend over real messages: one call, many destinations.

mod support;

use bytes::Bytes;
use posthaste_core::{ConnectionId, Fault, Messager, Rank, SendError};
use posthaste_protocols::multisend::{ConnectionManager, ManyError, ManyToMany, Part};
use posthaste_protocols::{Message, handler};
use std::sync::{Arc, Mutex};
use support::{Random, Setup, run, values};
use tokio::task::unconstrained;

fn bytes(seed: u64, rank: usize, len: usize) -> Bytes {
    values(seed, rank, len.div_ceil(8)).iter().flat_map(|word| word.to_le_bytes()).take(len).collect()
}

fn multicasts(setup: Setup, with_info: bool) {
    run(6, setup, async |member| {
        let log = Arc::new(Mutex::new(Vec::new()));
        let seen = log.clone();
        let keep = move |message: Message<'_>, _: &mut posthaste_core::Scope<'_>| {
            let mut log = seen.lock().unwrap();
            log.push((message.source(), message.info().to_vec(), message.to_bytes()));
        };
        let handle = member.client.contexts()[0].clone();
        let news = handler::register(&*member.client, handle, "news", 0, keep).unwrap();
        let world = member.collectives.world();
        world.barrier().await.unwrap();
        let lens = [0, 8, 100, 70_000];
        for (turn, len) in lens.into_iter().enumerate() {
            // To all but one, and to rank 1 twice.
            let targets = (0..6).filter(|rank| *rank != 4).chain([1]).map(Rank);
            let payload = bytes(turn as u64, member.rank.index(), len);
            let multicast = news.multicast(targets, payload);
            if with_info { multicast.info(&[turn as u8]) } else { multicast }.await.unwrap();
        }
        let times = [1, 2, 1, 1, 0, 1][member.rank.index()];
        while log.lock().unwrap().len() < times * 6 * lens.len() {
            tokio::task::yield_now().await;
        }
        let log = log.lock().unwrap().clone();
        for source in 0..6 {
            let from: Vec<_> = log.iter().filter(|(from, ..)| from.index() == source).collect();
            assert_eq!(from.len(), times * lens.len());
            for (number, (_, info, payload)) in from.into_iter().enumerate() {
                let turn = number / times;
                assert_eq!(*info, [turn as u8][..usize::from(with_info)]);
                assert!(*payload == bytes(turn as u64, source, lens[turn]), "turn {turn} of {source}");
            }
        }
        world.barrier().await.unwrap();
    });
}

#[test]
fn one_payload_reaches_every_listed_rank() {
    multicasts(Setup::new(), true);
    multicasts(Setup::new(), false);
}

#[test]
fn one_payload_reaches_every_listed_rank_with_little_room() {
    multicasts(Setup::tiny(), true);
    multicasts(Setup::tiny(), false);
}

/// Multicasts and sends in turn, all started before the first is awaited: with little room some of them wait, and what
/// comes later for the same rank stays behind.
fn multicasts_stay_in_order(setup: Setup) {
    // As many as there are places in a queue: who waits for a place is not in order with others who do.
    const COUNT: u64 = 300;
    run(4, setup, async |member| {
        let log = Arc::new(Mutex::new(Vec::new()));
        let seen = log.clone();
        let keep = move |message: Message<'_>, _: &mut posthaste_core::Scope<'_>| {
            seen.lock().unwrap().push((message.source(), message.read::<u64>(0).unwrap()));
        };
        let handle = member.client.contexts()[0].clone();
        let news = handler::register(&*member.client, handle, "news", 0, keep).unwrap();
        let world = member.collectives.world();
        world.barrier().await.unwrap();
        let others: Vec<Rank> = (0..4).map(Rank).filter(|rank| *rank != member.rank).collect();
        let one = |number: u64| {
            let (news, others) = (&news, &others);
            async move {
                let word = number.to_ne_bytes();
                match number % 3 {
                    0 => unconstrained(news.multicast(others.iter().copied(), word)).await.unwrap(),
                    1 => {
                        unconstrained(news.multicast(others.iter().copied(), word.repeat(12))).await.unwrap()
                    }
                    _ => {
                        // All are started at once, however much this task has done.
                        let sends = others.iter().map(|to| unconstrained(news.send(*to, word)));
                        futures::future::try_join_all(sends).await.unwrap();
                    }
                }
            }
        };
        let mut waiting = Vec::new();
        for number in 0..COUNT {
            let mut operation = Box::pin(one(number));
            if futures::poll!(&mut operation).is_pending() {
                waiting.push(operation);
            }
            // The others make room in the device, for which those that wait come first.
            if number % 16 == 15 {
                tokio::task::yield_now().await;
            }
        }
        futures::future::join_all(waiting).await;
        while log.lock().unwrap().len() < 3 * COUNT as usize {
            tokio::task::yield_now().await;
        }
        let log = log.lock().unwrap().clone();
        for source in others {
            let from: Vec<u64> =
                log.iter().filter(|(from, _)| *from == source).map(|(_, word)| *word).collect();
            assert_eq!(from, (0..COUNT).collect::<Vec<_>>(), "from {source}");
        }
        world.barrier().await.unwrap();
    });
}

#[test]
fn multicasts_and_sends_arrive_in_order_with_little_room() {
    multicasts_stay_in_order(Setup::new());
    // Devices with little room, behind long queues.
    multicasts_stay_in_order(Setup { limits: Setup::tiny().limits, ..Setup::new() });
}

#[test]
fn who_is_lost_is_told_and_the_others_get_theirs() {
    run(4, Setup::new(), async |member| {
        let heard = Arc::new(Mutex::new(0));
        let count = heard.clone();
        let add = move |_: Message<'_>, _: &mut posthaste_core::Scope<'_>| *count.lock().unwrap() += 1;
        let handle = member.client.contexts()[0].clone();
        let news = handler::register(&*member.client, handle, "news", 0, add).unwrap();
        let world = member.collectives.world();
        world.barrier().await.unwrap();
        match member.rank.0 {
            2 => member.fabric.kill(member.rank),
            0 => {
                // Until it is known, messages to the dead rank go nowhere.
                while news.send(Rank(2), b"").await.is_ok() {
                    tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                }
                for payload in
                    [Bytes::from_static(b"news"), Bytes::from_static(b"one word"), bytes(1, 0, 9000)]
                {
                    let error = news.multicast([1, 2, 3].map(Rank), payload).await.unwrap_err();
                    let lost = SendError::Fault(Fault::PeerLost(Rank(2)));
                    assert_eq!((error.failed, error.total), (vec![(Rank(2), lost)], 3));
                }
            }
            _ => {
                while *heard.lock().unwrap() < 3 {
                    tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                }
            }
        }
    });
}

fn many(setup: Setup) {
    run(5, setup, async |member| {
        let many = ManyToMany::new(&*member.client).unwrap();
        let world = member.collectives.world();
        world.barrier().await.unwrap();
        let me = member.rank.index();
        let len = |from: usize, to: usize, turn: usize| (from * 31 + to * 7 + turn) % 5 * [1, 700][turn % 2];
        let mut random = Random(me as u64);
        let manager = ConnectionManager::new(3);
        let connections = [manager.open().await, manager.open().await, manager.open().await];
        assert!(manager.try_open().is_none());
        for turn in 0..60 {
            let connection = connections[turn % 3].id();
            let send = async {
                let messages =
                    (0..5).map(|to| (Rank(to as u32), bytes((turn * 25 + to) as u64, me, len(me, to, turn))));
                many.send(connection, messages).await.unwrap();
            };
            // From right to left, with gaps between the parts.
            let mut parts = Vec::new();
            let mut offset = 3;
            for source in (0..5).rev() {
                let len = len(source, me, turn);
                parts.push(Part { source: Rank(source as u32), offset, len });
                offset += len + 2;
            }
            let receive = async {
                if random.below(2) == 0 {
                    tokio::task::yield_now().await;
                }
                many.receive(connection, offset, &parts).unwrap().await.unwrap()
            };
            let ((), received) = futures::join!(send, receive);
            for (part, outcome) in parts.iter().zip(received.parts) {
                assert_eq!(outcome, Ok(part.len));
                let got = &received.buffer[part.offset..part.offset + part.len];
                let sent = bytes((turn * 25 + me) as u64, part.source.index(), part.len);
                assert!(*got == sent, "turn {turn}, from {}", part.source);
                assert_eq!(received.buffer[part.offset + part.len..][..2], [0; 2]);
            }
        }
        world.barrier().await.unwrap();
    });
}

#[test]
fn different_buffers_come_into_one_buffer_at_their_places() {
    many(Setup::new());
}

#[test]
fn different_buffers_come_with_little_room() {
    many(Setup::tiny());
}

/// Messages of all lengths in one call, several of them to the same rank: those come in their order.
fn mixed(setup: Setup) {
    run(3, setup, async |member| {
        const LENS: [usize; 8] = [1 << 20, 8, 0, 60, 4 << 10, 8, 1 << 20, 8];
        let many = ManyToMany::new(&*member.client).unwrap();
        let world = member.collectives.world();
        world.barrier().await.unwrap();
        let (connection, me) = (ConnectionId(u32::MAX), member.rank.index());
        for turn in 0..2 {
            let seed = |number: usize, to: u32| (turn * 100 + number * 10) as u64 + u64::from(to);
            let messages = LENS.iter().enumerate();
            let messages = messages.flat_map(|(number, &len)| {
                (0..3).map(move |to| (Rank(to), bytes(seed(number, to), me, len)))
            });
            let send = many.send(connection, messages);
            let receive = async {
                for (number, len) in LENS.into_iter().enumerate() {
                    let part =
                        |source: u32| Part { source: Rank(source), offset: source as usize * len, len };
                    let receive = many.receive(connection, 3 * len, &[1, 2, 0].map(part)).unwrap();
                    let buffer = receive.await.unwrap().into_whole().unwrap();
                    let sent: Vec<u8> =
                        (0..3).flat_map(|from| bytes(seed(number, me as u32), from, len)).collect();
                    assert!(buffer == sent, "message {number} of turn {turn}");
                }
            };
            futures::join!(async { send.await.unwrap() }, receive);
        }
        world.barrier().await.unwrap();
    });
}

#[test]
fn buffers_of_all_lengths_go_in_one_call_and_stay_in_order() {
    mixed(Setup::new());
    // Devices with little room, behind long queues.
    mixed(Setup { limits: Setup::tiny().limits, ..Setup::new() });
}

#[test]
fn who_has_no_credit_left_holds_up_none_of_the_others() {
    let setup = Setup::new();
    let config = posthaste_core::engine::EngineConfig { credits: 2, ..setup.config };
    run(3, Setup { config, ..setup }, async |member| {
        let many = ManyToMany::new(&*member.client).unwrap();
        let world = member.collectives.world();
        world.barrier().await.unwrap();
        let connection = ConnectionId(0);
        let receive = || many.receive(connection, 8, &[Part { source: Rank(0), offset: 0, len: 8 }]).unwrap();
        let word = |number: u64| Bytes::copy_from_slice(&number.to_le_bytes());
        match member.rank.0 {
            0 => {
                for number in 0..2 {
                    many.send(connection, [1, 2].map(|to| (Rank(to), word(number)))).await.unwrap();
                }
                // Rank 2 has taken its two, and has given credit for them.
                world.barrier().await.unwrap();
                let messages = [1, 2, 1].map(|to| (Rank(to), word(2 + u64::from(to))));
                let mut third = Box::pin(many.send(connection, messages));
                assert!(futures::poll!(&mut third).is_pending());
                world.barrier().await.unwrap();
                let late = many.send(connection, [(Rank(1), word(9))]);
                let late = late.deadline(std::time::Duration::from_millis(5)).await.unwrap_err();
                let error = SendError::Fault(Fault::DeadlineExceeded);
                assert_eq!((late.failed, late.total), (vec![(Rank(1), error)], 1));
                world.barrier().await.unwrap();
                third.await.unwrap();
            }
            1 => {
                for _ in 0..3 {
                    world.barrier().await.unwrap();
                }
                for number in [0, 1, 3, 3] {
                    assert_eq!(receive().await.unwrap().into_whole().unwrap(), word(number));
                }
            }
            _ => {
                for number in 0..2 {
                    assert_eq!(receive().await.unwrap().into_whole().unwrap(), word(number));
                }
                world.barrier().await.unwrap();
                assert_eq!(receive().await.unwrap().into_whole().unwrap(), word(4));
                for _ in 0..2 {
                    world.barrier().await.unwrap();
                }
            }
        }
        world.barrier().await.unwrap();
    });
}

#[test]
fn a_buffer_for_a_lost_rank_fails_alone() {
    run(4, Setup::new(), async |member| {
        let many = ManyToMany::new(&*member.client).unwrap();
        let world = member.collectives.world();
        world.barrier().await.unwrap();
        let connection = ConnectionId(1);
        let (word, long) = (Bytes::from_static(b"one word"), bytes(1, 0, 1 << 20));
        match member.rank.0 {
            2 => member.fabric.kill(member.rank),
            0 => {
                // Until it is known, messages to the dead rank go nowhere.
                while many.send(connection, [(Rank(2), word.clone())]).await.is_ok() {
                    tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                }
                for payload in [word, long] {
                    let messages = [1, 2, 3, 9].map(|to| (Rank(to), payload.clone()));
                    let error = many.send(connection, messages).await.unwrap_err();
                    let lost = SendError::Fault(Fault::PeerLost(Rank(2)));
                    let unknown = SendError::UnknownRank { rank: Rank(9), size: 4 };
                    assert_eq!((error.failed, error.total), (vec![(Rank(2), lost), (Rank(9), unknown)], 4));
                }
            }
            _ => {
                for payload in [word, long] {
                    let part = Part { source: Rank(0), offset: 0, len: payload.len() };
                    let receive = many.receive(connection, payload.len(), &[part]).unwrap();
                    assert!(receive.await.unwrap().into_whole().unwrap() == payload);
                }
            }
        }
    });
}

#[test]
fn receives_are_checked_cut_off_and_taken_back() {
    run(3, Setup::new(), async |member| {
        let many = ManyToMany::new(&*member.client).unwrap();
        let world = member.collectives.world();
        world.barrier().await.unwrap();
        let connection = ConnectionId(9);
        let part = |source, offset, len| Part { source: Rank(source), offset, len };
        if member.rank.0 == 0 {
            let bad = |parts: &[Part]| many.receive(connection, 10, parts).map(drop).unwrap_err();
            assert_eq!(bad(&[part(1, 0, 4), part(2, 3, 4)]), ManyError::BadPart { part: 1, len: 10 });
            assert_eq!(bad(&[part(1, 8, 3)]), ManyError::BadPart { part: 0, len: 10 });
            assert_eq!(bad(&[part(1, 0, 1), part(1, 2, 1)]), ManyError::BadSource(Rank(1)));
            assert_eq!(bad(&[part(7, 0, 1)]), ManyError::BadSource(Rank(7)));
            for len in [usize::MAX, usize::MAX >> 1, 1 << 60] {
                let error = many.receive(connection, len, &[]).map(drop).unwrap_err();
                assert!(matches!(error, ManyError::Fault(Fault::OutOfMemory(_))), "{error}");
            }
            drop(many.receive(connection, 4, &[part(1, 0, 4)]).unwrap());
        }
        world.barrier().await.unwrap();
        match member.rank.0 {
            0 => {
                let parts = [part(1, 0, 4), part(2, 4, 4)];
                let received = many.receive(connection, 8, &parts).unwrap().await.unwrap();
                assert_eq!(received.buffer, *b"longab\0\0");
                assert_eq!(received.parts, [Ok(6), Ok(2)]);
                let cut = ManyError::OtherLength { rank: Rank(1), len: 6, expected: 4 };
                assert_eq!(received.into_whole(), Err(cut));
                // The one that is gone sends nothing.
                let received = many.receive(connection, 2, &[part(2, 0, 2)]).unwrap().await.unwrap();
                let fault = Fault::PeerLost(Rank(2));
                assert_eq!(received.parts, [Err(fault)]);
                assert_eq!(received.into_whole(), Err(ManyError::Missing { rank: Rank(2), fault }));
            }
            1 => many.send(connection, [(Rank(0), Bytes::from_static(b"longer"))]).await.unwrap(),
            _ => {
                many.send(connection, [(Rank(0), Bytes::from_static(b"ab"))]).await.unwrap();
                member.fabric.kill(member.rank);
            }
        }
    });
}

#[test]
fn a_call_waits_while_all_ids_are_in_use() {
    run(1, Setup::new(), async |_| {
        let manager = ConnectionManager::new(2);
        let (first, second) = (manager.open().await, manager.open().await);
        let mut third = Box::pin(manager.open());
        assert!(futures::poll!(&mut third).is_pending());
        let id = second.id();
        drop(second);
        assert_eq!(third.await.id(), id);
        drop(first);
        assert_eq!(manager.try_open().unwrap().id(), ConnectionId(0));
    });
}
