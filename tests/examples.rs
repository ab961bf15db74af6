//! The examples, run as a user runs them: each starts its own ranks and checks its own result.

use posthaste::JobShape;
use posthaste::launcher::{self, Launch, RankEnd, Settings};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant, SystemTime};

/// Every example that takes arguments: its smallest sensible run, and what its last line says.
const EXAMPLES: [(&str, &[&str], &str); 8] = [
    ("allreduce_sgd", &["--steps", "2000"], "converged, the weights are those of the sequential run"),
    ("communicator", &["--intervals", "1000"], "all of it is as expected"),
    (
        "fft3d",
        &["--size", "12", "--iterations", "2"],
        "are the sequential ones, and the inverse gives the input back",
    ),
    ("gups", &["--table", "9"], "every word is right, and doing all twice gives the first table back"),
    ("heat", &["--size", "64", "--steps", "30", "--png", "/dev/null"], "that of the sequential run"),
    ("kv_service", &["--operations", "400"], "have what was acknowledged last"),
    ("pgas_array", &["--points", "1000", "--steps", "20", "--samples", "500"], "as their sequential runs"),
    ("transpose", &["--size", "50", "--iterations", "3"], "every element is where it belongs"),
];

/// How long anything may take: far more than it does.
const WATCHDOG: Duration = Duration::from_secs(120);

/// The folder of the profile that this test was built with.
fn built() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(2).unwrap().to_owned()
}

/// An example, built now if it is not there or older than its sources. Where all tests are run it is there: examples are
/// built along with them.
fn example(name: &str) -> PathBuf {
    let folder = built();
    let path = folder.join("examples").join(name);
    if !is_current(&path) {
        let profile = match folder.file_name().unwrap().to_str().unwrap() {
            "debug" => "dev".to_owned(),
            name => name.to_owned(),
        };
        let status = Command::new(env!("CARGO"))
            .args(["build", "--locked", "--quiet", "--profile", &profile, "--example", name])
            .arg("--target-dir")
            .arg(folder.parent().unwrap())
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status();
        assert!(status.unwrap().success(), "{name} cannot be built");
    }
    path
}

/// Whether a program is newer than all that it was made of.
fn is_current(path: &Path) -> bool {
    let time = |path: &Path| path.metadata().and_then(|metadata| metadata.modified()).ok();
    let sources = std::fs::read_to_string(path.with_extension("d")).unwrap_or_default();
    let Some((_, sources)) = sources.split_once(": ") else { return false };
    let made = time(path).unwrap_or(SystemTime::UNIX_EPOCH);
    sources.split_whitespace().all(|source| time(Path::new(source)).is_some_and(|changed| changed <= made))
}

/// Runs a program to its end.
fn run(program: &Path, args: &[&str]) -> Output {
    let child =
        Command::new(program).args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = child.id();
    let (done, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || done.send(child.wait_with_output()));
    match ended.recv_timeout(WATCHDOG) {
        Ok(output) => output.unwrap(),
        Err(_) => {
            signal(pid, rustix::process::Signal::TERM);
            panic!("{} {args:?} does not end", program.display());
        }
    }
}

fn signal(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a program, which must end well and say so in its last line.
#[track_caller]
fn check(program: &Path, args: &[&str], last: &str) {
    let output = run(program, args);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{args:?}: {}\n{out}{err}", output.status);
    assert!(out.lines().last().unwrap_or_default().contains(last), "{args:?}\n{out}{err}");
    assert!(err.is_empty(), "{args:?}: {err}");
}

/// Alone, on 1 to 4 ranks.
#[track_caller]
fn alone(name: &str) {
    let (_, args, last) = EXAMPLES.iter().find(|(other, ..)| *other == name).unwrap();
    for ranks in ["1", "2", "3", "4"] {
        check(&example(name), &[&["--ranks", ranks], *args].concat(), last);
    }
}

/// Under a launcher, on two nodes.
#[track_caller]
fn on_two_nodes(name: &str) {
    let (_, args, last) = EXAMPLES.iter().find(|(other, ..)| *other == name).unwrap();
    let said = under_a_launcher(Launch::program(example(name)).args(*args).nodes(2));
    assert!(said.lines().last().unwrap_or_default().contains(last), "{said}");
}

/// Under a launcher, on four ranks; what rank 0 says.
#[track_caller]
fn under_a_launcher(launch: Launch) -> String {
    let launch = launch.stdout(launcher::Output::Capture).stderr(launcher::Output::Capture);
    let shape = JobShape { ranks: 4, clients: 1, contexts: 1 };
    let settings = Settings::parse([]).unwrap();
    let job = launcher::prepare_with(launch, shape, &settings).unwrap().spawn().unwrap();
    let outcome = job.wait_timeout(WATCHDOG).expect("it ends");
    let (outs, errs): (Vec<_>, Vec<_>) =
        (0..4).map(|rank| job.output(rank)).map(|(out, err)| (text(&out), text(&err))).unzip();
    assert!(outcome.ranks.iter().all(|end| *end == RankEnd::Exit(0)), "{outcome}\n{outs:?}{errs:?}");
    assert!(errs.iter().all(String::is_empty), "{errs:?}");
    outs.into_iter().next().unwrap()
}

#[test]
fn every_example_is_tested() {
    let files = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/examples")).unwrap();
    let mut names: Vec<String> = files
        .map(|file| file.unwrap().path())
        .filter(|path| path.extension().is_some_and(|end| end == "rs") || path.join("main.rs").exists())
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    names.sort();
    let mut tested: Vec<&str> = EXAMPLES.iter().map(|(name, ..)| *name).collect();
    tested.extend(["hello", "word_count"]);
    tested.sort();
    assert_eq!(names, tested);
}

#[test]
fn hello() {
    let output = run(&example("hello"), &[]);
    let mut greetings: Vec<String> = text(&output.stdout).lines().map(str::to_owned).collect();
    greetings.sort();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(greetings, [3, 0, 1, 2].map(|from| format!("{}: greetings from {from}", (from + 1) % 4)));
}

#[test]
fn word_count() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("text");
    std::fs::write(&file, "one two two three three three ".repeat(10_000)).unwrap();
    let file = file.to_str().unwrap();
    for ranks in ["1", "2", "3", "4", "33", "64"] {
        let output = run(&example("word_count"), &["--ranks", ranks, file]);
        let out = text(&output.stdout);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let lines: Vec<&str> = out.lines().map(str::trim).collect();
        assert_eq!(lines[..3], ["30000  three", "20000  two", "10000  one"]);
        assert_eq!(lines[4], "total 60000 words: matches the sequential count");
    }
    // The same program on two nodes, and with all traffic over sockets.
    let launch = || Launch::program(example("word_count")).args([file]);
    for launch in [launch().nodes(2), launch().tcp(true).env("POSTHASTE_DEVICE", "tcp")] {
        let said = under_a_launcher(launch);
        assert!(said.contains("total 60000 words: matches the sequential count"), "{said}");
    }
    let output = run(&example("word_count"), &["/nonexistent/text"]);
    assert_eq!(output.status.code(), Some(2));
    let told = "word_count: invalid value '/nonexistent/text' for '[FILE]': No such file or directory";
    assert!(text(&output.stderr).starts_with(told), "{}", text(&output.stderr));
}

#[test]
fn allreduce_sgd() {
    alone("allreduce_sgd");
    on_two_nodes("allreduce_sgd");
}

#[test]
fn allreduce_sgd_tells_where_a_file_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("data.csv");
    std::fs::write(&file, "x,y\n1,2\n3,four\n").unwrap();
    let output = run(&example("allreduce_sgd"), &["--csv", file.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(text(&output.stderr), format!("allreduce_sgd: {}, line 3: not 2 numbers\n", file.display()));
}

#[test]
fn communicator() {
    alone("communicator");
    on_two_nodes("communicator");
}

#[test]
fn fft3d() {
    alone("fft3d");
    on_two_nodes("fft3d");
}

#[test]
fn gups() {
    alone("gups");
    on_two_nodes("gups");
}

#[test]
fn heat() {
    alone("heat");
    on_two_nodes("heat");
}

#[test]
fn heat_draws_the_field() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("field.png");
    check(
        &example("heat"),
        &["--ranks", "2", "--size", "64", "--steps", "5", "--png", file.to_str().unwrap()],
        "",
    );
    let decoder = png::Decoder::new(BufReader::new(std::fs::File::open(file).unwrap()));
    let mut reader = decoder.read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    reader.next_frame(&mut pixels).unwrap();
    assert_eq!((reader.info().width, reader.info().height), (64, 64));
    // Cold in a corner, hot in the middle of the disc.
    let pixel = |row: usize, column: usize| &pixels[3 * (64 * row + column)..][..3];
    assert_eq!(pixel(63, 0), [0; 3]);
    assert_eq!(pixel(26, 35), [255; 3]);
}

#[test]
fn kv_service() {
    alone("kv_service");
    on_two_nodes("kv_service");
}

#[test]
fn kv_service_goes_on_when_a_rank_is_killed() {
    let program = example("kv_service");
    for killed in ["0", "2"] {
        let output = run(&program, &["--ranks", "4", "--operations", "400", "--kill", killed]);
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{}\n{out}{err}", output.status);
        assert!(out.contains(&format!("   {killed} was killed\n")), "{out}{err}");
        // The others' rows: answered, late and lost; what was lost was the dead rank's, and some of it was.
        let rows = out.lines().filter(|line| line.starts_with("   ") && !line.contains("killed"));
        let lost: Vec<u64> =
            rows.map(|row| row.split_whitespace().nth(3).unwrap().parse().unwrap()).collect();
        assert!(lost.len() == 3 && lost.iter().sum::<u64>() > 0, "{out}{err}");
        assert!(out.lines().last().unwrap().starts_with("finished: all "), "{out}{err}");
    }
    let output = run(&program, &["--kill", "4"]);
    assert_eq!(text(&output.stderr), "kv_service: --kill 4: there are ranks 0 to 3 only\n");
}

#[test]
fn pgas_array() {
    alone("pgas_array");
    on_two_nodes("pgas_array");
}

#[test]
fn transpose() {
    alone("transpose");
    on_two_nodes("transpose");
}

#[test]
fn wrong_arguments_are_told_in_one_line_and_help_is_given() {
    for name in EXAMPLES.map(|(name, ..)| name).into_iter().chain(["word_count"]) {
        let example = example(name);
        for (args, told) in [
            (&["--bogus"][..], "unexpected argument '--bogus' found"),
            (&["--ranks", "0"], "invalid value '0' for '--ranks <N>': 0 is not in 1..=64"),
            (&["--ranks"], "a value is required for '--ranks <N>' but none was supplied"),
        ] {
            let output = run(&example, args);
            assert_eq!(output.status.code(), Some(2), "{name} {args:?}");
            assert_eq!(text(&output.stderr), format!("{name}: {told}; see {name} --help\n"));
            assert!(output.stdout.is_empty(), "{name} {args:?}");
        }
        let output = run(&example, &["--help"]);
        let help = text(&output.stdout);
        assert!(output.status.success() && output.stderr.is_empty(), "{name}");
        assert!(help.contains("--ranks <N>") && help.ends_with('\n') && !help.ends_with("\n\n"), "{help}");
    }
}

/// The processes whose environment has this text.
fn processes(marked: &str) -> usize {
    let marked = marked.as_bytes();
    let has = |path: PathBuf| {
        let environment = std::fs::read(path.join("environ")).unwrap_or_default();
        environment.windows(marked.len()).any(|text| text == marked)
    };
    std::fs::read_dir("/proc").unwrap().filter(|entry| has(entry.as_ref().unwrap().path())).count()
}

#[track_caller]
fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < WATCHDOG, "{what} does not happen");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn an_interrupt_leaves_no_process() {
    let mark = format!("EXAMPLE_OF_TEST={}", std::process::id());
    let (name, value) = mark.split_once('=').unwrap();
    let args = ["--ranks", "3", "--steps", "1000000000", "--size", "64", "--png", "/dev/null"];
    let mut child = Command::new(example("heat")).args(args).env(name, value).spawn().unwrap();
    wait_until("the start of the ranks", || processes(&mark) == 4);
    std::thread::sleep(Duration::from_millis(500)); // as a rule they exchange rows by now
    signal(child.id(), rustix::process::Signal::INT);
    assert!(!child.wait().unwrap().success());
    wait_until("the end of all processes", || processes(&mark) == 0);
}

#[test]
fn kv_service_stops_in_order_at_an_interrupt() {
    let args = ["--ranks", "3", "--operations", "1000000000"];
    let mut child = Command::new(example("kv_service")).args(args).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert_eq!(lines.next().unwrap(), "3 ranks serve 4 clients each");
    signal(child.id(), rustix::process::Signal::INT);
    let last = lines.last().unwrap();
    assert!(
        last.starts_with("stopped in order: all ") && last.ends_with("have what was acknowledged last"),
        "{last}"
    );
    assert!(child.wait().unwrap().success());
}

/// `word_count | head -1`
#[test]
fn whoever_reads_the_first_line_only_is_no_reason_to_panic() {
    let mut child =
        Command::new(example("word_count")).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Before anything is printed.
    drop(child.stdout.take());
    let out = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&out.stderr), "");
    assert!(out.status.success(), "{}", out.status);
}
