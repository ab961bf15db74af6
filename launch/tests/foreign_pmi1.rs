//! The PMI-1 client before a process manager of the test's own: one that works, and ones that do not.

mod common;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{IntoRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use common::{eventually, watchdog};
use posthaste_launch::{Foreign, ForeignError, Meeting, MeetingError, detect};
use proptest::prelude::*;
use rustix::io::{FdFlags, fcntl_setfd};

const VALUE: usize = 1024;

/// Changes an answer: given the command that it answers and what it would be.
type Twist = dyn Fn(&str, String) -> Answer + Send + Sync;

enum Answer {
    Line(String),
    Bytes(Vec<u8>),
    /// These bytes, and then the end of the connection.
    Last(Vec<u8>),
    Nothing,
}

/// What the ranks of one job put.
struct Space {
    values: Mutex<BTreeMap<String, String>>,
    barrier: Barrier,
    /// The commands that came, without their arguments.
    heard: Mutex<Vec<String>>,
}

impl Space {
    fn new(ranks: usize) -> Arc<Self> {
        Arc::new(Self { values: Mutex::default(), barrier: Barrier::new(ranks), heard: Mutex::default() })
    }

    fn count(&self, command: &str) -> usize {
        self.heard.lock().unwrap().iter().filter(|heard| *heard == command).count()
    }

    /// The answer to one line; the limits that were told must be kept.
    fn answer(&self, line: &str) -> String {
        let word = |key: &str| {
            line.split(' ')
                .filter_map(|word| word.split_once('='))
                .find(|pair| pair.0 == key)
                .map(|pair| pair.1)
        };
        let command = word("cmd").unwrap();
        self.heard.lock().unwrap().push(command.to_owned());
        match command {
            "init" => "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0".into(),
            "get_maxes" => format!("cmd=maxes kvsname_max=256 keylen_max=64 vallen_max={VALUE}"),
            "get_my_kvsname" => "cmd=my_kvsname kvsname=kvs_1_0".into(),
            "put" => {
                assert_eq!(word("kvsname"), Some("kvs_1_0"));
                let (key, value) = (word("key").unwrap(), word("value").unwrap());
                assert!(key.len() <= 64 && line.len() < VALUE, "{} bytes", line.len());
                let old = self.values.lock().unwrap().insert(key.into(), value.into());
                if old.is_none() {
                    "cmd=put_result rc=0 msg=success"
                } else {
                    "cmd=put_result rc=-1 msg=duplicate"
                }
                .into()
            }
            "barrier_in" => {
                self.barrier.wait();
                "cmd=barrier_out".into()
            }
            "get" => match self.values.lock().unwrap().get(word("key").unwrap()) {
                Some(value) => format!("cmd=get_result rc=0 msg=success value={value}"),
                None => "cmd=get_result rc=-1 msg=not_found value=unknown".into(),
            },
            "finalize" => "cmd=finalize_ack".into(),
            other => panic!("no command {other}"),
        }
    }

    fn serve<S: Read + Write>(&self, stream: S, greeting: bool, numbers: (u32, u32), twist: &Twist) {
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        loop {
            line.clear();
            if stream.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            let line = line.trim_end();
            let command = line.strip_prefix("cmd=").unwrap().split(' ').next().unwrap();
            let answer = match command {
                "initack" if greeting => {
                    let (rank, size) = numbers;
                    format!("cmd=initack rc=0\ncmd=set size={size}\ncmd=set rank={rank}\ncmd=set debug=0")
                }
                _ => self.answer(line),
            };
            let (bytes, last) = match twist(command, answer) {
                Answer::Line(line) => (format!("{line}\n").into_bytes(), false),
                Answer::Bytes(bytes) => (bytes, false),
                Answer::Last(bytes) => (bytes, true),
                Answer::Nothing => continue,
            };
            if stream.get_mut().write_all(&bytes).is_err() || last {
                return;
            }
        }
    }
}

/// A process manager at a port for each rank of a job.
fn over_ports(ranks: u32, twist: Arc<Twist>) -> (Arc<Space>, Vec<u16>) {
    let space = Space::new(ranks as usize);
    let listen = |rank| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (space, twist) = (space.clone(), twist.clone());
        thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            space.serve(stream, true, (rank, ranks), &*twist);
        });
        port
    };
    let ports = (0..ranks).map(listen).collect();
    (space, ports)
}

fn faithful() -> Arc<Twist> {
    Arc::new(|_: &str, line| Answer::Line(line))
}

/// Twists the answers to one command.
fn only(command: &'static str, twist: impl Fn(String) -> Answer + Send + Sync + 'static) -> Arc<Twist> {
    Arc::new(move |heard: &str, line| if heard == command { twist(line) } else { Answer::Line(line) })
}

fn join(pairs: &[(&str, String)], within: Duration) -> Result<Box<dyn Meeting>, ForeignError> {
    let env: BTreeMap<&str, &String> = pairs.iter().map(|(name, value)| (*name, value)).collect();
    let detected = detect(&|name| env.get(name).map(|value| value.to_string()))?.expect("a launcher");
    assert_eq!(detected.launcher(), "MPICH or another PMI-1 launcher");
    match detected.connect(Instant::now() + within)? {
        Foreign::KeyValue(meeting) => Ok(meeting),
        other => panic!("{other:?}"),
    }
}

fn join_port(port: u16, within: Duration) -> Result<Box<dyn Meeting>, ForeignError> {
    join(&[("PMI_PORT", format!("127.0.0.1:{port}")), ("PMI_ID", "0".into())], within)
}

const LONG: Duration = Duration::from_secs(40);
const SHORT: Duration = Duration::from_millis(200);

fn soon() -> Instant {
    Instant::now() + LONG
}

fn blob(rank: usize, round: usize) -> Vec<u8> {
    // The first, the longest, and lengths around the ends of parts.
    let length = [0, 64 << 10, 1, 700, 701, 702, 703, 9000][(rank + round) % 8];
    (0..length).map(|at| (at * 7 + rank * 31 + round) as u8).collect()
}

fn gather_twice(meeting: &mut dyn Meeting, ranks: usize) {
    for round in 0..2 {
        let own = blob(meeting.rank() as usize, round);
        let all = meeting.all_gather(&own, soon()).unwrap();
        let expected: Vec<Vec<u8>> = (0..ranks).map(|rank| blob(rank, round)).collect();
        assert_eq!(all.len(), ranks);
        assert!(all == expected, "rank {} got other blobs in round {round}", meeting.rank());
    }
}

#[test]
fn ranks_at_a_port_gather_blobs_of_all_lengths() {
    let _dog = watchdog();
    const RANKS: usize = 8;
    let (space, ports) = over_ports(RANKS as u32, faithful());
    thread::scope(|scope| {
        for (rank, port) in ports.iter().enumerate() {
            scope.spawn(move || {
                let mut meeting = join_port(*port, LONG).unwrap();
                assert_eq!((meeting.rank() as usize, meeting.size() as usize), (rank, RANKS));
                assert!(meeting.identity().is_none());
                gather_twice(meeting.as_mut(), RANKS);
            });
        }
    });
    assert_eq!(space.count("barrier_in"), 2 * RANKS);
    // Nobody waits for long until that is answered.
    eventually("all have said farewell", || space.count("finalize") == RANKS);
}

/// An inherited socket, as a number, and the other end.
fn inherited() -> (i32, UnixStream) {
    let (own, other) = UnixStream::pair().unwrap();
    fcntl_setfd(&own, FdFlags::empty()).unwrap();
    (own.into_raw_fd(), other)
}

#[test]
fn ranks_with_inherited_sockets_gather() {
    let _dog = watchdog();
    const RANKS: usize = 3;
    let space = Space::new(RANKS);
    thread::scope(|scope| {
        for rank in 0..RANKS {
            let (fd, other) = inherited();
            let space = &space;
            scope.spawn(move || space.serve(other, false, (0, 0), &|_: &str, line| Answer::Line(line)));
            scope.spawn(move || {
                let env = descriptor(fd, rank, RANKS);
                let mut meeting = join(&env, LONG).unwrap();
                // The number has an owner now.
                let again = join(&env, LONG).map(drop).unwrap_err();
                assert!(matches!(again, ForeignError::NotInherited { .. }), "{again}");
                gather_twice(meeting.as_mut(), RANKS);
            });
        }
    });
    assert_eq!(space.count("finalize"), RANKS);
}

fn descriptor(fd: i32, rank: usize, ranks: usize) -> [(&'static str, String); 3] {
    [("PMI_FD", fd.to_string()), ("PMI_RANK", rank.to_string()), ("PMI_SIZE", ranks.to_string())]
}

#[test]
fn what_was_not_inherited_is_left_alone() {
    let refused = |fd: i32| {
        let error = join(&descriptor(fd, 0, 1), LONG).map(drop).unwrap_err();
        assert!(matches!(error, ForeignError::NotInherited { .. }), "{error}");
        assert!(error.to_string().contains("unset the PMI_ variables"), "{error}");
        error.to_string()
    };
    assert!(refused(1_000_000).contains("is not open"));
    // As after the number was given away anew: what this process opened closes on exec.
    let (own, mut other) = UnixStream::pair().unwrap();
    let number = std::os::fd::AsRawFd::as_raw_fd(&own);
    assert!(refused(number).contains("opened or taken over itself"));
    (&own).write_all(b"still ours").unwrap();
    other.read_exact(&mut [0; 10]).unwrap();

    let foreign = |fd: OwnedFd| {
        fcntl_setfd(&fd, FdFlags::empty()).unwrap();
        let text = refused(std::os::fd::AsRawFd::as_raw_fd(&fd));
        assert!(text.contains("is no connected socket"), "{text}");
        assert!(rustix::io::fcntl_getfd(&fd).unwrap().is_empty(), "it is left as it was");
    };
    foreign(std::fs::File::open("/dev/null").unwrap().into());
    foreign(rustix::pipe::pipe().unwrap().0);
    foreign(TcpListener::bind("127.0.0.1:0").unwrap().into());
    foreign(std::net::UdpSocket::bind("127.0.0.1:0").unwrap().into());
}

#[test]
fn a_process_manager_that_has_ended_is_told() {
    let _dog = watchdog();
    let (fd, other) = inherited();
    drop(other);
    let error = join(&descriptor(fd, 0, 1), LONG).map(drop).unwrap_err();
    assert!(matches!(error, ForeignError::Meeting(MeetingError::Refused { .. })), "{error}");
    assert!(error.to_string().contains("closed the connection instead of answering init"), "{error}");

    let (_kept, nowhere) = common::meeting::nowhere();
    let free = nowhere.port();
    let error = join_port(free, LONG).map(drop).unwrap_err();
    assert!(error.to_string().contains(&format!("127.0.0.1:{free}")), "{error}");
}

#[test]
fn answers_may_come_in_pieces() {
    let _dog = watchdog();
    let (space, ports) = over_ports(1, faithful());
    // Between the rank and the process manager, one byte at a time.
    let front = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = front.local_addr().unwrap().port();
    thread::spawn(move || {
        let rank = front.accept().unwrap().0;
        let manager = TcpStream::connect(("127.0.0.1", ports[0])).unwrap();
        let trickle = |mut from: TcpStream, mut to: TcpStream| {
            let mut byte = [0];
            while from.read_exact(&mut byte).is_ok() && to.write_all(&byte).is_ok() {}
        };
        let (rank_too, manager_too) = (rank.try_clone().unwrap(), manager.try_clone().unwrap());
        thread::spawn(move || trickle(rank_too, manager_too));
        trickle(manager, rank);
    });
    let mut meeting = join_port(port, LONG).unwrap();
    let own: Vec<u8> = (0..5000).map(|at| at as u8).collect();
    assert!(meeting.all_gather(&own, soon()).unwrap() == [own]);
    drop(meeting);
    eventually("it has said farewell", || space.count("finalize") == 1);
}

#[test]
fn numbers_that_contradict_the_variables_are_refused() {
    let _dog = watchdog();
    for (rank, size, good) in [("0", "1", true), ("1", "2", false), ("0", "2", false)] {
        let (_, ports) = over_ports(1, faithful());
        let env = [
            ("PMI_PORT", format!("127.0.0.1:{}", ports[0])),
            ("PMI_ID", "0".into()),
            ("PMI_RANK", rank.into()),
            ("PMI_SIZE", size.into()),
        ];
        match join(&env, LONG) {
            Ok(_) => assert!(good),
            Err(error) => {
                assert!(!good && matches!(error, ForeignError::Contradiction { .. }), "{error}");
            }
        }
    }
    for (size, rank) in [("4", "4"), ("0", "0"), ("4097", "1"), ("99999999999", "1"), ("2", "99999999999")] {
        let text = format!("cmd=initack rc=0\ncmd=set size={size}\ncmd=set rank={rank}\ncmd=set debug=0");
        let (_, ports) = over_ports(1, only("initack", move |_| Answer::Line(text.clone())));
        let error = join_port(ports[0], LONG).map(drop).unwrap_err();
        let known = matches!(error, ForeignError::RankOutOfRange { .. } | ForeignError::Invalid { .. });
        assert!(known, "{rank} of {size}: {error}");
    }
}

/// One rank's way through a whole exchange.
fn exchange(port: u16, within: Duration) -> Result<Vec<Vec<u8>>, ForeignError> {
    let deadline = Instant::now() + within;
    let mut meeting = join_port(port, within)?;
    let result = meeting.all_gather(b"the blob of a rank, a secret", deadline);
    if result.is_err() {
        let again = meeting.all_gather(b"", deadline).unwrap_err();
        assert!(again.to_string().contains("an earlier exchange failed"), "{again}");
    }
    Ok(result?)
}

const COMMANDS: [&str; 6] = ["init", "get_maxes", "get_my_kvsname", "put", "barrier_in", "get"];

#[test]
fn no_answer_is_an_error_at_the_deadline_and_not_before() {
    let _dog = watchdog();
    for command in COMMANDS.into_iter().chain(["initack"]) {
        let exchanged = |patience| {
            let (space, ports) = over_ports(1, only(command, |_| Answer::Nothing));
            let began = Instant::now();
            let text = exchange(ports[0], patience).unwrap_err().to_string();
            assert!(began.elapsed() >= patience, "{command}");
            (space, text)
        };
        let expected = format!("no answer to {command} at the deadline");
        // For what is answered before, too: which takes a moment, unless this process gets no core for so long.
        let (mut space, mut text) = exchanged(Duration::from_millis(1500));
        if !text.contains(&expected) {
            (space, text) = exchanged(Duration::from_secs(15));
        }
        assert!(text.contains(&expected), "{text}");
        assert_eq!(text.contains("not all ranks have come"), command == "barrier_in", "{text}");
        // A rank that gave up is not one that ended well.
        assert_eq!(space.count("finalize"), 0, "{command}");
    }
}

#[test]
fn answers_of_other_kinds_are_refused() {
    let _dog = watchdog();
    type Broken = (&'static str, fn(String) -> Answer);
    let broken: [Broken; 8] = [
        ("garbage", |_| Answer::Bytes(b"\x00\xff\xfe\x80\x1b[2J\n".to_vec())),
        ("an empty line", |_| Answer::Line(String::new())),
        ("another command", |_| Answer::Line("cmd=spawn_result rc=0".into())),
        ("a refusal", |line| Answer::Line(format!("{} rc=-1 msg=no", line.split(' ').next().unwrap()))),
        ("cut off", |line| Answer::Last(line.into_bytes()[..5].to_vec())),
        ("the end", |_| Answer::Last(Vec::new())),
        ("a line without an end", |_| Answer::Bytes(vec![b'a'; 4 << 20])),
        ("a long line", |line| Answer::Line(format!("{line} more={}", "a".repeat(64 << 10)))),
    ];
    for command in COMMANDS {
        for (what, twist) in broken {
            let (_, ports) = over_ports(1, only(command, twist));
            let error = exchange(ports[0], LONG).unwrap_err();
            let text = error.to_string();
            let known = matches!(
                error,
                ForeignError::Meeting(MeetingError::Refused { .. } | MeetingError::Garbled { .. })
            );
            assert!(known, "{what} for {command}: {text}");
            assert!(text.len() < 400 && !text.contains('\x1b'), "{what} for {command}: {text}");
        }
    }
}

#[test]
fn limits_that_no_exchange_fits_are_refused() {
    let _dog = watchdog();
    for maxes in [
        "keylen_max=64",
        "keylen_max=64 vallen_max=63",
        "keylen_max=39 vallen_max=1024",
        "keylen_max=64 vallen_max=-1",
        "keylen_max=64 vallen_max=99999999999999999999",
        "keylen_max=64 vallen_max=",
    ] {
        let (_, ports) =
            over_ports(1, only("get_maxes", move |_| Answer::Line(format!("cmd=maxes {maxes}"))));
        assert!(exchange(ports[0], LONG).is_err(), "{maxes}");
    }
    // The longest number there is makes no long values.
    let maxes = format!("cmd=maxes kvsname_max=1 keylen_max={0} vallen_max={0}", u64::MAX);
    let (_, ports) = over_ports(1, only("get_maxes", move |_| Answer::Line(maxes.clone())));
    assert_eq!(exchange(ports[0], LONG).unwrap(), [b"the blob of a rank, a secret"]);
}

#[test]
fn values_that_are_no_blob_are_refused_and_never_shown() {
    let _dog = watchdog();
    for value in [
        "",
        ".",
        "c2VjcmV0",
        "x.c2VjcmV0",
        "-8.c2VjcmV0",
        "4294967296.c2VjcmV0",
        "0099999.c2VjcmV0",
        "0000004.c2VjcmV0",
        "0000012.c2VjcmV0",
        "0000008.c2Vj=mV0",
        "0000008.c2VjcmV0 c2VjcmV0=",
        "0000009.c2VjcmV0Z",
    ] {
        let line = move |_| Answer::Line(format!("cmd=get_result rc=0 value={value}"));
        let (_, ports) = over_ports(1, only("get", line));
        let result = exchange(ports[0], LONG);
        if value.contains(' ') {
            // Words behind the value are other words.
            assert_eq!(result.unwrap(), [b"secret"]);
            continue;
        }
        let text = result.unwrap_err().to_string();
        assert!(!text.contains("c2V"), "{text}");
    }
    let refusal = |_| Answer::Line("cmd=get_result rc=-1 value=c2VjcmV0".into());
    let (_, ports) = over_ports(1, only("get", refusal));
    let text = exchange(ports[0], LONG).unwrap_err().to_string();
    assert!(text.contains("rc=-1") && !text.contains("c2V"), "{text}");
}

#[test]
fn a_blob_that_is_too_long_is_refused_before_it_is_put() {
    let _dog = watchdog();
    let (space, ports) = over_ports(1, faithful());
    let mut meeting = join_port(ports[0], LONG).unwrap();
    let error = meeting.all_gather(&vec![0; (64 << 10) + 1], soon()).unwrap_err();
    assert!(error.to_string().contains("65537"), "{error}");
    assert_eq!(space.count("put"), 0);
    // Nothing was said, so that the next one is understood.
    assert_eq!(meeting.all_gather(b"short", soon()).unwrap(), [b"short"]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// Whatever a process manager says, the exchange ends, and never with another blob in silence.
    #[test]
    fn any_answer_ends_the_exchange(
        command in proptest::sample::select(COMMANDS.to_vec()),
        bytes in prop_oneof![
            proptest::collection::vec(any::<u8>(), 0..200),
            "[a-z]{0,8}=[0-9a-z-]{0,8} (cmd|rc|value|vallen_max|kvsname)=[0-9]{0,20}\n".prop_map(String::into_bytes),
        ],
        last in any::<bool>(),
        keep in any::<bool>(),
    ) {
        let _dog = watchdog();
        let twist = move |line: String| {
            let mut text = if keep { line.into_bytes() } else { Vec::new() };
            text.extend_from_slice(&bytes);
            if last { Answer::Last(text) } else { Answer::Bytes(text) }
        };
        let (_, ports) = over_ports(1, only(command, twist));
        if let Ok(blobs) = exchange(ports[0], SHORT) {
            prop_assert!(command == "get" || blobs == [b"the blob of a rank, a secret"], "{:?}", blobs);
        }
    }
}
