//! Ranks killed by SIGKILL: at random times, at every named point, all at once.

use crate::support::{
    Options, Random, Transport, barrier_before_death, case, options, run, sealed, soak, soon,
    state_dirs_are_clean, transport, unseal, until, wait_for,
};
use posthaste::launcher::RankEnd;
use posthaste::{
    ActiveMessage, Bytes, CallError, Fault, Job, LossCause, Message, PatternError, Rank, RmaError, Scope,
    SendError, Service, Window,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Microseconds of the clock that all processes share.
fn now_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as u64
}

/// How often something is done: as often as is promised over shared memory and in the soak form, else a tenth of that.
fn rounds(all: u64) -> u64 {
    if soak() || transport() == Transport::Shm { all } else { all.div_ceil(10) }
}

fn seed() -> u64 {
    let given = std::env::var("POSTHASTE_TEST_SEED").ok().and_then(|text| text.parse().ok());
    let seed = given.unwrap_or_else(|| now_us() % 1_000_000);
    println!("POSTHASTE_TEST_SEED={seed}");
    seed
}

/// What every rank does to every other until it is told to stop.
#[derive(Clone)]
struct Traffic {
    message: ActiveMessage,
    echo: Service<Bytes, Bytes>,
    never: Service<(), ()>,
    window: Option<Window<u64>>,
    stop: Arc<AtomicBool>,
    received: Arc<AtomicU64>,
    /// Leaves some time for others: five ranks that do all they can on two cores see little of the clock.
    paced: bool,
    /// A message that is sent in fragments.
    long: Bytes,
}

fn fault_of_send(error: SendError) -> Fault {
    match error {
        SendError::Fault(fault) => fault,
        other => panic!("{other}"),
    }
}

fn fault_of_call(error: CallError) -> Fault {
    match error {
        CallError::Fault(fault) => fault,
        other => panic!("{other}"),
    }
}

fn fault_of_rma(error: RmaError) -> Fault {
    match error {
        RmaError::Fault(fault) => fault,
        other => panic!("{other}"),
    }
}

fn fault_of_pattern(error: PatternError) -> Fault {
    match error {
        PatternError::Fault(fault) => fault,
        other => panic!("{other}"),
    }
}

impl Traffic {
    fn register(job: &Job) -> Traffic {
        let received: Arc<AtomicU64> = Arc::default();
        let count = received.clone();
        let message = job
            .register("traffic", move |m: Message, _: &mut Scope| {
                assert!(unseal(&m.bytes()).is_some(), "{} corrupt bytes from rank {}", m.len(), m.source());
                count.fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
        let echo = job.service_inline("echo", |m, _| Ok(m.to_bytes().into())).unwrap();
        let never = job.service("never", |()| std::future::pending::<()>()).unwrap();
        let paced = std::env::var_os("POSTHASTE_TEST_PACED").is_some();
        Traffic {
            message,
            echo,
            never,
            window: None,
            stop: Arc::default(),
            received,
            paced,
            long: sealed(9, (4 << 20) + 9).into(),
        }
    }

    /// One operation; the payload tells whether it is whole.
    async fn step(&self, me: Rank, to: Rank, number: u64) -> Result<(), Fault> {
        match number % 6 {
            0 | 1 => self.message.send(to, sealed(number, 64)).await.map_err(fault_of_send),
            2 => self.message.send(to, sealed(number, 8000)).await.map_err(fault_of_send),
            3 => {
                let sent = sealed(number, [16, 3000, 9000][number as usize / 6 % 3]);
                let reply = self.echo.call_bytes(to, sent.clone()).await.map_err(fault_of_call)?;
                assert_eq!(reply.as_bytes(), sent, "a corrupt reply of rank {to}");
                Ok(())
            }
            4 if number % 600 == 4 => self.message.send(to, self.long.clone()).await.map_err(fault_of_send),
            _ => {
                let Some(window) = &self.window else { return Ok(()) };
                window.put(to, me.index(), number).await.map_err(fault_of_rma)?;
                let value = window.get(to, me.index()).await.map_err(fault_of_rma)?;
                assert_eq!(value, number, "only this rank puts there");
                Ok(())
            }
        }
    }

    /// Goes on until the rank is lost or the traffic is stopped.
    async fn exchange(self, me: Rank, to: Rank) -> Option<Fault> {
        let mut number = 0;
        while !self.stop.load(Ordering::Relaxed) {
            if let Err(fault) = self.step(me, to, number).await {
                return Some(fault);
            }
            number += 1;
            if self.paced && number % 8 == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            } else {
                tokio::task::yield_now().await;
            }
        }
        None
    }
}

/// Ranks 0 and 1 survive; the others die one after another while everybody talks to everybody.
async fn survive(job: Job, victims: u32) {
    let mut traffic = Traffic::register(&job);
    let lost = Arc::new(AtomicU64::new(0));
    let count = lost.clone();
    job.on_error(move |fault| {
        count.fetch_add(u64::from(matches!(fault, Fault::PeerLost(_))), Ordering::Relaxed);
    });
    let done = job.counter();
    let count = done.clone();
    let word = job.register("done", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
    traffic.window = Some(job.shmalloc::<u64>(job.size()).await.unwrap());
    job.barrier().await.unwrap();
    let me = job.rank();
    println!("ready");
    let mut tasks = Vec::new();
    for to in job.ranks().filter(|to| *to != me) {
        tasks.push((to, tokio::spawn(traffic.clone().exchange(me, to))));
        if to.0 >= 2 {
            // A call that is never answered, and a hundred that wait behind it.
            let never = traffic.never.clone();
            tasks.push((
                to,
                tokio::spawn(async move {
                    let ends = (0..100).map(|_| never.call(to, ()));
                    let ends = ::futures::future::join_all(ends).await;
                    println!("lost {to} {}", now_us());
                    let faults = ends.into_iter().map(|end| fault_of_call(end.unwrap_err()));
                    faults.reduce(|one, other| if one == other { one } else { panic!("{one} and {other}") })
                }),
            ));
        }
    }
    if me.0 >= 2 {
        std::future::pending::<()>().await;
    }
    let (dying, living): (Vec<_>, Vec<_>) = tasks.into_iter().partition(|(to, _)| to.0 >= 2);
    for (to, task) in dying {
        let end = soon("the end of the operations towards a dead rank", task).await.unwrap();
        assert_eq!(end, Some(Fault::PeerLost(to)));
    }
    // The survivors have talked to each other all the time, and do so still.
    let other = Rank(1 - me.0);
    let before = traffic.received.load(Ordering::Relaxed);
    until("more messages of the other survivor", || traffic.received.load(Ordering::Relaxed) > before + 20)
        .await;
    word.send(other, b"").await.unwrap();
    soon("the other survivor", done.reach(1)).await;
    traffic.stop.store(true, Ordering::Relaxed);
    for (_, task) in living {
        assert_eq!(soon("the end of the traffic", task).await.unwrap(), None);
    }
    // Everything that is under way arrives before one of the two leaves.
    job.flush(other).await.unwrap();
    word.send(other, b"").await.unwrap();
    soon("the other survivor", done.reach(2)).await;
    assert_eq!(job.stats().panics, 0, "a corrupt payload was dispatched");
    assert_eq!(lost.load(Ordering::Relaxed), u64::from(victims));
    job.leave().await.unwrap();
}

case!(fault_ranks_killed_at_random_times_are_lost_to_all_and_nobody_else_is_harmed);
fn fault_ranks_killed_at_random_times_are_lost_to_all_and_nobody_else_is_harmed() {
    kill_at_random(rounds(67), |options| run(2 + VICTIMS, options, async |job| survive(job, VICTIMS).await));
}

case!(fault_ranks_killed_at_random_times_with_time_to_spare);
fn fault_ranks_killed_at_random_times_with_time_to_spare() {
    kill_at_random(rounds(67), |options| {
        let paced = options.env("POSTHASTE_TEST_PACED", "1");
        run(2 + VICTIMS, paced, async |job| survive(job, VICTIMS).await)
    });
}

const VICTIMS: u32 = 3;

/// Prints how long it took to notice.
fn kill_at_random(jobs: u64, start: impl Fn(Options) -> Vec<String>) {
    let rank = std::env::var_os("POSTHASTE_JOB").is_some();
    let mut random = Random(if rank { 0 } else { seed() });
    let mut times: Vec<u64> = Vec::new();
    for _ in 0..jobs {
        let delays: Vec<u64> = (0..VICTIMS).map(|_| random.below(25_000)).collect();
        let killed: Arc<std::sync::Mutex<Vec<u64>>> = Arc::default();
        let kills = killed.clone();
        let mut options = options().body_leaves().during(move |job| {
            for rank in 0..2 + VICTIMS {
                wait_for(job, rank, "ready");
            }
            for (victim, delay) in (2..).zip(delays) {
                std::thread::sleep(Duration::from_micros(delay));
                kills.lock().unwrap().push(now_us());
                job.kill(victim).unwrap();
            }
        });
        for victim in 2..2 + VICTIMS {
            options = options.killed(victim);
        }
        let printed = start(options);
        let killed = killed.lock().unwrap().clone();
        for (survivor, text) in printed[..2].iter().enumerate() {
            let lost: Vec<(usize, u64)> = text
                .lines()
                .filter_map(|line| {
                    // The harness may print before it on the same line.
                    let (rank, time) = line.split_once("lost ")?.1.split_once(' ')?;
                    Some((rank.parse().ok()?, time.parse().ok()?))
                })
                .collect();
            assert_eq!(lost.len(), VICTIMS as usize, "rank {survivor}: {text}");
            times.extend(lost.iter().map(|(rank, time)| time.saturating_sub(killed[rank - 2])));
        }
    }
    times.sort_unstable();
    let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize] as f64 / 1000.0;
    println!(
        "{} kills, {} losses seen; from the kill to PeerLost: p50 {:.2} ms, p99 {:.2} ms, most {:.2} ms",
        jobs * u64::from(VICTIMS),
        times.len(),
        at(0.5),
        at(0.99),
        at(1.0)
    );
}

/// The names of all points at which the sources let a test kill the process.
fn failpoints() -> Vec<String> {
    fn scan(dir: &std::path::Path, names: &mut Vec<String>) {
        for entry in std::fs::read_dir(dir).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                scan(&path, names);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                for part in text.split("failpoint!(\"").skip(1) {
                    names.push(part.split('"').next().unwrap().to_owned());
                }
            }
        }
    }
    let mut names = Vec::new();
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    for part in ["core/src", "transport-shm/src", "transport-tcp/src", "protocols/src"] {
        scan(&root.join(part), &mut names);
    }
    names.sort();
    names.dedup();
    names
}

/// What words are multiples of.
const TICK: u64 = 0x9e37_79b1;
/// Messages of a pattern.
const RECORDED: usize = 64;
/// Bytes of what is put and got that no device takes in one go.
const BULK: usize = 3 << 20;

/// Puts and gets of a part of a window that only this rank touches there.
async fn move_bulk(window: &Window<u8>, me: Rank, to: Rank, rounds: u64) -> Result<(), Fault> {
    for round in 0..rounds {
        let sent = sealed(round, BULK);
        window.put_slice(to, me.index() * BULK, &sent).await.map_err(fault_of_rma)?;
        let got = window.get_slice(to, me.index() * BULK, BULK).await.map_err(fault_of_rma)?;
        assert!(got == sent, "other bytes than were put at rank {to}");
    }
    Ok(())
}

/// Sees to it which side makes the connections, where the victim's fate lies in that: the others wait until they have heard
/// from who connects, or of its death.
async fn come_in_turn(job: &Job, victim: Rank, traffic: &Traffic) {
    let plan = std::env::var("POSTHASTE_TEST_FAILPOINT").unwrap_or_default();
    let (dials, is_dialled) = (plan.starts_with("tcp.dial."), plan.starts_with("tcp.gate."));
    let is_victim = job.rank() == victim;
    if dials && is_victim || is_dialled && !is_victim {
        for to in job.ranks().filter(|to| is_victim || *to == victim) {
            // Whoever was lost meanwhile is so for what follows, too.
            let _ = traffic.message.send(to, sealed(0, 8)).await;
        }
    } else if dials || is_dialled {
        let lost = Arc::new(AtomicBool::new(false));
        let told = lost.clone();
        job.on_error(move |_| told.store(true, Ordering::Relaxed));
        let expected = if is_victim { 2 } else { 1 };
        until("a sign from who connects", || {
            traffic.received.load(Ordering::Relaxed) >= expected || lost.load(Ordering::Relaxed)
        })
        .await;
    }
}

/// Passes through everything that has a named point; rank 1 dies at one of them.
async fn pass_through_everything(job: Job) {
    let me = job.rank();
    let victim = Rank(1);
    let mut traffic = Traffic::register(&job);
    let (credited, mut stream) = job.stream("credited").unwrap();
    let done = job.counter();
    let count = done.clone();
    let both = Arc::new(AtomicBool::new(false));
    let theirs = both.clone();
    let word = job
        .register("done", move |m: Message, _: &mut Scope| {
            theirs.store(m.len() == 1, Ordering::Relaxed);
            count.add(1);
        })
        .unwrap();
    // One word each, which goes a way of its own.
    let tick = job
        .register("tick", move |m: Message, _: &mut Scope| {
            assert!(m.read::<u64>(0).is_some_and(|word| word % TICK == 0), "a corrupt word");
        })
        .unwrap();
    job.ready();
    come_in_turn(&job, victim, &traffic).await;
    let consumer = tokio::spawn(async move {
        while let Some(message) = stream.recv().await {
            assert!(unseal(&message.into_bytes()).is_some(), "corrupt bytes in the stream");
        }
    });
    let watch = tokio::spawn({
        let never = traffic.never.clone();
        async move { if me == victim { None } else { Some(never.call(victim, ()).await) } }
    });
    // A collective that the victim does not live to see ends with an error, perhaps not for all; all later ones do.
    if let Ok(window) = soon("a window", job.shmalloc::<u64>(3)).await {
        traffic.window = Some(window);
        for _ in 0..3 {
            let Ok(other) = soon("a window", job.shmalloc::<u64>(3)).await else { break };
            if soon("the free", other.free()).await.is_err() {
                break;
            }
        }
    }
    let bulk = soon("a window", job.shmalloc::<u8>(3 * BULK)).await.ok();
    let mut tasks = Vec::new();
    for to in job.ranks().filter(|to| *to != me) {
        if let Some(bulk) = bulk.clone() {
            tasks.push((to, tokio::spawn(async move { move_bulk(&bulk, me, to, 4).await })));
        }
        let (traffic, credited) = (traffic.clone(), credited.clone());
        tasks.push((
            to,
            tokio::spawn(async move {
                for number in 0..400 {
                    traffic.step(me, to, number).await?;
                    // Of two in a row the second gets a place for the next.
                    for _ in 0..3 {
                        credited.send(to, sealed(number, 100)).await.map_err(fault_of_send)?;
                    }
                }
                Ok(())
            }),
        ));
    }
    // Short messages that are recorded and replayed together, and long ones of which one page serves all.
    let source = job.region(64 * RECORDED).await.unwrap();
    for at in 0..RECORDED {
        source.write(64 * at, &sealed(at as u64, 64)).unwrap();
    }
    for to in job.ranks().filter(|to| *to != me) {
        let (job, source, message, tick) =
            (job.clone(), source.clone(), traffic.message.clone(), tick.clone());
        tasks.push((
            to,
            tokio::spawn(async move {
                let pattern = job.record(|r| {
                    (0..RECORDED).try_for_each(|at| r.send(&message, to, source.slice(at * 64..at * 64 + 64)))
                });
                // Nothing is sent yet.
                let pattern = pattern.await.unwrap();
                for number in 0..60 {
                    pattern.replay().await.map_err(fault_of_pattern)?;
                    tick.send(to, (number * TICK).to_ne_bytes()).await.map_err(fault_of_send)?;
                }
                Ok(())
            }),
        ));
    }
    let echo = traffic.echo.clone();
    let everybody = tokio::spawn({
        let (message, to) = (traffic.message.clone(), job.ranks().filter(|to| *to != me).collect::<Vec<_>>());
        async move {
            for number in 0..60u64 {
                let sent = message.multicast(to.iter().copied(), Bytes::from(sealed(number, 30_000))).await;
                for (rank, error) in sent.err().map(|error| error.failed).unwrap_or_default() {
                    assert_eq!((rank, fault_of_send(error)), (victim, Fault::PeerLost(victim)));
                }
                for to in &to {
                    match echo.call_bytes(*to, number.to_ne_bytes()).await {
                        Ok(word) => {
                            assert_eq!(word.as_bytes(), number.to_ne_bytes(), "a corrupt reply of rank {to}")
                        }
                        Err(error) => {
                            assert_eq!((*to, fault_of_call(error)), (victim, Fault::PeerLost(victim)))
                        }
                    }
                }
            }
        }
    });
    soon("the multicasts", everybody).await.unwrap();
    for (to, task) in tasks {
        match soon("the traffic", task).await.unwrap() {
            Ok(()) => {}
            Err(fault) => assert_eq!((to, fault), (victim, Fault::PeerLost(victim))),
        }
    }
    if me == victim {
        // Not dead yet: what peers do may still lead through the point, and what it does itself: a write that takes less than
        // there is needs more than the kernel keeps for a connection, which grows.
        let end = Instant::now() + Duration::from_secs(20);
        while Instant::now() < end {
            for to in job.ranks().filter(|to| *to != me) {
                // One like the other: a page that has come back takes the next.
                for _ in 0..4 {
                    traffic.message.send(to, sealed(0, 5000)).await.unwrap();
                }
                if let Some(bulk) = &bulk {
                    let sent = sealed(0, BULK);
                    let puts = (0..8).map(|_| bulk.put_slice(to, me.index() * BULK, &sent).into_future());
                    futures::future::try_join_all(puts).await.unwrap();
                }
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        return;
    }
    let end = soon("the loss of rank 1", watch).await.unwrap().unwrap();
    assert_eq!(end, Err(CallError::Fault(Fault::PeerLost(victim))));
    let other = Rank(2 - me.0);
    for number in 0..120 {
        traffic.step(me, other, number).await.unwrap();
    }
    job.flush(other).await.unwrap();
    let has = [1u8; 1];
    word.send(other, &has[..usize::from(traffic.window.is_some())]).await.unwrap();
    soon("the other survivor", done.reach(1)).await;
    assert_eq!(job.stats().panics, 0, "a corrupt payload was dispatched");
    job.clone().leave().await.unwrap();
    consumer.await.unwrap();
}

case!(fault_a_rank_killed_at_each_named_point_is_lost_to_all);
fn fault_a_rank_killed_at_each_named_point_is_lost_to_all() {
    let names = failpoints();
    assert!(names.len() >= 15, "{names:?}");
    let only = std::env::var("POSTHASTE_TEST_FAILPOINT").ok();
    // What belongs to neither device concerns both.
    let passed = |name: &String| match transport() {
        Transport::Shm => !name.starts_with("tcp."),
        Transport::Tcp => ["tcp.", "rendezvous.", "credit."].iter().any(|part| name.starts_with(part)),
        // One of the two others only is connected with.
        Transport::Nodes => {
            ["tcp.frames", "tcp.payload", "rendezvous."].iter().any(|part| name.starts_with(part))
        }
    };
    for name in names.into_iter().filter(passed) {
        for passage in [1, 2] {
            let plan = format!("{name}:{passage}@1");
            if only.as_ref().is_some_and(|only| *only != plan) {
                continue;
            }
            let start = std::time::Instant::now();
            let options: Options = options()
                .body_leaves()
                .killed(1)
                .env("POSTHASTE_TEST_FAILPOINT", &plan)
                // Few credits and narrow lanes lead to the points sooner.
                .env("POSTHASTE_CREDITS", "32")
                .env("POSTHASTE_LANE_BYTES", "4096")
                // And a message of any length is long.
                .env(
                    "POSTHASTE_RENDEZVOUS_BYTES",
                    if name.starts_with("rendezvous.") { "64" } else { "never" },
                );
            run(3, options, async |job| pass_through_everything(job).await);
            println!("{plan}: {:?}", start.elapsed());
        }
    }
}

case!(fault_all_ranks_killed_leave_nothing_behind);
fn fault_all_ranks_killed_leave_nothing_behind() {
    let rank = std::env::var_os("POSTHASTE_JOB").is_some();
    let mut random = Random(if rank { 0 } else { seed() });
    for _ in 0..rounds(50) {
        let delay = Duration::from_micros(random.below(20_000));
        let mut options = options().body_leaves().during(move |job| {
            (0..4).for_each(|rank| wait_for(job, rank, "ready"));
            std::thread::sleep(delay);
            for rank in 0..4 {
                job.kill(rank).unwrap();
            }
        });
        for rank in 0..4 {
            options = options.ends(rank, RankEnd::Signal(9));
        }
        // The harness looks for processes and for named memory.
        run(4, options, async |job| {
            let mut traffic = Traffic::register(&job);
            traffic.window = Some(job.shmalloc::<u64>(1 << 16).await.unwrap());
            job.barrier().await.unwrap();
            println!("ready");
            let me = job.rank();
            let all = job.ranks().map(|to| traffic.clone().exchange(me, to));
            ::futures::future::join_all(all).await;
            std::future::pending::<()>().await;
        });
    }
    state_dirs_are_clean();
}

case!(fault_a_rank_that_executed_a_program_and_died_is_lost_although_the_program_lives);
#[allow(clippy::zombie_processes, reason = "the rank dies before the child does: that is what is tested")]
fn fault_a_rank_that_executed_a_program_and_died_is_lost_although_the_program_lives() {
    run(2, options().body_leaves().killed(1), async |job| {
        let never = job.service("never", |()| std::future::pending::<()>()).unwrap();
        barrier_before_death(&job, Rank(1)).await;
        if job.rank() == Rank(1) {
            // A child that outlives the rank holds its standard streams, and nothing of the job.
            let child = std::process::Command::new("sleep").arg("3").spawn().unwrap();
            assert!(child.id() > 0);
            kill_self();
        }
        let end = soon("the loss", never.call(Rank(1), ())).await;
        assert_eq!(end, Err(CallError::Fault(Fault::PeerLost(Rank(1)))));
        job.leave().await.unwrap();
    });
}

case!(fault_a_loss_is_told_with_its_cause);
/// A loss is told with its cause: what the kernel says of a process, and what a connection shows of one that was cut.
fn fault_a_loss_is_told_with_its_cause() {
    run(3, options().body_leaves().killed(1), async |job| {
        let never = job.service("never", |()| std::future::pending::<()>()).unwrap();
        barrier_before_death(&job, Rank(1)).await;
        if job.rank() == Rank(1) {
            kill_self();
        }
        assert_eq!(job.loss_of(Rank(1)), None);
        let end = soon("the loss", never.call(Rank(1), ())).await;
        assert_eq!(end, Err(CallError::Fault(Fault::PeerLost(Rank(1)))));
        let cause = job.loss_of(Rank(1));
        let known = match transport() {
            Transport::Shm => cause == Some(LossCause::Exited),
            // Its launcher may have seen the process end before its connection showed it.
            Transport::Tcp | Transport::Nodes => matches!(
                cause,
                Some(LossCause::Exited | LossCause::Disconnected | LossCause::Broken(_) | LossCause::Told)
            ),
        };
        assert!(known, "{cause:?}");
        let living = if job.rank() == Rank(0) { Rank(2) } else { Rank(0) };
        assert_eq!(job.loss_of(living), None, "nobody else is lost");
        job.leave().await.unwrap();
    });
}

fn kill_self() {
    crate::support::kill_self();
}
