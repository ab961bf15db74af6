//! The command `posthaste perf`, as a user types it. What it measures in a fraction of a second on a busy machine is no
//! figure to rely on: these tests are about whether there is one.

use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const PROGRAM: &str = env!("CARGO_BIN_EXE_posthaste");
/// Rows of one kind, as short as possible.
const BRIEF: &[&str] = &["--seconds", "0.05", "--face", "handle", "--runtime", "current_thread", "--json"];

fn perf(args: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command.arg("perf").args(args).stdin(Stdio::null());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn rows(output: &Output) -> Vec<serde_json::Value> {
    let lines = text(&output.stdout);
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn benches(device: &str) -> Vec<String> {
    let out = perf(&["--list", "--device", device]).output().unwrap();
    text(&out.stdout).lines().map(str::to_owned).collect()
}

/// Rows that take seconds, however few are asked for.
const SLOW: [&str; 2] = ["idle_cpu", "neighbour_delay"];

/// Measures each of them once, with few ranks where there may be many.
fn figures_of(device: &str, picked: impl Fn(usize) -> bool) {
    let names = benches(device);
    assert!(names.len() > 15, "{names:?}");
    let picked = names.iter().enumerate().filter(|(at, _)| picked(*at)).map(|(_, name)| name.as_str());
    figures(device, picked.filter(|name| !SLOW.contains(name)));
}

fn figures<'n>(device: &str, names: impl Iterator<Item = &'n str>) {
    for name in names {
        let out = perf(&["--bench", name, "--device", device, "--ranks", "3"]).args(BRIEF).output().unwrap();
        assert!(out.status.success(), "{name}: {}", text(&out.stderr));
        let rows = rows(&out);
        assert!(!rows.is_empty(), "{name}");
        for row in rows {
            let number = |name: &str| row[name].as_f64();
            let value = number("value").unwrap();
            // A rank that is idle, or a peer that is silent, may cost nothing at all.
            let least =
                if ["idle_cpu", "memory_silent", "memory_talking"].contains(&name) { 0.0 } else { 1e-9 };
            assert!((least..1e9).contains(&value), "{row}");
            assert_eq!(row["against"].is_null(), row["limit"].is_null(), "{row}");
            if let Some(limit) = number("limit") {
                assert!(limit > 0.0 && (number("ratio").unwrap() - value / limit).abs() < 1e-6, "{row}");
            }
            assert!(row.get("rivals").is_none(), "{row}");
        }
    }
}

#[test]
fn every_row_over_shared_memory_has_a_figure_and_its_limit_1() {
    figures_of("shm", |at| at % 3 == 0);
}

#[test]
fn every_row_over_shared_memory_has_a_figure_and_its_limit_2() {
    figures_of("shm", |at| at % 3 == 1);
}

#[test]
fn every_row_over_shared_memory_has_a_figure_and_its_limit_3() {
    figures_of("shm", |at| at % 3 == 2);
}

#[test]
fn every_row_over_tcp_has_a_figure_and_its_limit() {
    figures_of("tcp", |_| true);
}

#[test]
fn an_idle_job_is_measured_for_five_seconds_at_least() {
    let start = Instant::now();
    figures("tcp", ["idle_cpu"].into_iter());
    assert!(start.elapsed() > Duration::from_secs(5));
}

#[test]
fn an_idle_job_over_shared_memory_has_a_figure() {
    figures("shm", ["idle_cpu"].into_iter());
}

#[test]
fn a_ticker_beside_tasks_has_a_figure_and_its_limit() {
    figures("shm", ["neighbour_delay"].into_iter());
}

#[test]
fn what_the_project_asks_for_is_there() {
    let all = |device: &str, asked: &str| {
        let there = benches(device);
        for name in asked.split_whitespace() {
            assert!(there.iter().any(|there| there == name), "{device}, {name}: {there:?}");
        }
    };
    all(
        "shm",
        "am_latency call_latency call_typed_latency calls_joined am_rate am_rate_awaited am_bandwidth loan_latency put_latency put_rate \
        get_rate put_bandwidth get_bandwidth replay replay_64 puts_awaited puts_awaited_64 puts_joined puts_joined_64 \
        replay_sends replay_sends_64 sends_awaited sends_awaited_64 sends_joined sends_joined_64 multicast many_to_many \
        barrier all_reduce all_to_all broadcast_bandwidth all_reduce_bandwidth strided_put strided_put_or_pack \
        strided_both_or_pack layout_strided layout_irregular layout_transpose typed_direct fetch_add gups put_signal \
        wakeup_latency neighbour_delay idle_cpu oversubscribed memory_silent memory_talking loss loss_busy long_bandwidth \
        oversend_put_rate oversend_get_rate oversend_put_bandwidth oversend_get_bandwidth join",
    );
    all(
        "tcp",
        "am_latency call_latency calls_joined am_rate am_bandwidth put_bandwidth get_bandwidth encrypted_am_bandwidth replay replay_64 \
        replay_sends_acked replay_sends_acked_64 typed_put_bandwidth fetch_add gups put_signal multicast barrier all_reduce \
        all_to_all idle_cpu loss loss_busy",
    );
}

#[test]
fn both_faces_and_both_runtimes_are_measured() {
    let faces = |device: &str, names: &str, more: &[&str]| {
        let args = ["--device", device, "--bench", names, "--seconds", "0.05", "--no-limits", "--json"];
        let out = perf(&args).args(more).output().unwrap();
        assert!(out.status.success(), "{names}: {}", text(&out.stderr));
        let rows = rows(&out);
        assert_eq!(rows.len(), 3 * names.split(',').count(), "{rows:?}");
        let kinds = [("handle", "current_thread"), ("context", "current_thread"), ("handle", "multi_thread")];
        for (row, (face, runtime)) in rows.iter().zip(kinds.into_iter().cycle()) {
            assert_eq!((row["face"].as_str(), row["runtime"].as_str()), (Some(face), Some(runtime)), "{row}");
            assert!(row["value"].as_f64().unwrap() > 0.0, "{row}");
        }
    };
    faces("shm", "call_latency,call_typed_latency,put_latency,put_rate,get_rate", &[]);
    faces("shm", "put_bandwidth,get_bandwidth", &["--sizes", "65536"]);
    faces("tcp", "put_bandwidth,get_bandwidth", &["--sizes", "65536"]);
}

#[test]
fn a_limit_says_once_how_it_came_about() {
    let args = [
        "--bench",
        "am_latency,put_latency",
        "--face",
        "handle",
        "--runtime",
        "current_thread",
        "--seconds",
        "0.05",
    ];
    let out = perf(&args).output().unwrap();
    let table = text(&out.stdout);
    let notes: Vec<_> = table.lines().filter(|line| line.starts_with("pingpong_two_lines: ")).collect();
    assert!(matches!(notes[..], [note] if note.contains("median pair")), "{table}");
    let rows = rows(&perf(&args).arg("--json").output().unwrap());
    let is_told =
        |row: &serde_json::Value| row["limit_detail"].as_str().is_some_and(|it| it.contains("median pair"));
    assert!(rows.len() == 2 && rows.iter().all(is_told), "{rows:?}");
}

#[test]
fn rows_tell_their_ranks_and_what_they_stand_beside() {
    let out = perf(&["--bench", "barrier", "--ranks", "3"]).args(BRIEF).output().unwrap();
    let told: Vec<_> = rows(&out).iter().map(|row| (row["ranks"].clone(), row["against"].clone())).collect();
    assert_eq!(told, [(2.into(), "pingpong_two_lines".into()), (3.into(), serde_json::Value::Null)]);
    let out =
        perf(&["--bench", "am_latency", "--sizes", "8,4096", "--no-limits"]).args(BRIEF).output().unwrap();
    let told: Vec<_> =
        rows(&out).iter().map(|row| (row["size"].clone(), row.get("limit").is_some())).collect();
    assert_eq!(told, [(8.into(), false), (4096.into(), false)]);
}

#[test]
fn a_bar_for_a_ratio_judges_no_value_without_its_limit() {
    let table = |more: &[&str]| {
        let args = ["--bench", "am_latency", "--sizes", "8", "--seconds", "0.05", "--face", "handle"];
        text(&perf(&args).args(more).output().unwrap().stdout)
    };
    let judged = |table: &str| table.contains(" met ") || table.contains(" missed ");
    let (with, without) = (table(&[]), table(&["--no-limits"]));
    assert!(judged(&with) && with.contains("≤ 1.35"), "{with}");
    assert!(without.contains("am_latency") && !judged(&without) && !without.contains("1.35"), "{without}");
}

#[test]
fn wrong_flags_are_told_in_a_line() {
    for (args, told) in [
        (&["--bench", "am_latenzy"][..], "no benchmark is called `am_latenzy`; there are am_latency, "),
        (&["--bench", "barrier", "--sizes", "64"], "--sizes: barrier has none but 0"),
        (&["--seconds", "0"], "--seconds must be from 0.05 to 600"),
        (&["--seconds", "NaN"], "--seconds must be from 0.05 to 600"),
        (&["--bench", "puts_joined", "--device", "ib"], "invalid value 'ib'"),
        (&["--bench", "barrier", "--plot", "x"], "cannot be used with '--plot <DIR>'"),
        (&["--plot", "/proc/none"], "/proc/none: "),
        (&["--sizes", "many"], "invalid value 'many'"),
        (&["--bench", "all_to_all", "--sizes", "2"], "--sizes 2: all_to_all takes a multiple of 4 bytes"),
        (
            &["--bench", "am_latency,all_to_all", "--sizes", "8,6"],
            "--sizes 6: all_to_all takes a multiple of 4",
        ),
        (&["--bench", "multicast", "--sizes", "7"], "--sizes 7: multicast takes 8 bytes at least"),
        (&["--bench", "replay_64", "--sizes", "0"], "--sizes 0: replay_64 takes a byte at least"),
        (&["--bench", "typed_direct", "--sizes", "48"], "typed_direct takes a power of two from 2 to 262144"),
        (&["--plot", "/proc/none", "--sizes", "48"], "--sizes 48: typed_direct takes a power of two"),
        (&["--bench", "loss", "--ranks", "1"], "--ranks 1: loss takes 2 to 4096"),
        (
            &["--bench", "put_latency,memory_silent", "--ranks", "2"],
            "--ranks 2: memory_silent takes 3 to 4096",
        ),
        (&["--ranks", "0"], "invalid value '0'"),
    ] {
        let out = perf(args).output().unwrap();
        let err = text(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{args:?}: {err}");
        let line = err.lines().next().unwrap_or_default();
        assert!(line.contains(told) && out.stdout.is_empty(), "{args:?}: {err}");
    }
}

#[test]
fn what_could_not_be_measured_is_told_and_ends_with_1() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    for args in [
        &["--bench", "put_latency", "--face", "handle", "--runtime", "current_thread"][..],
        &["--plot", folder, "--sizes", "4096"],
        &["--instructions", "--bench", "put"],
    ] {
        // Fewer descriptors than a job takes.
        let mut limited = Command::new("sh");
        limited.args(["-c", "ulimit -n 32; exec \"$@\"", "sh", PROGRAM, "perf"]);
        let out = limited.args(args).output().unwrap();
        let err = text(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{args:?}: {err}");
        assert!(err.lines().count() == 1 && err.contains("RLIMIT_NOFILE"), "{args:?}: {err}");
    }
}

#[test]
fn who_asks_for_ranks_that_a_row_has_not_is_told_so() {
    let out = perf(&["--bench", "put_latency", "--ranks", "3"]).args(BRIEF).output().unwrap();
    assert!(out.status.success());
    assert_eq!(text(&out.stderr).trim(), "posthaste: perf: put_latency is of 2 ranks, whatever --ranks says");
    assert!(rows(&out).iter().all(|row| row["ranks"] == 2));
    // Of two rows with a name, one of which has as many as are wanted.
    let out = perf(&["--bench", "barrier", "--ranks", "3"]).args(BRIEF).output().unwrap();
    assert_eq!((out.status.success(), text(&out.stderr).as_str()), (true, ""));
}

#[test]
fn rows_say_what_settings_they_were_measured_with() {
    let measured = |settings: &[(&str, &str)], more: &[&str]| {
        let args = ["--bench", "put_bandwidth", "--sizes", "65536", "--no-limits"];
        let out = perf(&args).args(BRIEF).args(more).envs(settings.iter().copied()).output().unwrap();
        let err = text(&out.stderr);
        assert!(out.status.success(), "{err}");
        (rows(&out).remove(0), err)
    };
    let (row, err) = measured(&[("POSTHASTE_SPIN_US", "0"), ("POSTHASTE_CREDITS", "9")], &[]);
    let settings = serde_json::json!({ "POSTHASTE_SPIN_US": "0", "POSTHASTE_CREDITS": "9" });
    assert_eq!((&row["settings"], &row["device"]), (&settings, &"shm".into()), "{row}");
    assert_eq!(err.lines().count(), 1, "{err}");
    for told in ["not those of the default configuration", "POSTHASTE_SPIN_US=0", "POSTHASTE_CREDITS=9"] {
        assert!(err.contains(told), "{err}");
    }
    // The device is that of the environment where no flag names one, and the row is one of that device.
    for (settings, more, device) in [
        (&[][..], &[][..], "shm"),
        (&[("POSTHASTE_DEVICE", "tcp")], &[], "tcp"),
        (&[("POSTHASTE_DEVICE", "tcp")], &["--device", "tcp"], "tcp"),
        (&[("POSTHASTE_DEVICE", "auto")], &["--device", "tcp"], "tcp"),
        (&[("POSTHASTE_DEVICE", "shm")], &[], "shm"),
    ] {
        let (row, err) = measured(settings, more);
        assert_eq!((row["device"].as_str(), row.get("settings")), (Some(device), None), "{row}");
        assert_eq!(err, "");
    }
    let refused = |settings: (&str, &str), args: &[&str], told: &[&str]| {
        let out = perf(args).env(settings.0, settings.1).output().unwrap();
        let err = text(&out.stderr);
        assert_eq!((out.status.code(), err.lines().count()), (Some(2), 1), "{err}");
        assert!(out.stdout.is_empty() && told.iter().all(|told| err.contains(told)), "{err}");
    };
    let both = ["--device shm", "POSTHASTE_DEVICE=tcp"];
    refused(("POSTHASTE_DEVICE", "tcp"), &["--device", "shm", "--bench", "put_latency"], &both);
    refused(("POSTHASTE_DEVICE", "ib"), &["--list"], &["POSTHASTE_DEVICE"]);
}

/// A folder with commands that look like those of rivals, to be the only one where commands are looked for.
struct Commands(tempfile::TempDir);

impl Commands {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn add(&self, name: &str, script: &str) {
        let file = self.path().join(name);
        std::fs::write(&file, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// An MPI that does so when it is to start a program.
    fn add_open_mpi(&self, starts: &str) {
        let version = "[ \"$1\" = --version ] && { echo 'mpirun.openmpi (OpenRTE) 4.9.9'; exit; }";
        self.add("mpirun.openmpi", &format!("{version}\n{starts}"));
        self.add("mpicc.openmpi", "while [ $# -gt 0 ]; do [ \"$1\" = -o ] && : > \"$2\"; shift; done");
    }

    fn perf(&self, args: &[&str]) -> Command {
        let mut command = perf(args);
        command.args(BRIEF).env("PATH", self.path());
        command
    }
}

#[test]
fn without_rivals_it_tells_what_is_missing() {
    let out = Commands::new().perf(&["--rivals", "--bench", "am_latency"]).output().unwrap();
    let err = text(&out.stderr);
    assert_eq!((out.status.code(), err.lines().count()), (Some(2), 1), "{err}");
    for told in
        ["openmpi-bin libopenmpi-dev", "mpich libmpich-dev", "ucx-utils", "`mpirun.openmpi`", "`mpicc.mpich`"]
    {
        assert!(err.contains(told), "{err}");
    }
}

#[test]
fn an_installed_rival_has_a_column_and_the_others_are_missed() {
    let commands = Commands::new();
    commands.add_open_mpi("for last; do :; done; echo started with $* >&2; echo figure 2.5");
    let out = commands.perf(&["--rivals", "--bench", "am_latency,am_rate_awaited"]).output().unwrap();
    let err = text(&out.stderr);
    assert!(out.status.success(), "{err}");
    let rows = rows(&out);
    assert_eq!(rows[0]["rivals"], serde_json::json!({ "Open MPI 4.9.9": 2.5 }));
    // It has no counterpart of that.
    assert!(rows[1].get("rivals").is_none());
    assert!(err.contains("without MPICH") && err.contains("without UCX"), "{err}");
}

#[test]
fn a_rival_that_fails_is_told_and_the_row_is_there() {
    for (starts, told) in [
        ("echo no slots >&2; exit 3", "exited with code 3"),
        ("echo figure of speech", "no figure was printed: figure of speech"),
    ] {
        let commands = Commands::new();
        commands.add_open_mpi(starts);
        let out = commands.perf(&["--rivals", "--bench", "am_latency"]).output().unwrap();
        let err = text(&out.stderr);
        assert!(out.status.success() && rows(&out).len() == 1, "{err}");
        assert!(err.contains("am_latency 8: Open MPI 4.9.9: ") && err.contains(told), "{err}");
    }
    let commands = Commands::new();
    commands.add_open_mpi("echo figure 1");
    commands.add("mpicc.openmpi", "[ \"$1\" = --version ] && exit; echo cannot find -lmpi >&2; exit 1");
    let out = commands.perf(&["--rivals", "--bench", "am_latency"]).output().unwrap();
    let err = text(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{err}");
    assert!(err.contains("could not be built by mpicc.openmpi") && err.contains("-lmpi"), "{err}");
}

/// Waits for what another process does.
fn wait_for<T>(what: &str, mut there: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = there() {
            return value;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn an_interrupt_ends_the_rival_that_runs_and_all() {
    let commands = Commands::new();
    let told = commands.path().join("pid");
    commands.add_open_mpi(&format!(
        "echo $$ > {0}.new; /bin/mv {0}.new {0}; exec /bin/sleep 600",
        told.display()
    ));
    let mut process =
        commands.perf(&["--rivals", "--bench", "am_latency"]).stdout(Stdio::null()).spawn().unwrap();
    let rival = wait_for("no rival runs", || std::fs::read_to_string(&told).ok());
    kill_process(Pid::from_child(&process), Signal::INT).unwrap();
    let status = wait_for("it goes on", || process.try_wait().unwrap());
    assert_eq!(status.code(), Some(130));
    assert!(!PathBuf::from(format!("/proc/{}", rival.trim())).exists(), "the rival goes on");
}

/// The same program with a signal as it is by default: `nohup` has whatever it starts ignore one, and the program leaves that so.
fn heeding(signal: Signal, command: Command) -> Command {
    if !posthaste_launch::is_ignored(signal.as_raw()) {
        return command;
    }
    let mut heeding = Command::new("env");
    heeding.arg(format!("--default-signal={}", signal.as_raw()));
    heeding.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => heeding.env(name, value),
            None => heeding.env_remove(name),
        };
    }
    heeding
}

/// Sends a signal as soon as a process has children; how it ends, and what it has said.
fn ended_by(signal: Signal, command: Command) -> Output {
    let process = heeding(signal, command).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let id = process.id().to_string();
    let of_it = |line: &str| line.strip_prefix("PPid:").is_some_and(|parent| parent.trim() == id);
    let is_child = |path: PathBuf| {
        std::fs::read_to_string(path.join("status")).is_ok_and(|status| status.lines().any(of_it))
    };
    wait_for("nothing runs", || {
        let processes = std::fs::read_dir("/proc").unwrap();
        processes.into_iter().flatten().any(|entry| is_child(entry.path())).then_some(())
    });
    kill_process(Pid::from_child(&process), signal).unwrap();
    process.wait_with_output().unwrap()
}

#[test]
fn a_signal_that_ends_a_program_ends_all_rows() {
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let start = Instant::now();
        let out =
            ended_by(signal, perf(&["--bench", "am_latency", "--no-limits", "--seconds", "20", "--json"]));
        assert_eq!((out.status.code(), text(&out.stdout).as_str()), (Some(130), ""), "{signal:?}");
        assert!(start.elapsed() < Duration::from_secs(20), "{signal:?}: {:?}", start.elapsed());
    }
}

#[test]
fn a_signal_to_the_program_alone_ends_it_amid_a_limit() {
    let start = Instant::now();
    let out = ended_by(Signal::TERM, perf(&["--bench", "am_latency", "--seconds", "60", "--json"]));
    assert_eq!((out.status.code(), text(&out.stdout).as_str()), (Some(130), ""), "{out:?}");
    // The first half of the limit alone takes as long.
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
}

#[test]
fn a_signal_ends_the_counting_of_instructions() {
    for signal in [Signal::INT, Signal::HUP] {
        let out = ended_by(signal, perf(&["--instructions", "--json"]));
        let err = text(&out.stderr);
        if err.contains("instructions cannot be counted here") {
            return println!("skipped: {err}");
        }
        assert_eq!((out.status.code(), err.as_str()), (Some(130), ""), "{signal:?}");
    }
}

/// Whether every element that is opened is closed, in order.
fn is_well_formed(document: &str) -> bool {
    let mut open = Vec::new();
    for tag in document.split('<').skip(1) {
        let Some((tag, rest)) = tag.split_once('>') else { return false };
        if rest.contains(['<', '>']) || tag.matches('"').count() % 2 != 0 {
            return false;
        }
        let name = tag.split([' ', '/']).find(|word| !word.is_empty()).unwrap_or_default();
        match (tag.starts_with('/'), tag.ends_with('/')) {
            (true, _) if open.pop() != Some(name) => return false,
            (false, false) => open.push(name),
            _ => {}
        }
    }
    open.is_empty()
}

#[test]
fn sweeps_are_written_as_pictures() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("pictures");
    let plot = |device: &str| {
        let args = ["--device", device, "--sizes", "4096,16384", "--seconds", "0.05"];
        let out = perf(&["--plot", target.to_str().unwrap()]).args(args).output().unwrap();
        assert!(out.status.success(), "{}", text(&out.stderr));
        text(&out.stdout)
    };
    let (shm, tcp) = (plot("shm"), plot("tcp"));
    assert_eq!(shm.lines().count(), 4, "{shm}");
    let names: Vec<_> = tcp.lines().map(|path| Path::new(path).file_name().unwrap()).collect();
    assert_eq!(names, ["latency_tcp.svg", "bandwidth_tcp.svg"]);
    for path in shm.lines().chain(tcp.lines()) {
        let picture = std::fs::read_to_string(path).unwrap();
        assert!(is_well_formed(&picture), "{path}: {picture}");
        assert!(picture.starts_with("<svg ") && picture.matches("<polyline").count() == 2, "{path}");
        for told in ["4 KiB", "16 KiB", "(log)"] {
            assert!(picture.contains(told), "{path}: {told}");
        }
    }
}

#[test]
fn the_instructions_of_operations_are_counted_and_the_most_frequent_lock_nothing() {
    let wanted = "put,fetch_add,send,message,replayed_send";
    let out = perf(&["--instructions", "--json", "--bench", wanted]).output().unwrap();
    if text(&out.stderr).contains("instructions cannot be counted here") {
        return println!("skipped: {}", text(&out.stderr));
    }
    assert!(out.status.success(), "{}", text(&out.stderr));
    let rows = rows(&out);
    let names: Vec<&str> = rows.iter().map(|row| row["count"].as_str().unwrap()).collect();
    assert_eq!(names.join(","), wanted);
    for row in &rows {
        let of = |name: &str| row[name].as_f64().unwrap();
        assert!((5.0..20_000.0).contains(&of("instructions")), "{row}");
        let locked = if row["count"] == "fetch_add" { 1.0 } else { 0.0 };
        // So many replays fill a lane, and a peer that is not let run does not make room.
        let some = if row["count"] == "replayed_send" { 0.5 } else { 0.0 };
        let besides = of("locked") - locked + of("system_calls");
        assert!((0.0..=some).contains(&besides), "{row}");
    }
    let out = perf(&["--instructions", "--bench", "nothing"]).output().unwrap();
    assert_eq!(out.status.code(), Some(2));
    assert!(text(&out.stderr).contains("counted of put, get"), "{}", text(&out.stderr));
}
