//! The first program: active messages, one-sided access, a request, and a replayed pattern. Starts 4 ranks of itself.

use posthaste::{Message, Scope};

#[tokio::main(flavor = "current_thread")]
async fn main() -> posthaste::Result<()> {
    let job = posthaste::join_or_local(4).await?; // under a launcher: join; alone: start 4 ranks of this program
    let (me, n) = (job.rank(), job.size());

    let hello = job.register("hello", move |m: Message, _: &mut Scope| println!("{me}: {}", m.text()))?;
    let sum = job.service("sum", |numbers: Vec<u64>| async move { numbers.iter().sum::<u64>() })?;
    let window = job.shmalloc::<u64>(n).await?; // n words on every rank

    let right = me.next(n);
    hello.send(right, format!("greetings from {me}")).await?; // active message
    window.put(right, me.index(), 42).await?; // one-sided; `.local()` is the earlier stage
    assert_eq!(window.get(right, me.index()).await?, 42);
    let total: u64 = sum.call(right, vec![1, 2, 3]).await?; // request and typed reply
    assert_eq!(total, 6);

    let source = job.region(8).await?;
    let ring = job.record(|r| window.record_put(r, right, me.index(), &source)).await?;
    for step in 0..1000u64 {
        source.write(0, &step.to_ne_bytes())?; // read afresh at each replay
        ring.replay().await?; // no protocol work, no allocation
    }
    assert_eq!(window.get(right, me.index()).await?, 999);

    job.barrier().await?;
    job.leave().await
}
