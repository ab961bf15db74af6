//! A port of a device that closes, moved by hand.

mod support;

use posthaste_core::Messager;
use posthaste_core::descriptor::{Op, SourceKind};
use posthaste_core::device::{Inject, Packet, PeerEvent, Sink, SourceTable, Sources, Stop, Verdict};
use posthaste_core::slot::{Outcome, Ticket};
use posthaste_core::{ContextId, Descriptor, Device, Fault, JobShape, LossCause, Port, ProtocolId, Rank};
use posthaste_tcp::handshake::{FINISH_LEN, HELLO_LEN, Identity, respond};
use posthaste_tcp::{AddressBook, Limits, Mode, PeerAddress, TcpConfig, TcpDevice};
use posthaste_testkit::conformance::Log;
use posthaste_testkit::watchdog::Watchdog;
use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use support::config;
use support::job::{Access, LOG, MEMORY, Member, job};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// How long peers may take to end their side.
const LINGER: Duration = Duration::from_millis(100);
const SHAPE: JobShape = JobShape { ranks: 2, clients: 1, contexts: 2 };

/// Counts packets.
#[derive(Default)]
struct Counted(usize);

impl Sink for Counted {
    fn packet(&mut self, _: &mut dyn Inject, _: &mut Packet<'_>) -> Verdict {
        self.0 += 1;
        Verdict::Taken
    }

    fn complete(&mut self, _: Ticket, _: Outcome) {}

    fn corrupt(&mut self, rank: Rank) {
        panic!("{rank} broke the rules");
    }
}

fn send(port: &mut dyn Port, rank: Rank, context: ContextId) {
    let mut message =
        Descriptor { op: Op::Send, rank, context, protocol: ProtocolId(20), ..Descriptor::default() };
    message.set_inline(&[1; 8]);
    let table = SourceTable::default();
    let sources = Sources::of(&table);
    assert_eq!(port.inject(&[message], &sources).stop, Stop::Done);
}

/// Tries to send so many bytes that lie elsewhere. Returns whether they were taken.
fn send_long(port: &mut dyn Port, to: Rank, payload: &[u8]) -> bool {
    let message = Descriptor {
        op: Op::Send,
        source_kind: SourceKind::Borrowed,
        rank: to,
        protocol: ProtocolId(20),
        len: payload.len() as u64,
        ..Descriptor::default()
    };
    let table = SourceTable::default();
    let sources = Sources { borrowed: payload, ..Sources::of(&table) };
    port.inject(&[message], &sources).stop == Stop::Done
}

/// What devices tell of their peers: who was told, of whom, and what.
type Told = Arc<Mutex<Vec<(Rank, Rank, PeerEvent)>>>;

/// Ranks 0 and 1 with ports that are moved by hand; peers have no time to linger.
async fn by_hand(contexts: u16) -> (Vec<Arc<TcpDevice>>, [Vec<Box<dyn Port>>; 2], Told) {
    let shape = JobShape { ranks: 2, clients: 1, contexts };
    let (book, told) = (Arc::new(AddressBook::new(2)), Told::default());
    let (mut devices, mut ports) = (Vec::new(), [Vec::new(), Vec::new()]);
    for rank in [Rank(0), Rank(1)] {
        let mut config = config(rank, shape, Mode::HandshakeOnly, Limits::default());
        config.times.linger = LINGER;
        let device = Arc::new(TcpDevice::new(config, book.clone()).expect("a free port"));
        ports[rank.index()].extend((0..contexts).map(|of| device.port(ContextId(of)).expect("its own")));
        let heard = told.clone();
        let news = move |peer, event| heard.lock().expect("no panic").push((rank, peer, event));
        device.open(Arc::new(news)).await.expect("there is a runtime");
        devices.push(device);
    }
    (devices, ports, told)
}

/// The order of the leave of a rank, as the device of the other one tells it.
fn has_left(told: &Told, rank: Rank) -> bool {
    let (fault, cause) = (Fault::PeerClosed(rank), None);
    let down = PeerEvent::Down { fault, incarnation: 1, cause };
    told.lock().expect("no panic").iter().any(|(_, peer, event)| (*peer, *event) == (rank, down))
}

/// Rank 0 sends so many messages, or as many as are taken, and closes, while rank 1 reads nothing for much longer than peers may
/// linger, as if it were stopped. When it goes on it gets all.
async fn who_reads_nothing_gets_all(count: usize) {
    let (devices, [mut near, mut far], told) = by_hand(1).await;
    let (mut seen, mut theirs) = (Counted::default(), Counted::default());
    send(&mut *near[0], Rank(1), ContextId(0));
    while seen.0 == 0 {
        near[0].advance(16, &mut theirs);
        far[0].advance(16, &mut seen);
        tokio::task::yield_now().await;
    }
    let mut sent = 1;
    while sent < count && send_long(&mut *near[0], Rank(1), &[1; 9000]) {
        near[0].advance(16, &mut theirs);
        sent += 1;
    }
    let closing = tokio::spawn({
        let zero = devices[0].clone();
        async move { zero.close().await }
    });
    let until = tokio::time::Instant::now() + 30 * LINGER;
    while tokio::time::Instant::now() < until {
        near[0].advance(16, &mut theirs);
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    // It goes on, and says something of its own before it has read that nobody listens any more.
    send(&mut *far[0], Rank(0), ContextId(0));
    while !has_left(&told, Rank(0)) {
        near[0].advance(16, &mut theirs);
        far[0].advance(16, &mut seen);
        tokio::task::yield_now().await;
        let lost = |event: &PeerEvent| matches!(event, PeerEvent::Down { fault: Fault::PeerLost(_), .. });
        assert!(!told.lock().expect("no panic").iter().any(|(_, _, event)| lost(event)), "{told:?}");
    }
    assert_eq!(seen.0, sent, "something that was taken is lost");
    while !closing.is_finished() {
        near[0].advance(16, &mut theirs);
        tokio::task::yield_now().await;
    }
    devices[1].abort();
}

#[cfg_attr(feature = "portable", ignore = "nobody tells what the kernel has yet to send")]
#[tokio::test]
async fn what_waits_for_a_peer_that_reads_nothing_is_sent_however_long_that_takes() {
    let _watchdog = Watchdog::start("a full peer", Duration::from_secs(60), || "it hangs".to_owned());
    // Until the buffers of the kernel are full, and this side's own.
    who_reads_nothing_gets_all(usize::MAX).await;
}

#[cfg_attr(feature = "portable", ignore = "nobody tells what the kernel has yet to send")]
#[tokio::test]
async fn what_the_kernel_has_yet_to_send_is_waited_for() {
    let _watchdog = Watchdog::start("a full kernel", Duration::from_secs(60), || "it hangs".to_owned());
    // More than the peer's kernel takes of what nobody reads, less than this side's own takes.
    who_reads_nothing_gets_all(100).await;
}

/// Counts packets, and the ranks that have left.
#[derive(Default)]
struct Heard {
    packets: usize,
    left: Vec<(Rank, u32)>,
}

impl Sink for Heard {
    fn packet(&mut self, _: &mut dyn Inject, _: &mut Packet<'_>) -> Verdict {
        self.packets += 1;
        Verdict::Taken
    }

    fn complete(&mut self, _: Ticket, _: Outcome) {}

    fn corrupt(&mut self, rank: Rank) {
        panic!("{rank} broke the rules");
    }

    fn left(&mut self, rank: Rank, incarnation: u32) {
        self.left.push((rank, incarnation));
    }
}

/// Of three contexts the first two have a connection with a rank that leaves, and nobody moves the second one: the others hear of the
/// leave all the same, and the second one when it has all that was sent to it.
#[tokio::test]
async fn a_leave_is_told_to_each_context_behind_what_it_was_sent() {
    let _watchdog = Watchdog::start("a leave", Duration::from_secs(60), || "nobody is told".to_owned());
    let (devices, [mut near, mut far], told) = by_hand(3).await;
    let (mut heard, mut theirs) = ([(); 3].map(|()| Heard::default()), Counted::default());
    for context in [0, 1] {
        send(&mut *far[context], Rank(0), ContextId(context as u16));
        while heard[context].packets == 0 {
            far[context].advance(16, &mut theirs);
            near[context].advance(16, &mut heard[context]);
            tokio::task::yield_now().await;
        }
        for _ in 0..100 {
            send(&mut *far[context], Rank(0), ContextId(context as u16));
        }
    }
    let closing = tokio::spawn({
        let one = devices[1].clone();
        async move { one.close().await }
    });
    let mut idle = 0;
    while heard[0].left.is_empty() || heard[2].left.is_empty() || idle < 100 {
        for port in &mut far {
            port.advance(16, &mut theirs);
        }
        for context in [0, 2] {
            near[context].advance(16, &mut heard[context]);
            let all = [101, 0, 0][context];
            assert!(heard[context].left.is_empty() || heard[context].packets == all, "it was sent more");
        }
        idle = if heard[0].left.is_empty() { 0 } else { idle + 1 };
        tokio::task::yield_now().await;
    }
    assert_eq!([&heard[0].left, &heard[2].left], [&[(Rank(1), 0)], &[(Rank(1), 0)]], "each is told once");
    assert_eq!(told.lock().expect("no panic").len(), 0, "the second one has not come to the end");
    while !has_left(&told, Rank(1)) {
        for port in &mut far {
            port.advance(16, &mut theirs);
        }
        assert!(heard[1].left.is_empty());
        near[1].advance(16, &mut heard[1]);
        tokio::task::yield_now().await;
    }
    assert_eq!(heard[1].packets, 101, "it was sent more");
    closing.await.expect("no panic");
    devices[0].abort();
}

/// The next connection, while others have their turn.
async fn whoever_comes(listener: &TcpListener) -> TcpStream {
    listener.set_nonblocking(true).expect("a socket can be asked");
    loop {
        match listener.accept() {
            Ok((stream, _)) => return stream,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        tokio::task::yield_now().await;
    }
}

/// Takes a handshake up to its verdict, as a rank does that is stopped then.
async fn without_verdict(listener: &TcpListener, me: &TcpConfig) -> tokio::net::TcpStream {
    let stream = whoever_comes(listener).await;
    stream.set_nonblocking(true).expect("a socket of Tokio's");
    let mut stream = tokio::net::TcpStream::from_std(stream).expect("there is a runtime");
    let (mut hello, mut finish) = ([0; HELLO_LEN], [0; FINISH_LEN]);
    stream.read_exact(&mut hello).await.expect("a hello");
    let (_, responder, answer) = respond(&Identity::new(me), &hello).expect("the same key");
    stream.write_all(&answer).await.expect("a small write");
    stream.read_exact(&mut finish).await.expect("a proof");
    responder.finished(&finish).expect("it is the one who began");
    stream
}

/// Of two that connect to each other at once, the one whose attempts have more weight cannot reach the other: that one's are accepted.
#[tokio::test]
async fn who_cannot_reach_a_rank_is_reached_by_it() {
    let _watchdog = Watchdog::start("one way", Duration::from_secs(60), || "both wait".to_owned());
    let nobody = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let (wrong, right) = (Arc::new(AddressBook::new(2)), Arc::new(AddressBook::new(2)));
    let make = |rank, book: &Arc<AddressBook>| {
        let config = config(Rank(rank), SHAPE, Mode::HandshakeOnly, Limits::default());
        Arc::new(TcpDevice::new(config, book.clone()).expect("a free port"))
    };
    let (zero, one) = (make(0, &wrong), make(1, &right));
    wrong.set(Rank(1), PeerAddress { address: nobody.local_addr().expect("it has one"), incarnation: 1 });
    right.set(Rank(0), PeerAddress { address: zero.address(), incarnation: 1 });
    let mut ports = [&zero, &one].map(|device| device.port(ContextId(0)).expect("its own"));
    for device in [&zero, &one] {
        device.open(Arc::new(|_, event| panic!("{event:?}"))).await.expect("the device opens");
    }
    send(&mut *ports[0], Rank(1), ContextId(0));
    let _silence = whoever_comes(&nobody).await;
    send(&mut *ports[1], Rank(0), ContextId(0));
    let mut seen = [Counted::default(), Counted::default()];
    while seen[0].0 == 0 || seen[1].0 == 0 {
        for (port, seen) in ports.iter_mut().zip(&mut seen) {
            port.advance(16, seen);
        }
        tokio::task::yield_now().await;
    }
    zero.abort();
    one.abort();
}

/// Rank 1 comes again, as its second incarnation: rank 0 was told so, and no context of it has taken note. Attempts to connect may take
/// so long.
async fn again(zero: &TcpDevice, connect: Duration) -> (Arc<TcpDevice>, Box<dyn Port>, Told) {
    let book = Arc::new(AddressBook::new(2));
    book.set(Rank(0), PeerAddress { address: zero.address(), incarnation: 1 });
    let shape = JobShape { ranks: 2, clients: 1, contexts: 1 };
    let mut config = config(Rank(1), shape, Mode::HandshakeOnly, Limits::default());
    (config.incarnation, config.times.connect, config.times.linger) = (2, connect, LINGER);
    let again = Arc::new(TcpDevice::new(config, book).expect("a free port"));
    let port = again.port(ContextId(0)).expect("its own");
    let told = Told::default();
    let heard = told.clone();
    let news = move |peer, event| heard.lock().expect("no panic").push((Rank(1), peer, event));
    again.open(Arc::new(news)).await.expect("there is a runtime");
    zero.restarted(Rank(1), PeerAddress { address: again.address(), incarnation: 2 });
    (again, port, told)
}

/// A rank that was started again finds a context of another that nobody moves, for longer than it would look for a rank: it waits for
/// it, as for one that is stopped.
#[tokio::test]
async fn a_context_that_nobody_moves_is_not_lost_for_who_comes_again() {
    let _watchdog =
        Watchdog::start("an unmoved context", Duration::from_secs(60), || "it is lost".to_owned());
    let (devices, [mut near, far], told) = by_hand(1).await;
    drop(far);
    devices[1].abort();
    let connect = Duration::from_millis(400);
    let (again, mut far, lost) = again(&devices[0], connect).await;
    send(&mut *far, Rank(0), ContextId(0));
    let (mut seen, mut theirs) = (Counted::default(), Counted::default());
    let until = tokio::time::Instant::now() + 4 * connect;
    while tokio::time::Instant::now() < until {
        far.advance(16, &mut theirs);
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert_eq!(*lost.lock().expect("no panic"), []);
    let is_up = |(rank, _, event): &(Rank, Rank, PeerEvent)| {
        *rank == Rank(1) || matches!(event, PeerEvent::Up { incarnation: 2 })
    };
    assert!(told.lock().expect("no panic").iter().all(is_up));
    near[0].peer_up(Rank(1), 2);
    while seen.0 == 0 {
        near[0].advance(16, &mut seen);
        far.advance(16, &mut theirs);
        tokio::task::yield_now().await;
    }
    devices[0].abort();
    again.abort();
}

/// And if it leaves it gives that context up in the end: nobody may ever move it.
#[tokio::test]
async fn who_leaves_waits_only_so_long_for_a_context_that_nobody_moves() {
    let _watchdog = Watchdog::start("an unmoved context", Duration::from_secs(60), || "it waits".to_owned());
    let (devices, [near, far], _) = by_hand(1).await;
    drop(far);
    devices[1].abort();
    let (again, mut far, _) = again(&devices[0], Duration::from_millis(300)).await;
    send(&mut *far, Rank(0), ContextId(0));
    let closing = tokio::spawn({
        let again = again.clone();
        async move { again.close().await }
    });
    let mut theirs = Counted::default();
    while !closing.is_finished() {
        far.advance(16, &mut theirs);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(near);
    devices[0].abort();
}

/// A rank leaves whose second context still connects with a peer that has something for its first one meanwhile: what it has sent
/// arrives before it is told to have left.
#[tokio::test]
async fn what_a_leaving_rank_has_sent_arrives_though_its_peer_connects_meanwhile() {
    let _watchdog = Watchdog::start("a leaving rank", Duration::from_secs(60), || "it is lost".to_owned());
    let nobody = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let (wrong, right) = (Arc::new(AddressBook::new(2)), Arc::new(AddressBook::new(2)));
    let make = |rank, book: &Arc<AddressBook>| {
        let config = config(Rank(rank), SHAPE, Mode::HandshakeOnly, Limits::default());
        Arc::new(TcpDevice::new(config, book.clone()).expect("a free port"))
    };
    let (zero, one) = (make(0, &right), make(1, &wrong));
    wrong.set(Rank(0), PeerAddress { address: nobody.local_addr().expect("it has one"), incarnation: 1 });
    right.set(Rank(1), PeerAddress { address: one.address(), incarnation: 1 });
    let ports = |device: &TcpDevice| [0, 1].map(|context| device.port(ContextId(context)).expect("its own"));
    let (mut near, mut far) = (ports(&zero), ports(&one));
    let told = Told::default();
    let heard = told.clone();
    let news = move |peer, event| heard.lock().expect("no panic").push((Rank(0), peer, event));
    zero.open(Arc::new(news)).await.expect("the device opens");
    one.open(Arc::new(|_, _| {})).await.expect("the device opens");
    send(&mut *far[1], Rank(0), ContextId(0));
    let silence = whoever_comes(&nobody).await;
    let closing = tokio::spawn({
        let one = one.clone();
        async move { one.close().await }
    });
    let (mut seen, mut theirs) = (Counted::default(), Counted::default());
    let mut turn = |near: &mut [Box<dyn Port>; 2], far: &mut [Box<dyn Port>; 2]| {
        for (near, far) in near.iter_mut().zip(far) {
            near.advance(16, &mut seen);
            far.advance(16, &mut theirs);
        }
        seen.0
    };
    for _ in 0..10 {
        turn(&mut near, &mut far);
        tokio::task::yield_now().await;
    }
    send(&mut *near[1], Rank(1), ContextId(0));
    let until = tokio::time::Instant::now() + Duration::from_millis(100);
    while tokio::time::Instant::now() < until {
        turn(&mut near, &mut far);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(told.lock().expect("no panic").len(), 0, "it has yet to say something");
    wrong.set(Rank(0), PeerAddress { address: zero.address(), incarnation: 1 });
    drop(silence);
    while !has_left(&told, Rank(1)) {
        let seen = turn(&mut near, &mut far);
        assert!(seen == 1 || !has_left(&told, Rank(1)), "what it has sent is lost");
        tokio::task::yield_now().await;
    }
    while !closing.is_finished() {
        turn(&mut near, &mut far);
        tokio::task::yield_now().await;
    }
    closing.await.expect("no panic");
    assert_eq!(turn(&mut near, &mut far), 1);
    zero.abort();
}

/// What one context has flushed stays open while another one still connects with that rank; meanwhile it sleeps.
#[tokio::test]
async fn a_port_that_waits_for_another_ones_connection_sleeps() {
    let _watchdog = Watchdog::start("a closing port", Duration::from_secs(60), || "it is polled".to_owned());
    // Where rank 0 looks for rank 1: somebody listens who does not come to a verdict. So rank 0 may have been accepted in its second
    // context, and has rank 1, whose attempts are of less weight, go on as well.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let (wrong, right) = (Arc::new(AddressBook::new(2)), Arc::new(AddressBook::new(2)));
    let make = |rank, book: &Arc<AddressBook>| {
        let mut config = config(Rank(rank), SHAPE, Mode::HandshakeOnly, Limits::default());
        config.times.linger = Duration::from_secs(600);
        Arc::new(TcpDevice::new(config, book.clone()).expect("a free port"))
    };
    let (zero, one) = (make(0, &wrong), make(1, &right));
    wrong.set(Rank(1), PeerAddress { address: silent.local_addr().expect("it has one"), incarnation: 1 });
    right.set(Rank(0), PeerAddress { address: zero.address(), incarnation: 1 });
    let ports = |device: &TcpDevice| [0, 1].map(|context| device.port(ContextId(context)).expect("its own"));
    let ([mut far, mut far_second], [mut near, mut near_second]) = (ports(&zero), ports(&one));
    for device in [&zero, &one] {
        device.open(Arc::new(|_, _| {})).await.expect("the device opens");
    }
    send(&mut *far_second, Rank(1), ContextId(1));
    let _undecided =
        without_verdict(&silent, &config(Rank(1), SHAPE, Mode::HandshakeOnly, Limits::default())).await;
    send(&mut *near_second, Rank(0), ContextId(1));
    send(&mut *near, Rank(0), ContextId(0));
    let (mut far_seen, mut near_seen) = (Counted::default(), Counted::default());
    while far_seen.0 == 0 {
        near.advance(16, &mut near_seen);
        far.advance(16, &mut far_seen);
        tokio::task::yield_now().await;
    }
    let closing = tokio::spawn({
        let one = one.clone();
        async move { one.close().await }
    });
    for _ in 0..10 {
        // It has asked the ports to close then.
        tokio::task::yield_now().await;
    }
    let mut slept = 0;
    while slept < 3 {
        near.advance(16, &mut near_seen);
        if near.arm(false) {
            slept += 1;
            near.disarm();
        }
        tokio::task::yield_now().await;
    }
    assert!(!closing.is_finished(), "what another context has sent is not there yet");
    one.abort();
    zero.abort();
    closing.abort();
}

/// A connection that is still on its way to its port when the engine gives the peer up is ended: the peer hears of it.
#[tokio::test]
async fn what_arrives_for_a_peer_that_was_given_up_is_ended() {
    let _watchdog =
        Watchdog::start("a given up peer", Duration::from_secs(60), || "nobody is told".to_owned());
    let shape = JobShape { ranks: 2, clients: 1, contexts: 1 };
    let book = Arc::new(AddressBook::new(2));
    let lost = Arc::new(Mutex::new(Vec::new()));
    let mut ports = Vec::new();
    let mut devices = Vec::new();
    for rank in [Rank(0), Rank(1)] {
        let config = config(rank, shape, Mode::HandshakeOnly, Limits::default());
        let device = TcpDevice::new(config, book.clone()).expect("a free port");
        ports.push(device.port(ContextId(0)).expect("its only one"));
        let told = lost.clone();
        let news = move |peer, event| told.lock().expect("no panic").push((rank, peer, event));
        device.open(Arc::new(news)).await.expect("there is a runtime");
        devices.push(device);
    }
    send(&mut *ports[0], Rank(1), ContextId(0));
    // Both sides have settled it, and the second port has not yet looked at its door.
    while !devices[1].has_met(Rank(0)) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    ports[1].peer_down(Rank(0));
    let sink = &mut Counted::default();
    while lost.lock().expect("no panic").is_empty() {
        for port in &mut ports {
            port.advance(100, sink);
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let lost = lost.lock().expect("no panic").clone();
    // What it had sent was not read: the kernel may say so by a reset.
    let causes = [LossCause::Disconnected, LossCause::Broken(ErrorKind::ConnectionReset)];
    let is_told = causes.into_iter().any(|cause| {
        let (fault, cause) = (Fault::PeerLost(Rank(1)), Some(cause));
        lost == [(Rank(0), Rank(1), PeerEvent::Down { fault, incarnation: 1, cause })]
    });
    assert!(is_told, "{lost:?}");
    assert_eq!(sink.0, 0);
}

/// What waits for a rank that is gone, of which nobody has told, keeps nobody who leaves for as long as it may linger.
#[tokio::test]
async fn who_leaves_does_not_linger_for_a_rank_whose_port_is_closed() {
    let _watchdog = Watchdog::start("leaving", Duration::from_secs(60), || "it lingers".to_owned());
    // Bound and never listened at: nobody else of this machine comes to listen there meanwhile.
    let kept = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
    kept.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("a free port");
    let gone = kept.local_addr().expect("it is bound").as_socket().expect("of this kind");
    let book = Arc::new(AddressBook::new(2));
    book.set(Rank(1), PeerAddress { address: gone, incarnation: 1 });
    let mut config = config(Rank(0), SHAPE, Mode::HandshakeOnly, Limits::default());
    config.times.linger = Duration::from_secs(600);
    let zero = Member::open(config, book, &Log::default()).await;
    zero.send(1, LOG, &[], b"nobody hears it", false).await.expect("nobody has told of its end");
    zero.client.close().await;
}

/// Records that one look at the socket has fetched and not opened are opened although others connect meanwhile, with whom
/// the port begins to look only where it is told to.
#[tokio::test]
async fn encrypted_records_that_were_fetched_are_not_forgotten_when_others_connect() {
    const BURST: usize = 20;
    let _watchdog = Watchdog::start("fetched records", Duration::from_secs(60), || "it is polled".to_owned());
    let shape = JobShape { ranks: 4, clients: 1, contexts: 1 };
    let book = Arc::new(AddressBook::new(4));
    let devices: Vec<Arc<TcpDevice>> = (0..4)
        .map(|rank| {
            let config = config(Rank(rank), shape, Mode::Encrypted, Limits::default());
            let device = Arc::new(TcpDevice::new(config, book.clone()).expect("a free port"));
            book.set(Rank(rank), PeerAddress { address: device.address(), incarnation: 1 });
            device
        })
        .collect();
    let mut ports: Vec<_> =
        devices.iter().map(|device| device.port(ContextId(0)).expect("its own")).collect();
    for device in &devices {
        device.open(Arc::new(|_, _| {})).await.expect("the device opens");
    }
    let (zero, others) = ports.split_first_mut().expect("four");
    let (mut seen, mut theirs) = (Counted::default(), Counted::default());
    send(&mut *others[0], Rank(0), ContextId(0));
    while seen.0 == 0 {
        others[0].advance(16, &mut theirs);
        zero.advance(16, &mut seen);
        tokio::task::yield_now().await;
    }
    // Until it finds nothing more.
    while zero.advance(16, &mut seen) > 0 {}
    for _ in 0..BURST {
        // Each is a record of its own.
        send(&mut *others[0], Rank(0), ContextId(0));
        others[0].advance(16, &mut theirs);
    }
    // All of it has arrived, so that one look fetches it.
    tokio::time::sleep(Duration::from_millis(100)).await;
    zero.advance(1000, &mut seen);
    assert!(seen.0 > 1, "nothing has come");
    assert!(seen.0 < 1 + BURST, "one look has opened all: nothing is left to be forgotten");
    for other in &mut others[1..] {
        send(&mut **other, Rank(0), ContextId(0));
    }
    for _ in 0..100 {
        for other in &mut *others {
            other.advance(16, &mut theirs);
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let end = std::time::Instant::now() + Duration::from_secs(30);
    while seen.0 < 1 + BURST + 2 && std::time::Instant::now() < end {
        zero.advance(1000, &mut seen);
        for other in &mut *others {
            other.advance(16, &mut theirs);
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert_eq!(seen.0, 1 + BURST + 2, "what was fetched is forgotten");
    devices.iter().for_each(|device| device.abort());
}

/// A port whose last look has moved nothing sleeps, whatever the system can tell, and wakes up for what comes then.
#[tokio::test]
async fn a_port_with_idle_connections_sleeps_and_is_woken() {
    let _watchdog = Watchdog::start("an idle port", Duration::from_secs(60), || "it is polled".to_owned());
    let (devices, [mut near, mut far], _told) = by_hand(1).await;
    let (mut seen, mut theirs) = (Counted::default(), Counted::default());
    for round in 1..4 {
        send(&mut *near[0], Rank(1), ContextId(0));
        while seen.0 < round {
            near[0].advance(16, &mut theirs);
            let idle = far[0].advance(16, &mut seen) == 0;
            if idle && far[0].arm(false) {
                let bell = devices[1].doorbell(ContextId(0));
                let mut ring = std::pin::pin!(std::future::poll_fn(|cx| bell.poll_ring(cx)));
                // Nobody else moves the other side, which may be connected only now.
                loop {
                    match tokio::time::timeout(Duration::from_millis(1), ring.as_mut()).await {
                        Ok(rung) => break rung.expect("there is a runtime"),
                        Err(_) => drop(near[0].advance(16, &mut theirs)),
                    }
                }
                far[0].disarm();
            }
            tokio::task::yield_now().await;
        }
        while far[0].advance(16, &mut seen) > 0 {}
        assert!(far[0].arm(false), "it goes on looking");
        far[0].disarm();
    }
    devices.iter().for_each(|device| device.abort());
}

/// What is refused because more waits for a connection than fits is no reason to look again at once.
#[tokio::test]
async fn a_port_whose_messages_wait_for_their_connection_sleeps() {
    let _watchdog = Watchdog::start("a waiting port", Duration::from_secs(60), || "it is polled".to_owned());
    // Nobody knows where rank 1 is.
    let config = config(Rank(0), SHAPE, Mode::HandshakeOnly, Limits::default());
    let device = TcpDevice::new(config, Arc::new(AddressBook::new(2))).expect("a free port");
    let mut port = device.port(ContextId(0)).expect("its own");
    device.open(Arc::new(|_, _| {})).await.expect("the device opens");
    let payload = vec![1; 60_000];
    let message = Descriptor {
        op: Op::Send,
        source_kind: SourceKind::Borrowed,
        rank: Rank(1),
        protocol: ProtocolId(20),
        len: payload.len() as u64,
        ..Descriptor::default()
    };
    let table = SourceTable::default();
    let sources = Sources { borrowed: &payload, ..Sources::of(&table) };
    let mut refused = 0;
    let mut seen = Counted::default();
    for _ in 0..1000 {
        refused += usize::from(port.inject(&[message], &sources).stop == Stop::Full);
        port.advance(16, &mut seen);
        // Whoever drives it asks again in each round.
        if refused > 3 {
            break;
        }
    }
    assert!(refused > 3, "everything fits");
    assert!(port.arm(true), "it goes on looking");
    device.abort();
}

/// Whose answers never all fit into the kernel's buffers, because the others go on asking, leaves in order all the same.
#[tokio::test]
async fn a_leave_is_told_while_others_go_on_getting() {
    let _watchdog = Watchdog::start("a leave amid gets", Duration::from_secs(60), || "it hangs".to_owned());
    let limits = Limits { socket_buffers: Some(16 << 10), ..Limits::default() };
    let (members, _log) = job(2, Mode::HandshakeOnly, limits).await;
    let [zero, one] = &members[..] else { unreachable!("there are two") };
    let gets = || async {
        loop {
            if let Err(fault) = one.access(zero, 0, 0, Access::Get(MEMORY)).await {
                return fault;
            }
        }
    };
    let leave = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        zero.client.close().await;
    };
    let (a, b, c, d, ()) = tokio::join!(gets(), gets(), gets(), gets(), leave);
    assert_eq!([a, b, c, d], [Fault::PeerClosed(Rank(0)); 4]);
    assert_eq!(one.told(1).await, [Fault::PeerClosed(Rank(0))]);
}
