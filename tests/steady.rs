//! The steady state of small operations allocates nothing and makes no system call, within a process and between two; and a
//! payload for many is kept for all of them, over sockets, too.
//!
//! In a binary of its own because it replaces the allocator.
#![allow(unsafe_code, reason = "an allocator that counts has to be one")]

mod support;

use posthaste::{Job, Message, Scope};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};
use support::{options, run, soon};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
/// Bytes of them.
static BYTES: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed on unchanged to the system's allocator, which upholds the contract; counting touches no
// memory of the caller.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        BYTES.fetch_add(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller's promises are those that `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above; the pointer came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        BYTES.fetch_add(size as u64, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What is counted, operation by operation.
const KINDS: [&str; 10] =
    ["send", "borrowed", "put", "slice", "get", "get_to", "replay", "mixture", "call", "typed call"];
/// Operations are counted in batches. A rank that has to wait for another may fall asleep, which takes system calls and
/// now and then an allocation; on a busy machine it often does. What an operation costs by itself it costs in every
/// batch, so the batch that cost least tells it.
const BATCHES: usize = 300;
/// Operations of a batch: together shorter than what a rank waits for before it falls asleep.
const BATCH: usize = 50;
/// What a call to a service that awaits allocates: the task in which it does, the values on their way there and back.
const TASK: u64 = 5;

/// A place in the run, before or behind a batch.
#[derive(Clone, Copy)]
enum Place {
    Begin,
    End,
}

/// Small operations between all ranks, one after another; each kind in batches.
async fn operations(job: &Job, mut at: impl FnMut(&str, usize, Place)) {
    let arrived = job.counter();
    let count = arrived.clone();
    let message = job.register("small", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
    let echo = job.service_inline("echo", |m, _| Ok(m.read::<u64>(0).unwrap().to_ne_bytes().into())).unwrap();
    let double = job.service("double", async |word: u64| 2 * word).unwrap();
    let window = job.shmalloc::<u64>(150).await.unwrap();
    let (source, mirror) = (job.region(8).await.unwrap(), job.region(8).await.unwrap());
    let peer = job.rank().next(job.size());
    let pattern = job.record(|r| window.record_put(r, peer, 0, &source)).await.unwrap();
    let mixture = job
        .record(|r| {
            r.put(&window, peer, 3, &source)?;
            r.send(&message, peer, &source)?;
            r.send_with_info(&message, peer, b"info", &source)?;
            r.get(&window, peer, 4, &mirror)
        })
        .await
        .unwrap();
    let mut done = 0;
    for kind in KINDS {
        job.barrier().await.unwrap();
        for batch in 0..BATCHES {
            at(kind, batch, Place::Begin);
            for number in 0..BATCH as u64 {
                match kind {
                    // Ping-pong: both sides take part in each round, so that nobody runs ahead.
                    "send" => {
                        message.send(peer, number.to_ne_bytes()).await.unwrap();
                        done += 1;
                        arrived.reach(done).await;
                    }
                    // 8 to 1024 bytes.
                    "borrowed" => {
                        let bytes = [7; 1024];
                        message.send_slice(peer, &bytes[..8 + number as usize % 1017]).await.unwrap();
                        done += 1;
                        arrived.reach(done).await;
                    }
                    "put" => window.put(peer, 1, number).await.unwrap(),
                    // 8 to 512 bytes.
                    "slice" => {
                        let words = [number; 64];
                        window.put_slice(peer, 1, &words[..1 + number as usize % 64]).await.unwrap();
                    }
                    "get" => assert!(window.get(peer, 79).await.unwrap() == 0),
                    // 8 to 512 bytes.
                    "get_to" => {
                        let mut words = [1; 64];
                        let some = &mut words[..1 + number as usize % 64];
                        window.get_to(peer, 80, some).await.unwrap();
                        assert!(some.iter().all(|word| *word == 0));
                    }
                    "replay" => {
                        source.write(0, &number.to_ne_bytes()).unwrap();
                        pattern.replay().await.unwrap();
                    }
                    "mixture" => {
                        mixture.replay().await.unwrap();
                        done += 2;
                        arrived.reach(done).await;
                    }
                    "typed call" => assert_eq!(double.call(peer, number).await.unwrap(), 2 * number),
                    _ => {
                        let value = echo.call_bytes(peer, number.to_ne_bytes()).await.unwrap();
                        assert_eq!(value.as_bytes(), number.to_ne_bytes());
                    }
                }
            }
            at(kind, batch, Place::End);
        }
    }
    job.barrier().await.unwrap();
}

/// The least and the sum of what the batches of a kind cost.
fn least_and_sum(costs: &[u64]) -> (u64, u64) {
    (costs.iter().copied().min().unwrap(), costs.iter().sum())
}

#[test]
fn small_operations_allocate_nothing_in_the_steady_state() {
    for ranks in [1, 2] {
        let printed = run(ranks, options(), async |job| {
            // Made before anything is counted.
            let mut costs = KINDS.map(|_| Vec::with_capacity(BATCHES));
            let mut before = 0;
            let counting = operations(&job, |kind, _, place| match place {
                Place::Begin => before = ALLOCATIONS.load(Ordering::Relaxed),
                Place::End => {
                    let cost = ALLOCATIONS.load(Ordering::Relaxed) - before;
                    costs[KINDS.iter().position(|one| *one == kind).unwrap()].push(cost);
                }
            });
            soon("the operations", counting).await;
            for (kind, costs) in KINDS.iter().zip(&costs) {
                let (least, sum) = least_and_sum(costs);
                let ranks = job.size();
                println!("{ranks} ranks, {kind}: {sum} allocations in {} operations", BATCHES * BATCH);
                let each = if *kind == "typed call" { TASK } else { 0 };
                assert!(least <= each * BATCH as u64, "{kind} allocates: {costs:?} in batches of {BATCH}");
                // Falling asleep and timers may allocate now and then, as may the first use.
                let all = (BATCHES * BATCH) as u64;
                assert!(sum < each * all + all / 100, "{kind}: {costs:?}");
            }
        });
        for line in
            printed.iter().flat_map(|text| text.lines()).filter(|line| line.contains("allocations in"))
        {
            println!("{line}");
        }
    }
}

/// Multicasts of so many bytes, and how many: kept, written at once as far as there is room, and gone in parts.
const SHARED: [(usize, u64); 4] = [(8 << 10, 64), (64 << 10, 32), (4 << 20, 4), (24 << 20, 2)];
/// What buffers of connections may grow by meanwhile.
const GROWTH: u64 = 128 << 10;

#[test]
fn m_d18_over_sockets_all_connections_share_the_payload_of_a_multicast() {
    for mode in ["handshake-only", "encrypted"] {
        run(4, options().over_tcp().env("POSTHASTE_TCP_MODE", mode), async |job| {
            let arrived = job.counter();
            let count = arrived.clone();
            let message = job.register("shared", move |m: Message, _: &mut Scope| {
                let bytes = m.bytes();
                assert!(bytes.iter().enumerate().step_by(61).all(|(at, byte)| *byte == (at % 251) as u8));
                count.add(1);
            });
            let (message, mut expected) = (message.unwrap(), 0);
            job.barrier().await.unwrap();
            for (len, times) in SHARED {
                let payload: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
                let payload = bytes::Bytes::from(payload);
                let mut before = 0;
                // At the first ones connections take what they keep for good.
                for times in [times, times] {
                    before = BYTES.load(Ordering::Relaxed);
                    expected += times;
                    for _ in 0..if job.rank().0 == 0 { times } else { 0 } {
                        let targets = support::others(&job);
                        soon("a multicast", message.multicast(targets, payload.clone())).await.unwrap();
                    }
                    if job.rank().0 > 0 {
                        soon("the messages", arrived.reach(expected)).await;
                    }
                    soon("a barrier", job.barrier()).await.unwrap();
                }
                let bytes = BYTES.load(Ordering::Relaxed) - before;
                println!("{bytes} bytes for {times} multicasts of {len}");
                // Not even one copy for all three of each.
                let few = bytes < GROWTH + times * len as u64 / 4;
                assert!(few || job.rank().0 > 0, "{bytes} bytes for {times} multicasts of {len}");
            }
        });
    }
}

/// Loans of 1 MiB, and of as many bytes as the longest page has.
const LOANS: [(usize, u64); 2] = [(1 << 20, 40), (16 << 20, 8)];

#[test]
fn m_v03_a_loan_takes_no_memory_where_it_is_sent_nor_where_it_is_read() {
    run(2, options(), async |job| {
        let arrived = job.counter();
        let count = arrived.clone();
        let message = job.register("loan", move |m: Message, _: &mut Scope| {
            let next = count.value();
            assert_eq!((m.read(0), m.read(m.len() - 8)), (Some(next), Some(!next)));
            count.add(1);
        });
        let (message, mut expected, mut number) = (message.unwrap(), 0, 0u64);
        job.barrier().await.unwrap();
        for (len, times) in LOANS {
            let before = BYTES.load(Ordering::Relaxed);
            expected += times;
            for _ in 0..if job.rank().0 == 0 { times } else { 0 } {
                let mut loan = message.loan(len);
                while loan.is_none() {
                    tokio::task::yield_now().await;
                    loan = message.loan(len);
                }
                let loan = loan.unwrap();
                loan.memory().write_u64(0, number);
                loan.memory().write_u64(len - 8, !number);
                soon("a loan", message.send(posthaste::Rank(1), loan)).await.unwrap();
                number += 1;
            }
            if job.rank().0 > 0 {
                soon("the loans", arrived.reach(expected)).await;
            }
            soon("a barrier", job.barrier()).await.unwrap();
            let bytes = BYTES.load(Ordering::Relaxed) - before;
            assert!(bytes < GROWTH, "{bytes} bytes for {times} loans of {len}");
        }
        assert_eq!(job.stats().panics, 0);
    });
}

/// A path that does not exist; asking for it leaves a line in the trace.
fn mark(kind: &str, batch: usize, place: Place) {
    let place = match place {
        Place::Begin => "begin",
        Place::End => "end",
    };
    let _ = std::fs::metadata(format!("/steady/{kind}/{batch}/{place}"));
}

/// The system calls of each batch of a kind between its marks.
fn calls_of(trace: &str, kind: &str) -> Vec<u64> {
    let begin = format!("\"/steady/{kind}/");
    let mut batches = Vec::new();
    let mut inside: Option<u64> = None;
    for line in trace.lines() {
        if line.contains(&begin) {
            if line.contains("/begin\"") {
                inside = Some(0);
            } else {
                batches.extend(inside.take());
            }
        } else if let Some(calls) = &mut inside {
            // Signals are not calls, and a call that took long has a second line.
            *calls += u64::from(!line.contains("---") && !line.contains("resumed>"));
        }
    }
    batches
}

#[test]
fn small_operations_make_no_system_call_in_the_steady_state() {
    let strace = std::process::Command::new("strace").arg("-V").output();
    if !strace.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: strace is not installed");
        return;
    }
    for ranks in [1, 2] {
        let report = std::sync::Arc::new(std::sync::Mutex::new(String::new()));
        let traced = options()
            // So long that a peer that lost its core for a moment does not end in a sleep.
            .env("POSTHASTE_SPIN_US", "2000")
            .during(trace_rank_0(report.clone()));
        let printed = run(ranks, traced, async |job| {
            if job.rank().0 == 0 {
                println!("trace me");
                let tracer = || {
                    let status = std::fs::read_to_string("/proc/self/status").unwrap();
                    !status.lines().any(|line| line == "TracerPid:\t0")
                };
                let began = std::time::Instant::now();
                while !tracer() && began.elapsed().as_secs() < 10 {
                    std::thread::sleep(std::time::Duration::from_millis(20));
                }
                if !tracer() {
                    println!("not allowed here");
                }
            }
            soon("the operations", operations(&job, mark)).await;
            println!("traced");
        });
        if printed[0].contains("not allowed") {
            eprintln!("skipped: strace may not trace here");
            return;
        }
        let trace = report.lock().unwrap().clone();
        for kind in KINDS {
            let calls = calls_of(&trace, kind);
            assert_eq!(calls.len(), BATCHES, "marks of {kind} in the trace");
            let (least, sum) = least_and_sum(&calls);
            println!("{ranks} ranks, {kind}: {sum} system calls in {} operations", BATCHES * BATCH);
            // The runtime asks for events when it has begun a task, which is how a service that awaits answers.
            let each = if *kind == *"typed call" { 1 } else { 0 };
            let own = each * BATCH as u64;
            assert!(least <= own, "{kind} makes system calls: {calls:?} in batches of {BATCH}");
            // Nor is it more than the runtime's own, which asks once in some hundred turns.
            let some = calls.iter().filter(|calls| **calls > own + 1).count();
            assert!(some < BATCHES / 2, "{kind} makes system calls: {calls:?} in batches of {BATCH}");
        }
    }
}

/// Has strace write down the calls of rank 0, from when it asks for it until it ends.
fn trace_rank_0(
    report: std::sync::Arc<std::sync::Mutex<String>>,
) -> impl FnOnce(&posthaste::launcher::RunningJob) {
    move |job| {
        support::wait_for(job, 0, "trace me");
        let file = std::env::temp_dir().join(format!("strace-of-{}", std::process::id()));
        let mut strace = std::process::Command::new("strace")
            .args(["-f", "-o"])
            .arg(&file)
            .args(["-p", &job.pid(0).unwrap().to_string()])
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        support::wait_for(job, 0, "traced");
        // Ends with the process that it traces.
        strace.wait().unwrap();
        *report.lock().unwrap() = std::fs::read_to_string(&file).unwrap_or_default();
        let _ = std::fs::remove_file(&file);
    }
}
