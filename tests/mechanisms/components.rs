//! The components: each can be looked at, driven and replaced.

use crate::support::{Transport, case, options, others, run, soon, transport, until};
use posthaste::components::core::protocol::{Accept, FirstPacket, Incoming};
use posthaste::{ContextId, Endpoint, Fault, Message, Messager, Protocol, Rank, Scope};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// A protocol of the user's own: counts, answers, and is told of the end of peers.
#[derive(Default)]
struct Echo {
    seen: Mutex<Vec<(Rank, Vec<u8>)>>,
    accepted: AtomicU64,
    down: Mutex<Vec<Fault>>,
    closed: AtomicU64,
}

impl Protocol for Echo {
    fn name(&self) -> &str {
        "echo"
    }

    fn chooses_buffer(&self) -> bool {
        true
    }

    fn accept(&self, _scope: &mut Scope<'_>, first: &FirstPacket<'_>) -> Accept {
        self.accepted.fetch_add(first.total, Ordering::Relaxed);
        Accept::Whole
    }

    fn on_message(&self, _scope: &mut Scope<'_>, message: Incoming<'_>) {
        assert!(message.reply().is_none());
        let bytes = match message.body {
            posthaste::components::core::device::Body::Short(bytes) => bytes.to_vec(),
            _ => panic!("short messages only"),
        };
        self.seen.lock().unwrap().push((message.source.rank, bytes));
    }

    fn on_peer_down(&self, _rank: Rank, fault: Fault) {
        self.down.lock().unwrap().push(fault);
    }

    fn on_close(&self) {
        self.closed.fetch_add(1, Ordering::Relaxed);
    }
}

case!(m_d01_a_protocol_of_the_users_own_works_like_those_of_the_library);
fn m_d01_a_protocol_of_the_users_own_works_like_those_of_the_library() {
    run(2, options().body_leaves(), async |job| {
        let echo = Arc::new(Echo::default());
        let id = job.messager().register(echo.clone()).unwrap();
        let peer = Rank(1 - job.rank().0);
        let target = Endpoint::new(peer, ContextId(0));
        for number in 0..20u8 {
            while !job.messager().inject(ContextId(0), target, id, &[number; 3]).unwrap() {
                tokio::task::yield_now().await;
            }
        }
        until("the messages", || echo.seen.lock().unwrap().len() == 20).await;
        let expected: Vec<_> = (0..20).map(|number| (peer, vec![number; 3])).collect();
        assert_eq!(*echo.seen.lock().unwrap(), expected);
        assert_eq!(echo.accepted.load(Ordering::Relaxed), 60);
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            job.leave().await.unwrap();
        } else {
            until("the leave of the peer", || !echo.down.lock().unwrap().is_empty()).await;
            job.leave().await.unwrap();
            assert_eq!(*echo.down.lock().unwrap(), [Fault::PeerClosed(Rank(0))]);
        }
        assert_eq!(echo.closed.load(Ordering::Relaxed), 1);
    });
}

case!(m_d03_the_messagers_advance_moves_all_contexts_and_counts_events);
fn m_d03_the_messagers_advance_moves_all_contexts_and_counts_events() {
    run(2, options().contexts(2), async |job| {
        let seen = Arc::new(AtomicU64::new(0));
        let count = seen.clone();
        let message = job
            .register("count", move |_: Message, _: &mut Scope| {
                count.fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
        let asked = job.counter();
        let count = asked.clone();
        let go = job.register("go", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
        job.barrier().await.unwrap();
        let through = |context| message.through(job.context_handle(ContextId(context)).unwrap());
        if job.rank() == Rank(0) {
            // Each context has spoken once: where there are connections, these are made by tasks of the runtime.
            for context in [0, 1] {
                through(context).send(Rank(1), b"first").await.unwrap();
            }
            soon("the word to go", asked.reach(1)).await;
            for context in [0, 1] {
                let through = through(context);
                for _ in 0..50 {
                    through.send(Rank(1), b"event").await.unwrap();
                }
            }
        } else {
            until("the first messages", || seen.load(Ordering::Relaxed) == 2).await;
            go.send(Rank(0), b"").await.unwrap();
            // This thread never yields to the drivers: all progress is made here.
            let mut events = 0;
            let began = std::time::Instant::now();
            while seen.load(Ordering::Relaxed) < 102 {
                events += job.messager().advance();
                assert!(began.elapsed().as_secs() < 40, "{events} events");
            }
            assert!(events >= 100, "{events} events for 100 messages");
            assert_eq!(job.messager().contexts().len(), 2);
        }
        job.barrier().await.unwrap();
    });
}

case!(m_d04_the_personality_says_who_and_where_a_rank_is);
fn m_d04_the_personality_says_who_and_where_a_rank_is() {
    run(3, options().contexts(2), async |job| {
        let sysdep = job.messager().sysdep().clone();
        let personality = sysdep.personality();
        assert_eq!(personality.rank, job.rank());
        assert_eq!(personality.shape, job.shape());
        assert_eq!((job.size(), job.shape().contexts, job.shape().clients), (3, 2, 1));
        let local = match transport() {
            Transport::Shm => 3,
            // Nobody shares memory with anybody.
            Transport::Tcp => 1,
            // Two on the first node, one on the second.
            Transport::Nodes => 2 - usize::from(job.rank() == Rank(2)),
        };
        assert_eq!(personality.local_size(), local);
        let ranks = job.all_gather(&std::process::id().to_ne_bytes()).await.unwrap();
        assert_eq!(&ranks[job.rank().index()][..], std::process::id().to_ne_bytes());
        for rank in others(&job) {
            assert_ne!(ranks[rank.index()], ranks[job.rank().index()], "ranks are processes");
        }
        // Each knows where it is in a torus, and who is beside it.
        let torus = personality.torus(2);
        assert_eq!(
            (torus.extents(), torus.coordinates(job.rank())),
            (&[3, 1][..], Some(vec![job.rank().0, 0]))
        );
        let next = torus.neighbour(job.rank(), 0, 1).unwrap();
        let window = job.shmalloc::<u32>(1).await.unwrap();
        window.put(next, 0, job.rank().0 + 10).await.unwrap();
        job.barrier().await.unwrap();
        let previous = torus.neighbour(job.rank(), 0, -1).unwrap();
        assert_eq!(window.load(0), Some(previous.0 + 10));
        let before = sysdep.now();
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        assert!(sysdep.now() > before && sysdep.cores() > 0);
        job.barrier().await.unwrap();
    });
}

/// The cores on which the calling thread may run.
fn affinity() -> Vec<usize> {
    let set = rustix::thread::sched_getaffinity(None).unwrap();
    (0..rustix::thread::CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect()
}

case!(m_d04_a_thread_runs_on_the_core_that_it_is_given_and_has_a_context_there);
fn m_d04_a_thread_runs_on_the_core_that_it_is_given_and_has_a_context_there() {
    run(2, options().contexts(2), async |job| {
        let (peer, sysdep) = (Rank(1 - job.rank().0), job.messager().sysdep().clone());
        let seen = Arc::new(AtomicU64::new(0));
        let count = seen.clone();
        let add = move |_: Message, _: &mut Scope| {
            count.fetch_add(1, Ordering::Relaxed);
        };
        let message = job.register("from a core", add).unwrap();
        job.barrier().await.unwrap();
        let all = affinity();
        assert!(!all.is_empty() && sysdep.cores() > 0);
        for given in [all.last().copied(), None] {
            let context = job.own_context(ContextId(1)).expect("free");
            let (message, (tell, told)) = (message.clone(), tokio::sync::oneshot::channel());
            let main = move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                let sent = runtime.block_on(async { message.on(&context).send(peer, b"x").await });
                drop(context);
                let name = std::thread::current().name().map(str::to_owned);
                tell.send((affinity(), name, sent)).unwrap();
            };
            sysdep.spawn("on a core", given, Box::new(main)).unwrap();
            let (cores, name, sent) = soon("the thread", told).await.unwrap();
            assert_eq!(cores, given.map_or(all.clone(), |core| vec![core]));
            assert_eq!((name.as_deref(), sent), (Some("on a core"), Ok(())));
        }
        assert_eq!(affinity(), all, "whoever starts a thread goes on where it was");
        until("the messages", || seen.load(Ordering::Relaxed) == 2).await;
        job.barrier().await.unwrap();
    });
}

case!(m_d05_handlers_and_completions_post_more);
fn m_d05_handlers_and_completions_post_more() {
    run(2, options(), async |job| {
        // A ball goes to and fro 1,000 times, from handler to handler; no task takes part.
        let arrived = job.counter();
        let count = arrived.clone();
        let back: Arc<std::sync::OnceLock<posthaste::ActiveMessage>> = Arc::default();
        let again = back.clone();
        let ball = job
            .register("ball", move |m: Message, scope: &mut Scope| {
                let left = m.read::<u64>(0).unwrap();
                count.add(1);
                if left > 0 {
                    again.get().unwrap().send_in(scope, m.endpoint(), (left - 1).to_ne_bytes()).unwrap();
                }
            })
            .unwrap();
        back.set(ball.clone()).unwrap();
        // The end of a filled buffer sends the next message.
        let filled = job.counter();
        let full = filled.clone();
        let relay: Arc<std::sync::OnceLock<posthaste::ActiveMessage>> = Arc::default();
        let next = relay.clone();
        let first = move |first: posthaste::First<'_>, _: &mut Scope| {
            let (next, full, from) = (next.clone(), full.clone(), first.source);
            posthaste::Fill::Into {
                buffer: bytes::BytesMut::new(),
                limit: usize::MAX >> 1,
                done: Box::new(move |scope, buffer| {
                    full.add(1);
                    if buffer[0] > 0 {
                        let target = Endpoint::new(from, scope.me().context);
                        next.get()
                            .unwrap()
                            .send_in(scope, target, vec![buffer[0] - 1; buffer.len()])
                            .unwrap();
                    }
                }),
            }
        };
        let chain = job.register_first_packet("chain", first).unwrap();
        relay.set(chain.clone()).unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            ball.send(Rank(1), 999u64.to_ne_bytes()).await.unwrap();
            chain.send(Rank(1), vec![99; 5000]).await.unwrap();
        }
        soon("the ball", arrived.reach(500)).await;
        soon("the chain", filled.reach(50)).await;
        job.barrier().await.unwrap();
        assert_eq!((arrived.value(), filled.value(), job.stats().panics), (500, 50, 0));
    });
}

case!(m_d17_the_error_handler_names_the_peer);
fn m_d17_the_error_handler_names_the_peer() {
    run(3, options().body_leaves().killed(2), async |job| {
        let told: Arc<Mutex<Vec<Fault>>> = Arc::default();
        let faults = told.clone();
        job.on_error(move |fault| faults.lock().unwrap().push(fault));
        let seen = job.counter();
        let count = seen.clone();
        let gone = job.register("seen", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
        let nobody = (job.rank() == Rank(0))
            .then(|| job.register("nobody knows this", |_: Message, _: &mut Scope| {}).unwrap());
        job.barrier().await.unwrap();
        if job.rank() == Rank(2) {
            // The others' barrier must not end with its death.
            soon("the others' word", seen.reach(2)).await;
            crate::support::kill_self();
        }
        gone.send(Rank(2), b"").await.unwrap();
        if let Some(message) = nobody {
            // The send itself is through before anybody can know.
            message.send(Rank(1), b"?").await.unwrap();
            until("the refusal", || told.lock().unwrap().contains(&Fault::NoSuchProtocol(Rank(1)))).await;
        }
        until("the loss", || told.lock().unwrap().contains(&Fault::PeerLost(Rank(2)))).await;
        let number = told.lock().unwrap().len();
        assert_eq!(number, if job.rank() == Rank(0) { 2 } else { 1 }, "{:?}", told.lock().unwrap());
        // Both stay until the other has seen the same.
        gone.send(Rank(1 - job.rank().0), b"").await.unwrap();
        soon("the other's word", seen.reach(1)).await;
        job.leave().await.unwrap();
    });
}

case!(m_p04_a_messager_in_front_of_another_keeps_names_apart);
/// Two libraries that know nothing of each other use the same name, through a messager of another kind.
fn m_p04_a_messager_in_front_of_another_keeps_names_apart() {
    use posthaste::components::protocols::Namespace;
    use posthaste::components::protocols::handler::register;
    run(2, options(), async |job| {
        let peer = Rank(1 - job.rank().0);
        let sums: Vec<_> = (0..2).map(|_| Arc::new(AtomicU64::new(0))).collect();
        let mut messages = Vec::new();
        for (library, sum) in ["left", "right"].into_iter().zip(&sums) {
            let space = Namespace::new(job.messager().as_ref(), library);
            let sum = sum.clone();
            let add = move |m: Message, _: &mut Scope| {
                sum.fetch_add(m.read::<u64>(0).unwrap(), Ordering::Relaxed);
            };
            messages.push(register(&space, job.handle().clone(), "done", 0, add).unwrap());
            assert_eq!(space.peers().ranks, 2);
            assert!(register(&space, job.handle().clone(), "done", 0, |_, _| {}).is_err(), "taken");
            assert!(register(&space, job.handle().clone(), "", 0, |_, _| {}).is_err(), "no name");
        }
        job.barrier().await.unwrap();
        for number in 1..=100u64 {
            messages[(number % 2) as usize].send(peer, number.to_ne_bytes()).await.unwrap();
        }
        until("the messages", || sums.iter().map(|sum| sum.load(Ordering::Relaxed)).sum::<u64>() == 5050)
            .await;
        let sums: Vec<u64> = sums.iter().map(|sum| sum.load(Ordering::Relaxed)).collect();
        assert_eq!(sums, [2550, 2500], "even numbers went left, odd ones right");
        job.barrier().await.unwrap();
    });
}
