//! Clients and contexts: separate traffic, threads of their own, work from anywhere.

use crate::support::{case, options, run, soon, until};
use posthaste::{ContextId, Fault, FifoOptions, JoinError, Message, Rank, RmaError, Scope, SendError};
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

case!(m_p04_two_clients_do_not_see_each_others_traffic);
fn m_p04_two_clients_do_not_see_each_others_traffic() {
    run(2, options().clients(2), async |job| {
        let second = job.client(1).await.unwrap();
        assert!(
            matches!(job.client(1).await, Err(posthaste::Error::Join(JoinError::Client { .. }))),
            "taken"
        );
        assert!(
            matches!(job.client(2).await, Err(posthaste::Error::Join(JoinError::Client { .. }))),
            "no such"
        );
        let mut messages = Vec::new();
        let mut counters = Vec::new();
        for (number, client) in [&job, &second].into_iter().enumerate() {
            let counter = client.counter();
            let count = counter.clone();
            // The same name in both.
            let message = client
                .register("same", move |m: Message, _: &mut Scope| {
                    assert_eq!(m.read::<u64>(0), Some(number as u64));
                    count.add(1);
                })
                .unwrap();
            messages.push(message);
            counters.push(counter);
        }
        let peer = Rank(1 - job.rank().0);
        for _ in 0..300 {
            messages[0].send(peer, 0u64.to_ne_bytes()).await.unwrap();
        }
        for _ in 0..500 {
            messages[1].send(peer, 1u64.to_ne_bytes()).await.unwrap();
        }
        soon("the first client's messages", counters[0].reach(300)).await;
        soon("the second client's messages", counters[1].reach(500)).await;
        job.barrier().await.unwrap();
        second.barrier().await.unwrap();
        assert_eq!((counters[0].value(), counters[1].value()), (300, 500));
        assert_eq!((job.stats().panics, second.stats().panics), (0, 0));
        // Windows, too.
        let (mine, other) = (job.shmalloc::<u64>(8).await.unwrap(), second.shmalloc::<u64>(8).await.unwrap());
        mine.put(peer, 3, 7).await.unwrap();
        job.barrier().await.unwrap();
        assert_eq!((mine.load(3), other.load(3)), (Some(7), Some(0)));
        second.leave().await.unwrap();
    });
}

case!(m_p04_contexts_are_driven_by_threads_of_their_own_and_take_work_from_any);
fn m_p04_contexts_are_driven_by_threads_of_their_own_and_take_work_from_any() {
    run(2, options().contexts(3).workers(2), async |job| {
        let peer = Rank(1 - job.rank().0);
        let seen: Arc<[AtomicU64; 3]> = Arc::default();
        let counts = seen.clone();
        let message = job
            .register("context", move |_: Message, scope: &mut Scope| {
                counts[scope.me().context.index()].fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
        job.barrier().await.unwrap();
        // Context 1 belongs to a thread with a runtime of its own; context 2 stays with its driver.
        let context = job.own_context(ContextId(1)).expect("free");
        assert!(job.own_context(ContextId(1)).is_none(), "owned");
        let (own, counts) = (message.clone(), seen.clone());
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let message = own.on(&context);
                for number in 0..1000u64 {
                    message.send(peer, number.to_ne_bytes()).await.unwrap();
                }
                // Its own part, and what other threads posted to it.
                while counts[1].load(Ordering::Relaxed) < 2000 {
                    context.advance();
                    tokio::task::yield_now().await;
                }
            });
            drop(context);
        });
        // Work for both contexts from tasks on other threads.
        let tasks: Vec<_> = [1u16, 1, 2, 2]
            .map(|number| {
                let through = message.through(job.context_handle(ContextId(number)).unwrap());
                tokio::spawn(async move {
                    for number in 0..500u64 {
                        through.send(peer, number.to_ne_bytes()).await.unwrap();
                    }
                })
            })
            .into_iter()
            .collect();
        for task in tasks {
            soon("the posted sends", task).await.unwrap();
        }
        soon("the thread", tokio::task::spawn_blocking(move || thread.join())).await.unwrap().unwrap();
        until("context 2's messages", || seen[2].load(Ordering::Relaxed) == 1000).await;
        assert_eq!(seen.each_ref().map(|count| count.load(Ordering::Relaxed)), [0, 2000, 1000]);
        job.barrier().await.unwrap();
    });
}

case!(m_p04_an_owned_context_sleeps_and_is_woken_by_messages_and_posted_work);
fn m_p04_an_owned_context_sleeps_and_is_woken_by_messages_and_posted_work() {
    run(2, options().contexts(2), async |job| {
        let arrived = job.counter();
        let count = arrived.clone();
        let message = job.register("wake", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
        job.barrier().await.unwrap();
        let peer = Rank(1 - job.rank().0);
        let context = job.own_context(ContextId(1)).expect("free");
        for round in 1..=50u64 {
            // One side sends while the other sleeps; then the other way round.
            if (round % 2 == 0) == (job.rank() == Rank(0)) {
                tokio::time::sleep(std::time::Duration::from_millis(2)).await;
                message.on(&context).send(peer, b"x").await.unwrap();
            } else {
                soon("the message", arrived.reach_on(&context, round.div_ceil(2))).await;
            }
        }
        drop(context);
        job.barrier().await.unwrap();
    });
}

case!(m_d06_both_faces_of_a_context_work_at_once);
fn m_d06_both_faces_of_a_context_work_at_once() {
    run(2, options().contexts(2), async |job| {
        let arrived = job.counter();
        let count = arrived.clone();
        let message = job.register("faces", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
        let answer = job
            .service_inline("double", |m, _| Ok((m.read::<u64>(0).unwrap() * 2).to_ne_bytes().into()))
            .unwrap();
        job.barrier().await.unwrap();
        let peer = Rank(1 - job.rank().0);
        let context = job.own_context(ContextId(1)).expect("free");
        let handle = job.context_handle(ContextId(1)).unwrap().clone();
        let (through, asks) = (message.through(&handle), answer.through(&handle));
        let by_handle = tokio::spawn(async move {
            for number in 0..200u64 {
                through.send(peer, number.to_ne_bytes()).await.unwrap();
                let value = asks.call_bytes(peer, number.to_ne_bytes()).await.unwrap();
                assert_eq!(value.as_bytes(), (number * 2).to_ne_bytes());
            }
        });
        let (own, own_answer) = (message.on(&context), answer.on(&context));
        for number in 0..200u64 {
            own.send(peer, number.to_ne_bytes()).await.unwrap();
            let value = own_answer.call_bytes(peer, number.to_ne_bytes()).await.unwrap();
            assert_eq!(value.as_bytes(), (number * 2).to_ne_bytes());
        }
        soon("all messages", arrived.reach_on(&context, 400)).await;
        // The owner goes on until the other face is through on both sides.
        let done = job.counter();
        let told = done.clone();
        tokio::spawn(async move {
            by_handle.await.unwrap();
            told.add(1);
        });
        soon("the handle's operations", done.reach_on(&context, 1)).await;
        drop(context);
        job.barrier().await.unwrap();
    });
}

case!(m_d06_threads_have_a_context_alone_in_turn_or_all_at_once);
/// The levels of thread support: a context of one thread, among others that leave it alone; one that threads have in turn; and
/// one that threads use at once.
fn m_d06_threads_have_a_context_alone_in_turn_or_all_at_once() {
    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }
    run(2, options().contexts(2), async |job| {
        const EACH: u64 = 200;
        let peer = Rank(1 - job.rank().0);
        let heard: Arc<Mutex<Vec<u64>>> = Arc::default();
        let log = heard.clone();
        let note = move |m: Message, _: &mut Scope| log.lock().unwrap().push(m.read::<u64>(0).unwrap());
        let say = job.register("say", note).unwrap();
        job.barrier().await.unwrap();
        // This thread alone has it: nothing is locked.
        let mut context = job.own_context(ContextId(1)).expect("free");
        for number in 0..EACH {
            say.on(&context).send(peer, number.to_ne_bytes()).await.unwrap();
        }
        // It goes from thread to thread, and its messages stay in order.
        for turn in 1..4 {
            let say = say.clone();
            let own = move || {
                block_on(async {
                    for number in turn * EACH..(turn + 1) * EACH {
                        say.on(&context).send(peer, number.to_ne_bytes()).await.unwrap();
                    }
                });
                context
            };
            context = soon("a thread", tokio::task::spawn_blocking(own)).await.unwrap();
        }
        drop(context);
        // All of them have it at once, each in its own order.
        let threads = (4..8).map(|thread| {
            let say = say.through(job.context_handle(ContextId(1)).unwrap());
            tokio::task::spawn_blocking(move || {
                block_on(async {
                    for number in thread * EACH..(thread + 1) * EACH {
                        say.send(peer, number.to_ne_bytes()).await.unwrap();
                    }
                });
            })
        });
        for thread in threads.collect::<Vec<_>>() {
            soon("a thread", thread).await.unwrap();
        }
        until("all messages", || heard.lock().unwrap().len() as u64 >= 8 * EACH).await;
        let heard = heard.lock().unwrap().clone();
        let (in_turn, at_once) = heard.split_at(4 * EACH as usize);
        assert!(in_turn.iter().copied().eq(0..4 * EACH), "{in_turn:?}");
        for thread in 4..8 {
            let of = at_once.iter().copied().filter(|number| number / EACH == thread);
            assert!(of.eq(thread * EACH..(thread + 1) * EACH), "thread {thread}");
        }
        assert_eq!(heard.len() as u64, 8 * EACH);
        job.barrier().await.unwrap();
    });
}

case!(m_p04_deadlines_of_an_owned_context_are_met_whatever_it_waits_for);
/// Whatever an owned context waits for, be it an operation of its own, one that goes through a handle, or nothing of this
/// library: its deadline is met, and what ends in time ends as it would without one.
fn m_p04_deadlines_of_an_owned_context_are_met_whatever_it_waits_for() {
    run(2, options(), async |job| {
        let never = job.service("never", |()| std::future::pending::<()>()).unwrap();
        let window = job.shmalloc::<u64>(1).await.unwrap();
        job.barrier().await.unwrap();
        let peer = Rank(1 - job.rank().0);
        let context = job.own_context(ContextId(0)).expect("nobody else owns it");
        let late = Fault::DeadlineExceeded;
        for time in [1, 7, 40].map(Duration::from_millis) {
            let began = Instant::now();
            let (_kept, outside) = tokio::sync::oneshot::channel::<()>();
            let outside = async { outside.await.map_err(|_| Fault::Shutdown) };
            assert_eq!(soon("what is not ours", posthaste::within(&context, time, outside)).await, Err(late));
            let asked = async { never.on(&context).call(peer, ()).await };
            assert_eq!(soon("a call", posthaste::within(&context, time, asked)).await, Err(late.into()));
            let written = window.wait_until_on(&context, 0, |word| word == 1);
            assert_eq!(soon("memory", posthaste::within(&context, time, written)).await, Err(late.into()));
            // Through the handle of the same context: nobody drives it but the owner.
            let through = job.drive(&context, job.within(time, never.call(peer, ())));
            assert_eq!(soon("a call through the handle", through).await, Err(late.into()));
            assert!(began.elapsed() >= 4 * time, "met after {:?}", began.elapsed());
        }
        let hour = Duration::from_secs(3600);
        soon("a put", job.drive(&context, job.within(hour, window.put(peer, 0, 2)))).await.unwrap();
        soon("the barrier", job.drive(&context, job.within(hour, job.barrier()))).await.unwrap();
        assert_eq!(window.load(0), Some(2));
    });
}

case!(m_p04_memory_and_patterns_are_used_through_any_context);
/// Windows, regions, patterns and FIFOs of a context, whichever it is, driven by its driver or owned by a thread.
fn m_p04_memory_and_patterns_are_used_through_any_context() {
    const CONTEXTS: u16 = 3;
    const WORDS: usize = 1000;
    run(2, options().contexts(CONTEXTS).workers(2), async |job| {
        let peer = Rank(1 - job.rank().0);
        let message = job.register("counted", |_: Message, _: &mut Scope| {}).unwrap();
        let window = job.shmalloc::<u64>(WORDS * usize::from(CONTEXTS) + 1).await.unwrap();
        let sum = WORDS * usize::from(CONTEXTS);
        job.barrier().await.unwrap();
        for number in 0..CONTEXTS {
            let handle = job.context_handle(ContextId(number)).unwrap();
            let view = window.through(handle).await.unwrap();
            let first = WORDS * usize::from(number);
            let values: Vec<u64> = (0..WORDS as u64).map(|at| at * 7 + u64::from(number)).collect();
            view.put_slice(peer, first, &values).await.unwrap();
            assert_eq!(view.get_slice(peer, first, WORDS).await.unwrap(), values);
            view.put(peer, first, 1).await.unwrap();
            assert_eq!(view.get(peer, first).await.unwrap(), 1);
            assert_eq!(view.fetch_add(peer, first, 4).await.unwrap(), 1);
            assert_eq!(window.get(peer, first).await.unwrap(), 5, "it is one window");
            // Recorded there, of what is there.
            let source = job.region(800).await.unwrap();
            let theirs = source.through(handle).await.unwrap();
            let sent = message.through(handle);
            let pattern = job.record_through(handle, |r| {
                r.put(&view, peer, first, &theirs)?;
                r.send(&sent, peer, theirs.slice(0..8))
            });
            let pattern = soon("the recording", pattern).await.unwrap();
            let fifo = posthaste::Fifo::open(handle, FifoOptions::default()).await.unwrap();
            for round in 1..=20u64 {
                source.write(0, &round.to_ne_bytes()).unwrap();
                source.write(792, &(round + 1).to_ne_bytes()).unwrap();
                soon("the replay", pattern.replay()).await.unwrap();
                soon("the message", fifo.send(&sent, peer, "beside")).await.unwrap();
                assert_eq!(view.get(peer, first).await.unwrap(), round);
                assert_eq!(view.get(peer, first + 99).await.unwrap(), round + 1);
            }
            // What is of another context is refused, and not sent some other way.
            if number > 0 {
                let mixed = job.record_through(handle, |r| r.put(&window, peer, first, &theirs)).await;
                let other = |error: &posthaste::Error| format!("{error}").contains("context 0");
                assert!(mixed.as_ref().is_err_and(other), "{mixed:?}");
            }
            view.add(peer, sum, 1).await.unwrap();
        }
        // Each of both has seen all of the other's.
        soon("the peer", window.wait_until(sum, |count| count == u64::from(CONTEXTS))).await.unwrap();
        job.barrier().await.unwrap();
        // A thread that owns a context puts and waits there.
        let (context, theirs) = (job.own_context(ContextId(1)).expect("free"), job.clone());
        let handle = job.context_handle(ContextId(1)).unwrap();
        let view = job.drive(&context, window.through(handle)).await.unwrap();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                // The replays have left zeros there.
                for round in 1..=300u64 {
                    let (value, signal) = ([round], view.signal_add(WORDS + 1, 1));
                    let put = view.put_signal(peer, WORDS + 2, &value, signal);
                    theirs.drive(&context, put).await.unwrap();
                    view.wait_until_on(&context, WORDS + 1, |count| count >= round).await.unwrap();
                    assert!(view.load(WORDS + 2).unwrap() >= round);
                }
            });
            drop(context);
        });
        soon("the thread", tokio::task::spawn_blocking(move || thread.join())).await.unwrap().unwrap();
        job.barrier().await.unwrap();
        // Freed once, through whichever.
        let view = window.through(job.context_handle(ContextId(2)).unwrap()).await.unwrap();
        let waits = view.clone();
        let waiting = tokio::spawn(async move { waits.wait_until(0, |word| word == u64::MAX).await });
        soon("the free", view.free()).await.unwrap();
        assert!(matches!(soon("the wait", waiting).await.unwrap(), Err(RmaError::NoSuchWindow(_))));
        assert!(matches!(window.put(peer, 0, 1).await, Err(RmaError::NoSuchWindow(_))));
        for number in 0..CONTEXTS {
            let late = window.through(job.context_handle(ContextId(number)).unwrap()).await;
            assert!(matches!(late, Err(RmaError::NoSuchWindow(_))), "{late:?}");
        }
        assert!(matches!(window.free().await, Err(RmaError::NoSuchWindow(_))));
    });
}

case!(m_d31_a_signal_through_another_context_than_the_data_comes_after_it);
/// Data that goes through one context and a signal that goes through another: the signal comes last all the same.
fn m_d31_a_signal_through_another_context_than_the_data_comes_after_it() {
    const WORDS: usize = 1 << 19;
    run(2, options().contexts(2), async |job| {
        let peer = Rank(1 - job.rank().0);
        let data = job.shmalloc::<u64>(WORDS).await.unwrap();
        let arrived = job.shmalloc::<u64>(1).await.unwrap();
        let beside = data.through(job.context_handle(ContextId(1)).unwrap()).await.unwrap();
        job.barrier().await.unwrap();
        for round in 1..=16u64 {
            // So long that a word on another connection would be there long before it.
            let values = vec![round; WORDS];
            let way = if round % 2 == 0 { &data } else { &beside };
            // Who waits does nothing else, or it would come too late to see that something is missing.
            if job.rank() == Rank(round as u32 / 2 % 2) {
                soon("the put", way.put_signal(peer, 0, &values, arrived.signal_set(0, round)))
                    .await
                    .unwrap();
            } else {
                soon("the signal", arrived.wait_until(0, |last| last == round)).await.unwrap();
                assert_eq!(data.load(WORDS - 1), Some(round));
            }
            job.barrier().await.unwrap();
        }
    });
}

case!(error_memory_of_another_client_is_refused);
fn error_memory_of_another_client_is_refused() {
    run(1, options().clients(2), async |job| {
        let second = job.client(1).await.unwrap();
        let window = job.shmalloc::<u64>(1).await.unwrap();
        let error = window.through(second.handle()).await.unwrap_err();
        assert!(error == RmaError::OtherClient && error.to_string().contains("another client"));
        let region = job.region(8).await.unwrap();
        assert!(matches!(region.through(second.handle()).await, Err(RmaError::OtherClient)));
        let remote = job.remote_region(region.key()).await.unwrap();
        assert!(matches!(remote.through(second.handle()).await, Err(RmaError::OtherClient)));
        let recorded = job.record_through(second.handle(), |r| r.put(&window, Rank(0), 0, &region)).await;
        assert!(matches!(recorded, Err(posthaste::Error::Rma(RmaError::OtherClient))), "{recorded:?}");
        second.leave().await.unwrap();
    });
}

case!(fault_i10_no_put_is_done_after_a_leave_whose_context_an_idle_owner_has);
fn fault_i10_no_put_is_done_after_a_leave_whose_context_an_idle_owner_has() {
    run(2, options().body_leaves(), async |job| {
        let window = job.shmalloc::<u64>(1).await.unwrap();
        let peer = Rank(1 - job.rank().0);
        window.put(peer, 0, 1).await.unwrap();
        job.barrier().await.unwrap();
        let owner = job.own_context(ContextId(0)).unwrap();
        // The owner looks at nothing any more.
        soon("the leave", job.leave()).await.unwrap();
        let put = tokio::time::timeout(Duration::from_millis(50), window.put(peer, 0, 2)).await;
        assert!(!matches!(put, Ok(Ok(()))), "a put reaches memory that its owner may have taken anew");
        drop(owner);
    });
}

case!(m_p04_a_context_is_owned_although_others_are_at_it);
fn m_p04_a_context_is_owned_although_others_are_at_it() {
    run(2, options().contexts(2).workers(2), async |job| {
        let (arrived, peer) = (job.counter(), Rank(1 - job.rank().0));
        let count = arrived.clone();
        let message = job.register("long", move |_: Message, scope: &mut Scope| {
            // Whoever has the context at this moment keeps it for longer than anybody would spin.
            if scope.me().context == ContextId(1) {
                std::thread::sleep(Duration::from_millis(300));
            }
            count.add(1);
        });
        let message = message.unwrap();
        job.barrier().await.unwrap();
        let to = message.send(peer, "").to_context(ContextId(1));
        to.await.unwrap();
        let missing = message.send(peer, "").to_context(ContextId(2)).await.unwrap_err();
        let SendError::UnknownContext { context, contexts } = missing else { panic!("{missing}") };
        assert_eq!((context, contexts), (ContextId(2), 2));
        tokio::time::sleep(Duration::from_millis(50)).await;
        let owner = job.clone();
        let context = tokio::task::spawn_blocking(move || owner.own_context(ContextId(1)));
        let context = soon("the context", context).await.unwrap().expect("nobody owns it");
        assert!(job.own_context(ContextId(1)).is_none(), "somebody does");
        soon("the message", arrived.reach_on(&context, 1)).await;
        drop(context);
        job.barrier().await.unwrap();
    });
}

case!(a_handler_that_blocks_its_context_leaves_the_others_alone);
fn a_handler_that_blocks_its_context_leaves_the_others_alone() {
    run(2, options().contexts(2).workers(2), async |job| {
        let peer = Rank(1 - job.rank().0);
        let (entered, go) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let (inside, wait) = (entered.clone(), go.clone());
        let slow = job
            .register("slow", move |_: Message, scope: &mut Scope| {
                assert_eq!(scope.me().context, ContextId(1));
                inside.store(1, Ordering::SeqCst);
                while wait.load(Ordering::SeqCst) == 0 {
                    std::thread::sleep(Duration::from_millis(1));
                }
            })
            .unwrap();
        // A thread of its own moves that context, and nothing else does.
        let context = job.own_context(ContextId(1)).expect("free");
        let (notes, echo) =
            (job.counter(), job.service_inline("echo", |m, _| Ok(m.to_bytes().into())).unwrap());
        let count = notes.clone();
        let note = job.register("note", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
        let window = job.shmalloc::<u64>(1).await.unwrap();
        let (done, far) = (go.clone(), slow.clone());
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                far.on(&context).send(peer, "begin").to_context(ContextId(1)).await.unwrap();
                while done.load(Ordering::SeqCst) == 0 || entered.load(Ordering::SeqCst) == 0 {
                    context.advance();
                    tokio::task::yield_now().await;
                }
            });
            drop(context);
        });
        soon("what comes meanwhile", async {
            for number in 0..1000u64 {
                note.send(peer, number.to_ne_bytes()).await.unwrap();
                window.put(peer, 0, number).await.unwrap();
                let reply = echo.call_bytes(peer, number.to_ne_bytes()).await.unwrap();
                assert_eq!(reply.as_bytes(), number.to_ne_bytes());
            }
            notes.reach(1000).await;
        })
        .await;
        job.barrier().await.unwrap();
        go.store(1, Ordering::SeqCst);
        thread.join().unwrap();
        job.barrier().await.unwrap();
        assert_eq!((job.stats().panics, window.load(0)), (0, Some(999)));
    });
}
