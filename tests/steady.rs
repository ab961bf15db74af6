//! The steady state of small operations allocates nothing and makes no system call.
//!
//! In a binary of its own because it replaces the allocator.
#![allow(unsafe_code, reason = "an allocator that counts has to be one")]

mod support;

use posthaste::{Job, Message, Rank, Scope};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};
use support::{options, run, soon};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed on unchanged to the system's allocator, which upholds the contract; counting touches no
// memory of the caller.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are those that `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above; the pointer came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Small operations, one after another, with the figures that each kind has to keep.
async fn operations(job: &Job, rounds: u64, mut after: impl FnMut(&str, u64)) {
    let arrived = job.counter();
    let count = arrived.clone();
    let message = job.register("small", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
    let echo = job.service_inline("echo", |m, _| Ok(m.read::<u64>(0).unwrap().to_ne_bytes().into())).unwrap();
    let window = job.shmalloc::<u64>(16).await.unwrap();
    let source = job.region(8).await.unwrap();
    let peer = Rank(1 - job.rank().0);
    let pattern = job.record(|r| window.record_put(r, peer, 0, &source)).await.unwrap();
    // Ping-pong: both sides take part in each round, so that nobody runs ahead.
    let mut done = 0;
    for kind in ["send", "put", "get", "replay", "call"] {
        for warm in [true, false] {
            job.barrier().await.unwrap();
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            let rounds = if warm { 3000 } else { rounds };
            for number in 0..rounds {
                match kind {
                    "send" => {
                        message.send(peer, number.to_ne_bytes()).await.unwrap();
                        done += 1;
                        arrived.reach(done).await;
                    }
                    "put" => window.put(peer, 1, number).await.unwrap(),
                    "get" => assert!(window.get(peer, 2).await.unwrap() == 0),
                    "replay" => {
                        source.write(0, &number.to_ne_bytes()).unwrap();
                        pattern.replay().await.unwrap();
                    }
                    _ => {
                        let value = echo.call_bytes(peer, number.to_ne_bytes()).await.unwrap();
                        assert_eq!(value.as_bytes(), number.to_ne_bytes());
                    }
                }
            }
            let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
            if !warm {
                after(kind, allocations);
            }
        }
    }
    job.barrier().await.unwrap();
}

#[test]
fn small_operations_allocate_nothing_in_the_steady_state() {
    let printed = run(2, options(), async |job| {
        const ROUNDS: u64 = 20_000;
        let figures = std::cell::RefCell::new(Vec::new());
        soon(
            "the operations",
            operations(&job, ROUNDS, |kind, allocations| {
                figures.borrow_mut().push((kind.to_owned(), allocations));
            }),
        )
        .await;
        for (kind, allocations) in figures.into_inner() {
            println!("{kind}: {allocations} allocations in {ROUNDS} operations");
            // Falling asleep and timers may allocate now and then; operations may not.
            assert!(allocations < ROUNDS / 200, "{kind}: {allocations} allocations in {ROUNDS} operations");
        }
    });
    for line in printed.iter().flat_map(|text| text.lines()).filter(|line| line.contains("allocations in")) {
        println!("{line}");
    }
}

#[test]
fn one_sided_operations_make_no_system_call() {
    let strace = std::process::Command::new("strace").arg("-V").output();
    if !strace.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: strace is not installed");
        return;
    }
    // Rank 0 alone is traced while it puts, gets, replays and sends to itself: nothing here sleeps.
    let attached = std::sync::Arc::new(std::sync::Mutex::new(String::new()));
    let report = attached.clone();
    let traced = options().during(move |job| {
        support::wait_for(job, 0, "trace me");
        let file = std::env::temp_dir().join(format!("strace-of-{}", std::process::id()));
        let mut strace = std::process::Command::new("strace")
            .args(["-f", "-c", "-o"])
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
    });
    let printed = run(1, traced, async |job| {
        let window = job.shmalloc::<u64>(16).await.unwrap();
        let source = job.region(8).await.unwrap();
        let arrived = job.counter();
        let count = arrived.clone();
        let message = job.register("small", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
        let pattern = job.record(|r| window.record_put(r, Rank(0), 0, &source)).await.unwrap();
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
            println!("traced: not allowed here");
            return;
        }
        for number in 0..20_000u64 {
            window.put(Rank(0), 1, number).await.unwrap();
            window.get(Rank(0), 1).await.unwrap();
            pattern.replay().await.unwrap();
            message.send(Rank(0), number.to_ne_bytes()).await.unwrap();
            arrived.reach(number + 1).await;
        }
        println!("traced");
    });
    if printed[0].contains("not allowed") {
        eprintln!("skipped: strace may not trace here");
        return;
    }
    let report = attached.lock().unwrap().clone();
    // The last line: percent, seconds, microseconds per call, calls, (errors), "total".
    let total = report.lines().rfind(|line| line.ends_with("total")).unwrap_or_else(|| panic!("{report}"));
    let calls: u64 =
        total.split_whitespace().nth(3).and_then(|text| text.parse().ok()).expect("a number of calls");
    println!("{calls} system calls in 80,000 operations");
    assert!(calls < 4000, "{report}");
}
