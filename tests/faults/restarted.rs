//! Ranks that died and were started again under their number.

use crate::support::{
    Options, Random, Transport, barrier_before_death, case, here, is_launcher_with, options, own_file, run,
    soak, soon, text_of, transport, until, wait_for,
};
use posthaste::components::core::device::Body;
use posthaste::components::core::protocol::Incoming;
use posthaste::{
    CallError, ContextId, Element, Endpoint, Error, Fault, Group, Job, Message, Messager, Protocol, Rank,
    Reduce, RegionKey, RmaError, Scope, SendError,
};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const ONE: Rank = Rank(1);

/// Every rank may die once and come again.
fn once() -> Options {
    options().restart(1)
}

fn stale(held: u32, now: u32) -> Fault {
    Fault::StaleHandle { rank: ONE, held, now }
}

fn fault_of(error: Error) -> Fault {
    match error {
        Error::Fault(fault) | Error::Send(SendError::Fault(fault)) | Error::Rma(RmaError::Fault(fault)) => {
            fault
        }
        Error::Call(CallError::Fault(fault)) => fault,
        other => panic!("{other}"),
    }
}

fn rma<T>(result: Result<T, RmaError>) -> Result<T, Fault> {
    result.map_err(|error| fault_of(error.into()))
}

/// A group of all ranks as they are now.
async fn everybody(job: &Job) -> Group {
    let ranks: Vec<Rank> = job.ranks().collect();
    soon("a group of all", job.collectives().subset(&ranks)).await.expect("all are there")
}

async fn sum(group: &Group, value: u64) -> u64 {
    soon("a sum", group.all_reduce(&[value], &Reduce::sum())).await.expect("all take part")[0]
}

/// Waits until the rank is found to be lost.
async fn lost<T: Element>(window: &posthaste::Window<T>, rank: Rank) {
    loop {
        match rma(window.get_slice(rank, 0, 1).await) {
            Ok(_) => tokio::time::sleep(Duration::from_millis(1)).await,
            Err(fault) => {
                assert!(matches!(fault, Fault::PeerLost(_) | Fault::StaleHandle { .. }), "{fault}");
                return;
            }
        }
    }
}

case!(fault_a_restarted_rank_talks_both_ways_and_old_handles_are_stale);
fn fault_a_restarted_rank_talks_both_ways_and_old_handles_are_stale() {
    run(3, once(), async |job| {
        let (me, mine) = (job.rank(), job.incarnation());
        let told: Arc<Mutex<Vec<(Rank, u64)>>> = Arc::default();
        let log = told.clone();
        let hello = job
            .register("hello", move |m: Message, _: &mut Scope| {
                let word = u64::from_le_bytes(m.bytes()[..].try_into().unwrap());
                log.lock().unwrap().push((m.source(), word));
            })
            .unwrap();
        let who = job.service("who", move |()| async move { mine }).unwrap();
        let region = job.region(4096).await.unwrap();
        region.write(8, &u64::from(mine).to_le_bytes()).unwrap();
        let key = region.key();
        let keys = job.service("key", move |()| async move { key }).unwrap();
        job.ready();

        if mine == 0 {
            let window = job.shmalloc::<u64>(4).await.unwrap();
            let old_key: RegionKey = keys.call(ONE, ()).await.unwrap();
            let old_region = job.remote_region(old_key).await.unwrap();
            let source = job.region(8).await.unwrap();
            let pattern = job.record(|recorder| window.record_put(recorder, ONE, 2, &source)).await.unwrap();
            let old_group = everybody(&job).await;
            assert_eq!(sum(&old_group, 1).await, 3);
            pattern.replay().await.unwrap();
            barrier_before_death(&job, ONE).await;
            if me == ONE {
                std::process::abort();
            }
            soon("the loss", lost(&window, ONE)).await;
            assert_eq!(soon("the restart", job.peer_restarted(ONE, 0)).await.unwrap(), 1);
            assert_eq!(job.incarnation_of(ONE), 1);

            // What belongs to the incarnation that died is refused, and says so.
            let word = vec![0_u64; 1];
            assert_eq!(rma(window.put(ONE, 0, 7).await), Err(stale(0, 1)));
            assert_eq!(rma(window.get(ONE, 0).await), Err(stale(0, 1)));
            assert_eq!(rma(window.get_into(ONE, 0, word).await).map(|_| ()), Err(stale(0, 1)));
            assert_eq!(rma(old_region.put_slice(0, "x").await), Err(stale(0, 1)));
            assert_eq!(fault_of(job.remote_region(old_key).await.unwrap_err()), stale(0, 1));
            let replayed = soon("the replay", pattern.replay()).await.unwrap_err();
            assert!(replayed.to_string().contains("incarnation 0 of rank 1"), "{replayed}");
            let again = job.record(|recorder| window.record_put(recorder, ONE, 2, &source)).await;
            assert_eq!(fault_of_pattern(again.map(|_| ()).unwrap_err()), stale(0, 1));
            let broken = soon("the old group", old_group.barrier()).await.unwrap_err();
            assert!(broken.to_string().contains("peer 1"), "{broken}");
            assert_eq!(fault_of(soon("the world", job.barrier()).await.unwrap_err()), Fault::PeerLost(ONE));
            // What the survivors have of each other goes on.
            let other = if me == Rank(0) { Rank(2) } else { Rank(0) };
            window.put(other, 3, 33).await.unwrap();
            assert_eq!(window.get(other, 3).await.unwrap(), 33);
        } else {
            assert_eq!((me, mine), (ONE, 1));
            // Not a wait: the others have no barrier to meet it in.
            let world = fault_of(soon("the world", job.barrier()).await.unwrap_err());
            assert_eq!(world, stale(0, 1));
            assert_eq!(fault_of(job.shmalloc::<u64>(1).await.unwrap_err()), stale(0, 1));
            assert!(soon("the group of the world", job.world().barrier()).await.is_err());
        }

        // Both ways: messages, calls, puts and gets.
        for to in job.ranks() {
            let theirs = u32::from(to == ONE);
            assert_eq!(soon("a call", who.call(to, ())).await.unwrap(), theirs, "of rank {to}");
            hello.send(to, (u64::from(me.0) << 32 | u64::from(mine)).to_le_bytes().to_vec()).await.unwrap();
            let key: RegionKey = keys.call(to, ()).await.unwrap();
            assert_eq!((key.rank, key.incarnation), (to, theirs));
            let there = job.remote_region(key).await.unwrap();
            let seen = there.get_into(8, vec![0; 8]).await.unwrap();
            assert_eq!(seen, u64::from(theirs).to_le_bytes());
            there.put_slice(64 + 8 * me.index(), &u64::from(me.0).to_le_bytes()).await.unwrap();
        }
        let group = everybody(&job).await;
        assert_eq!(sum(&group, 1 << (8 * me.0)).await, 0x1_0101);
        until("all greetings", || told.lock().unwrap().len() >= 3).await;
        let mut heard = told.lock().unwrap().clone();
        heard.sort_unstable();
        let expected = [0_u32, 1, 2].map(|r| (Rank(r), u64::from(r) << 32 | u64::from(r == 1)));
        assert_eq!(heard, expected, "each once, of the incarnations that live");
        for rank in 0..3_u64 {
            let mut word = [0; 8];
            region.read(64 + 8 * rank as usize, &mut word).unwrap();
            assert_eq!(u64::from_le_bytes(word), rank);
        }
        soon("the end", group.barrier()).await.unwrap();
    });
}

fn fault_of_pattern(error: Error) -> Fault {
    match error {
        Error::Pattern(posthaste::PatternError::Fault(fault)) => fault,
        other => fault_of(other),
    }
}

case!(fault_an_answer_to_the_old_incarnation_never_reaches_the_new);
fn fault_an_answer_to_the_old_incarnation_never_reaches_the_new() {
    run(2, once(), async |job| {
        let (first, second) = (Arc::new(tokio::sync::Notify::new()), Arc::new(AtomicU32::new(0)));
        let (hold, count) = (first.clone(), second.clone());
        // Answers the first request when the second one is there: by then its caller is another process.
        let slow = job
            .service("slow", move |value: u64| {
                let (hold, count) = (hold.clone(), count.clone());
                async move {
                    if count.fetch_add(1, Ordering::SeqCst) == 0 {
                        hold.notified().await;
                    } else {
                        hold.notify_one();
                        // The other answer goes first.
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                    value
                }
            })
            .unwrap();
        let count = second.clone();
        let came = job.service("came", move |()| std::future::ready(count.load(Ordering::SeqCst))).unwrap();
        job.ready();
        if job.rank() == ONE {
            if job.incarnation() == 0 {
                let call = slow.call(Rank(0), 111);
                let begun = async {
                    while came.call(Rank(0), ()).await != Ok(1) {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                };
                tokio::select! {
                    // First: it is the first request.
                    biased;
                    reply = call => panic!("{reply:?}"),
                    () = begun => std::process::abort(),
                }
            }
            // The first request of this process, and so the same cookie as that of its predecessor.
            assert_eq!(soon("a reply", slow.call(Rank(0), 222)).await.unwrap(), 222);
        }
        let group = {
            if job.rank() == Rank(0) {
                soon("the restart", job.peer_restarted(ONE, 0)).await.unwrap();
            }
            everybody(&job).await
        };
        soon("the end", group.barrier()).await.unwrap();
        if job.rank() == Rank(0) {
            assert_eq!(second.load(Ordering::SeqCst), 2);
        }
    });
}

/// What a protocol is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    Word(Rank, u8),
    Down(Rank, Fault),
    Up(Rank, u32),
}

/// A protocol of the user's own, which writes down what it is told.
#[derive(Default)]
struct Diary(Mutex<Vec<Told>>);

impl Diary {
    fn has(&self, told: Told) -> bool {
        self.0.lock().unwrap().contains(&told)
    }
}

impl Protocol for Diary {
    fn name(&self) -> &str {
        "diary"
    }

    fn on_message(&self, _scope: &mut Scope<'_>, message: Incoming<'_>) {
        let Body::Short(&[word]) = message.body else { panic!("words of a byte only") };
        self.0.lock().unwrap().push(Told::Word(message.source.rank, word));
    }

    fn on_peer_down(&self, rank: Rank, fault: Fault) {
        self.0.lock().unwrap().push(Told::Down(rank, fault));
    }

    fn on_peer_up(&self, _scope: &mut Scope<'_>, rank: Rank, incarnation: u32) {
        self.0.lock().unwrap().push(Told::Up(rank, incarnation));
    }
}

case!(fault_a_protocol_of_the_users_own_is_told_that_a_rank_was_started_again);
fn fault_a_protocol_of_the_users_own_is_told_that_a_rank_was_started_again() {
    run(2, once(), async |job| {
        let diary = Arc::new(Diary::default());
        let id = job.messager().register(diary.clone()).unwrap();
        let (me, mine, peer) = (job.rank(), job.incarnation() as u8, Rank(1 - job.rank().0));
        let say = async |word: u8| {
            let to = Endpoint::new(peer, ContextId(0));
            while !job.messager().inject(ContextId(0), to, id, &[word]).unwrap() {
                tokio::task::yield_now().await;
            }
        };
        job.ready();
        if me == ONE {
            say(mine).await;
            until("an answer", || diary.has(Told::Word(Rank(0), 10 + mine))).await;
            if mine == 0 {
                std::process::abort();
            }
        } else {
            for incarnation in [0, 1] {
                until("a word", || diary.has(Told::Word(ONE, incarnation))).await;
                say(10 + incarnation).await;
            }
        }
        // Of the loss before the return, and of both before what the successor says; the successor meets nobody again.
        let expected = match me {
            ONE => vec![Told::Word(Rank(0), 11)],
            _ => vec![
                Told::Word(ONE, 0),
                Told::Down(ONE, Fault::PeerLost(ONE)),
                Told::Up(ONE, 1),
                Told::Word(ONE, 1),
            ],
        };
        assert_eq!(*diary.0.lock().unwrap(), expected);
        soon("the end", everybody(&job).await.barrier()).await.unwrap();
    });
}

/// How often a rank is killed and started again.
fn kills() -> u32 {
    if soak() || transport() == Transport::Shm { 1000 } else { 100 }
}

/// What a process holds: resident KiB, descriptors, mappings.
type Held = (u64, usize, usize);

fn held_by(pid: u32) -> Held {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let rss = rss.and_then(|text| text.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0);
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).map_or(0, |text| text.lines().count());
    (rss, fds, maps)
}

/// Where the launcher says that nobody is killed any more.
const DONE: &str = "POSTHASTE_TEST_DONE";

case!(fault_restarts_in_a_row_at_random_times_mix_nothing_and_keep_memory_flat);
fn fault_restarts_in_a_row_at_random_times_mix_nothing_and_keep_memory_flat() {
    // In a process without other tests: what the launcher has is counted, too.
    if !is_launcher_with(here!(), &[]) {
        return;
    }
    let done = own_file("restarts-done");
    let path = done.to_string_lossy().into_owned();
    let options = options()
        .restart(u32::MAX)
        .env(DONE, &path)
        .watchdog(Duration::from_secs(60 + 2 * u64::from(kills())))
        .during(move |job| {
            let seed = std::env::var("POSTHASTE_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
            let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
            println!("POSTHASTE_TEST_SEED={seed}");
            let mut random = Random(seed);
            wait_for(job, 0, "ready");
            wait_for(job, 2, "ready");
            let mut before = Vec::new();
            let mut ready = 0;
            for killed in 1..=kills() {
                // One in four is killed somewhere on its way into the job, the others once they are a part of it.
                if random.below(4) != 0 {
                    let end = std::time::Instant::now() + Duration::from_secs(40);
                    while text_of(job, 1).matches("ready").count() == ready {
                        assert!(std::time::Instant::now() < end, "{}", text_of(job, 1));
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
                std::thread::sleep(Duration::from_micros(random.below(30_000)));
                // Before the next is started, which may be ready before this thread goes on.
                ready = text_of(job, 1).matches("ready").count();
                job.kill(1).unwrap();
                let end = std::time::Instant::now() + Duration::from_secs(40);
                while job.restarts(1) < killed {
                    assert!(std::time::Instant::now() < end, "rank 1 is not started again");
                    std::thread::sleep(Duration::from_millis(1));
                }
                if [10, 30, 100, 500, 1000].contains(&killed) {
                    let survivors = [0, 2].map(|rank| held_by(job.pid(rank).unwrap()));
                    let launcher = held_by(std::process::id());
                    println!("restart {killed}: ranks 0 and 2 {survivors:?}, launcher {launcher:?} (KiB, fds, maps)");
                    before.push((survivors, launcher));
                }
            }
            std::fs::write(&done, "done").unwrap();
            let all = |at: &([Held; 2], Held)| [at.0[0], at.0[1], at.1];
            let (first, last) = (all(before.first().unwrap()), all(before.last().unwrap()));
            // By the second time all threads that there may be have been, with their stacks and heaps.
            let second = all(before.get(1).or(before.first()).unwrap());
            for ((first, second), last) in first.into_iter().zip(second).zip(last) {
                assert!(last.0 < first.0 + 2 * 1024, "memory grows: {first:?} {last:?}");
                assert!(last.1 < first.1 + 8, "descriptors grow: {first:?} {last:?}");
                assert!(last.2 < second.2 + 12, "mappings grow: {second:?} {last:?}");
            }
        });
    run(3, options, async |job| {
        let (me, mine) = (job.rank(), job.incarnation());
        let latest = Arc::new(AtomicU32::new(0));
        let seen = latest.clone();
        let note = job
            .register("note", move |m: Message, _: &mut Scope| {
                let [of, for_] =
                    [&m.bytes()[..4], &m.bytes()[4..8]].map(|b| u32::from_le_bytes(b.try_into().unwrap()));
                assert_eq!(for_, mine, "a message to another incarnation was delivered to rank {me}");
                if m.source() == ONE {
                    let before = seen.fetch_max(of, Ordering::SeqCst);
                    assert!(of >= before, "incarnation {of} of rank 1 after {before}");
                }
            })
            .unwrap();
        let who = job.service("who", move |()| async move { mine }).unwrap();
        let never = job.service("never", |()| std::future::pending::<()>()).unwrap();
        let region = job.region(1 << 16).await.unwrap();
        region.write(0, &mine.to_le_bytes()).unwrap();
        let key = region.key();
        // Who goes on may put until it hears that this rank has left.
        std::mem::forget(region);
        let keys = job.service("key", move |()| async move { key }).unwrap();
        let stopped = Arc::new(AtomicU64::new(0));
        let stop = stopped.clone();
        let stop = job.register("stop", move |_: Message, _: &mut Scope| {
            stop.fetch_add(1, Ordering::SeqCst);
        });
        let stop = stop.unwrap();
        job.ready();
        let tagged = |to: Rank| {
            let mut text = mine.to_le_bytes().to_vec();
            text.extend(job.incarnation_of(to).to_le_bytes());
            text.resize(8 + 2000 * (to.index() % 2), 0);
            text
        };
        let others: Vec<Rank> = job.ranks().filter(|rank| *rank != me).collect();
        println!("ready {mine}");
        let path = std::env::var(DONE).unwrap();
        let mut rounds = 0_u64;
        let mut losses = 0_u64;
        // What every rank does to every other: all ends, and what ends well is of the right incarnation.
        while stopped.load(Ordering::SeqCst) == 0 && !(me == Rank(0) && std::path::Path::new(&path).exists())
        {
            rounds += 1;
            for &to in &others {
                let ended = soon("an operation", async {
                    note.send(to, tagged(to)).await.map_err(|error| fault_of(error.into()))?;
                    let known = job.incarnation_of(to);
                    let said = who.call(to, ()).await.map_err(|error| fault_of(error.into()))?;
                    assert!(said >= known, "rank {to} was {known} and says {said}");
                    let key: RegionKey = keys.call(to, ()).await.map_err(|error| fault_of(error.into()))?;
                    let there = job.remote_region(key).await.map_err(fault_of)?;
                    let bytes = rma(there.get_into(0, vec![0; 4]).await)?;
                    assert_eq!(bytes, key.incarnation.to_le_bytes(), "memory of another incarnation");
                    rma(there.put_slice(64, &[7; 30_000]).await)?;
                    if rounds % 64 == 1 && to == ONE {
                        let pending = never.call_within(to, (), Duration::from_millis(30)).await;
                        return Err(fault_of(pending.unwrap_err().into()));
                    }
                    Ok::<(), Fault>(())
                })
                .await;
                match ended {
                    Ok(()) | Err(Fault::DeadlineExceeded) => {}
                    Err(fault @ (Fault::PeerLost(rank) | Fault::StaleHandle { rank, .. })) => {
                        assert_eq!(rank, ONE, "{fault} at {to} in round {rounds} of incarnation {mine}");
                        losses += 1;
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                    Err(Fault::PeerClosed(_)) if me != Rank(0) => break,
                    Err(other) => panic!("{other}"),
                }
            }
            tokio::task::yield_now().await;
        }
        if me == Rank(0) {
            // The last incarnation may still be on its way.
            for to in others {
                soon("the last word", async {
                    loop {
                        let sent = stop.send(to, "").await.map_err(|error| fault_of(error.into()));
                        let told = if sent.is_ok() { job.flush(to).await.map_err(fault_of) } else { sent };
                        // Who has heard may leave before it says so.
                        if matches!(told, Ok(()) | Err(Fault::PeerClosed(_))) {
                            break;
                        }
                        tokio::time::sleep(Duration::from_millis(2)).await;
                    }
                })
                .await;
            }
        }
        if me != ONE {
            assert!(losses > 0 && rounds > 0);
            println!("{rounds} rounds, {losses} losses, {} incarnations", job.incarnation_of(ONE));
        }
    });
    let _ = std::fs::remove_file(path);
}

case!(fault_a_persistent_collective_that_broke_is_told_to_no_restarted_member);
fn fault_a_persistent_collective_that_broke_is_told_to_no_restarted_member() {
    run(3, once(), async |job| {
        let who = job.service("who", |()| async {}).unwrap();
        if job.incarnation() == 0 {
            let sums = job.persistent().all_reduce::<u64>(&job.world(), 1, &Reduce::sum()).await;
            let mut sums = sums.unwrap();
            let mut value = [1];
            sums.run(&mut value).await.unwrap();
            assert_eq!(value, [3]);
            barrier_before_death(&job, ONE).await;
            if job.rank() == ONE {
                std::process::abort();
            }
            // Not a look at it while the rank dies and comes again.
            soon("the restart", job.peer_restarted(ONE, 0)).await.unwrap();
            soon("its end", sums.run(&mut value)).await.unwrap_err();
        } else {
            job.ready();
        }
        let group = everybody(&job).await;
        for to in job.ranks() {
            soon("an answer", who.call(to, ())).await.expect("nobody is cut off");
        }
        soon("the end", group.barrier()).await.unwrap();
    });
}

case!(fault_i10_who_was_started_again_is_waited_for_when_windows_of_groups_are_freed);
fn fault_i10_who_was_started_again_is_waited_for_when_windows_of_groups_are_freed() {
    run(2, once(), async |job| {
        let said = job.counter();
        let count = said.clone();
        let says = job.register("says", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
        job.ready();
        if job.incarnation() == 0 {
            let group = everybody(&job).await;
            let window = soon("a window", group.shmalloc::<u64>(4)).await.unwrap();
            barrier_before_death(&job, ONE).await;
            if job.rank() == ONE {
                std::process::abort();
            }
            soon("the restart", job.peer_restarted(ONE, 0)).await.unwrap();
            soon("the free", window.free()).await.unwrap();
        }
        let group = everybody(&job).await;
        for round in 1..=2 {
            let window = soon("a window", group.shmalloc::<u64>(4)).await.unwrap();
            assert_eq!(sum(&group, 1).await, 2);
            if job.rank() == ONE {
                tokio::time::sleep(Duration::from_millis(300)).await;
                says.send(Rank(0), "").await.unwrap();
                // It has been handled.
                job.flush(Rank(0)).await.unwrap();
            }
            soon("the free", window.free()).await.unwrap();
            assert!(job.rank() == ONE || said.value() == round, "the free was over before the other's began");
        }
        // More than may be released before they are made.
        for _ in 0..4200 {
            let window = soon("a window", group.shmalloc::<u64>(0)).await.unwrap();
            soon("the free", window.free()).await.unwrap();
        }
        soon("the end", group.barrier()).await.unwrap();
    });
}
