//! What the system refuses or limits.

use crate::support::{
    Transport, case, here, is_launcher_with, options, others, run, run_unjoined, sealed, soon, transport,
    unseal,
};
use posthaste::{
    CallError, Error, Fault, Job, MemoryError, Message, Rank, Region, RmaError, Scope, SendError,
};
use std::time::Duration;

/// A bit of everything between all ranks, with pauses in which they fall asleep.
async fn exercise(job: &Job) {
    let arrived = job.counter();
    let count = arrived.clone();
    let message = job
        .register("exercise", move |m: Message, _: &mut Scope| {
            assert!(unseal(&m.bytes()).is_some());
            count.add(1);
        })
        .unwrap();
    let echo = job.service("echo", |bytes: Vec<u8>| async move { bytes }).unwrap();
    let window = job.shmalloc::<u64>(job.size()).await.unwrap();
    for round in 0..20 {
        for to in others(job) {
            message.send(to, sealed(round, [10, 3000, 100_000, 1 << 20][round as usize % 4])).await.unwrap();
            assert_eq!(echo.call(to, vec![round as u8; 100]).await.unwrap(), vec![round as u8; 100]);
            window.put(to, job.rank().index(), round).await.unwrap();
        }
        if round % 4 == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    soon("the messages", arrived.reach(20 * (job.size() as u64 - 1))).await;
    job.barrier().await.unwrap();
    for from in others(job) {
        assert_eq!(window.load(from.index()), Some(19));
    }
    assert_eq!(job.stats().panics, 0);
    job.barrier().await.unwrap();
}

case!(fault_memfd_refused_is_no_obstacle);
fn fault_memfd_refused_is_no_obstacle() {
    if is_launcher_with(here!(), &[("POSTHASTE_TEST_NO_MEMFD", "1")]) {
        run(3, options(), async |job| {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            assert!(!maps.contains("memfd:posthaste"), "the arena is no memfd");
            exercise(&job).await;
        });
    }
}

case!(fault_membarrier_refused_is_no_obstacle);
fn fault_membarrier_refused_is_no_obstacle() {
    run(3, options().env("POSTHASTE_TEST_NO_MEMBARRIER", "1"), async |job| exercise(&job).await);
}

case!(fault_membarrier_refused_to_one_rank_loses_no_wake_up);
/// Where one rank is refused what the others rely on, whether it comes first or last, none sleeps through a message.
fn fault_membarrier_refused_to_one_rank_loses_no_wake_up() {
    if transport() == Transport::Tcp {
        return; // nobody looks at another's memory
    }
    for late in [0, 1] {
        let script = "if [ \"$POSTHASTE_RANK\" = 1 ]; then export POSTHASTE_TEST_NO_MEMBARRIER=1; fi; exec \"$0\" \"$@\"";
        let options = options()
            .in_shell_script(script)
            .delay(late, Duration::from_millis(300))
            .env("POSTHASTE_SPIN_US", "0");
        run(2, options, async |job| {
            let echo = job.service("echo", |number: u64| async move { number }).unwrap();
            job.barrier().await.unwrap();
            // First each of them only answers: what it does not see nothing else brings up. Then both ask.
            for asks in [[true, false], [false, true], [true, true]] {
                let other = Rank(1 - job.rank().0);
                for number in 0..if asks[job.rank().index()] { 4000 } else { 0 } {
                    assert_eq!(soon("the answer", echo.call(other, number)).await, Ok(number));
                }
                job.barrier().await.unwrap();
            }
        });
    }
}

case!(fault_dear_fences_hold_up_nobody);
/// Where a heavy fence takes as long as a tick of the clock, sleeps do not wait for it, and none is slept through a message.
fn fault_dear_fences_hold_up_nobody() {
    if transport() == Transport::Tcp {
        return; // nobody looks at another's memory
    }
    let options = options().env("POSTHASTE_TEST_DEAR_FENCE_US", "50000").env("POSTHASTE_SPIN_US", "0");
    run(2, options, async |job| {
        let echo = job.service("answer", |number: u64| async move { number }).unwrap();
        let other = Rank(1 - job.rank().0);
        job.barrier().await.unwrap();
        // Each answer is slept for on both sides: with a fence for each, the watchdog would end this long before.
        for number in 0..if job.rank() == Rank(0) { 4000 } else { 0 } {
            assert_eq!(soon("the answer", echo.call(other, number)).await, Ok(number));
        }
        job.barrier().await.unwrap();
        // Sleeps that are settled, and some that are about to be.
        for number in 0..if job.rank() == Rank(1) { 20 } else { 0 } {
            tokio::time::sleep(Duration::from_millis(90 + number)).await;
            assert_eq!(soon("the answer", echo.call(other, number)).await, Ok(number));
        }
        job.barrier().await.unwrap();
        exercise(&job).await;
    });
}

case!(fault_little_private_memory_is_no_obstacle);
fn fault_little_private_memory_is_no_obstacle() {
    // What all share, of which there are addresses for far more than is ever used, is nobody's own: neither this limit nor
    // a system that promises no more than it has (`vm.overcommit_memory=2`) counts it.
    let options = options().after_shell_command("ulimit -d 300000").env("POSTHASTE_SEGMENT", "16G");
    run(3, options, async |job| exercise(&job).await);
}

case!(fault_too_few_descriptors_are_a_typed_error);
fn fault_too_few_descriptors_are_a_typed_error() {
    // From a process without other tests, whose descriptors would give those of the ranks numbers beyond the limit, and leave
    // the low ones free.
    if !is_launcher_with(here!(), &[]) {
        return;
    }
    let rank = std::env::var_os("POSTHASTE_JOB").is_some();
    let (mut refused, mut joined) = (0, 0);
    for limit in 10..=34 {
        let low = options().after_shell_command(&format!("ulimit -n {limit}"));
        let printed = run_unjoined(2, low, || {
            // Tokio panics where it cannot get its own descriptors.
            let runtime = std::panic::catch_unwind(|| {
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
            });
            let Ok(runtime) = runtime else {
                println!("not even a runtime");
                return;
            };
            runtime.block_on(async {
                match posthaste::join().await {
                    Ok(_job) => println!("joined"),
                    Err(error) => {
                        let text = error.to_string();
                        println!("refused: {text}");
                        assert!(text.contains("open files") || text.contains("descriptors"), "{error:?}");
                    }
                }
            });
        });
        for text in printed {
            refused += usize::from(text.contains("refused: "));
            joined += usize::from(text.contains("joined"));
        }
    }
    assert!(rank || (refused > 0 && joined > 0), "{refused} refused, {joined} joined");
}

case!(fault_too_few_addresses_are_a_typed_error_that_names_the_setting);
fn fault_too_few_addresses_are_a_typed_error_that_names_the_setting() {
    let joined = |segment: &str| {
        let low = options().after_shell_command("ulimit -v 4000000").env("POSTHASTE_SEGMENT", segment);
        run_unjoined(2, low, || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            match runtime.block_on(posthaste::join()) {
                Ok(_job) => println!("joined"),
                Err(error) => println!("refused: {error}"),
            }
        })
    };
    for text in joined("16G") {
        assert!(text.contains("refused: cannot map the arena (lower POSTHASTE_SEGMENT"), "{text}");
    }
    for text in joined("256M") {
        assert!(text.contains("joined"), "{text}");
    }
}

case!(fault_memory_over_the_jobs_limit_is_a_typed_error_and_the_job_goes_on);
fn fault_memory_over_the_jobs_limit_is_a_typed_error_and_the_job_goes_on() {
    run(3, options().env("POSTHASTE_MEMORY_LIMIT", "8M"), async |job| {
        for _ in 0..3 {
            let wanted = if job.rank() == Rank(1) { 64 << 20 } else { 4096 };
            let error = job.shmalloc::<u8>(wanted).await.unwrap_err();
            match (job.rank().0, &error) {
                (1, Error::Rma(RmaError::Memory(MemoryError::JobLimit { wanted, limit, .. }))) => {
                    assert_eq!((*wanted, *limit), (64 << 20, 8 << 20));
                    assert!(error.to_string().contains("POSTHASTE_MEMORY_LIMIT"), "{error}");
                }
                (0 | 2, Error::Rma(RmaError::Fault(Fault::OutOfMemory(_)))) => {}
                _ => panic!("{error:?}"),
            }
        }
        assert!(job.region(64 << 20).await.is_err());
        // Nothing was taken by what failed.
        for _ in 0..5 {
            let window = job.shmalloc::<u8>(1 << 20).await.unwrap();
            window.put(job.rank().next(3), 5, 7).await.unwrap();
            job.barrier().await.unwrap();
            assert_eq!(window.load(5), Some(7));
            window.free().await.unwrap();
        }
    });
}

/// All that is left of what the job may commit, down to the last page.
async fn all_that_is_left(job: &Job) -> Vec<Region> {
    let mut taken = Vec::new();
    let mut len = 8 << 20;
    while len >= 4096 {
        match job.region(len).await {
            Ok(region) => taken.push(region),
            Err(_) => len /= 2,
        }
    }
    taken
}

case!(fault_what_is_sent_without_memory_ends_and_nobody_is_cut_off);
/// What was begun when memory ran out comes to its end, whoever waits for what could not be is told, and nobody is taken for
/// corrupt.
fn fault_what_is_sent_without_memory_ends_and_nobody_is_cut_off() {
    if transport() == Transport::Tcp {
        return; // what it sends is in no memory that the job counts
    }
    run(2, options().env("POSTHASTE_MEMORY_LIMIT", "16M"), async |job| {
        const LONG: usize = 5 << 20;
        let echo = job.service("echo", |bytes: Vec<u8>| async move { bytes }).unwrap();
        let length = job.service("length", |bytes: Vec<u8>| async move { bytes.len() }).unwrap();
        let fill = job.service("fill", |len: usize| async move { vec![7u8; len] }).unwrap();
        let other = job.rank().next(2);
        // Both have a lane.
        assert_eq!(soon("the answer", echo.call(other, vec![1])).await, Ok(vec![1]));
        job.barrier().await.unwrap();
        let taken = if job.rank() == Rank(0) { all_that_is_left(&job).await } else { Vec::new() };
        job.barrier().await.unwrap();
        for _ in 0..2 {
            assert_eq!(soon("the length", length.call(other, vec![2; LONG])).await, Ok(LONG));
            assert_eq!(soon("the long answer", fill.call(other, LONG)).await, Ok(vec![7; LONG]));
            // One page each, of which there may be some that were used before.
            for len in [100_000, 1 << 20] {
                let told = |ended: Result<bool, CallError>| match ended {
                    Ok(whole) => assert!(whole),
                    Err(CallError::Fault(Fault::OutOfMemory(_))) => {}
                    Err(CallError::Send(SendError::Fault(Fault::OutOfMemory(_)))) => {}
                    Err(error) => panic!("{error:?}"),
                };
                told(soon("its end", length.call(other, vec![2; len])).await.map(|there| there == len));
                told(soon("its end", fill.call(other, len)).await.map(|bytes| bytes == vec![7; len]));
            }
        }
        job.barrier().await.unwrap();
        drop(taken);
        job.barrier().await.unwrap();
        assert_eq!(soon("the answer", fill.call(other, 3000)).await, Ok(vec![7; 3000]));
        assert_eq!(job.stats().peers_lost, 0);
        job.barrier().await.unwrap();
    });
}

case!(fault_memory_over_the_segment_is_a_typed_error);
fn fault_memory_over_the_segment_is_a_typed_error() {
    run(2, options().env("POSTHASTE_SEGMENT", "1M"), async |job| {
        let error = job.shmalloc::<u8>(2 << 20).await.unwrap_err();
        assert!(matches!(error, Error::Rma(RmaError::Memory(MemoryError::Segment { .. }))), "{error:?}");
        assert!(job.shmalloc::<u64>(usize::MAX / 2).await.is_err(), "a length that overflows");
        let window = job.shmalloc::<u8>(1 << 19).await.unwrap();
        window.put(job.rank().next(2), 0, 1).await.unwrap();
        job.barrier().await.unwrap();
    });
}

case!(fault_sixty_four_ranks_on_few_cores_exchange_all_to_all);
fn fault_sixty_four_ranks_on_few_cores_exchange_all_to_all() {
    run(64, options(), async |job| {
        let arrived = job.counter();
        let count = arrived.clone();
        let message = job
            .register("all", move |m: Message, _: &mut Scope| {
                assert!(unseal(&m.bytes()).is_some());
                count.add(1);
            })
            .unwrap();
        job.barrier().await.unwrap();
        for round in 0..5u64 {
            for to in others(&job) {
                message.send(to, sealed(round, if round == 3 { 5000 } else { 40 })).await.unwrap();
            }
        }
        soon("all messages", arrived.reach(5 * 63)).await;
        job.barrier().await.unwrap();
        assert_eq!((arrived.value(), job.stats().panics), (5 * 63, 0));
        job.barrier().await.unwrap();
    });
}

case!(fault_idle_ranks_use_no_processor_time);
fn fault_idle_ranks_use_no_processor_time() {
    run(4, options(), async |job| {
        exercise(&job).await;
        let used = || {
            let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
            let fields: Vec<u64> = stat
                .rsplit_once(')')
                .unwrap()
                .1
                .split_whitespace()
                .skip(11)
                .take(2)
                .map(|f| f.parse().unwrap())
                .collect();
            // Ticks of 10 ms.
            (fields[0] + fields[1]) * 10
        };
        // What another one still has to do, or a host that takes the core away, may fall into one second and not into all.
        let mut taken = Vec::new();
        for _ in 0..10 {
            tokio::time::sleep(Duration::from_millis(100)).await;
            let before = used();
            tokio::time::sleep(Duration::from_millis(1000)).await;
            taken.push(used() - before);
            if taken[0] <= 50 || taken.iter().filter(|second| **second <= 50).count() > taken.len() / 2 {
                break;
            }
        }
        let quiet = taken.iter().filter(|second| **second <= 50).count();
        assert!(quiet > taken.len() / 2, "{taken:?} ms of processor time in seconds of sleep");
        job.barrier().await.unwrap();
    });
}

case!(fault_a_program_that_a_rank_executes_inherits_nothing_of_the_job);
fn fault_a_program_that_a_rank_executes_inherits_nothing_of_the_job() {
    run(2, options(), async |job| {
        // What the launcher handed over, by number; other descriptors may be the test runner's.
        let numbers = std::env::var("POSTHASTE_FDS").unwrap();
        let numbers = numbers.split(|c: char| !c.is_ascii_digit()).filter(|number| !number.is_empty());
        let target = |number: &str| std::fs::read_link(format!("/proc/self/fd/{number}")).ok();
        let handed: Vec<_> = numbers.filter_map(target).map(|path| path.display().to_string()).collect();
        assert!(handed.len() >= 3, "{handed:?}");
        let output = std::process::Command::new("ls").arg("-l").arg("/proc/self/fd").output().unwrap();
        let listed = String::from_utf8(output.stdout).unwrap();
        assert!(listed.contains("->"), "{listed}");
        for file in handed {
            assert!(!listed.contains(&file), "{file} is open in a program that the rank executed:\n{listed}");
        }
        exercise(&job).await;
    });
}

case!(fault_collective_operations_go_on_beside_too_many_answers);
fn fault_collective_operations_go_on_beside_too_many_answers() {
    run(2, options().env("POSTHASTE_ANSWER_BYTES", "100k"), async |job| {
        let big = job.service_inline("big", |_, _| Ok(vec![0_u8; 64 << 10].into())).unwrap();
        let ring = job.world().schedule(posthaste::Algorithm::Ring);
        let (mut mine, sum) = (vec![1_u64; 5000], posthaste::Reduce::sum());
        job.barrier().await.unwrap();
        let mut busy = 0;
        // Until it has been so a few times. Where memory is shared, there are never too many in the FIFO.
        for _ in 0..100 {
            mine[4999] = busy;
            let right = |sums: &[u64]| sums[..4999].iter().all(|sum| *sum == 2);
            if job.rank() == Rank(1) {
                let calls = futures::future::join_all((0..60).map(|_| big.call_bytes(Rank(0), "")));
                let (answers, sums) = futures::join!(calls, soon("the sums", ring.all_reduce(&mine, &sum)));
                let sums = sums.unwrap();
                assert!(right(&sums));
                if sums[4999] > 20 {
                    break;
                }
                for answer in answers {
                    match answer {
                        Ok(answer) => assert_eq!(answer.as_bytes().len(), 64 << 10),
                        Err(error) => {
                            assert_eq!(error, posthaste::CallError::Fault(Fault::Busy(Rank(0))));
                            busy += 1;
                        }
                    }
                }
            } else {
                let sums = soon("the sums", ring.all_reduce(&mine, &sum)).await.unwrap();
                assert!(right(&sums));
                if sums[4999] > 20 {
                    break;
                }
            }
        }
        job.barrier().await.unwrap();
    });
}

case!(fault_messages_that_are_kept_for_long_keep_no_credit_of_others);
fn fault_messages_that_are_kept_for_long_keep_no_credit_of_others() {
    const CREDITS: u64 = 16;
    run(2, options().env("POSTHASTE_CREDITS", "16"), async |job| {
        let (begun, go) = (job.counter(), std::sync::Arc::new(tokio::sync::Notify::new()));
        let count = begun.clone();
        let work = job
            .register_spawned("work", 1000, move |message: posthaste::OwnedMessage| {
                let (count, go) = (count.clone(), go.clone());
                async move {
                    count.add(1);
                    // The first two end at once, the others when the last has come.
                    match message.read::<u64>(0).unwrap() {
                        0 | 1 => {}
                        CREDITS => (0..CREDITS).for_each(|_| go.notify_one()),
                        _ => go.notified().await,
                    }
                }
            })
            .unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            for number in 0..=CREDITS {
                soon("credit", work.send(Rank(1), number.to_ne_bytes())).await.unwrap();
            }
        } else {
            soon("all of them", begun.reach(CREDITS + 1)).await;
        }
        job.barrier().await.unwrap();
    });
}
