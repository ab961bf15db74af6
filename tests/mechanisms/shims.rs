//! Puts and gets over sends: the same as the device's own, forced by a setting.

use crate::support::{
    Options, Transport, case, here, is_payload, options, others, payload, run, run_as, soon, transport,
};
use posthaste::{Fault, Job, Message, Rank, RegionKey, RmaError, Scope};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

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
    let outside = |offset, count| RmaError::OutOfRange { rank: Rank(1), offset, count, len: PART as u64 };
    let last = PART as u64 - 1;
    assert_eq!(window.put_slice(Rank(1), PART - 1, &[1, 2]).await, Err(outside(last, 2)));
    assert_eq!(window.put_slice(Rank(1), PART - 1, &[1, 2]).local().await.map(drop), Err(outside(last, 2)));
    assert_eq!(window.get_slice(Rank(1), PART - 1, 2).await.map(drop), Err(outside(last, 2)));
    assert_eq!(window.get_to(Rank(1), PART - 1, &mut [0; 2]).await, Err(outside(last, 2)));
    assert_eq!(window.put_slice(Rank(1), PART, &[1]).await, Err(outside(last + 1, 1)));
    let nobody = RmaError::UnknownRank { rank: Rank(99), size: 3 };
    assert_eq!(words.put(Rank(99), 0, 1).await, Err(nobody.clone()));
    assert_eq!(words.get(Rank(99), 0).await.map(drop), Err(nobody));
    // To a region that a rank tells of, and that is gone then.
    let region = job.region(100).await.unwrap();
    let keys = job.world().all_gather(&[region.key()]).await.unwrap();
    let owner = job.rank().next(3);
    let theirs = job.remote_region(keys[owner.index()]).await.unwrap();
    theirs.put_slice(0, &[3; 100]).await.unwrap();
    let beyond = theirs.put_slice(50, &[3; 51]).await;
    assert_eq!(beyond, Err(RmaError::OutOfRange { rank: owner, offset: 50, count: 51, len: 100 }));
    job.barrier().await.unwrap();
    let gone = window.clone();
    window.free().await.unwrap();
    let number = match gone.put_slice(Rank(1), 0, &[1]).await {
        Err(RmaError::NoSuchWindow(number)) => number,
        other => panic!("it is freed: {other:?}"),
    };
    assert_eq!(gone.get_slice(Rank(1), 0, 1).await.map(drop), Err(RmaError::NoSuchWindow(number)));
    words.free().await.unwrap();
}

case!(m_d13_puts_and_gets_are_the_same_natively);
fn m_d13_puts_and_gets_are_the_same_natively() {
    run_as(here!(), 3, options().env("POSTHASTE_OVERSEND", "auto"), async |job| {
        puts_and_gets(job.clone()).await;
        let mapped = job.stats().one_sided == 0;
        assert_eq!(mapped, transport() == Transport::Shm, "memory that is mapped needs no descriptor");
    });
}

case!(m_d13_puts_and_gets_are_the_same_over_sends);
fn m_d13_puts_and_gets_are_the_same_over_sends() {
    run_as(here!(), 3, over_send(), async |job| {
        puts_and_gets(job.clone()).await;
        assert!(job.handle().stats().one_sided >= 3 * 9 * 4, "each is a message");
    });
}

case!(m_d13_what_is_put_over_sends_is_there_before_a_message_behind_it);
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

case!(m_d13_patterns_are_replayed_over_sends);
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
                Ok(())
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

case!(m_d13_memory_that_is_not_there_is_told_over_sends);
fn m_d13_memory_that_is_not_there_is_told_over_sends() {
    run(2, over_send(), async |job| {
        let key = Arc::new(OnceLock::new());
        let told = key.clone();
        let tell = job
            .register("key", move |m: Message, _: &mut Scope| {
                let word = |at| m.read::<u64>(at).unwrap();
                let _ =
                    told.set(RegionKey { rank: m.source(), offset: word(0), len: word(8), incarnation: 0 });
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
        remote.put_slice(9_990, "0123456789").await.unwrap();
        job.barrier().await.unwrap();
        // Freed, or never given to anybody.
        drop(region);
        job.barrier().await.unwrap();
        let none = RmaError::Fault(Fault::NoSuchMemory(peer));
        assert_eq!(remote.put_slice(0, &[1; 5_000]).await, Err(none.clone()));
        assert_eq!(remote.get_into(0, vec![0; 5_000]).await, Err(none.clone()));
        assert_eq!(remote.get_to(0, &mut [0; 5_000]).await, Err(none.clone()));
        let beyond = job.remote_region(RegionKey { offset: 1 << 20, ..key }).await.unwrap();
        assert_eq!(beyond.put_slice(0, "x").await, Err(none));
        // Nothing else suffers from it.
        job.barrier().await.unwrap();
    });
}

case!(m_d14_a_control_gets_past_messages_that_wait);
fn m_d14_a_control_gets_past_messages_that_wait() {
    const MESSAGES: usize = 400;
    run(2, options(), async |job| {
        let (arrived, controls) = (job.counter(), job.counter());
        let (count, ticks) = (arrived.clone(), controls.clone());
        let long = job.register("long", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
        let seen: Arc<Mutex<Vec<(u64, u64)>>> = Arc::default();
        let (log, so_far) = (seen.clone(), arrived.clone());
        let tick = job
            .register_control("tick", move |from, payload: [u8; 16], _| {
                assert_eq!(from, Rank(0));
                assert_eq!(payload[8..], [7; 8]);
                let number = u64::from_ne_bytes(payload[..8].try_into().unwrap());
                log.lock().unwrap().push((number, so_far.value()));
                ticks.add(1);
            })
            .unwrap();
        let name = format!("posthaste-test-{}", std::env::var("POSTHASTE_JOB").unwrap());
        let name = SocketAddr::from_abstract_name(name).unwrap();
        let word = (job.rank() == Rank(1)).then(|| UnixDatagram::bind_addr(&name).unwrap());
        // Whoever drives, nothing moves on rank 1 from here on until rank 0 has sent what it can.
        let hold = job
            .register("hold", move |_: Message, _: &mut Scope| {
                let word = word.as_ref().expect("rank 1 is held");
                word.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
                word.recv(&mut [0]).expect("rank 0 has got its first control out");
            })
            .unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(1) {
            soon("all controls", controls.reach(200)).await;
            soon("all messages", arrived.reach(MESSAGES as u64)).await;
            let seen = seen.lock().unwrap().clone();
            assert_eq!(seen.iter().map(|tick| tick.0).collect::<Vec<_>>(), (0..200).collect::<Vec<_>>());
            assert!(seen[0].1 < MESSAGES as u64, "all messages were there before the first control");
        } else {
            hold.send(Rank(1), b"").await.unwrap();
            let messages = (0..MESSAGES).map(|_| long.send(Rank(1), vec![1; 64 << 10]));
            let controls = async {
                for number in 0..200u64 {
                    let mut payload = [7; 16];
                    payload[..8].copy_from_slice(&number.to_ne_bytes());
                    tick.send(Rank(1), payload).await.unwrap();
                    if number == 0 {
                        UnixDatagram::unbound().unwrap().send_to_addr(b"!", &name).unwrap();
                    }
                }
            };
            // The messages are started first.
            let (sent, ()) = futures::future::join(futures::future::join_all(messages), controls).await;
            assert!(sent.into_iter().all(|sent| sent.is_ok()));
        }
        job.barrier().await.unwrap();
    });
}

case!(m_d14_a_control_that_nobody_knows_is_told_to_the_error_handler);
fn m_d14_a_control_that_nobody_knows_is_told_to_the_error_handler() {
    run(2, options(), async |job| {
        let told: Arc<Mutex<Vec<Fault>>> = Arc::default();
        let log = told.clone();
        job.on_error(move |fault| log.lock().unwrap().push(fault));
        let handler = |_, _: [u8; 16], _: &mut Scope| {};
        let tick = if job.rank() == Rank(0) {
            Some(job.register_control("only here", handler).unwrap())
        } else {
            None
        };
        assert!(matches!(job.register_control("", handler), Err(posthaste::RegisterError::BadName(_))));
        if let Some(tick) = tick {
            let again = job.register_control("only here", handler);
            assert!(matches!(again, Err(posthaste::RegisterError::Taken(_))), "{again:?}");
            tick.send(Rank(1), [1; 16]).await.unwrap();
            assert!(tick.send(Rank(2), [1; 16]).await.is_err());
        }
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            let start = std::time::Instant::now();
            while told.lock().unwrap().is_empty() && start.elapsed() < std::time::Duration::from_secs(30) {
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            }
            assert_eq!(*told.lock().unwrap(), [Fault::NoSuchProtocol(Rank(1))]);
        }
        job.barrier().await.unwrap();
    });
}

/// Who sent a message, its number, its length, and whether it was whole.
type Seen = (u32, u64, usize, bool);

case!(m_d11_long_messages_go_straight_to_their_places);
fn m_d11_long_messages_go_straight_to_their_places() {
    const LENGTHS: [usize; 10] =
        [0, 99_999, 100_000, 7, 1 << 20, (4 << 20) + 1, 100_001, 20 << 20, 8, 300_000];
    run(3, options().env("POSTHASTE_RENDEZVOUS_BYTES", "100000"), async |job| {
        let arrived = job.counter();
        let log: Arc<Mutex<Vec<Seen>>> = Arc::default();
        let (count, seen) = (arrived.clone(), log.clone());
        let message = job
            .register("straight", move |m: Message, _: &mut Scope| {
                let number = u64::from_ne_bytes(m.info().try_into().unwrap());
                let whole = is_payload(number, &m.to_bytes());
                seen.lock().unwrap().push((m.source().0, number, m.len(), whole));
                count.add(1);
            })
            .unwrap();
        let echo = job.service("echo", |bytes: Vec<u8>| async move { bytes }).unwrap();
        job.barrier().await.unwrap();
        for round in 0..3 {
            for (n, len) in LENGTHS.into_iter().enumerate() {
                let number = (round * LENGTHS.len() + n) as u64;
                for to in job.ranks() {
                    message.send(to, payload(number, len)).info(&number.to_ne_bytes()).await.unwrap();
                }
            }
        }
        soon("all messages", arrived.reach(9 * LENGTHS.len() as u64)).await;
        let log = log.lock().unwrap().clone();
        for source in 0..3 {
            let of: Vec<_> = log.iter().filter(|entry| entry.0 == source).collect();
            for (n, (_, number, len, whole)) in of.into_iter().enumerate() {
                assert_eq!((*number, *len), (n as u64, LENGTHS[n % LENGTHS.len()]), "from rank {source}");
                assert!(whole, "message {number} from rank {source}");
            }
        }
        let long = 3 * 3 * LENGTHS.iter().filter(|len| **len >= 100_000).count() as u64;
        assert_eq!(job.handle().stats().rendezvous, long);
        // Requests are messages; answers are not.
        let bytes = payload(5, 5_000_000);
        assert!(echo.call(job.rank().next(3), bytes.clone()).await.unwrap() == bytes);
        assert_eq!(job.handle().stats().rendezvous, long + 1);
        job.barrier().await.unwrap();
    });
}

case!(m_d11_the_next_long_messages_are_put_while_a_handler_has_the_last);
fn m_d11_the_next_long_messages_are_put_while_a_handler_has_the_last() {
    // Over sockets the receiver's engine takes what is put, and that is in the handler.
    if transport() != crate::support::Transport::Shm {
        return;
    }
    // Of long ones one, of shorter ones two.
    for (length, ahead) in [(5 << 20, 1), (1 << 20, 2)] {
        run(2, options().env("POSTHASTE_RENDEZVOUS_BYTES", "1000"), async |job| {
            let window = Arc::new(job.shmalloc::<u64>(1).await.unwrap());
            let (arrived, sent) = (job.counter(), window.clone());
            let count = arrived.clone();
            let message = job
                .register("next", move |m: Message, _: &mut Scope| {
                    let number = u64::from_ne_bytes(m.info().try_into().unwrap());
                    assert!(is_payload(number, &m.to_bytes()), "message {number}");
                    // All but the first two have their places in time: they are given with the second.
                    let (start, last) = (Instant::now(), 8.min(number + ahead));
                    while number >= 2 && sent.load(0).unwrap() < last {
                        assert!(start.elapsed() < Duration::from_secs(60), "nothing is put behind {number}");
                        std::hint::spin_loop();
                    }
                    count.add(1);
                })
                .unwrap();
            job.barrier().await.unwrap();
            if job.rank() == Rank(0) {
                for number in 1..=8u64 {
                    message.send(Rank(1), payload(number, length)).info(&number.to_ne_bytes()).await.unwrap();
                    window.put(Rank(1), 0, number).await.unwrap();
                }
                let stats = job.handle().stats();
                assert_eq!((stats.rendezvous, stats.rendezvous_ahead), (8, 6));
            } else {
                soon("all messages", arrived.reach(8)).await;
                assert_eq!(job.stats().panics, 0, "a handler waited in vain, or got other bytes");
            }
            job.barrier().await.unwrap();
        });
    }
}

case!(m_d11_a_handler_that_chooses_its_buffer_gets_long_messages_there);
fn m_d11_a_handler_that_chooses_its_buffer_gets_long_messages_there() {
    run(2, options().env("POSTHASTE_RENDEZVOUS_BYTES", "1000"), async |job| {
        let arrived = job.counter();
        let count = arrived.clone();
        let head = job
            .register_first_packet("head", move |first: posthaste::First<'_>, _: &mut Scope| {
                let (count, number) = (count.clone(), first.total);
                let limit = 3_000_000;
                posthaste::Fill::Into {
                    buffer: bytes::BytesMut::with_capacity(limit.min(first.total as usize)),
                    limit,
                    done: Box::new(move |_, head| {
                        assert_eq!(head.len(), limit.min(number as usize));
                        assert!(head == payload(number, number as usize)[..head.len()]);
                        count.add(1);
                    }),
                }
            })
            .unwrap();
        job.barrier().await.unwrap();
        let peer = Rank(1 - job.rank().0);
        for len in [1, 999, 1000, 2_999_999, 3_000_000, 3_000_001, 12_000_000] {
            head.send(peer, payload(len as u64, len)).await.unwrap();
        }
        soon("all heads", arrived.reach(7)).await;
        job.barrier().await.unwrap();
    });
}

case!(m_d32_a_small_message_makes_the_far_side_inject_a_put);
fn m_d32_a_small_message_makes_the_far_side_inject_a_put() {
    // A receiver answers a request to send with a place in its memory, and the sender's put goes there: over puts of the
    // device as over sends.
    for oversend in ["auto", "always"] {
        let options = options().env("POSTHASTE_RENDEZVOUS_BYTES", "4096").env("POSTHASTE_OVERSEND", oversend);
        run(2, options, async |job| {
            let arrived = job.counter();
            let count = arrived.clone();
            let kept: Arc<Mutex<Vec<posthaste::OwnedMessage>>> = Arc::default();
            let (message, mut stream) = job.stream("kept").unwrap();
            job.barrier().await.unwrap();
            let peer = Rank(1 - job.rank().0);
            let send = async {
                for number in 0..20u64 {
                    message.send(peer, payload(number, 600_000)).await.unwrap();
                }
            };
            let receive = async {
                while count.value() < 20 {
                    let message = stream.recv().await.unwrap();
                    kept.lock().unwrap().push(message);
                    count.add(1);
                }
            };
            futures::future::join(send, receive).await;
            assert_eq!(job.handle().stats().rendezvous, 20);
            // What is kept stays as it was put, whatever came after it.
            for (number, message) in std::mem::take(&mut *kept.lock().unwrap()).into_iter().enumerate() {
                assert!(is_payload(number as u64, &message.into_bytes()), "message {number}");
            }
            job.barrier().await.unwrap();
        });
    }
}
