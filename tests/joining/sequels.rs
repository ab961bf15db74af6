//! What came before: another program of the same ranks, or processes that died, some before they were part of the job.

use super::{GO, ROLE, be_a_rank, command, job, slurm, text};
use posthaste::launcher::{self, JobOutcome, Launch, Output};
use posthaste::{Message, Rank, Scope};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The first of two programs; the second one is a plain rank. The rank that is named takes its time to leave the first.
pub async fn first_rank() -> posthaste::Result<()> {
    let first = posthaste::join().await?;
    let me = first.rank();
    first.barrier().await?;
    if std::env::var(GO).as_deref() == Ok(me.0.to_string().as_str()) {
        tokio::time::sleep(Duration::from_millis(1500)).await;
    }
    first.leave().await?;
    let mut second = Command::new(std::env::current_exe()?);
    second.args(std::env::args_os().skip(1)).env(ROLE, "rank").env_remove(GO);
    let ended = second.stdin(Stdio::null()).status()?;
    assert!(ended.success(), "the second program of rank {me}: {ended}");
    Ok(())
}

/// Both programs of all ranks find each other, though one rank takes its time to leave the first.
fn both_programs_meet(test: &str, slow: u32) {
    let outputs = job(test, 3, |_, command| {
        command.env(ROLE, "first").env(GO, slow.to_string()).env("POSTHASTE_DEVICE", "tcp");
    });
    for (rank, output) in outputs.iter().enumerate() {
        let expected = format!("rank {rank} of 3 by ");
        assert!(output.status.success() && text(output).contains(&expected), "{}", text(output));
    }
}

#[test]
fn the_next_program_of_the_same_ranks_waits_for_the_end_of_the_one_before() {
    be_a_rank();
    both_programs_meet("sequels::the_next_program_of_the_same_ranks_waits_for_the_end_of_the_one_before", 0);
}

#[test]
fn the_next_program_waits_for_ranks_to_which_the_place_of_the_one_before_was_passed_on() {
    be_a_rank();
    let test = "sequels::the_next_program_waits_for_ranks_to_which_the_place_of_the_one_before_was_passed_on";
    both_programs_meet(test, 2);
}

#[test]
fn a_host_whose_own_name_is_a_loopback_address_is_found_by_it() {
    be_a_rank();
    let test = "sequels::a_host_whose_own_name_is_a_loopback_address_is_found_by_it";
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let resolved = std::net::ToSocketAddrs::to_socket_addrs(&(name.as_str(), 1));
    if !resolved.is_ok_and(|mut found| found.next().is_some_and(|address| address.ip().is_loopback())) {
        return slurm::skipped(test, &format!("{name} is none here"));
    }
    let outputs = job(test, 3, |_, command| {
        command.env("MASTER_ADDR", &name).env("POSTHASTE_DEVICE", "tcp");
    });
    if outputs.iter().any(|output| text(output).contains("POSTHASTE_TCP_INTERFACE")) {
        return slurm::skipped(test, "no network leads anywhere");
    }
    for (rank, output) in outputs.iter().enumerate() {
        let expected = format!("rank {rank} of 3 by ");
        assert!(output.status.success() && text(output).contains(&expected), "{}", text(output));
    }
}

/// Its first process ends before it is part of the job.
pub fn hasty_rank(runtime: &tokio::runtime::Runtime) -> posthaste::Result<()> {
    if std::env::var("POSTHASTE_RANK").as_deref() == Ok("1") && std::env::var_os("POSTHASTE_FDS").is_some() {
        std::process::exit(1);
    }
    runtime.block_on(super::rank())
}

/// What three ranks say that are started again so often.
fn started_again(test: &str, role: &str, times: u32) -> Vec<String> {
    let own = command(test);
    let launch = Launch::program(own.get_program()).args(own.get_args()).env(ROLE, role).restart(times);
    let (outcome, said) = launched(launch, 3, 90);
    assert!(outcome.success(), "{outcome}:\n{}", said.concat());
    said
}

/// How a job of so many ranks ends in so many seconds, and what they say.
fn launched(launch: Launch, ranks: u32, within: u64) -> (JobOutcome, Vec<String>) {
    let launch = launcher::prepare(launch, ranks, 1, 1).unwrap();
    let running = launch.stdout(Output::Capture).stderr(Output::Capture).spawn().unwrap();
    let outcome = running.wait_timeout(Duration::from_secs(within));
    let said = (0..ranks).map(|rank| {
        let (out, err) = running.output(rank);
        String::from_utf8_lossy(&[out, err].concat()).into_owned()
    });
    let said: Vec<String> = said.collect();
    (outcome.unwrap_or_else(|| panic!("the job does not end:\n{}", said.concat())), said)
}

#[test]
fn fault_a_rank_that_died_before_it_was_part_of_the_job_is_started_again_and_met() {
    be_a_rank();
    let test = "sequels::fault_a_rank_that_died_before_it_was_part_of_the_job_is_started_again_and_met";
    let said = started_again(test, "hasty", 1);
    for (rank, ways) in ["shm,tcp,shm", "tcp,shm,tcp", "shm,tcp,shm"].iter().enumerate() {
        assert!(said[rank].contains(&format!("rank {rank} of 3 by {ways}")), "{}", said.concat());
    }
}

/// How often the twins end.
const TIMES: u32 = 3;

/// Ranks 1 and 2 end at once, and come again at once: neither has said yet where it is when the other asks.
pub async fn twin_rank() -> posthaste::Result<()> {
    const ZERO: Rank = Rank(0);
    let job = posthaste::join().await?;
    let (me, mine) = (job.rank(), job.incarnation());
    let who = job.service("who", move |()| async move { mine })?;
    let met = job.counter();
    let count = met.clone();
    let tell = job.register("met", move |_: Message, _: &mut Scope| count.add(1))?;
    for to in job.ranks() {
        let wanted = match (me, to) {
            (_, ZERO) => 0,
            (ZERO, _) => TIMES,
            _ => mine,
        };
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            let asked = tokio::time::timeout(Duration::from_secs(20), who.call(to, ())).await;
            if matches!(asked.expect("an answer or an error"), Ok(incarnation) if incarnation >= wanted) {
                break;
            }
            assert!(Instant::now() < until, "rank {to} does not answer as it should");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    println!("rank {me} of incarnation {mine} has met all");
    if me != ZERO {
        tell.send(Rank(3 - me.0), "").await?;
        met.reach(1).await;
    }
    if me != ZERO && mine < TIMES {
        // Both at the same time.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64;
        tokio::time::sleep(Duration::from_millis(300 - now % 200)).await;
        std::process::exit(3);
    }
    let ranks: Vec<Rank> = job.ranks().collect();
    job.collectives().subset(&ranks).await?.barrier().await?;
    job.leave().await
}

#[test]
fn fault_ranks_that_come_again_at_the_same_time_reach_each_other() {
    be_a_rank();
    let test = "sequels::fault_ranks_that_come_again_at_the_same_time_reach_each_other";
    let said = started_again(test, "twin", TIMES);
    for (rank, incarnation) in [(0, 0)].into_iter().chain([1, 2].map(|rank| (rank, TIMES))) {
        let expected = format!("rank {rank} of incarnation {incarnation} has met all");
        assert!(said[rank].contains(&expected), "{expected}:\n{}", said.concat());
    }
}

#[test]
fn a_second_program_of_a_rank_is_told_at_once_that_its_launcher_has_one_job() {
    be_a_rank();
    let own = command("sequels::a_second_program_of_a_rank_is_told_at_once_that_its_launcher_has_one_job");
    let script = r#""$0" "$@"; exec "$0" "$@""#;
    let launch =
        Launch::program("/bin/sh").args(["-c", script]).args([own.get_program()]).args(own.get_args());
    // A rank whose number is taken would try for a minute.
    let (outcome, said) = launched(launch.env(ROLE, "rank").nodes(2).keep_going(true), 2, 40);
    assert_eq!(outcome.exit_code(), 3, "{outcome}:\n{}", said.concat());
    for (rank, said) in said.iter().enumerate() {
        assert!(said.contains(&format!("rank {rank} of 2 by ")), "the first program: {said}");
        let told = said.split_once("not joined: ").unwrap_or_else(|| panic!("the second: {said}")).1;
        let whole = format!("rank {rank} was here as ");
        assert!(told.contains(&whole) && told.contains("one program per `posthaste run`"), "{told}");
    }
}

#[test]
fn a_rank_that_left_is_told_so_when_the_others_stay() {
    be_a_rank();
    let test = "sequels::a_rank_that_left_is_told_so_when_the_others_stay";
    let outputs = job(test, 2, |rank, command| {
        command.env(ROLE, if rank == 0 { "keeper" } else { "leaver" }).env("POSTHASTE_DEVICE", "tcp");
    });
    let said = text(&outputs[1]);
    assert!(said.contains("rank 1 was at") && said.contains("has left the job in order"), "{said}");
    assert!(outputs[0].status.success(), "{}", text(&outputs[0]));
}

/// Leaves, and comes again while rank 0 stays.
pub async fn leaver_rank() -> posthaste::Result<()> {
    let job = posthaste::join().await?;
    job.barrier().await?;
    job.leave().await?;
    let mut second = Command::new(std::env::current_exe()?);
    second.args(std::env::args_os().skip(1)).env(ROLE, "rank").env("POSTHASTE_JOIN_TIMEOUT", "3");
    second.stdin(Stdio::null()).status()?;
    Ok(())
}

/// Stays for a while when the other has left.
pub async fn keeper_rank() -> posthaste::Result<()> {
    let job = posthaste::join().await?;
    job.barrier().await?;
    tokio::time::sleep(Duration::from_secs(12)).await;
    job.leave().await
}
