//! Connections that break, at every byte and at random ones: every operation ends once, and no byte is wrong.

mod support;

use posthaste_core::{Fault, JobShape, LossCause, Rank, SendError};
use posthaste_tcp::{AddressBook, Limits, Memory, Mode, PeerAddress, TcpConfig};
use posthaste_testkit::conformance::Log;
use posthaste_testkit::proxy::{Course, Cut, Plan, Proxy};
use posthaste_testkit::random::Random;
use posthaste_testkit::watchdog::Watchdog;
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::job::{Access, LOG, MEMORY, Member, at};
use support::{config, runtime};

const SHAPE: JobShape = JobShape { ranks: 2, clients: 1, contexts: 1 };

/// Two ranks whose connections all pass through a proxy, whichever of them connects.
struct Pair {
    members: Vec<Member>,
    log: Log,
    proxies: Vec<Proxy>,
}

impl Pair {
    async fn open(
        change: impl Fn(&mut TcpConfig),
        plan: impl Fn(u64) -> Plan + Send + Clone + 'static,
    ) -> Pair {
        let log = Log::default();
        let books = [0, 1].map(|_| Arc::new(AddressBook::new(2)));
        let (mut members, mut proxies) = (Vec::new(), Vec::new());
        for rank in [0, 1] {
            let mut config = config(Rank(rank), SHAPE, Mode::HandshakeOnly, Limits::default());
            config.times.connect = Duration::from_secs(60);
            config.times.linger = Duration::from_millis(300);
            // It is never given back to the system.
            config.memory = Memory::Own(2 * MEMORY);
            change(&mut config);
            members.push(Member::open(config, books[rank as usize].clone(), &log).await);
            proxies.push(Proxy::start(members[rank as usize].device.address(), plan.clone()));
        }
        for (rank, other) in [(0, 1u32), (1, 0)] {
            let address = proxies[other as usize].address();
            books[rank].set(Rank(other), PeerAddress { address, incarnation: 1 });
        }
        Pair { members, log, proxies }
    }

    /// How often a connection was cut.
    fn cuts(&self) -> u64 {
        self.proxies.iter().map(Proxy::cuts).sum()
    }

    /// The most bytes that have passed through one connection, up and down.
    fn passed(&self) -> (u64, u64) {
        let all = self.proxies.iter().flat_map(Proxy::passed).collect::<Vec<_>>();
        let most = |side: fn(&posthaste_testkit::proxy::Passed) -> &std::sync::Mutex<Vec<u8>>| {
            all.iter().map(|passed| side(passed).lock().expect("no panic").len() as u64).max().unwrap_or(0)
        };
        (most(|passed| &passed.up), most(|passed| &passed.down))
    }
}

/// A short session of every kind of operation. Ends with the first fault.
async fn session(pair: &Pair) -> Result<(), Fault> {
    let [zero, one] = &pair.members[..] else { unreachable!("there are two") };
    let fault = |error: SendError| match error {
        SendError::Fault(fault) => fault,
        other => panic!("{other}"),
    };
    zero.send(1, LOG, b"1", b"first", false).await.map_err(fault)?;
    assert_eq!(zero.call(1, b"ping").await.map_err(fault)?, b"ping");
    zero.access(one, 1, 3, Access::Put(b"put")).await?;
    assert_eq!(zero.access(one, 1, 2, Access::Get(5)).await?.as_bytes(), b"\0put\0");
    assert_eq!(one.call(0, b"pong").await.map_err(fault)?, b"pong");
    zero.send(1, LOG, b"2", b"second", false).await.map_err(fault)?;
    assert_eq!(zero.call(1, b"end").await.map_err(fault)?, b"end");
    Ok(())
}

async fn told_within_time(member: &Member) {
    let until = Instant::now() + Duration::from_secs(60);
    while Instant::now() < until {
        if !member.errors().is_empty() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("rank was never told of the other's loss");
}

/// Runs the session with a connection that breaks there, and checks what both sides make of it.
async fn broken_session(mode: Mode, up: bool, at_byte: u64, cut: Cut) {
    let plan = move |number: u64| {
        // Later attempts pass.
        let broken = Course { cut: (number == 0).then_some((at_byte, cut)), ..Course::default() };
        if up { Plan { up: broken, ..Plan::default() } } else { Plan { down: broken, ..Plan::default() } }
    };
    let pair = Pair::open(|config| config.mode = mode, plan).await;
    let ended = tokio::time::timeout(Duration::from_secs(60), session(&pair)).await;
    let place = if up { "up" } else { "down" };
    let ended = ended.unwrap_or_else(|_| panic!("{cut:?} {place} at byte {at_byte}: an operation hangs"));
    match ended {
        // It broke before the connection was settled, and was made again, or after all was done.
        Ok(()) => assert_eq!(pair.log.of(at(0), at(1)).len(), 2),
        Err(fault) => {
            assert!(matches!(fault, Fault::PeerLost(_)), "{cut:?} {place} at byte {at_byte}: {fault}");
            told_within_time(&pair.members[0]).await;
            told_within_time(&pair.members[1]).await;
        }
    }
    for (rank, member) in pair.members.iter().enumerate() {
        let errors = member.errors();
        let lost = Fault::PeerLost(Rank(1 - rank as u32));
        assert!(errors.is_empty() || errors == [lost], "{cut:?} {place} at byte {at_byte}: {errors:?}");
        let cause = member.client.loss_of(Rank(1 - rank as u32));
        let told = match cause {
            None => errors.is_empty(),
            // A connection that is closed with something unread is reset by the kernel. Nobody has died or fallen silent.
            Some(cause) => {
                matches!(cause, LossCause::Disconnected | LossCause::Broken(_) | LossCause::Unreachable)
            }
        };
        assert!(told, "{cut:?} {place} at byte {at_byte}: {cause:?}");
    }
    let got: Vec<_> = pair.log.all().into_iter().map(|message| message.bytes).collect();
    assert!([&b"first"[..], b"second"].iter().zip(&got).all(|(sent, got)| sent == got), "{got:?}");
    let memory = pair.members[1].memory(1);
    assert!(memory[..8] == *b"\0\0\0put\0\0" || memory[..8] == [0; 8], "a torn put");
}

fn every_byte(mode: Mode) {
    let _dog = Watchdog::start("every byte", Duration::from_secs(200), || "it hangs".to_owned());
    let runtime = runtime();
    let (up, down) = runtime.block_on(async {
        let pair = Pair::open(|config| config.mode = mode, |_| Plan::default()).await;
        session(&pair).await.expect("nothing breaks");
        pair.passed()
    });
    assert!(up > 200 && down > 150, "{up} and {down} bytes have passed");
    for (is_up, len) in [(true, up), (false, down)] {
        for place in 0..=len {
            for cut in [Cut::Close, Cut::Reset] {
                runtime.block_on(broken_session(mode, is_up, place, cut));
            }
        }
    }
}

#[test]
fn a_connection_may_break_at_every_byte() {
    every_byte(Mode::HandshakeOnly);
}

#[test]
fn an_encrypted_connection_may_break_at_every_byte() {
    every_byte(Mode::Encrypted);
}

/// Traffic of all kinds both ways until it breaks, or until all is done. Every operation ends, messages are a prefix of
/// what was sent, values are right, and what was told to be at the target is there.
///
/// Returns how often a connection was cut.
async fn random_cut(seed: u64) -> u64 {
    let mut random = Random::new(seed);
    let mode = [Mode::Insecure, Mode::HandshakeOnly, Mode::Encrypted][random.below(3)];
    let course = |random: &mut Random, cut: bool| {
        let far = [300, 3_000, 30_000, 60_000][random.below(4)];
        let split = random.chance(40).then(|| 1 + random.below(far / 10));
        let delay = random.chance(10).then(|| Duration::from_micros(random.below(100) as u64));
        Course {
            // Each of so many thousand bytes alone and late would take longer than anybody waits.
            split: split.map(|split| if delay.is_some() { split.max(64) } else { split }),
            delay,
            cut: cut.then(|| {
                let cut = if random.chance(50) { Cut::Reset } else { Cut::Close };
                (random.below(far) as u64, cut)
            }),
            flip: None,
        }
    };
    let up = random.chance(60);
    let down = !up || random.chance(60);
    let plan = Plan { up: course(&mut random, up), down: course(&mut random, down) };
    let again = random.chance(50);
    let limits = Limits {
        outgoing: [1, 2000, 256 << 10][random.below(3)],
        max_eager: 20_000,
        get_chunk: 3000,
        get_window: 8000,
        read_buffer: [1, 128 << 10][random.below(2)],
        ..Limits::default()
    };
    let first_only = plan.clone();
    let pair = Pair::open(
        |config| {
            config.mode = mode;
            config.limits = limits;
            config.times.connect = Duration::from_millis(250);
        },
        move |number| if number == 0 || again { first_only.clone() } else { Plan::default() },
    )
    .await;
    let seeds = [random.next_word(), random.next_word()];
    let [a, b] = [0, 1].map(|rank: usize| traffic(&pair, rank, seeds[rank]));
    let both = async { tokio::join!(a, b) };
    let ended = tokio::time::timeout(Duration::from_secs(30), both).await;
    let (a, b) = ended.unwrap_or_else(|_| panic!("seed {seed}: an operation hangs"));
    if a.is_err() || b.is_err() {
        for member in &pair.members {
            told_within_time(member).await;
        }
    }
    for (rank, member) in pair.members.iter().enumerate() {
        let errors = member.errors();
        let lost = Fault::PeerLost(Rank(1 - rank as u32));
        assert!(errors.is_empty() || errors == [lost], "seed {seed}: {errors:?}");
    }
    for from in [0, 1u32] {
        let mut random = Random::new(seeds[from as usize] ^ 1);
        for received in pair.log.of(at(from), at(1 - from)) {
            let expected = message(&mut random);
            assert!(received.bytes == expected, "seed {seed}: a message of rank {from} is wrong");
        }
    }
    pair.cuts()
}

fn message(random: &mut Random) -> Vec<u8> {
    let len = [0, 8, 100, 2048, 2049, 19_000, 25_000][random.below(7)];
    random.bytes(len)
}

async fn traffic(pair: &Pair, rank: usize, seed: u64) -> Result<(), Fault> {
    let (me, other) = (&pair.members[rank], &pair.members[1 - rank]);
    let to = 1 - rank as u32;
    // The messages follow from the seed alone, so that it can be told which they must be.
    let (mut random, mut messages) = (Random::new(seed), Random::new(seed ^ 1));
    let mut model = vec![0u8; 4000];
    for _ in 0..25 {
        let sent = match random.below(5) {
            0..2 => me.send(to, LOG, &[], &message(&mut messages), false).await.map(|_| ()),
            2 => {
                let len = [5, 3000, 22_000][random.below(3)];
                let asked = random.bytes(len);
                me.call(to, &asked).await.map(|answer| assert!(answer == asked, "another answer"))
            }
            3 => {
                let (at, len) = (random.below(2000), 1 + random.below(2000));
                let bytes = random.bytes(len);
                model[at..at + len].copy_from_slice(&bytes);
                let put = me.access(other, to, at as u64, Access::Put(&bytes)).await;
                if put.is_ok() {
                    assert!(other.memory(to)[at..at + len] == bytes, "the put is not there");
                }
                put.map(|_| ()).map_err(SendError::from)
            }
            _ => {
                let (at, len) = (random.below(2000), 1 + random.below(2000));
                let got = me.access(other, to, at as u64, Access::Get(len as u64)).await;
                got.map(|value| assert!(value.as_bytes() == &model[at..at + len], "a get is wrong"))
                    .map_err(SendError::from)
            }
        };
        match sent {
            Ok(()) => {}
            Err(SendError::Fault(fault)) => {
                assert!(matches!(fault, Fault::PeerLost(_)), "{fault}");
                return Err(fault);
            }
            Err(other) => panic!("{other}"),
        }
    }
    Ok(())
}

#[test]
fn random_cuts_lose_peers_and_nothing_else() {
    let one = std::env::var("POSTHASTE_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
    let wanted: u64 = if std::env::var_os("POSTHASTE_TEST_SOAK").is_some() { 10_000 } else { 500 };
    let patience = Duration::from_secs(600.max(wanted / 5));
    let _dog = Watchdog::start("random cuts", patience, || "it hangs".to_owned());
    let runtime = runtime();
    let (mut cuts, mut seed) = (0, one.unwrap_or(0));
    while cuts < wanted {
        let result =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| runtime.block_on(random_cut(seed))));
        match result {
            Ok(more) => cuts += more,
            Err(panic) => {
                eprintln!("repeat it with POSTHASTE_TEST_SEED={seed}");
                std::panic::resume_unwind(panic);
            }
        }
        if one.is_some() {
            return;
        }
        seed += 1;
        assert!(seed < 10 + 3 * wanted, "of {seed} sessions only {cuts} were cut");
    }
    println!("{cuts} cuts in {seed} sessions");
}
