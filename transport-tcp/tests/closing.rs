//! A port of a device that closes, moved by hand.

mod support;

use posthaste_core::descriptor::Op;
use posthaste_core::device::{Inject, Packet, Sink, SourceTable, Sources, Stop, Verdict};
use posthaste_core::slot::{Outcome, Ticket};
use posthaste_core::{ContextId, Descriptor, Device, JobShape, Port, ProtocolId, Rank};
use posthaste_tcp::{AddressBook, Limits, Mode, PeerAddress, TcpDevice};
use posthaste_testkit::watchdog::Watchdog;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;
use support::config;

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
    let sources = Sources { info: &[], borrowed: &[], table: &table };
    assert_eq!(port.inject(&[message], &sources).stop, Stop::Done);
}

/// What one context has flushed stays open while another one still connects with that rank; meanwhile it sleeps.
#[cfg_attr(feature = "portable", ignore = "a port is never asleep there")]
#[tokio::test]
async fn a_port_that_waits_for_another_ones_connection_sleeps() {
    let _watchdog = Watchdog::start("a closing port", Duration::from_secs(60), || "it is polled".to_owned());
    // Where rank 0 looks for rank 1: somebody listens and does not answer. So it goes on trying in its second context, and
    // has rank 1, whose attempts are of less weight, go on as well.
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
