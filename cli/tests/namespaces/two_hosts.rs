//! The same program on two hosts: neighbours share memory, the others reach each other through the network.

use crate::Namespaces;
use posthaste::{Message, Rank, Result, Scope};

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
