//! What a rank's process can become: a zombie, the parent of a process that outlives it, another program, the child of
//! a process that is no rank.

use crate::support::fork::fork;
use crate::support::{
    Transport, case, here, options, others, process_state, run, run_as, run_unjoined, soon, start_external,
    text_of, transport, until, wait_for,
};
use posthaste::components::protocols::Counter;
use posthaste::launcher::{Cause, RunningJob};
use posthaste::{ActiveMessage, CallError, Error, Fault, Job, Message, Rank, Scope, SendError, Service};
use rustix::process::Signal;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What survivors print; the names of the tests, which are printed too, do not contain it.
pub const GONE: &str = "the peer is gone";

pub fn kill(pid: u32) {
    // It may have gone already.
    let _ = crate::support::signal(pid, Signal::KILL);
}

/// The number that a rank has printed behind a word.
pub fn number_behind(job: &RunningJob, rank: u32, word: &str) -> u32 {
    wait_for(job, rank, word);
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        let text = text_of(job, rank);
        // A line is complete once it has an end.
        if let Some(line) = text.lines().find_map(|line| line.split_once(word))
            && let Some((number, _)) = line.1.split_once('.')
        {
            return number.trim().parse().unwrap();
        }
        assert!(Instant::now() < end, "no number behind {word:?} in {text:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A service whose calls end with the peer only.
fn never(job: &Job) -> Service<(), ()> {
    job.service("never", |()| std::future::pending::<()>()).unwrap()
}

/// Words by which ranks wait for each other where a barrier would not do: it ends with the first rank that dies, and
/// a rank that is past its end may leave before the others are.
pub struct Words {
    word: ActiveMessage,
    heard: Counter,
}

impl Words {
    pub fn register(job: &Job) -> Words {
        let heard = job.counter();
        let count = heard.clone();
        let word = job.register("word", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
        Words { word, heard }
    }

    /// Returns in the rank that is to die when all others are past the barrier.
    async fn last(&self, job: &Job, victim: Rank) {
        job.barrier().await.unwrap();
        if job.rank() == victim {
            soon("the last words", self.heard.reach(job.size() as u64 - 1)).await;
        } else {
            self.word.send(victim, b"").await.unwrap();
        }
    }

    /// Waits until all survivors are here: they can still talk to each other.
    pub async fn among(&self, job: &Job, survivors: &[Rank]) {
        let others = || survivors.iter().filter(|rank| **rank != job.rank());
        for other in others() {
            job.flush(*other).await.unwrap();
        }
        for other in others() {
            self.word.send(*other, b"").await.unwrap();
        }
        soon("the other survivors", self.heard.reach(others().count() as u64)).await;
    }
}

async fn is_lost(never: &Service<(), ()>, rank: Rank) {
    let end = soon("the loss", never.call(rank, ())).await;
    assert_eq!(end, Err(CallError::Fault(Fault::PeerLost(rank))));
}

case!(fault_a_dead_peer_that_nobody_has_waited_for_is_lost);
fn fault_a_dead_peer_that_nobody_has_waited_for_is_lost() {
    if transport() == Transport::Nodes {
        return; // of several nodes every rank is started by the launcher
    }
    zombie(here!(), false);
}

case!(fault_a_dead_peer_that_nobody_has_waited_for_is_lost_although_a_process_that_it_forked_lives);
/// Its pipe lives on in the forked process, so it is the zombie itself that has to be recognised as dead. Over sockets nobody
/// can: only whoever started a process is told of its end.
fn fault_a_dead_peer_that_nobody_has_waited_for_is_lost_although_a_process_that_it_forked_lives() {
    if transport() != Transport::Shm {
        eprintln!(
            "skipped: over sockets only whoever started a process sees its end where another holds its sockets"
        );
        return;
    }
    zombie(here!(), true);
}

fn zombie(test: &'static str, forked: bool) {
    let options = options().external(1).during(move |job| {
        let mut rank = start_external(job, 1, test);
        let survivors = [0, 2];
        survivors.iter().for_each(|survivor| wait_for(job, *survivor, "ready"));
        let forked = forked.then(|| number_behind(job, 0, "forked "));
        rank.kill().unwrap();
        survivors.iter().for_each(|survivor| wait_for(job, *survivor, GONE));
        // Its files are closed a little before its end is told.
        let late = std::time::Instant::now() + Duration::from_secs(20);
        while process_state(rank.id()).expect("somebody has waited for the dead rank") != 'Z' {
            assert!(std::time::Instant::now() < late, "it does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
        if let Some(forked) = forked {
            assert!(matches!(process_state(forked), Some('S' | 'R')), "the forked process does not live");
            kill(forked);
        }
        rank.wait().unwrap();
    });
    run_as(test, 3, options, async move |job: Job| {
        let (never, words) = (never(&job), Words::register(&job));
        if job.rank() == Rank(1) {
            let forked = if forked { fork() } else { 0 };
            job.all_gather(&forked.to_ne_bytes()).await.unwrap();
            std::future::pending::<()>().await;
        }
        let all = job.all_gather(&[0; 4]).await.unwrap();
        println!("forked {}.", u32::from_ne_bytes(all[1][..].try_into().unwrap()));
        println!("ready");
        is_lost(&never, Rank(1)).await;
        println!("{GONE}");
        words.among(&job, &[Rank(0), Rank(2)]).await;
    });
}

/// As a program's whose `main` is not Rust's: what nobody reads any more ends it, unless somebody sees to that.
#[allow(unsafe_code, reason = "what a signal does is the whole process's affair")]
fn let_broken_pipes_end_this_process() {
    use nix::sys::signal::{SigHandler, Signal, signal};
    // SAFETY: no handler is installed.
    let before = unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) };
    assert!(matches!(before.unwrap(), SigHandler::SigIgn), "as Rust's runtime leaves it");
}

case!(fault_a_rank_whose_main_is_not_rusts_outlives_what_it_writes_to_one_that_has_ended);
fn fault_a_rank_whose_main_is_not_rusts_outlives_what_it_writes_to_one_that_has_ended() {
    let options = options().killed(1).during(|job| {
        wait_for(job, 0, "ready");
        // Rank 1 goes to sleep, and rank 0 looks at nothing while it is killed.
        std::thread::sleep(Duration::from_millis(400));
        job.kill(1).unwrap();
    });
    run_unjoined(2, options, || {
        let_broken_pipes_end_this_process();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let job = posthaste::join().await.unwrap();
            let (never, words) = (never(&job), Words::register(&job));
            job.barrier().await.unwrap();
            if job.rank() == Rank(1) {
                return std::future::pending().await;
            }
            println!("ready");
            std::thread::sleep(Duration::from_millis(1200));
            // Over sockets the first that is written to one that has ended is refused, and the next is written to nobody.
            for _ in 0..3 {
                let _may_be_lost_already = words.word.try_send(Rank(1), b"");
                std::thread::sleep(Duration::from_millis(50));
            }
            is_lost(&never, Rank(1)).await;
            job.leave().await.unwrap();
        });
    });
}

case!(fault_a_rank_that_forked_and_died_is_lost_although_the_forked_process_lives);
fn fault_a_rank_that_forked_and_died_is_lost_although_the_forked_process_lives() {
    let options = options().killed(1).during(|job| {
        let forked = number_behind(job, 1, "forked ");
        for rank in [0, 2] {
            wait_for(job, rank, "ready");
        }
        job.kill(1).unwrap();
        wait_for(job, 0, GONE);
        wait_for(job, 2, GONE);
        assert!(matches!(process_state(forked), Some('S' | 'R')), "the forked process does not live");
        kill(forked);
    });
    run(3, options, async |job| {
        let (never, words) = (never(&job), Words::register(&job));
        if job.rank() == Rank(1) {
            println!("forked {}.", fork());
        }
        job.barrier().await.unwrap();
        println!("ready");
        if job.rank() == Rank(1) {
            std::future::pending::<()>().await;
        }
        is_lost(&never, Rank(1)).await;
        println!("{GONE}");
        words.among(&job, &[Rank(0), Rank(2)]).await;
    });
}

case!(fault_a_rank_that_forked_and_died_is_lost_to_those_that_never_talked_to_it);
fn fault_a_rank_that_forked_and_died_is_lost_to_those_that_never_talked_to_it() {
    let options = options().killed(3).during(|job| {
        let forked = number_behind(job, 3, "forked ");
        job.kill(3).unwrap();
        for survivor in 0..3 {
            wait_for(job, survivor, GONE);
        }
        assert!(matches!(process_state(forked), Some('S' | 'R')), "the forked process does not live");
        kill(forked);
    });
    run(4, options, async |job| {
        let words = Words::register(&job);
        if job.rank() == Rank(3) {
            println!("forked {}.", fork());
            std::future::pending::<()>().await;
        }
        // Rank 0 waits for a word of rank 3 before it sends it one.
        let end = soon("the end of the barrier", job.barrier()).await;
        assert!(matches!(end, Err(Error::Send(SendError::Fault(Fault::PeerLost(Rank(3)))))), "{end:?}");
        println!("{GONE}");
        words.among(&job, &[Rank(0), Rank(1), Rank(2)]).await;
    });
}

case!(fault_a_rank_that_forked_and_died_is_started_again_although_the_forked_process_lives);
/// Over shared memory the forked process holds its pipe, over sockets its connections, and that with its launcher.
fn fault_a_rank_that_forked_and_died_is_started_again_although_the_forked_process_lives() {
    let options = options().restart(1).during(|job| {
        let forked = number_behind(job, 1, "forked ");
        job.kill(1).unwrap();
        for survivor in [0, 2] {
            wait_for(job, survivor, "answered by incarnation 1");
        }
        assert!(matches!(process_state(forked), Some('S' | 'R')), "the forked process does not live");
        kill(forked);
    });
    run(3, options, async |job| {
        let me = job.rank();
        let (never, words) = (never(&job), Words::register(&job));
        let incarnation = job.incarnation();
        let which = job.service("which", move |()| async move { incarnation }).unwrap();
        job.ready();
        if me == Rank(1) {
            if incarnation == 0 {
                // Both have a connection with it.
                soon("words of the others", words.heard.reach(2)).await;
                println!("forked {}.", fork());
                std::future::pending::<()>().await;
            }
            soon("words of the others", words.heard.reach(2)).await;
            return;
        }
        words.word.send(Rank(1), b"").await.unwrap();
        is_lost(&never, Rank(1)).await;
        assert_eq!(soon("the next one", job.peer_restarted(Rank(1), 0)).await.unwrap(), 1);
        assert_eq!(soon("its answer", which.call(Rank(1), ())).await, Ok(1));
        println!("answered by incarnation 1");
        words.word.send(Rank(1), b"").await.unwrap();
    });
}

case!(fault_a_rank_that_forked_lives_and_so_do_its_peers);
fn fault_a_rank_that_forked_lives_and_so_do_its_peers() {
    run(3, options(), async |job| {
        let told: Arc<Mutex<Vec<Fault>>> = Arc::default();
        let faults = told.clone();
        job.on_error(move |fault| faults.lock().unwrap().push(fault));
        let window = job.shmalloc::<u64>(job.size()).await.unwrap();
        let echo = job.service("echo", |number: u64| async move { number }).unwrap();
        job.barrier().await.unwrap();
        let me = job.rank();
        let forked = (me == Rank(1)).then(fork);
        for round in 0..20 {
            for to in others(&job) {
                assert_eq!(echo.call(to, round).await, Ok(round));
                window.put(to, me.index(), round).await.unwrap();
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        job.barrier().await.unwrap();
        if let Some(forked) = forked {
            // What the forked process does not have: the memory in which peers trust.
            let maps = |pid: String| std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
            assert!(maps("self".into()).contains("posthaste"));
            assert!(!maps(forked.to_string()).lines().any(|line| line.contains("memfd:posthaste")));
            kill(forked);
        }
        assert_eq!(*told.lock().unwrap(), []);
        for from in others(&job) {
            assert_eq!(window.load(from.index()), Some(19));
        }
        job.barrier().await.unwrap();
    });
}

case!(fault_a_rank_that_becomes_another_program_is_lost_although_its_process_lives);
fn fault_a_rank_that_becomes_another_program_is_lost_although_its_process_lives() {
    let options = options().killed(1).during(|job| {
        wait_for(job, 0, GONE);
        wait_for(job, 2, GONE);
        assert_eq!(job.try_wait(1), None, "the process does not live");
        job.kill(1).unwrap();
    });
    run(3, options, async |job| {
        let (never, words) = (never(&job), Words::register(&job));
        words.last(&job, Rank(1)).await;
        if job.rank() == Rank(1) {
            let error = Command::new("sleep").arg("60").exec();
            panic!("{error}");
        }
        is_lost(&never, Rank(1)).await;
        println!("{GONE}");
        words.among(&job, &[Rank(0), Rank(2)]).await;
    });
}

case!(fault_a_rank_that_a_script_started_is_lost_although_the_script_lives);
fn fault_a_rank_that_a_script_started_is_lost_although_the_script_lives() {
    // The shell inherited what the rank inherits, the read end of its pipe as well.
    let script = "\"$0\" \"$@\"; test $? -eq 0 || kill -STOP $$";
    let options = options().killed(1).in_shell_script(script).during(|job| {
        wait_for(job, 0, GONE);
        assert_eq!(job.try_wait(1), None, "the script does not live");
        job.kill(1).unwrap();
    });
    run(2, options, async |job| {
        let (never, words) = (never(&job), Words::register(&job));
        words.last(&job, Rank(1)).await;
        if job.rank() == Rank(1) {
            kill(std::process::id());
        }
        is_lost(&never, Rank(1)).await;
        until("the report", || job.stats().peers_lost == 1).await;
        println!("{GONE}");
    });
}

case!(fault_the_rank_that_failed_first_is_named_though_it_ends_last);
fn fault_the_rank_that_failed_first_is_named_though_it_ends_last() {
    let options = options().body_leaves().any_end().during(|job| {
        let failure = job.wait_failure().expect("ranks fail");
        assert_eq!((failure.rank, &failure.cause), (2, &Cause::Exit(3)), "{failure}");
    });
    run(4, options, async |job| {
        job.barrier().await.unwrap();
        if job.rank() == Rank(2) {
            // As a panic does: it is gone for the others while what is left of it is put away.
            drop(job);
            tokio::time::sleep(Duration::from_millis(150)).await;
            std::process::exit(3);
        }
        let lost = soon("a barrier without rank 2", job.barrier()).await;
        std::process::exit(if lost.is_err() { 1 } else { 4 });
    });
}

case!(fault_a_rank_that_forgot_to_leave_is_named_by_the_launcher);
fn fault_a_rank_that_forgot_to_leave_is_named_by_the_launcher() {
    let options = options().body_leaves().any_end().during(|job| {
        let failure = job.wait_failure().expect("ranks fail");
        assert_ne!(failure.rank, 2, "{failure}");
        assert_eq!((&failure.cause, failure.quit_before), (&Cause::Exit(1), Some(2)), "{failure}");
        let told = "rank 2 had ended before, with code 0: is there a `leave`";
        assert!(failure.to_string().contains(told), "{failure}");
    });
    run(4, options, async |job| {
        let heard = job.counter();
        let count = heard.clone();
        let here = job.register("here", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(2) {
            soon("the others", heard.reach(3)).await;
            std::process::exit(0);
        }
        here.send(Rank(2), "").await.unwrap();
        let lost = soon("a barrier without rank 2", job.barrier()).await;
        std::process::exit(if lost.is_err() { 1 } else { 4 });
    });
}
