//! A rank that writes where and what it must not.

use crate::support::{
    Random, barrier_before_death, case, options, others, run, sealed, soon, unseal, until, wait_for,
};
use posthaste::components::shm::{Layout, Sizes};
use posthaste::{CallError, ClientId, ContextId, Endpoint, Fault, Job, Message, Rank, Scope};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The arena of this process, to be written to behind the library's back.
struct Arena {
    memory: std::fs::File,
    at: u64,
    layout: Layout,
}

impl Arena {
    fn find(job: &Job) -> Arena {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let line = maps
            .lines()
            .find(|line| line.contains("posthaste") && line.contains("memfd"))
            .expect("the arena");
        let at = u64::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
        let memory = std::fs::OpenOptions::new().write(true).open("/proc/self/mem").unwrap();
        let layout = Layout::new(job.shape(), Sizes::default()).unwrap();
        Arena { memory, at, layout }
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        self.memory.write_all_at(bytes, self.at + offset).unwrap();
    }
}

/// Ranks 0 and 1 are honest; rank 2 is not.
struct Honest {
    never: posthaste::Service<(), ()>,
    message: posthaste::ActiveMessage,
    own: posthaste::ActiveMessage,
    received: Arc<AtomicU64>,
    told: Arc<Mutex<Vec<Fault>>>,
}

fn register(job: &Job) -> Honest {
    let told: Arc<Mutex<Vec<Fault>>> = Arc::default();
    let faults = told.clone();
    job.on_error(move |fault| faults.lock().unwrap().push(fault));
    let received: Arc<AtomicU64> = Arc::default();
    let count = received.clone();
    // Between the honest; what comes from rank 2 may be anything.
    let own = job
        .register("own", move |m: Message, _: &mut Scope| {
            if m.source() != Rank(2) {
                assert!(unseal(&m.bytes()).is_some(), "corrupt bytes from an honest rank");
                count.fetch_add(1, Ordering::Relaxed);
            }
        })
        .unwrap();
    let message = job
        .register("any", |m: Message, _: &mut Scope| {
            std::hint::black_box(m.to_bytes());
        })
        .unwrap();
    let never = job.service("never", |()| std::future::pending::<()>()).unwrap();
    Honest { never, message, own, received, told }
}

/// What the honest send each other: so many messages, every eighth of them long, with a pause behind each so many.
pub(crate) struct Traffic {
    pub messages: u64,
    pub long: usize,
    pub pause: u64,
}

/// Rank 2 is cut off, as an honest rank sees it: a call to it ends, the handler is told once, and nothing can be sent to it; all that
/// the honest send each other meanwhile arrives.
pub(crate) async fn is_cut_off_amid(
    traffic: Traffic,
    other: Rank,
    own: &posthaste::ActiveMessage,
    never: &posthaste::Service<(), ()>,
    received: &AtomicU64,
    told: &Mutex<Vec<Fault>>,
) {
    let Traffic { messages, long, pause } = traffic;
    let chatter = tokio::spawn({
        let own = own.clone();
        async move {
            for number in 0..messages {
                let len = if number % 8 == 0 { long } else { 50 };
                own.send(other, sealed(number, len)).await.unwrap();
                if number % pause == 0 {
                    tokio::time::sleep(Duration::from_micros(50)).await;
                }
            }
        }
    });
    let end = soon("the end of a call to the hostile rank", never.call(Rank(2), ())).await;
    assert_eq!(end, Err(CallError::Fault(Fault::PeerCorrupt(Rank(2)))));
    // Who waits is woken before the handler is told.
    until("the handler to be told", || !told.lock().unwrap().is_empty()).await;
    assert_eq!(*told.lock().unwrap(), [Fault::PeerCorrupt(Rank(2))]);
    assert!(own.send(Rank(2), b"x").await.is_err());
    soon("the traffic of the honest", chatter).await.unwrap();
    until("their messages", || received.load(Ordering::Relaxed) >= messages).await;
}

/// Writes anything over the lanes of this rank, and sends messages meanwhile.
async fn write_garbage(job: &Job, message: &posthaste::ActiveMessage, time: Duration) {
    let me = job.rank();
    let arena = Arena::find(job);
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let garbage = std::thread::spawn(move || {
        let mut random = Random(2);
        while !stopped.load(Ordering::Relaxed) {
            for to in [Rank(0), Rank(1)] {
                let (from, to) = (Endpoint::new(me, ContextId(0)), Endpoint::new(to, ContextId(0)));
                let (lane, len) = arena.layout.lane(ClientId(0), from, to);
                let bytes: Vec<u8> = (0..len / 8).flat_map(|_| random.next().to_le_bytes()).collect();
                // The ring; the page before it is for both sides.
                arena.write(lane + 4096, &bytes[4096..]);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    let until = Instant::now() + time;
    while Instant::now() < until {
        for to in others(job) {
            let _ = message.try_send(to, [1; 24]);
        }
        tokio::time::sleep(Duration::from_micros(100)).await;
    }
    stop.store(true, Ordering::Relaxed);
    garbage.join().unwrap();
}

case!(fault_a_peer_that_writes_garbage_over_its_own_lanes_is_cut_off);
fn fault_a_peer_that_writes_garbage_over_its_own_lanes_is_cut_off() {
    let printed = run(3, options().body_leaves(), async |job| {
        let Honest { never, message, own, received, told } = register(&job);
        barrier_before_death(&job, Rank(2)).await;
        let me = job.rank();
        if me == Rank(2) {
            write_garbage(&job, &message, Duration::from_millis(1500)).await;
            // Goes without a word.
            std::process::exit(0);
        }
        let other = Rank(1 - me.0);
        let traffic = Traffic { messages: 4000, long: 5000, pause: 8 };
        is_cut_off_amid(traffic, other, &own, &never, &received, &told).await;
        assert_eq!(job.stats().panics, 0);
        // One of them leaves only when the other has got everything.
        job.flush(other).await.unwrap();
        own.send(other, sealed(1, 8)).await.unwrap();
        until("the last word", || received.load(Ordering::Relaxed) == 4001).await;
        job.leave().await.unwrap();
    });
    for text in printed {
        assert!(!text.contains("panicked at"), "{text}");
    }
}

case!(fault_a_window_that_a_rank_which_was_cut_off_may_reach_is_freed_without_waiting_for_it);
fn fault_a_window_that_a_rank_which_was_cut_off_may_reach_is_freed_without_waiting_for_it() {
    // Of 32 MiB, so that there is no room for two.
    const LONG: usize = 20 << 20;
    let options = options().body_leaves().killed(2).env("POSTHASTE_SEGMENT", "32M").during(|job| {
        (0..2).for_each(|rank| wait_for(job, rank, "WINDOW OVER"));
        job.kill(2).unwrap();
    });
    let printed = run(3, options, async |job| {
        let Honest { message, told, .. } = register(&job);
        let window = job.world().shmalloc::<u8>(LONG).await.unwrap();
        barrier_before_death(&job, Rank(2)).await;
        if job.rank() == Rank(2) {
            write_garbage(&job, &message, Duration::from_millis(500)).await;
            // It lives on, and what the others have exposed is mapped here.
            std::future::pending::<()>().await;
        }
        let corrupt = Fault::PeerCorrupt(Rank(2));
        until("the news of the hostile rank", || told.lock().unwrap().contains(&corrupt)).await;
        let freed = soon("the end of the window", window.free()).await;
        assert_eq!(freed, Err(posthaste::RmaError::Fault(corrupt)));
        // It may be reached still. What cannot be made takes nothing of the rest.
        assert!(job.region(LONG).await.is_err());
        for _ in 0..100 {
            let made = soon("the refusal", job.world().shmalloc::<u8>(1 << 20)).await;
            assert_eq!(made.err(), Some(posthaste::RmaError::Fault(corrupt)));
        }
        // What it cannot reach works as ever.
        let honest = job.collectives().subset(&[Rank(0), Rank(1)]).await.unwrap();
        let ours = honest.shmalloc::<u64>(16).await.unwrap();
        ours.put(Rank(1 - job.rank().0), 3, 7).await.unwrap();
        honest.barrier().await.unwrap();
        assert_eq!(ours.get(job.rank(), 3).await.unwrap(), 7);
        soon("the end of the other window", ours.free()).await.unwrap();
        println!("WINDOW OVER");
        // When it is gone, it reaches nothing any more.
        soon("the end of the hostile rank", async {
            while job.region(LONG).await.is_err() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
        .await;
        job.leave().await.unwrap();
    });
    for text in printed {
        assert!(!text.contains("panicked at"), "{text}");
    }
}

/// Words that no writer writes where a record is looked for, each wrong in one way only.
const IMPOSSIBLE: [(&str, u64); 11] = [
    ("an unknown kind", u64::MAX),
    ("no kind", 8 << 32),
    ("a wrap to a wrap", 3),
    ("a short record that is longer than the ring", 1 | 0x7fff_fff0 << 32),
    ("a short record that is longer than short records are", 1 | 3000 << 32),
    ("more message info than there can be", 1 | 120 << 8 | 8 << 32),
    ("a page that is none", 2 | 64 << 32),
    ("a batch of messages with info", 4 | 8 << 8 | 8 << 32),
    ("a batch of requests", 1 << 63 | 4 | 8 << 32),
    ("a batch of messages that are longer than short records are", 4 | 3000 << 32),
    ("a batch of more messages than there can be", 4 | 64 << 32),
];

case!(fault_a_peer_that_writes_an_impossible_record_is_cut_off);
/// Every word of the ring is the same, so wherever the reader looks, the record is wrong in just that way and nothing
/// but a look at the header (or, last, at the page) can tell it.
fn fault_a_peer_that_writes_an_impossible_record_is_cut_off() {
    for (number, (what, word)) in IMPOSSIBLE.into_iter().enumerate() {
        let number = number.to_string();
        let options = options().body_leaves().env("POSTHASTE_TEST_IMPOSSIBLE", &number);
        run(2, options, async move |job| {
            let told: Arc<Mutex<Vec<Fault>>> = Arc::default();
            let faults = told.clone();
            job.on_error(move |fault| faults.lock().unwrap().push(fault));
            let message = job.register("any", |_: Message, _: &mut Scope| {}).unwrap();
            let never = job.service("never", |()| std::future::pending::<()>()).unwrap();
            barrier_before_death(&job, Rank(1)).await;
            let me = job.rank();
            if me == Rank(1) {
                // The rank reads its own variable: the loop is that of the launcher.
                let number = std::env::var("POSTHASTE_TEST_IMPOSSIBLE").unwrap();
                let (_, word) = IMPOSSIBLE[number.parse::<usize>().unwrap()];
                let arena = Arena::find(&job);
                let (from, to) = (Endpoint::new(me, ContextId(0)), Endpoint::new(Rank(0), ContextId(0)));
                let (lane, len) = arena.layout.lane(ClientId(0), from, to);
                let ring: Vec<u8> = (0..(len - 4096) / 8).flat_map(|_| word.to_le_bytes()).collect();
                // Until rank 0 has seen it and is gone.
                let until = Instant::now() + Duration::from_secs(60);
                while job.stats().peers_lost == 0 && Instant::now() < until {
                    // Wakes the reader, which looks behind the message.
                    let _ = message.try_send(Rank(0), [1; 24]);
                    arena.write(lane + 4096, &ring);
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                std::process::exit(0);
            }
            let end = soon("the end of a call to the hostile rank", never.call(Rank(1), ())).await;
            assert_eq!(end, Err(CallError::Fault(Fault::PeerCorrupt(Rank(1)))), "{what}: {word:#x}");
            until("the handler to be told", || !told.lock().unwrap().is_empty()).await;
            assert_eq!(*told.lock().unwrap(), [Fault::PeerCorrupt(Rank(1))], "{what}");
            assert_eq!(job.stats().panics, 0);
            job.leave().await.unwrap();
        });
    }
}

case!(fault_a_peer_that_scribbles_over_the_whole_arena_crashes_nobody);
fn fault_a_peer_that_scribbles_over_the_whole_arena_crashes_nobody() {
    for seed in 0..4u64 {
        let seed = seed.to_string();
        let printed = run(3, options().body_leaves().env("POSTHASTE_TEST_SCRIBBLE", &seed), async |job| {
            let Honest { never, message, .. } = register(&job);
            let window = job.shmalloc::<u64>(1000).await.unwrap();
            barrier_before_death(&job, Rank(2)).await;
            let me = job.rank();
            if me == Rank(2) {
                scribble(&job);
                std::process::exit(0);
            }
            // Operations may fail, be lost or never end: nothing is promised but that this process lives.
            let until = Instant::now() + Duration::from_millis(1500);
            let mut number = 0;
            while Instant::now() < until {
                for to in job.ranks() {
                    let within = Duration::from_millis(20);
                    let _ = tokio::time::timeout(within, message.send(to, sealed(number, 60))).await;
                    let _ = tokio::time::timeout(within, message.send(to, sealed(number, 9000))).await;
                    let _ = tokio::time::timeout(within, never.call_within(to, (), Duration::from_millis(2)))
                        .await;
                    let _ =
                        tokio::time::timeout(within, window.put(to, number as usize % 1000, number)).await;
                    let _ = tokio::time::timeout(within, window.get(to, number as usize % 1000)).await;
                    if number % 50 == 0 {
                        let _ = tokio::time::timeout(within, message.send(to, sealed(number, 5 << 20))).await;
                    }
                    number += 1;
                }
                tokio::time::sleep(Duration::from_micros(300)).await;
            }
            let _ = tokio::time::timeout(Duration::from_secs(2), window.free()).await;
            let _ = tokio::time::timeout(Duration::from_secs(2), job.leave()).await;
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let peak = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
            let kib: u64 = peak.split_whitespace().nth(1).unwrap().parse().unwrap();
            assert!(kib < 2 << 20, "{peak}");
        });
        for text in printed {
            assert!(!text.contains("panicked at"), "seed {seed}: {text}");
        }
    }
}

/// Random bytes over everything that is in use: the header, the tables, the lanes, the pages, the windows.
fn scribble(job: &Job) {
    let arena = Arena::find(job);
    let mut random = Random(std::env::var("POSTHASTE_TEST_SCRIBBLE").unwrap().parse().unwrap());
    let layout = arena.layout;
    let ranks: Vec<Endpoint> = job.ranks().map(|rank| Endpoint::new(rank, ContextId(0))).collect();
    let mut parts = vec![(0, 4096), layout.rank_table(), layout.clients_left()];
    for to in &ranks {
        parts.push(layout.block(ClientId(0), *to));
        parts.push((layout.pool(ClientId(0), *to).0, 256 << 10));
        parts.push((layout.segment(ClientId(0), to.rank).0, 8192));
        parts.extend(ranks.iter().map(|from| layout.lane(ClientId(0), *from, *to)));
    }
    let until = Instant::now() + Duration::from_millis(1000);
    while Instant::now() < until {
        let (at, len) = parts[random.below(parts.len() as u64) as usize];
        // Words and their bytes, small numbers and large ones.
        for _ in 0..8 {
            let word = match random.below(4) {
                0 => random.below(256),
                1 => random.next() & 0xffff_ffff,
                2 => 1 << random.below(64),
                _ => random.next(),
            };
            arena.write(at + random.below(len / 8) * 8, &word.to_le_bytes());
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}
