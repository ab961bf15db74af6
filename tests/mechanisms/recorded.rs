//! Patterns of every kind of operation: what they send is what is in their regions when they are replayed.

use crate::support::{case, is_payload, options, payload, run, soon};
use crate::windows::keep_busy;
use futures::future::join_all;
use futures::poll;
use posthaste::{
    Bytes, ConnectionManager, Fault, FifoOptions, Message, Part, PatternError, Rank, Recorder, RmaError,
    Scope, SendError,
};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

case!(m_d25_a_recorded_mixture_is_carried_out_at_each_replay);
fn m_d25_a_recorded_mixture_is_carried_out_at_each_replay() {
    run(3, options(), async |job| {
        const LENS: [usize; 5] = [8, 0, 40, 3_000, 100_000];
        let (me, ranks) = (job.rank(), job.size());
        let (right, left) = (me.next(ranks), me.previous(ranks));
        let heard = Arc::new(Mutex::new(Vec::new()));
        let log = heard.clone();
        let arrived = job.counter();
        let count = arrived.clone();
        let say = job
            .register("say", move |m: Message<'_>, _: &mut Scope<'_>| {
                log.lock().unwrap().push((m.source(), m.info().to_vec(), m.bytes().to_vec()));
                count.add(1);
            })
            .unwrap();
        let window = job.shmalloc::<u8>(200_000).await.unwrap();
        let source = job.region(300_000).await.unwrap();
        let mirror = job.region(5_000).await.unwrap();
        let manager = ConnectionManager::new(1);
        let connection = manager.open().await.id();
        job.barrier().await.unwrap();
        let pattern = job
            .record(|r| {
                let mut first = 0;
                for (number, len) in LENS.into_iter().enumerate() {
                    let slice = source.slice(first..first + len);
                    r.put(&window, right, first, slice.clone())?;
                    r.send_with_info(&say, right, &[number as u8; 5], slice.clone())?;
                    r.send(&say, left, slice)?;
                    first += len;
                }
                r.get(&window, left, 150_000, &mirror)?;
                r.multicast(&say, job.ranks(), source.slice(16..116))?;
                r.many_to_many(job.many_to_many(), connection, [(right, source.slice(0..64))])
            })
            .await
            .unwrap();
        let total: usize = LENS.iter().sum();
        assert_eq!(pattern.messages(), 3 * LENS.len() + 1 + ranks + 1);
        assert_eq!(pattern.bytes() as usize, 3 * total + 5_000 + ranks * 100 + 64);
        // It records only.
        job.barrier().await.unwrap();
        assert!(window.to_vec().iter().all(|byte| *byte == 0) && arrived.value() == 0);
        job.barrier().await.unwrap();
        for step in 0..6u64 {
            let seed = |of: Rank| step * 3 + u64::from(of.0);
            source.write(0, &payload(seed(me), total)).unwrap();
            let own = payload(1_000 + seed(me), 5_000);
            window.store_slice(150_000, &own).unwrap();
            job.barrier().await.unwrap();
            let part = Part { source: left, offset: 0, len: 64 };
            let receive = job.many_to_many().receive(connection, 64, &[part]).unwrap();
            // New info is that of all messages but those of many-to-many.
            let info = [9, step as u8];
            match step % 2 {
                0 => soon("a replay", pattern.replay()).await.unwrap(),
                _ => soon("a replay", pattern.replay().info(&info)).await.unwrap(),
            }
            let received = soon("many-to-many", receive).await.unwrap();
            assert!(received.buffer == payload(seed(left), total)[..64], "step {step}");
            let messages = 2 * LENS.len() as u64 + ranks as u64;
            soon("the messages", arrived.reach((step + 1) * messages)).await;
            job.barrier().await.unwrap();
            assert!(is_payload(seed(left), &window.to_vec()[..total]), "puts of step {step}");
            for from in job.ranks() {
                let bytes = payload(seed(from), total);
                let mut expected = Vec::new();
                let mut first = 0;
                for (number, len) in LENS.into_iter().enumerate() {
                    let part = bytes[first..first + len].to_vec();
                    if from == left {
                        expected.push((vec![number as u8; 5], part.clone()));
                    }
                    if from == right {
                        expected.push((vec![], part));
                    }
                    first += len;
                }
                expected.push((vec![], bytes[16..116].to_vec()));
                if step % 2 == 1 {
                    expected.iter_mut().for_each(|one| one.0 = info.to_vec());
                }
                let heard = heard.lock().unwrap();
                let got: Vec<_> = heard.iter().filter(|one| one.0 == from).collect();
                assert_eq!(got.len(), expected.len(), "step {step} from {from}");
                for ((_, info, bytes), expected) in got.into_iter().zip(&expected) {
                    assert!((info, bytes) == (&expected.0, &expected.1), "step {step} from {from}");
                }
            }
            heard.lock().unwrap().clear();
            let mut there = vec![0; 5_000];
            mirror.read(0, &mut there).unwrap();
            assert!(is_payload(1_000 + seed(left), &there), "get of step {step}");
            job.barrier().await.unwrap();
        }
        // All of it again at once; the sources are as they are.
        let before = 6 * (2 * LENS.len() + ranks) as u64;
        let all = join_all((0..20).map(|_| pattern.replay()));
        let parts = [Part { source: left, offset: 0, len: 64 }];
        let receives: Vec<_> =
            (0..20).map(|_| job.many_to_many().receive(connection, 64, &parts).unwrap()).collect();
        for ended in soon("twenty replays", all).await {
            ended.unwrap();
        }
        for receive in receives {
            soon("many-to-many", receive).await.unwrap();
        }
        soon("the messages", arrived.reach(before + 20 * (2 * LENS.len() + ranks) as u64)).await;
        job.barrier().await.unwrap();
    });
}

case!(m_d25_multicast_and_many_to_many_record_as_they_are_carried_out);
fn m_d25_multicast_and_many_to_many_record_as_they_are_carried_out() {
    run(4, options(), async |job| {
        let me = job.rank();
        let heard = Arc::new(Mutex::new(vec![Vec::new(); 4]));
        let log = heard.clone();
        let arrived = job.counter();
        let count = arrived.clone();
        let news = job
            .register("news", move |m: Message<'_>, _: &mut Scope<'_>| {
                log.lock().unwrap()[m.source().index()].push(m.bytes().to_vec());
                count.add(1);
            })
            .unwrap();
        let connection = ConnectionManager::new(1).open().await.id();
        let source = job.region(4_000).await.unwrap();
        job.barrier().await.unwrap();
        let mut patterns = None;
        for step in 0..5u64 {
            let seed = |of: Rank| step * 4 + u64::from(of.0);
            source.write(0, &payload(seed(me), 4_000)).unwrap();
            let parts: Vec<_> =
                job.ranks().map(|rank| Part { source: rank, offset: rank.index() * 100, len: 100 }).collect();
            let receive = job.many_to_many().receive(connection, 400, &parts).unwrap();
            match &patterns {
                None => {
                    let cast = news.multicast_recording(job.ranks(), &source).await.unwrap();
                    let slice = |to: Rank| (to, source.slice(to.index() * 100..to.index() * 100 + 100));
                    let many = job.many_to_many().send_recording(connection, job.ranks().map(slice));
                    patterns = Some((cast, many.await.unwrap()));
                }
                Some((cast, many)) => {
                    cast.replay().await.unwrap();
                    many.replay().await.unwrap();
                }
            }
            let received = soon("many-to-many", receive).await.unwrap();
            for from in job.ranks() {
                let expected = &payload(seed(from), 4_000)[me.index() * 100..][..100];
                assert_eq!(received.buffer[from.index() * 100..][..100], *expected, "step {step}");
            }
            soon("the multicasts", arrived.reach((step + 1) * 4)).await;
            for from in job.ranks() {
                let last = heard.lock().unwrap()[from.index()].pop();
                assert!(is_payload(seed(from), &last.unwrap()), "step {step} from {from}");
            }
            job.barrier().await.unwrap();
        }
    });
}

case!(m_d25_nothing_that_is_sent_behind_what_records_as_it_sends_passes_it);
/// Also while another task is at the context, which then begins what this one sends.
fn m_d25_nothing_that_is_sent_behind_what_records_as_it_sends_passes_it() {
    const ROUNDS: u64 = 1500;
    run(2, options().workers(2), async |job| {
        let peer = Rank(1 - job.rank().0);
        let busy = Arc::new(job.shmalloc::<u64>(1).await.unwrap());
        let arrived = job.counter();
        let count = arrived.clone();
        let news = job
            .register("news", move |m: Message<'_>, _: &mut Scope<'_>| {
                let number = m.read::<u64>(0).unwrap();
                assert_eq!(number, count.value() + 1, "a message has passed another one");
                count.add(1);
            })
            .unwrap();
        let source = job.region(8).await.unwrap();
        job.barrier().await.unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let beside = tokio::spawn(keep_busy(busy, peer, stop.clone()));
        for round in 0..ROUNDS {
            source.write(0, &(2 * round + 1).to_ne_bytes()).unwrap();
            // The order in which they are polled is that of the program.
            let first = news.multicast_recording([peer], &source);
            let (first, second) = tokio::join!(biased; first, news.send(peer, (2 * round + 2).to_ne_bytes()));
            first.unwrap();
            second.unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        beside.await.unwrap();
        soon("all messages", arrived.reach(2 * ROUNDS)).await;
        job.barrier().await.unwrap();
    });
}

case!(m_d27_4096_patterns_share_a_context_and_all_their_replays_may_be_queued);
fn m_d27_4096_patterns_share_a_context_and_all_their_replays_may_be_queued() {
    run(2, options(), async |job| {
        const PATTERNS: usize = 4096;
        let window = job.shmalloc::<u64>(PATTERNS).await.unwrap();
        let source = job.region(8 * PATTERNS).await.unwrap();
        let arrived = job.counter();
        let (count, sum) = (arrived.clone(), Arc::new(Mutex::new(0u64)));
        let total = sum.clone();
        let say = job
            .register("say", move |m: Message<'_>, _: &mut Scope<'_>| {
                *total.lock().unwrap() += m.read::<u64>(0).unwrap();
                count.add(1);
            })
            .unwrap();
        let peer = Rank(1 - job.rank().0);
        job.barrier().await.unwrap();
        let mut patterns = Vec::new();
        for place in 0..PATTERNS {
            let slice = source.slice(place * 8..place * 8 + 8);
            let pattern = job.record(|r| {
                r.put(&window, peer, place, slice.clone())?;
                r.send(&say, peer, slice)
            });
            patterns.push(pattern.await.unwrap());
        }
        for round in 1..=3u64 {
            for place in 0..PATTERNS {
                source.write(place * 8, &(round * 10_000 + place as u64).to_ne_bytes()).unwrap();
            }
            // Whatever has no room waits: nobody awaits one before the next is started.
            let ended = soon("all replays", join_all(patterns.iter().map(|pattern| pattern.replay()))).await;
            assert!(ended.into_iter().all(|ended| ended.is_ok()));
            soon("all messages", arrived.reach(round * PATTERNS as u64)).await;
            job.barrier().await.unwrap();
            let expected: Vec<u64> = (0..PATTERNS as u64).map(|place| round * 10_000 + place).collect();
            assert_eq!(window.to_vec(), expected);
            assert_eq!(std::mem::take(&mut *sum.lock().unwrap()), expected.iter().sum::<u64>());
            job.barrier().await.unwrap();
        }
        // Freed sections are used again, and an old id names nothing.
        let old = patterns[7].id();
        patterns.clear();
        let again = job.record(|r| r.put(&window, peer, 0, source.slice(0..8))).await.unwrap();
        assert_ne!(again.id(), old);
        again.replay().await.unwrap();
        job.barrier().await.unwrap();
    });
}

case!(m_d31_a_recorded_put_moves_the_counter_that_it_names_at_its_target);
fn m_d31_a_recorded_put_moves_the_counter_that_it_names_at_its_target() {
    run(3, options(), async |job| {
        let (me, ranks) = (job.rank(), job.size());
        let data = job.shmalloc::<u8>(20_000).await.unwrap();
        // Bytes and messages that have come, one word each.
        let counters = job.shmalloc::<u64>(2).await.unwrap();
        let source = job.region(10_000).await.unwrap();
        let right = me.next(ranks);
        let lens = [5_000usize, 8, 0, 4_000];
        let pattern = job
            .record(|r| {
                let mut first = 0;
                for len in lens {
                    let slice = source.slice(first..first + len);
                    r.put_signal(&data, right, first, slice.clone(), counters.signal_add(0, len as u64))?;
                    // Empty ones count, too.
                    r.put_signal(&data, right, 10_000 + first, slice, counters.signal_add(1, 1))?;
                    first += len;
                }
                Ok(())
            })
            .await
            .unwrap();
        let total: usize = lens.iter().sum();
        job.barrier().await.unwrap();
        for step in 1..=20u64 {
            source.write(0, &payload(step * 3 + u64::from(me.0), total)).unwrap();
            let local = soon("the sources", pattern.replay().local()).await.unwrap();
            source.write(0, &vec![0xee; total]).unwrap();
            // Nobody is told but by the counters.
            let bytes = counters.wait_until(0, |bytes| bytes >= step * total as u64);
            assert_eq!(soon("the bytes", bytes).await.unwrap(), step * total as u64);
            let count = counters.wait_until(1, |count| count >= step * lens.len() as u64);
            assert_eq!(soon("the messages", count).await.unwrap(), step * lens.len() as u64);
            let own = data.to_vec();
            let seed = step * 3 + u64::from(me.previous(ranks).0);
            assert!(is_payload(seed, &own[..total]) && is_payload(seed, &own[10_000..][..total]), "{step}");
            soon("the end", local.remote()).await.unwrap();
            job.barrier().await.unwrap();
        }
    });
}

case!(m_d16_a_finished_send_is_started_again_with_what_is_in_its_region_then);
fn m_d16_a_finished_send_is_started_again_with_what_is_in_its_region_then() {
    run(2, options(), async |job| {
        let heard = Arc::new(Mutex::new(Vec::new()));
        let log = heard.clone();
        let arrived = job.counter();
        let count = arrived.clone();
        let say = job
            .register("say", move |m: Message<'_>, _: &mut Scope<'_>| {
                log.lock().unwrap().push((m.info().to_vec(), m.bytes().to_vec()));
                count.add(1);
            })
            .unwrap();
        let peer = Rank(1 - job.rank().0);
        // The last one is longer than a packet.
        let lens = [0usize, 8, 2_000, 70_000, 9 << 20];
        job.barrier().await.unwrap();
        for (number, len) in lens.into_iter().enumerate() {
            let source = job.region(len.max(1)).await.unwrap();
            let send = say.restartable(peer, &[7; 20], source.slice(0..len)).await.unwrap();
            for turn in 0..4u64 {
                source.write(0, &payload(turn, len)).unwrap();
                soon("the send", send.start()).await.unwrap();
            }
            soon("the messages", arrived.reach(4 * (number as u64 + 1))).await;
            for (turn, (info, bytes)) in heard.lock().unwrap().drain(..).enumerate() {
                assert_eq!((info.as_slice(), bytes.len()), (&[7; 20][..], len));
                assert!(is_payload(turn as u64, &bytes), "turn {turn} of {len} bytes");
            }
            job.barrier().await.unwrap();
        }
    });
}

case!(m_d26_what_cannot_be_recorded_is_told_and_a_pattern_says_what_it_does);
fn m_d26_what_cannot_be_recorded_is_told_and_a_pattern_says_what_it_does() {
    run(2, options().contexts(2), async |job| {
        let window = job.shmalloc::<u64>(10).await.unwrap();
        let source = job.region(64).await.unwrap();
        let peer = Rank(1 - job.rank().0);
        let say = job.register("say", |_: Message<'_>, _: &mut Scope<'_>| {}).unwrap();
        let (kept, _stream) = job.stream("kept").unwrap();
        let error = |error: posthaste::Error| match error {
            posthaste::Error::Pattern(error) => error,
            other => panic!("{other}"),
        };
        let told = job.record(|r| r.send(&say, Rank(2), &source)).await.unwrap_err();
        assert_eq!(error(told), SendError::UnknownRank { rank: Rank(2), size: 2 }.into());
        let told = job.record(|r| r.send_with_info(&say, peer, &[0; 113], &source)).await.unwrap_err();
        assert_eq!(error(told), SendError::InfoTooLong { len: 113 }.into());
        let told = job.record(|r| r.send(&say, peer, source.slice(60..65))).await.unwrap_err();
        assert!(matches!(error(told), PatternError::Rma(RmaError::OutOfRange { .. })));
        #[expect(clippy::reversed_empty_ranges, reason = "it is what is to be refused")]
        let told = job.record(|r| r.send(&say, peer, source.slice(50..30))).await.unwrap_err();
        assert_eq!(error(told), PatternError::Rma(RmaError::Backwards { first: 50, end: 30 }));
        let told = job.record(|r| r.put(&window, peer, 3, source.slice(0..60))).await.unwrap_err();
        assert!(matches!(error(told), PatternError::Rma(RmaError::OutOfRange { .. })));
        let elsewhere = say.through(job.context_handle(posthaste::ContextId(1)).unwrap());
        let told = error(job.record(|r| r.send(&elsewhere, peer, &source)).await.unwrap_err());
        assert!(matches!(told, PatternError::OtherContext { subject: "the message", .. }), "{told}");
        let many = |r: &mut posthaste::Recorder| (0..5_000).try_for_each(|_| r.send(&kept, peer, &source));
        let told = error(job.record(many).await.unwrap_err());
        assert!(matches!(told, PatternError::TooMuchCredit { messages: 5_000, .. }), "{told}");
        let many = |r: &mut posthaste::Recorder| (0..300_000).try_for_each(|_| r.send(&say, peer, &source));
        let told = error(job.record(many).await.unwrap_err());
        assert!(matches!(told, PatternError::Full { wanted: 300_000, .. }), "{told}");
        let puts = job.record(|r| r.put(&window, peer, 0, &source)).await.unwrap();
        assert_eq!(puts.replay().info(&[1]).await.unwrap_err(), PatternError::NoMessage);
        let sends = job
            .record(|r| {
                r.put(&window, peer, 2, source.slice(0..16))?;
                r.send_with_info(&say, peer, &[1; 50], source.slice(16..24))
            })
            .await
            .unwrap();
        let told = sends.replay().info(&[0; 113]).await.unwrap_err();
        assert_eq!(told, SendError::InfoTooLong { len: 113 }.into());
        let text = sends.describe().await.unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert!(lines[0].contains("2 operations, 24 bytes"), "{text}");
        assert!(lines[2].contains("put") && lines[2].contains("16") && lines[2].contains("at 16"), "{text}");
        assert!(lines[3].contains("send") && lines[3].contains("\"say\""), "{text}");
        assert!(lines[3].ends_with("info of 50 bytes"), "{text}");
        job.barrier().await.unwrap();
    });
}

case!(error_a_pattern_is_not_replayed_on_another_context);
fn error_a_pattern_is_not_replayed_on_another_context() {
    run(2, options().contexts(2), async |job| {
        let window = job.shmalloc::<u64>(1).await.unwrap();
        let (source, peer) = (job.region(8).await.unwrap(), Rank(1 - job.rank().0));
        source.write(0, &7_u64.to_ne_bytes()).unwrap();
        let say = job.register("say", |_: Message<'_>, _: &mut Scope<'_>| {}).unwrap();
        job.barrier().await.unwrap();
        let handle = job.context_handle(posthaste::ContextId(1)).unwrap();
        let (view, theirs) = (window.through(handle).await.unwrap(), source.through(handle).await.unwrap());
        // The first of each context: they have the same name.
        let ours = say.restartable(peer, b"", &source).await.unwrap();
        let put = job.record_through(handle, |r| r.put(&view, peer, 0, &theirs)).await.unwrap();
        let context = job.own_context(posthaste::ContextId(1)).unwrap();
        let elsewhere = |error| matches!(error, PatternError::OtherContext { subject: "the pattern", .. });
        assert!(ours.start_on(&context).await.is_err_and(elsewhere));
        assert!(put.replay_on(job.handle()).await.is_err_and(elsewhere));
        assert_eq!(
            (job.stats().replays, window.get(peer, 0).await),
            (0, Ok(0)),
            "nothing else was done instead"
        );
        put.replay_on(&context).await.unwrap();
        ours.start().await.unwrap();
        assert_eq!(window.get(peer, 0).await, Ok(7));
        drop(context);
        job.barrier().await.unwrap();
    });
}

case!(error_a_replay_behind_the_leave_ends_as_a_send_does);
fn error_a_replay_behind_the_leave_ends_as_a_send_does() {
    run(2, options().body_leaves(), async |job| {
        let say = job.register("say", |_: Message<'_>, _: &mut Scope<'_>| {}).unwrap();
        let source = job.region(8).await.unwrap();
        let pattern = job.record(|r| r.send(&say, Rank(1), &source)).await.unwrap();
        job.barrier().await.unwrap();
        job.leave().await.unwrap();
        assert_eq!(say.send(Rank(1), "too late").await, Err(SendError::Fault(Fault::Shutdown)));
        assert_eq!(pattern.replay().await, Err(PatternError::Fault(Fault::Shutdown)));
    });
}

case!(m_d27_replays_to_a_slow_receiver_wait_for_its_credit_and_nothing_else_does);
fn m_d27_replays_to_a_slow_receiver_wait_for_its_credit_and_nothing_else_does() {
    run(2, options().env("POSTHASTE_CREDITS", "8"), async |job| {
        let (kept, mut stream) = job.stream("kept").unwrap();
        let arrived = job.counter();
        let count = arrived.clone();
        let say = job.register("say", move |_: Message<'_>, _: &mut Scope<'_>| count.add(1)).unwrap();
        let source = job.region(8).await.unwrap();
        let window = job.shmalloc::<u64>(1).await.unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            let pattern = job
                .record(|r| {
                    for _ in 0..5 {
                        r.send(&kept, Rank(1), &source)?;
                    }
                    r.put(&window, Rank(1), 0, &source)
                })
                .await
                .unwrap();
            let replays = async {
                for number in 0..40u64 {
                    source.write(0, &number.to_ne_bytes()).unwrap();
                    pattern.replay().await.unwrap();
                }
            };
            let others = async {
                for _ in 0..200 {
                    say.send(Rank(1), Bytes::from_static(b"not kept")).await.unwrap();
                }
            };
            soon("both", async { tokio::join!(replays, others) }).await;
        } else {
            // Not one of those that are kept is taken before this.
            soon("the others", arrived.reach(200)).await;
            for number in 0..200u64 {
                let message = soon("a kept one", stream.recv()).await.unwrap();
                assert_eq!(message.read::<u64>(0), Some(number / 5));
            }
        }
        job.barrier().await.unwrap();
        if job.rank() == Rank(1) {
            assert_eq!(window.load(0), Some(39));
        }
        job.barrier().await.unwrap();
    });
}

case!(m_d27_a_replay_gets_the_credit_that_its_receiver_has_not_told_of);
fn m_d27_a_replay_gets_the_credit_that_its_receiver_has_not_told_of() {
    run(2, options(), async |job| {
        let (numbers, mut all) = job.stream("numbers").unwrap();
        let source = job.region(64).await.unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            let peer = Rank(1);
            // All of them are consumed, and are too few for a word on it.
            for _ in 0..450 {
                numbers.send(peer, [0; 8]).await.unwrap();
            }
            let record = |count| {
                let (source, numbers) = (source.slice(0..8), &numbers);
                job.record(move |r| (0..count).try_for_each(|_| r.send(numbers, peer, source.clone())))
            };
            let (most, every) = (record(600).await.unwrap(), record(1024).await.unwrap());
            for _ in 0..3 {
                soon("most of the credit", most.replay()).await.unwrap();
                soon("all the credit", every.replay()).await.unwrap();
            }
        } else {
            for _ in 0..450 + 3 * (600 + 1024) {
                soon("a message", all.recv()).await.unwrap();
            }
        }
        job.barrier().await.unwrap();
    });
}

case!(m_d27_a_replay_that_has_all_the_bytes_is_not_behind_who_waits_for_them);
fn m_d27_a_replay_that_has_all_the_bytes_is_not_behind_who_waits_for_them() {
    run(2, options().env("POSTHASTE_CREDIT_BYTES", "65536"), async |job| {
        let (say, mut all) = job.stream("say").unwrap();
        let window = job.shmalloc::<u64>(1).await.unwrap();
        let source = job.region(32 << 10).await.unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            let peer = Rank(1);
            say.send(peer, vec![0; 64 << 10]).await.unwrap();
            let halves = job
                .record(|r| {
                    r.send(&say, peer, &source)?;
                    r.send(&say, peer, &source)
                })
                .await
                .unwrap();
            let mut replay = Box::pin(halves.replay().into_future());
            assert!(futures::poll!(&mut replay).is_pending());
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            let mut send = Box::pin(say.send(peer, "behind").into_future());
            assert!(futures::poll!(&mut send).is_pending());
            window.put(peer, 0, 1).await.unwrap();
            let (replay, send) = soon("both", async { futures::join!(replay, send) }).await;
            replay.unwrap();
            send.unwrap();
        } else {
            soon("the word", window.wait_until(0, |word| word == 1)).await.unwrap();
            for len in [64 << 10, 32 << 10, 32 << 10, 6] {
                assert_eq!(soon("a message", all.recv()).await.unwrap().len(), len);
            }
        }
        job.barrier().await.unwrap();
    });
}

case!(m_d27_a_replay_that_waits_for_credit_holds_up_those_that_go_its_way_and_no_others);
fn m_d27_a_replay_that_waits_for_credit_holds_up_those_that_go_its_way_and_no_others() {
    run(2, options().env("POSTHASTE_CREDITS", "8"), async |job| {
        let (kept, mut stream) = job.stream("kept").unwrap();
        let window = job.shmalloc::<u64>(3).await.unwrap();
        let source = job.region(8).await.unwrap();
        source.write(0, &1_u64.to_ne_bytes()).unwrap();
        let mut barrier = job.persistent().barrier(&job.world()).await.unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            let five = |r: &mut Recorder| (0..5).try_for_each(|_| r.send(&kept, Rank(1), &source));
            let put = |place| {
                let (window, source) = (&window, &source);
                move |r: &mut Recorder| r.put(window, Rank(1), place, source)
            };
            let bulk = job.fifo(FifoOptions::default()).await.unwrap();
            let urgent = job.fifo(FifoOptions { priority: true, ..FifoOptions::default() }).await.unwrap();
            let slow = bulk.record(five).await.unwrap();
            soon("what there is credit for", slow.replay()).await.unwrap();
            let mut second = slow.replay();
            assert!(poll!(&mut second).is_pending(), "three credits are left");
            let (halo, signal) = (job.record(put(0)).await.unwrap(), urgent.record(put(1)).await.unwrap());
            soon("one past the FIFO", halo.replay()).await.unwrap();
            soon("one through another", signal.replay()).await.unwrap();
            let (direct, behind) = (job.record(five).await.unwrap(), job.record(put(2)).await.unwrap());
            let (mut third, mut last) = (direct.replay(), behind.replay());
            assert!(poll!(&mut third).is_pending() && poll!(&mut last).is_pending());
            soon("a persistent barrier", barrier.run()).await.unwrap();
            assert!(poll!(&mut last).is_pending(), "it keeps its place behind the one before it");
            // Only now the other one takes what gives credit back.
            soon("another barrier", barrier.run()).await.unwrap();
            soon("all", async { futures::try_join!(second, third, last) }).await.unwrap();
        } else {
            soon("a persistent barrier", barrier.run()).await.unwrap();
            assert_eq!(window.to_vec(), [1, 1, 0]);
            soon("another barrier", barrier.run()).await.unwrap();
            for _ in 0..15 {
                soon("a kept one", stream.recv()).await.unwrap();
            }
            soon("the last word", window.wait_until(2, |word| word == 1)).await.unwrap();
        }
        job.barrier().await.unwrap();
    });
}

case!(m_d27_replays_on_different_ways_do_not_wait_for_each_others_credit);
fn m_d27_replays_on_different_ways_do_not_wait_for_each_others_credit() {
    run(2, options().env("POSTHASTE_CREDITS", "8"), async |job| {
        const ROUNDS: usize = 50;
        let (left, mut lefts) = job.stream("left").unwrap();
        let (right, mut rights) = job.stream("right").unwrap();
        let source = job.region(8).await.unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            // Each needs more than half of the credit of both, and no two begin with the same.
            let both = |order: [usize; 2]| {
                let (streams, source) = ([&left, &right], &source);
                move |r: &mut Recorder| {
                    let five = |at: usize| (0..5).map(move |_| at);
                    order.into_iter().flat_map(five).try_for_each(|at| r.send(streams[at], Rank(1), source))
                }
            };
            let fifo = job.fifo(FifoOptions::default()).await.unwrap();
            let (one, other) =
                (job.record(both([0, 1])).await.unwrap(), fifo.record(both([1, 0])).await.unwrap());
            for _ in 0..ROUNDS {
                let replays = [&one, &other, &other, &one].map(|pattern| pattern.replay());
                soon("all four", futures::future::try_join_all(replays)).await.unwrap();
            }
        } else {
            let all = async { tokio::join!(count(&mut lefts, 20 * ROUNDS), count(&mut rights, 20 * ROUNDS)) };
            soon("all messages", all).await;
        }
        job.barrier().await.unwrap();
    });
}

async fn count(stream: &mut posthaste::MessageStream, messages: usize) {
    for _ in 0..messages {
        stream.recv().await.unwrap();
    }
}

case!(m_d29_recorded_collectives_are_replayed_with_new_values_each_time);
fn m_d29_recorded_collectives_are_replayed_with_new_values_each_time() {
    run(5, options(), async |job| {
        use posthaste::Reduce;
        let (me, ranks) = (job.rank().0 as u64, job.size() as u64);
        let world = job.world();
        let mut sum = job.persistent().all_reduce::<u64>(&world, 1_000, &Reduce::sum()).await.unwrap();
        let mut first = job.persistent().all_reduce::<u64>(&world, 1, &Reduce::by(|a, _| a)).await.unwrap();
        let mut news = job.persistent().broadcast::<u8>(&world, 2, 100_000).await.unwrap();
        let mut barrier = job.persistent().barrier(&world).await.unwrap();
        let half = world.split(Some(job.rank().0 % 2), 0).await.unwrap().unwrap();
        let mut most = job.persistent().all_reduce::<u64>(&half, 3, &Reduce::max()).await.unwrap();
        let mut exchange = job.persistent().all_to_all::<u64>(&world, 700).await.unwrap();
        for step in 0..50u64 {
            let mut values: Vec<u64> = (0..1_000).map(|at| step * at + me).collect();
            soon("the sum", sum.run(&mut values)).await.unwrap();
            let total = |at: u64| ranks * step * at + ranks * (ranks - 1) / 2;
            assert!(values.iter().zip(0..).all(|(value, at)| *value == total(at)), "step {step}");
            let mut one = [step * 10 + me];
            soon("the first", first.run(&mut one)).await.unwrap();
            assert_eq!(one, [step * 10], "in the order of the ranks");
            // The root may be ahead: it is held up by the slowest, and nothing is lost.
            for turn in 0..3u64 {
                let mut bytes = vec![0; 100_000];
                if me == 2 {
                    bytes = payload(step * 3 + turn, 100_000);
                }
                soon("the broadcast", news.run(&mut bytes)).await.unwrap();
                assert!(is_payload(step * 3 + turn, &bytes), "step {step}, turn {turn}");
            }
            let mut mine = [me, step, me * step];
            soon("the maximum", most.run(&mut mine)).await.unwrap();
            let top = if me.is_multiple_of(2) { 4 } else { 3 };
            assert_eq!(mine, [top, step, top * step]);
            // Who is ahead gives its next part while others still look at the last one.
            for turn in 0..4u64 {
                let value = |from: u64, to: u64| (step * 4 + turn) * 10_000 + from * 100 + to;
                let give: Vec<u64> = (0..ranks).flat_map(|to| vec![value(me, to); 700]).collect();
                let mut take = vec![0; give.len()];
                if (step + turn + me).is_multiple_of(7) {
                    tokio::time::sleep(std::time::Duration::from_micros(300)).await;
                }
                soon("the exchange", exchange.run(&give, &mut take)).await.unwrap();
                let expected: Vec<u64> = (0..ranks).flat_map(|from| vec![value(from, me); 700]).collect();
                assert!(take == expected, "step {step}, turn {turn}");
            }
            soon("the barrier", barrier.run()).await.unwrap();
        }
        let wrong = sum.run(&mut [0; 3]).await.unwrap_err();
        assert!(wrong.to_string().contains("1000"), "{wrong}");
        job.barrier().await.unwrap();
    });
}
