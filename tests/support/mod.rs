//! Tests between real processes: a test function starts the ranks of a job from its own executable, and is the body
//! of each of them.
//!
//! In the process that the test runner starts, [`run`] launches the ranks, waits for them under a watchdog and
//! checks how they ended. In a rank it joins the job, runs the body and leaves. The name of the test is taken from
//! the type of the body, so the body must be a closure written in the test function itself.
#![allow(dead_code, reason = "every test binary uses its own part of it")]

pub mod cases;
pub mod fork;
pub mod lines;

#[allow(unused_imports, reason = "not every program has cases")]
pub(crate) use cases::case;
use cases::{Setting, name_of, setting};

use posthaste::launcher::{self, Launch, Output, RankEnd, RunningJob, Settings};
use posthaste::{Job, JobShape, MessageStream, Rank};
use rustix::process::{Pid, Signal};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How the ranks of a test's jobs reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Shared memory.
    Shm,
    /// Sockets.
    Tcp,
    /// Two nodes: memory within, sockets between.
    Nodes,
}

/// That of the case that runs: shared memory, where none says otherwise.
pub fn transport() -> Transport {
    match setting() {
        None | Some(Setting::Shm | Setting::Thread) => Transport::Shm,
        Some(Setting::Tcp) => Transport::Tcp,
        Some(Setting::Nodes) => Transport::Nodes,
    }
}

/// Whether a thread of its own drives each rank's contexts, rather than the runtime that joins.
pub fn driven_by_thread() -> bool {
    setting() == Some(Setting::Thread)
}

/// Whether all is asked for that takes long.
pub fn soak() -> bool {
    std::env::var("POSTHASTE_TEST_SOAK").is_ok_and(|value| value == "1")
}

/// How a job is started and how it is to end.
pub struct Options {
    contexts: u16,
    clients: u16,
    workers: usize,
    leave: bool,
    keep_going: bool,
    env: Vec<(String, String)>,
    delays: Vec<(u32, Duration)>,
    ends: Vec<(u32, RankEnd)>,
    any_end: bool,
    watchdog: Duration,
    shell: Option<String>,
    external: Vec<u32>,
    restart: u32,
    tcp: bool,
    during: Option<During>,
}

/// What the launcher's side does while the ranks run.
type During = Box<dyn FnOnce(&RunningJob)>;

/// One context, one client, a current-thread runtime, and all ranks are to end well.
pub fn options() -> Options {
    Options {
        contexts: 1,
        clients: 1,
        workers: 0,
        leave: true,
        keep_going: false,
        env: Vec::new(),
        delays: Vec::new(),
        ends: Vec::new(),
        any_end: false,
        watchdog: Duration::from_secs(100),
        shell: None,
        external: Vec::new(),
        restart: 0,
        tcp: false,
        during: None,
    }
}

impl Options {
    /// Contexts per client.
    pub fn contexts(mut self, contexts: u16) -> Self {
        self.contexts = contexts;
        self
    }

    /// Clients per rank.
    pub fn clients(mut self, clients: u16) -> Self {
        self.clients = clients;
        self
    }

    /// A multi-thread runtime with this many workers.
    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = workers;
        self
    }

    /// The body leaves the job itself, or not at all.
    pub fn body_leaves(mut self) -> Self {
        self.leave = false;
        self
    }

    /// An environment variable of all ranks.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// A rank starts later than the others.
    pub fn delay(mut self, rank: u32, delay: Duration) -> Self {
        self.delays.push((rank, delay));
        self
    }

    /// A rank is to end otherwise than well; the others go on.
    pub fn ends(mut self, rank: u32, end: RankEnd) -> Self {
        self.ends.push((rank, end));
        self.keep_going = true;
        self
    }

    /// A rank is to die by SIGKILL; the others go on.
    pub fn killed(self, rank: u32) -> Self {
        self.ends(rank, RankEnd::Signal(9))
    }

    /// How the ranks end does not matter, if only they do.
    pub fn any_end(mut self) -> Self {
        self.any_end = true;
        self.keep_going = true;
        self
    }

    /// The ranks are started through `sh -c`, after this command.
    pub fn after_shell_command(self, command: &str) -> Self {
        self.in_shell_script(&format!("{command}; exec \"$0\" \"$@\""))
    }

    /// The ranks are started by this script for `sh -c`, in which `"$0" "$@"` is the rank.
    pub fn in_shell_script(mut self, script: &str) -> Self {
        self.shell = Some(script.into());
        self
    }

    /// A rank is not started by the launcher but by [`start_external`]; the others go on whatever becomes of it.
    pub fn external(mut self, rank: u32) -> Self {
        self.external.push(rank);
        self.ends(rank, RankEnd::External)
    }

    /// Ranks that fail are started again, so often each.
    pub fn restart(mut self, times: u32) -> Self {
        self.restart = times;
        self
    }

    /// Over sockets, whatever the other tests of the program are about.
    pub fn over_tcp(mut self) -> Self {
        self.tcp = true;
        self
    }

    /// How long the whole may take.
    pub fn watchdog(mut self, time: Duration) -> Self {
        self.watchdog = time;
        self
    }

    /// What the launcher's side does while the ranks run.
    pub fn during(mut self, during: impl FnOnce(&RunningJob) + 'static) -> Self {
        self.during = Some(Box::new(during));
        self
    }
}

/// Runs the body in `ranks` processes; returns in the launcher's process when all have ended as they should, with what
/// they printed. In a rank it does not return: a test may start several jobs with one body, told apart by variables
/// of their environment.
pub fn run<F: AsyncFnOnce(Job)>(ranks: u32, options: Options, body: F) -> Vec<String> {
    run_as(test_name::<F>(), ranks, options, body)
}

/// As [`run`], for a body that several test functions share: `test` is the path of the one that calls, [`here!`].
pub fn run_as<F: AsyncFnOnce(Job)>(test: &str, ranks: u32, options: Options, body: F) -> Vec<String> {
    if std::env::var_os("POSTHASTE_JOB").is_some() {
        be_a_rank(&options, body);
        std::process::exit(0);
    }
    launch(test, ranks, options)
}

/// The path of the test function that this stands in, for a body that several share.
#[allow(unused_macros, reason = "every test binary uses its own part of it")]
macro_rules! here {
    () => {{
        let here = || {};
        $crate::support::test_name_of(&here)
    }};
}
#[allow(unused_imports, reason = "every test binary uses its own part of it")]
pub(crate) use here;

/// As [`test_name`], of a closure in hand.
pub fn test_name_of<F>(_: &F) -> &'static str {
    test_name::<F>()
}

/// The path of the test function whose closure this is, without the crate's name.
fn test_name<F>() -> &'static str {
    let path = std::any::type_name::<F>();
    let path = path.split_once("::{{closure}}").map_or(path, |(function, _)| function);
    path.split_once("::").map_or(path, |(_, path)| path)
}

/// As [`run`], for a body that makes its runtime and joins by itself.
pub fn run_unjoined<F: FnOnce()>(ranks: u32, options: Options, body: F) -> Vec<String> {
    if std::env::var_os("POSTHASTE_JOB").is_some() {
        body();
        std::process::exit(0);
    }
    launch(test_name::<F>(), ranks, options)
}

/// Runs the calling test once more in a process of its own with these variables, and says whether this is that
/// process (or one of its ranks). For what the launcher reads from its environment.
pub fn is_launcher_with(test: &str, variables: &[(&str, &str)]) -> bool {
    const MARK: &str = "POSTHASTE_TEST_LAUNCHER";
    if std::env::var_os(MARK).is_some() || std::env::var_os("POSTHASTE_JOB").is_some() {
        return true;
    }
    let status = Command::new(std::env::current_exe().expect("the test's executable"))
        .args([&name_of(test), "--exact", "--nocapture"])
        .env(MARK, "1")
        .envs(variables.iter().copied())
        .status()
        .expect("the same test");
    assert!(status.success(), "with {variables:?}: {status}");
    false
}

fn be_a_rank<F: AsyncFnOnce(Job)>(options: &Options, body: F) {
    let mut builder = match options.workers {
        0 => tokio::runtime::Builder::new_current_thread(),
        workers => {
            let mut builder = tokio::runtime::Builder::new_multi_thread();
            builder.worker_threads(workers);
            builder
        }
    };
    let runtime = builder.enable_all().build().expect("runtime");
    runtime.block_on(async {
        let job = posthaste::join().await.expect("join");
        body(job.clone()).await;
        if options.leave {
            job.leave().await.expect("leave");
        }
    });
}

fn launch(test: &str, ranks: u32, options: Options) -> Vec<String> {
    let program = std::env::current_exe().expect("the test's executable");
    let arguments = arguments_of(test);
    let mut launch = match &options.shell {
        None => Launch::program(program).args(arguments),
        Some(script) => {
            Launch::program("/bin/sh").args(["-c", script]).args([program.into_os_string()]).args(arguments)
        }
    };
    launch = launch.stdout(Output::Capture).stderr(Output::Capture).keep_going(options.keep_going);
    launch = launch.restart(options.restart);
    for (name, value) in &options.env {
        launch = launch.env(name, value);
    }
    if driven_by_thread() {
        launch = launch.env("POSTHASTE_DRIVER", "thread");
    }
    let transport = if options.tcp { Transport::Tcp } else { transport() };
    launch = match transport {
        Transport::Shm => launch,
        Transport::Tcp => launch.tcp(true).env("POSTHASTE_DEVICE", "tcp"),
        Transport::Nodes => launch.nodes(ranks.min(2)),
    };
    for (rank, delay) in &options.delays {
        launch = launch.delay(*rank, *delay);
    }
    for rank in &options.external {
        launch = launch.broker_rank(*rank);
    }
    let shape = JobShape { ranks, clients: options.clients, contexts: options.contexts };
    let settings = Settings::parse(options.env.clone()).expect("settings");
    let job = launcher::prepare_with(launch, shape, &settings).expect("launch").spawn().expect("spawn");
    if let Some(during) = options.during {
        during(&job);
    }
    let Some(outcome) = job.wait_timeout(options.watchdog) else {
        for rank in 0..ranks {
            eprintln!("{}", state_of(&job, rank));
        }
        panic!("{}: watchdog: not ended after {:?}", name_of(test), options.watchdog);
    };
    let expected = |rank: u32| {
        let end = options.ends.iter().find(|(wanted, _)| *wanted == rank);
        end.map_or(RankEnd::Exit(0), |(_, end)| *end)
    };
    let as_expected = outcome.ranks.iter().enumerate().all(|(rank, end)| *end == expected(rank as u32));
    if !as_expected && !options.any_end {
        for rank in 0..ranks {
            eprintln!("--- rank {rank}: {:?}\n{}", outcome.ranks[rank as usize], tail(&text_of(&job, rank)));
        }
        panic!("{}: {outcome}; ends: {:?}", name_of(test), outcome.ranks);
    }
    let printed: Vec<String> = (0..ranks).map(|rank| text_of(&job, rank)).collect();
    let ran_nothing = printed.iter().any(|text| text.contains("running 0 tests"));
    assert!(!ran_nothing, "{test} is not the path of a test function: shared bodies need `run_as`");
    let pids = job.pids();
    drop(job);
    nothing_is_left(&pids);
    printed
}

fn arguments_of(test: &str) -> [String; 4] {
    [&name_of(test), "--exact", "--nocapture", "--test-threads=1"].map(str::to_owned)
}

/// Starts a rank that the launcher does not: a child of this process, which alone waits for it. `test` is the path of
/// the test function, as [`run`] finds it by itself.
pub fn start_external(job: &RunningJob, rank: u32, test: &str) -> Child {
    let device = (transport() == Transport::Tcp).then_some(("POSTHASTE_DEVICE", "tcp"));
    Command::new(std::env::current_exe().expect("the test's executable"))
        .args(arguments_of(test))
        .envs(job.join_env(rank).expect("a rank that is left to others"))
        .envs(device)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .expect("the rank")
}

/// What the kernel says a process is doing, by its letter: `Z` has ended and is not waited for.
pub fn process_state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

/// No process and no named memory survives a job.
fn nothing_is_left(pids: &[Option<u32>]) {
    for pid in pids.iter().flatten() {
        let parent = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let ours = format!("PPid:\t{}\n", std::process::id());
        assert!(!parent.contains(&ours), "process {pid} is left");
    }
    state_dirs_are_clean();
}

/// The next messages of a stream have these texts.
pub async fn receives(stream: &mut MessageStream, texts: &[&str]) {
    for text in texts {
        let message = soon("a message", stream.recv()).await.unwrap();
        assert_eq!(message.into_bytes(), *text);
    }
}

/// A file of the launcher's process and of the setting that its case runs in, of which several may run in one process.
pub fn own_file(name: &str) -> std::path::PathBuf {
    let name = name_of(name).replace("::", "-");
    std::env::temp_dir().join(format!("{name}-{}", std::process::id()))
}

/// No memory of a job has a name.
pub fn state_dirs_are_clean() {
    for dir in ["/dev/shm", "/tmp"] {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let named = entries.map(|entry| entry.file_name()).find(|name| {
            let name = name.to_string_lossy();
            name.strip_prefix("posthaste-").is_some_and(|rest| rest.len() == 32)
        });
        assert_eq!(named, None, "left in {dir}");
    }
}

/// What a rank has printed on both of its streams.
pub fn text_of(job: &RunningJob, rank: u32) -> String {
    let (out, err) = job.output(rank);
    format!("{}{}", String::from_utf8_lossy(&out), String::from_utf8_lossy(&err))
}

/// The end of what a rank has printed, its first panics, and where it saw ranks hang.
fn tail(text: &str) -> String {
    let start = text.len().saturating_sub(6000);
    let lines: Vec<&str> = text.get(..start).unwrap_or_default().lines().collect();
    let panics = lines.windows(2).filter(|pair| pair[0].contains("panicked at")).take(3);
    let panics: String = panics.map(|pair| format!("{}\n{}\n..\n", pair[0], pair[1])).collect();
    let states = lines.iter().filter(|line| line.starts_with("--- process") || line.starts_with("/proc/"));
    let states: String = states.take(100).map(|line| format!("{line}\n")).collect();
    panics + &states + text.get(start..).unwrap_or(text)
}

/// Everything that tells where a rank hangs.
fn state_of(job: &RunningJob, rank: u32) -> String {
    let mut report = format!("--- rank {rank}: {:?}\n{}\n", job.try_wait(rank), tail(&text_of(job, rank)));
    if let Some(pid) = job.pid(rank).filter(|_| job.try_wait(rank).is_none()) {
        report += &state_of_process(pid);
    }
    report
}

/// Everything that tells where the ranks of the job hang of which this process is one.
fn state_of_all() -> String {
    let job = std::env::var("POSTHASTE_JOB").unwrap_or_else(|_| "none".into());
    let set = format!("POSTHASTE_JOB={job}\0");
    let of_job = |pid: &u32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.windows(set.len()).any(|window| window == set.as_bytes())
    };
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(of_job);
    pids.map(|pid| format!("--- process {pid}\n{}", state_of_process(pid))).collect()
}

/// Where a process hangs.
fn state_of_process(pid: u32) -> String {
    let mut report = String::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        for file in ["comm", "wchan", "syscall", "stack"] {
            let text =
                std::fs::read_to_string(task.path().join(file)).unwrap_or_else(|error| error.to_string());
            report += &format!("{} {file}: {}\n", task.path().display(), text.trim_end());
        }
    }
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let telling = ["State", "Threads", "VmRSS", "RssShmem", "voluntary"];
    for line in status.lines().filter(|line| telling.iter().any(|word| line.contains(word))) {
        report += line;
        report.push('\n');
    }
    report
}

/// Waits until a rank has printed a text; the launcher's way to learn how far a rank is.
pub fn wait_for(job: &RunningJob, rank: u32, text: &str) {
    let until = Instant::now() + Duration::from_secs(60);
    let mut looks_after_end = 0;
    while !text_of(job, rank).contains(text) {
        // What a rank printed last is read a little later than its end is seen.
        looks_after_end += u32::from(job.try_wait(rank).is_some());
        if looks_after_end > 1000 || Instant::now() > until {
            panic!("rank {rank} does not print {text:?}:\n{}", state_of(job, rank));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Fails if the future takes absurdly long: the promise is an end, not a time.
pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(Duration::from_secs(40), future).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: no end in sight\n{}", state_of_all()),
    }
}

/// Sends a signal to a process that this test has started.
pub fn signal(pid: u32, signal: Signal) -> std::io::Result<()> {
    let pid = Pid::from_raw(pid as i32).expect("the number of a process");
    Ok(rustix::process::kill_process(pid, signal)?)
}

/// Stops a process; when it is done, all of its threads have stopped: one of them has to run to stop the others.
pub async fn stop(pid: u32) {
    signal(pid, Signal::STOP).expect("it may do that");
    until("the stop", || {
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("it lives");
        let stats = threads.map(|thread| match thread {
            // One that has ended since it was listed is not there to be stopped.
            Ok(thread) => std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default(),
            Err(_) => String::new(),
        });
        stats
            .filter_map(|stat| Some(stat.rsplit_once(')')?.1.trim_start().starts_with('T')))
            .all(|stopped| stopped)
    })
    .await;
}

/// Ends this process as an operator would.
pub fn kill_self() {
    signal(std::process::id(), Signal::KILL).expect("it may do that");
}

/// A barrier before a rank dies: that one is past it only when all others are, whose barrier its death would end otherwise.
pub async fn barrier_before_death(job: &Job, dying: Rank) {
    let past = job.counter();
    let count = past.clone();
    let name = "past the barrier";
    let word =
        job.register(name, move |_: posthaste::Message, _: &mut posthaste::Scope| count.add(1)).unwrap();
    job.barrier().await.unwrap();
    if job.rank() == dying {
        soon("the others' words", past.reach(job.size() as u64 - 1)).await;
    } else {
        word.send(dying, b"").await.unwrap();
    }
}

/// Waits, through the scheduler, until something is so.
pub async fn until(what: &str, mut so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(40);
    while !so() {
        assert!(Instant::now() < end, "{what}: does not come\n{}", state_of_all());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// The ranks but one.
pub fn others(job: &Job) -> impl Iterator<Item = Rank> + use<> {
    let me = job.rank();
    job.ranks().filter(move |rank| *rank != me)
}

/// A repeatable sequence of numbers (SplitMix64, Steele et al. 2014).
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below a limit.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// Bytes that follow from their seed, to be compared at the other end.
pub fn payload(seed: u64, len: usize) -> Vec<u8> {
    let mut random = Random(seed ^ len as u64);
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend_from_slice(&random.next().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Whether these are the bytes of that seed, without a second copy of them.
pub fn is_payload(seed: u64, bytes: &[u8]) -> bool {
    let mut random = Random(seed ^ bytes.len() as u64);
    let (words, rest) = bytes.as_chunks::<8>();
    words.iter().all(|word| random.next() == u64::from_le_bytes(*word))
        && (rest.is_empty() || random.next().to_le_bytes()[..rest.len()] == *rest)
}

/// A payload that carries its own seed in its first 8 bytes; at least 8 bytes long.
pub fn sealed(seed: u64, len: usize) -> Vec<u8> {
    let len = len.max(8);
    let mut bytes = seed.to_le_bytes().to_vec();
    bytes.extend(payload(seed, len - 8));
    bytes
}

/// The seed of a sealed payload, if it is whole.
pub fn unseal(bytes: &[u8]) -> Option<u64> {
    let (seed, rest) = bytes.split_first_chunk::<8>()?;
    let seed = u64::from_le_bytes(*seed);
    is_payload(seed, rest).then_some(seed)
}
