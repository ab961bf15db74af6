//! Ranks started by the launchers of others, if they are installed: Open MPI's `mpirun`, MPICH's `mpiexec.hydra`, and
//! Slurm's `srun` before daemons of the test's own. The ranks are this test binary in the role of one.
//!
//! What is not installed is said on standard error, also where the output of tests is captured.

mod slurm;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use posthaste_launch::{Foreign, Meeting, detect};
use slurm::{Cluster, in_path, skipped};

/// What a rank does: nothing, unless this is set.
const ROLE: &str = "POSTHASTE_TEST_MEET";
/// A key-value space has to cut a blob of this many bytes into parts.
const BLOB: u32 = 40 << 10;

#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let code = match play(&role) {
        Ok(said) => {
            println!("MEET {said}");
            0
        }
        Err(error) => {
            // Time for a launcher to end what it takes for crashed, as while a program closes its files.
            std::thread::sleep(Duration::from_millis(if role == "absent" { 500 } else { 0 }));
            println!("MEET error: {error}");
            1
        }
    };
    std::io::stdout().flush().unwrap();
    std::process::exit(code);
}

fn play(role: &str) -> Result<String, Box<dyn std::error::Error>> {
    // Only what is waited for in vain needs to end soon, and that begins when there is a connection.
    let within = Duration::from_secs(if role == "absent" { 3 } else { 30 });
    let detected = detect(&|name| std::env::var(name).ok())?.ok_or("no launcher")?;
    let found = detected.connect(Instant::now() + Duration::from_secs(30))?;
    let deadline = Instant::now() + within;
    match found {
        Foreign::Rendezvous(at) => Ok(format!(
            "{} of {} at {}{}",
            at.rank,
            at.size,
            at.place,
            if at.serve { ", serves" } else { "" }
        )),
        Foreign::KeyValue(mut meeting) => {
            if role == "absent" && meeting.rank() == 1 {
                std::thread::sleep(within + Duration::from_secs(10));
            }
            // Another job has other blobs.
            let first = if role == "child" { 10 } else { 0 };
            for round in first..first + 2 {
                gather(meeting.as_mut(), round, deadline)?;
            }
            if role == "parent" {
                // While this rank has its place, what it starts cannot take it too.
                let child = rank_of(Path::new("/usr/bin/env"), &[], "child").output()?;
                print!("{}", String::from_utf8_lossy(&child.stdout).replace("MEET", "MEET child:"));
            }
            Ok(format!("{} of {} gathered", meeting.rank(), meeting.size()))
        }
    }
}

fn gather(meeting: &mut dyn Meeting, round: u32, until: Instant) -> Result<(), Box<dyn std::error::Error>> {
    let blobs = meeting.all_gather(&blob(meeting.rank(), round), until)?;
    let expected: Vec<Vec<u8>> = (0..meeting.size()).map(|rank| blob(rank, round)).collect();
    if blobs == expected { Ok(()) } else { Err(format!("other blobs came in round {round}").into()) }
}

/// Bytes of all values, which only this rank gives, of a length of its own.
fn blob(rank: u32, round: u32) -> Vec<u8> {
    (0..BLOB + rank).map(|at| (rank * 7 + round * 3 + at + at / 251) as u8).collect()
}

/// A launcher's command line for ranks in a role, which ends by itself.
fn rank_of(launcher: &Path, arguments: &[&str], role: &str) -> Command {
    let mut command = Command::new("timeout");
    command.args(["-k", "5", "45"]).arg(launcher).args(arguments);
    command.arg(std::env::current_exe().unwrap()).args(["--exact", "role", "--nocapture"]);
    // Open MPI needs no remote shell on one host, and whoever runs the tests may be root.
    command.env(ROLE, role).env("OMPI_MCA_plm", "isolated").env("OMPI_MCA_ras", "^slurm");
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command
        .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
        .env("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe");
    command.stdin(Stdio::null());
    command
}

/// What the ranks said, sorted, and the launcher's own end.
fn run(mut command: Command) -> (Vec<String>, ExitStatus) {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    // Test harnesses of several ranks write into one line, before a rank does.
    let mut said: Vec<String> =
        text.lines().filter_map(|line| Some(line.split_once("MEET ")?.1.to_owned())).collect();
    said.sort();
    if said.is_empty() {
        panic!("{command:?} said {text} and {}", String::from_utf8_lossy(&output.stderr));
    }
    (said, output.status)
}

fn all_gathered(ranks: u32) -> Vec<String> {
    (0..ranks).map(|rank| format!("{rank} of {ranks} gathered")).collect()
}

fn expect_all_gathered(command: Command, ranks: u32) {
    let line = format!("{command:?}");
    let (said, status) = run(command);
    assert_eq!(said, all_gathered(ranks), "{line}");
    assert!(status.success(), "{line}: {status}");
}

/// A launcher that has the name of others, if this one tells its maker.
fn made_by(name: &str, maker: &str) -> Option<PathBuf> {
    in_path(name).filter(|program| {
        let output = Command::new(program).arg("--version").stdin(Stdio::null()).output();
        output.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains(maker))
    })
}

fn open_mpi(test: &str) -> Option<PathBuf> {
    let found = in_path("mpirun.openmpi").or_else(|| made_by("mpirun", "Open MPI"));
    if found.is_none() {
        skipped(test, "Open MPI's mpirun is not installed (Debian: openmpi-bin)");
    }
    found
}

fn hydra(test: &str) -> Option<PathBuf> {
    let found = in_path("mpiexec.hydra");
    if found.is_none() {
        skipped(test, "MPICH's mpiexec.hydra is not installed (Debian: mpich)");
    }
    found
}

#[test]
fn ranks_of_open_mpi_meet() {
    let Some(mpirun) = open_mpi("ranks_of_open_mpi_meet") else { return };
    for ranks in [1, 4] {
        expect_all_gathered(rank_of(&mpirun, &["-n", &ranks.to_string()], "gather"), ranks);
    }
}

#[test]
fn ranks_of_hydra_meet() {
    let Some(mpiexec) = hydra("ranks_of_hydra_meet") else { return };
    for ranks in [1, 4] {
        expect_all_gathered(rank_of(&mpiexec, &["-n", &ranks.to_string()], "gather"), ranks);
    }
    expect_all_gathered(rank_of(&mpiexec, &["-pmi-port", "-n", "4"], "gather"), 4);
}

#[test]
fn ranks_miss_one_of_open_mpi_that_does_not_come() {
    let Some(mpirun) = open_mpi("ranks_miss_one_of_open_mpi_that_does_not_come") else { return };
    let (said, status) = run(rank_of(&mpirun, &["-n", "3"], "absent"));
    assert!(said.iter().all(|said| said.contains("no answer to PMIx_Fence at the deadline")), "{said:?}");
    assert!(!status.success());
}

#[test]
fn ranks_miss_one_of_hydra_that_does_not_come() {
    let Some(mpiexec) = hydra("ranks_miss_one_of_hydra_that_does_not_come") else { return };
    let (said, status) = run(rank_of(&mpiexec, &["-n", "3"], "absent"));
    assert!(said.iter().all(|said| said.contains("no answer to barrier_in at the deadline")), "{said:?}");
    assert!(!status.success());
}

#[test]
fn what_a_rank_of_hydra_starts_is_no_rank() {
    let Some(mpiexec) = hydra("what_a_rank_of_hydra_starts_is_no_rank") else { return };
    let (said, status) = run(rank_of(&mpiexec, &["-n", "2"], "parent"));
    let (children, ranks): (Vec<_>, Vec<_>) = said.into_iter().partition(|said| said.contains("PMI_FD"));
    assert_eq!(ranks, all_gathered(2));
    assert_eq!(children.len(), 2);
    assert!(children.iter().all(|said| said.contains("unset the PMI_ variables for it")), "{children:?}");
    assert!(status.success(), "{status}");
}

#[test]
fn what_a_rank_of_open_mpi_starts_is_no_rank() {
    let Some(mpirun) = open_mpi("what_a_rank_of_open_mpi_starts_is_no_rank") else { return };
    // PMIx would let a rank have several processes, which would meet apart from the first ones.
    let (said, status) = run(rank_of(&mpirun, &["-n", "2"], "parent"));
    let (children, ranks): (Vec<_>, Vec<_>) = said.into_iter().partition(|said| said.starts_with("child: "));
    assert_eq!(ranks, all_gathered(2));
    assert_eq!(children.len(), 2);
    for (rank, said) in children.iter().enumerate() {
        assert!(said.contains(&format!("rank {rank} is already claimed by pid ")), "{said}");
        assert!(said.contains("inherits the variables but not the place; unset them"), "{said}");
    }
    assert!(status.success(), "{status}");
}

#[test]
fn open_mpi_that_has_ended_is_told() {
    let Some(mpirun) = open_mpi("open_mpi_that_has_ended_is_told") else { return };
    let mut command = Command::new("timeout");
    command.args(["-k", "5", "45"]).arg(mpirun).args(["-n", "1", "env"]).env("OMPI_MCA_plm", "isolated");
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    let output = command.stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let of_rank = text.lines().filter_map(|line| line.split_once('='));
    let of_rank = of_rank.filter(|(name, _)| name.starts_with("PMIX_") || name.starts_with("OMPI_"));
    let mut left_behind = rank_of(Path::new("/usr/bin/env"), &[], "gather");
    left_behind.envs(of_rank);
    let (said, status) = run(left_behind);
    assert!(said.len() == 1 && said[0].contains("PMIx_Init failed: UNREACHABLE"), "{said:?}");
    assert!(!status.success());
}

#[test]
fn ranks_of_two_launchers_at_once_are_of_none() {
    let test = "ranks_of_two_launchers_at_once_are_of_none";
    let (Some(mpirun), Some(mpiexec)) = (open_mpi(test), hydra(test)) else { return };
    // Both of them have a rank 0 of 2 and a rank 1 of 2.
    let mut command = rank_of(&mpirun, &["-n", "2", mpiexec.to_str().unwrap(), "-n", "2"], "gather");
    // So that the first that fails does not end the others before they have spoken.
    command.env("OMPI_MCA_orte_abort_on_non_zero_status", "0");
    let (said, _) = run(command);
    assert!(said.iter().all(|said| said.contains("only one of them started this process")), "{said:?}");
}

fn tasks(cluster: &Cluster, arguments: &[&str], role: &str) -> Command {
    let mut command = rank_of(&cluster.srun, arguments, role);
    command.env("SLURM_CONF", cluster.config());
    command
}

#[test]
fn tasks_of_slurm_meet() {
    let Some(cluster) = Cluster::start("tasks_of_slurm_meet") else { return };
    let (said, status) = run(tasks(&cluster, &["--mpi=none", "-n", "4"], "gather"));
    assert!(status.success() && said.len() == 4, "{said:?}");
    let place = said[0].strip_prefix("0 of 4 at ").and_then(|said| said.strip_suffix(", serves")).unwrap();
    let port: u16 = place.strip_prefix("127.0.0.1:").unwrap().parse().unwrap();
    assert!((15_000..30_000).contains(&port));
    for (rank, said) in said.iter().enumerate().skip(1) {
        assert_eq!(*said, format!("{rank} of 4 at {place}"));
    }

    for kind in ["pmi2", "pmix"] {
        if cluster.offers(kind, "tasks_of_slurm_meet") {
            expect_all_gathered(tasks(&cluster, &[&format!("--mpi={kind}"), "-n", "4"], "gather"), 4);
        }
    }
    launchers_inside_meet(&cluster);
}

/// Clusters may give each task, and so each part of another launcher, a key-value space that is not meant.
fn launchers_inside_meet(cluster: &Cluster) {
    let test = "tasks_of_slurm_meet, a launcher in a task";
    if let Some(mpirun) = open_mpi(test).filter(|_| cluster.offers("pmi2", test)) {
        let inside = ["--mpi=pmi2", "-n", "1", mpirun.to_str().unwrap(), "-n", "3"];
        expect_all_gathered(tasks(cluster, &inside, "gather"), 3);
    }
    if let Some(mpiexec) = hydra(test).filter(|_| cluster.offers("pmix", test)) {
        let inside = ["--mpi=pmix", "-n", "1", mpiexec.to_str().unwrap(), "-launcher", "fork", "-n", "3"];
        expect_all_gathered(tasks(cluster, &inside, "gather"), 3);
    }
}
