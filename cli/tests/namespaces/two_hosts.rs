//! The same program on two hosts: neighbours share memory, the others reach each other through the network.

use crate::{Namespaces, PROGRAM};
use posthaste::{Message, Rank, Result, Scope};
use std::path::{Path, PathBuf};
use std::process::Command;

/// What each rank puts to a rank of the other host, in bytes, and to its neighbour on the same one.
const ACROSS: usize = 1 << 20;
const BESIDE: usize = 16 << 20;

/// One of four ranks, two on each host.
pub async fn rank() -> Result<()> {
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

#[test]
fn one_program_runs_on_two_hosts() {
    let Some(namespaces) = Namespaces::new("one_program_runs_on_two_hosts", 2) else { return };
    let before = namespaces.received();
    let out = namespaces.job("talks").output().unwrap();
    let crossed = namespaces.received() - before;
    let (text, problems) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{text}{problems}");
    for rank in 0..4 {
        assert!(text.contains(&format!("[{rank}] rank {rank} is done\n")), "{text}{problems}");
    }
    // What two ranks put across came this way, and what neighbours put to each other did not.
    assert!((2 * ACROSS..BESIDE).contains(&crossed), "{crossed} bytes crossed");
}

/// The example beside this program, built now if it is not there or not as its sources are.
fn word_count() -> PathBuf {
    let folder = Path::new(PROGRAM).parent().unwrap();
    let profile = match folder.file_name().unwrap().to_str().unwrap() {
        "debug" => "dev",
        name => name,
    };
    let built = Command::new(env!("CARGO"))
        .args(["build", "--locked", "--quiet", "--package", "posthaste", "--example", "word_count"])
        .args(["--profile", profile, "--target-dir"])
        .arg(folder.parent().unwrap())
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
        .status();
    assert!(built.unwrap().success(), "it cannot be built");
    folder.join("examples/word_count")
}

#[test]
fn the_main_job_runs_on_two_hosts() {
    let Some(namespaces) = Namespaces::new("the_main_job_runs_on_two_hosts", 2) else { return };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("text");
    let text = "one two two three three three ".repeat(10_000);
    std::fs::write(&file, &text).unwrap();
    let before = namespaces.received();
    let out = namespaces.job_of(&[word_count().to_str().unwrap(), file.to_str().unwrap()]).output().unwrap();
    let crossed = namespaces.received() - before;
    let (said, problems) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{said}{problems}");
    let lines: Vec<_> = said.lines().map(|line| line.trim_start_matches("[0]").trim()).collect();
    assert_eq!(lines[..3], ["30000  three", "20000  two", "10000  one"], "{said}");
    assert_eq!(lines[4], "total 60000 words: matches the sequential count", "{said}");
    // Half of the file is counted on the other host, which is told of nothing but what it has to do: the answers are short.
    assert!((1..text.len()).contains(&crossed), "{crossed} bytes crossed");
}
