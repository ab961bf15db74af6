//! Clocks that jump or differ.
//!
//! The time of day jumps whenever somebody sets it; nobody here may ask for it. The clock that only goes forward
//! differs between containers, and nobody may compare it with that of another process.

use crate::processes::{GONE, Words, kill, number_behind};
use crate::support::fork::fork;
use crate::support::{case, options, others, process_state, run, sealed, soon, unseal, wait_for};
use posthaste::{CallError, Fault, Message, Rank, Scope};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// A rank's own clocks, ahead of the others' by days.
const OTHER_CLOCKS: &str = "unshare --time --monotonic 1000000 --boottime 3000000";

case!(fault_a_rank_with_other_clocks_meets_its_deadlines_and_its_death_is_seen);
fn fault_a_rank_with_other_clocks_meets_its_deadlines_and_its_death_is_seen() {
    if std::env::var_os("POSTHASTE_JOB").is_none() {
        let allowed = Command::new("sh").args(["-c", &format!("{OTHER_CLOCKS} true")]).output();
        if !allowed.as_ref().is_ok_and(|output| output.status.success()) {
            eprintln!("skipped: a time namespace cannot be made here: {allowed:?}");
            return;
        }
    }
    let script = format!(
        "if [ \"$POSTHASTE_RANK\" = 1 ]; then exec {OTHER_CLOCKS} \"$0\" \"$@\"; fi; exec \"$0\" \"$@\""
    );
    let options = options().killed(1).in_shell_script(&script).during(|job| {
        let forked = number_behind(job, 1, "forked ");
        for survivor in [0, 2] {
            wait_for(job, survivor, "ready");
        }
        job.kill(1).unwrap();
        for survivor in [0, 2] {
            wait_for(job, survivor, GONE);
        }
        assert!(matches!(process_state(forked), Some('S' | 'R')), "the forked process does not live");
        kill(forked);
    });
    run(3, options, async |job| {
        let me = job.rank();
        let words = Words::register(&job);
        let arrived = job.counter();
        let count = arrived.clone();
        let message = job
            .register("sealed", move |m: Message, _: &mut Scope| {
                assert!(unseal(&m.bytes()).is_some());
                count.add(1);
            })
            .unwrap();
        let never = job.service("never", |()| std::future::pending::<()>()).unwrap();
        let late = job
            .service("late", |pause: u64| async move {
                tokio::time::sleep(Duration::from_millis(pause)).await;
                pause
            })
            .unwrap();
        let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
        let uptime: f64 = uptime.split_whitespace().next().unwrap().parse().unwrap();
        let uptimes = job.all_gather(&uptime.to_ne_bytes()).await.unwrap();
        let uptime_of = |rank: usize| f64::from_ne_bytes(uptimes[rank][..].try_into().unwrap());
        assert!((uptime_of(1) - uptime_of(0) - 3e6).abs() < 1000.0, "the clocks do not differ");
        for to in others(&job) {
            for (number, len) in [20, 9000, 20, 9000, 200_000].into_iter().enumerate() {
                message.send(to, sealed(number as u64, len)).await.unwrap();
                // Asleep, so that the next one is a wake-up.
                tokio::time::sleep(Duration::from_millis(3)).await;
            }
            // None is met too early, none is missed.
            let began = Instant::now();
            let wait = Duration::from_millis(60);
            let end = soon("a deadline", never.call_within(to, (), wait)).await;
            assert_eq!(end, Err(CallError::Fault(Fault::DeadlineExceeded)));
            assert!(began.elapsed() >= wait, "met after {:?}", began.elapsed());
            assert_eq!(late.call_within(to, 80, Duration::from_secs(3600)).await, Ok(80));
        }
        soon("the messages", arrived.reach(10)).await;
        if me == Rank(1) {
            println!("forked {}.", fork());
        }
        job.barrier().await.unwrap();
        println!("ready");
        if me == Rank(1) {
            std::future::pending::<()>().await;
        }
        // The numbers of processes are told apart by when these started, which each clock says differently.
        let end = soon("the loss", never.call(Rank(1), ())).await;
        assert_eq!(end, Err(CallError::Fault(Fault::PeerLost(Rank(1)))));
        println!("{GONE}");
        words.among(&job, &[Rank(0), Rank(2)]).await;
    });
}

case!(fault_a_clock_that_is_set_moves_nothing_because_nobody_asks_for_the_time_of_day);
fn fault_a_clock_that_is_set_moves_nothing_because_nobody_asks_for_the_time_of_day() {
    fn scan(dir: &Path, files: &mut usize) {
        for entry in std::fs::read_dir(dir).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                scan(&path, files);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                *files += 1;
                let text = std::fs::read_to_string(&path).unwrap();
                for name in ["SystemTime", "UNIX_EPOCH", "Realtime", "CLOCK_REALTIME", "gettimeofday"] {
                    assert!(!text.contains(name), "{} uses {name}", path.display());
                }
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = 0;
    // Every package that ships; tests and tools may ask.
    let tools = ["cli", "testkit", "loom", "fuzz", "target"];
    scan(&root.join("src"), &mut files);
    for entry in std::fs::read_dir(root).unwrap().flatten() {
        let sources = entry.path().join("src");
        if sources.is_dir() && !tools.iter().any(|tool| entry.file_name() == *tool) {
            scan(&sources, &mut files);
        }
    }
    assert!(files > 50, "{files} files");
}
