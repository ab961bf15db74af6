//! A job on two hosts that are network namespaces, joined by nothing but a pair of virtual interfaces.

use std::process::{Command, Output};

use posthaste::{Message, Rank, Result, Scope};

const PROGRAM: &str = env!("CARGO_BIN_EXE_posthaste");
/// What each rank puts to a rank of the other host, in bytes, and to its neighbour on the same one.
const ACROSS: usize = 1 << 20;
const BESIDE: usize = 16 << 20;

#[test]
fn role() {
    if std::env::var("POSTHASTE_TEST_ROLE").is_ok_and(|role| role == "rank") {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(rank()).unwrap();
        std::process::exit(0);
    }
}

/// One of four ranks, two on each host.
async fn rank() -> Result<()> {
    let job = posthaste::join().await?;
    let me = job.rank();
    let (across, beside) = (Rank((me.0 + 2) % 4), Rank(me.0 ^ 1));
    let greetings = job.counter();
    let heard = greetings.clone();
    let hello = job.register("hello", move |message: Message<'_>, _: &mut Scope<'_>| {
        assert_eq!(message.text(), format!("from {}", message.source().0));
        heard.add(1);
    })?;
    let double = job.service("double", |number: u64| async move { 2 * number })?;
    let window = job.shmalloc::<u8>(ACROSS + BESIDE).await?;

    for other in job.ranks() {
        hello.send(other, format!("from {}", me.0)).await?;
        assert_eq!(double.call(other, u64::from(other.0)).await?, 2 * u64::from(other.0));
    }
    greetings.reach(4).await;
    window.put_slice(across, 0, &vec![me.0 as u8 + 1; ACROSS]).await?;
    window.put_slice(beside, ACROSS, &vec![me.0 as u8 + 101; BESIDE]).await?;
    job.barrier().await?;
    let own = window.get_slice(me, 0, ACROSS + BESIDE).await?;
    assert!(own[..ACROSS].iter().all(|byte| *byte == across.0 as u8 + 1));
    assert!(own[ACROSS..].iter().all(|byte| *byte == beside.0 as u8 + 101));
    job.barrier().await?;
    println!("rank {} is done", me.0);
    job.leave().await
}

/// Two namespaces, which go with this value.
struct Namespaces([String; 2]);

impl Namespaces {
    /// None, and why, where this machine makes none.
    fn new() -> std::result::Result<Self, String> {
        let names = ["a", "b"].map(|end| format!("pht{}{end}", std::process::id()));
        let made = Self(names.clone());
        let [a, b] = &names;
        for line in [
            format!("netns add {a}"),
            format!("netns add {b}"),
            format!("-n {a} link set lo up"),
            format!("-n {b} link set lo up"),
            format!("-n {a} link add {a} type veth peer name {b} netns {b}"),
            format!("-n {a} address add 10.213.7.1/24 dev {a}"),
            format!("-n {b} address add 10.213.7.2/24 dev {b}"),
            format!("-n {a} link set {a} up"),
            format!("-n {b} link set {b} up"),
        ] {
            let out = Command::new("ip").args(line.split(' ')).output();
            let out = out.map_err(|error| format!("there is no program `ip`: {error}"))?;
            if !out.status.success() {
                return Err(format!("`ip {line}`: {}", String::from_utf8_lossy(&out.stderr).trim()));
            }
        }
        Ok(made)
    }

    /// Runs a command in the first.
    fn run(&self, command: &[&str], envs: &[(&str, &str)]) -> Output {
        let mut inside = Command::new("ip");
        inside.args(["netns", "exec", &self.0[0]]).args(command).envs(envs.iter().copied());
        inside.output().unwrap()
    }

    /// Bytes that have come to the first from the second.
    fn received(&self) -> usize {
        let path = format!("/sys/class/net/{}/statistics/rx_bytes", self.0[0]);
        String::from_utf8(self.run(&["cat", &path], &[]).stdout).unwrap().trim().parse().unwrap()
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.0 {
            // It may not have come to be.
            let _ = Command::new("ip").args(["netns", "delete", name]).output();
        }
    }
}

#[test]
fn one_program_runs_on_two_hosts() {
    let namespaces = match Namespaces::new() {
        Ok(namespaces) => namespaces,
        Err(why) => {
            eprintln!("skipped: this machine makes no network namespaces: {why}");
            return;
        }
    };
    let list = std::env::temp_dir().join(format!("posthaste-namespaces-{}", std::process::id()));
    let [a, b] = &namespaces.0;
    std::fs::write(&list, format!("{a} slots=2\n{b} slots=2\n")).unwrap();
    let rank = std::env::current_exe().unwrap();
    let agent = format!("{PROGRAM} agent");
    let command = [
        PROGRAM,
        "run",
        "--hosts",
        list.to_str().unwrap(),
        "--ssh",
        "ip netns exec",
        "--agent",
        &agent,
        "--interface",
        a,
        "--label",
        "--",
        rank.to_str().unwrap(),
        "--exact",
        "role",
        "--nocapture",
    ];
    let before = namespaces.received();
    let out = namespaces.run(&command, &[("POSTHASTE_TEST_ROLE", "rank")]);
    let crossed = namespaces.received() - before;
    std::fs::remove_file(&list).unwrap();
    let (text, problems) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{text}{problems}");
    for rank in 0..4 {
        assert!(text.contains(&format!("[{rank}] rank {rank} is done\n")), "{text}{problems}");
    }
    // What two ranks put across came this way, and what neighbours put to each other did not.
    assert!((2 * ACROSS..BESIDE).contains(&crossed), "{crossed} bytes crossed");
}
