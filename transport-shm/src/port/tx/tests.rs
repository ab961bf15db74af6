//! Whether a port goes to sleep on what could go on.

use super::*;
use crate::lane::{Consumer, Peek, return_grant};
use crate::link::tests::{end, link_to_the_dead};
use crate::link::{LIFE_MASK, grant_number};
use crate::port::ShmPort;
use posthaste_core::{ClientId, ContextId, MAX_INFO, Port};

const NAME: ProtocolId = ProtocolId(7);

/// Rank 0's port, in a job of four ranks, whose lanes to the others are open.
fn port() -> ShmPort {
    let link = Arc::new(link_to_the_dead(4));
    let home = ClientLink::new(link, ClientId(0), Endpoint::new(Rank(0), ContextId(0)));
    let mut port = ShmPort::new(Arc::new(home)).expect("a port");
    for target in 1..4 {
        port.tx.lane(target).expect("a lane");
    }
    port
}

/// The other end of a lane.
struct Reader {
    consumer: Consumer<SharedWords>,
    control: SharedWords,
}

impl Reader {
    fn of(port: &ShmPort, target: usize) -> Reader {
        let home = &port.tx.home;
        let (control, ring) = home.lane(home.me, home.endpoint(target));
        Reader { consumer: Consumer::new(control, ring), control }
    }

    /// Takes the next record; the second word of its body, if it names a page.
    fn pull(&mut self) -> Option<u64> {
        let Peek::Record(header) = self.consumer.peek() else { return None };
        let mut info = [0; MAX_INFO];
        let word = |ring: &SharedWords, at| ring.load(at + 1, posthaste_core::sync::Ordering::Relaxed);
        let (_, word) = self.consumer.record(header, &mut info, word);
        self.consumer.consume(header, LightFence::Full);
        Some(word)
    }

    /// Takes the next record and gives its page back.
    fn give_back(&mut self) {
        let word = self.pull().expect("a record");
        return_grant(&self.control, grant_number(word), word & LIFE_MASK, LightFence::Full);
    }
}

const SMALL: usize = 4 << 10;
const LARGE: usize = 256 << 10;

fn send(port: &mut ShmPort, target: usize, len: usize) -> bool {
    port.tx.plain(target, NAME, 0, &vec![1; len])
}

/// Lends all the pages that there are.
fn lend_all(port: &mut ShmPort) -> Vec<Loan> {
    let lens = [LARGE, SMALL];
    lens.into_iter().flat_map(|len| std::iter::from_fn(|| port.tx.loan(len)).collect::<Vec<_>>()).collect()
}

#[test]
fn a_ring_for_nothing_does_not_hide_that_a_reader_has_moved() {
    let mut port = port();
    let mut reader = Reader::of(&port, 1);
    while port.tx.word(1, NAME, 0, 1) {}
    assert!(port.arm(true), "nothing can go on");
    // Rung for nothing. The reader looks at whether to ring just before the next sleep is shown.
    port.disarm();
    while reader.pull().is_some() {}
    assert!(!port.arm(true), "it sleeps beside an empty ring");
    assert!(port.arm(true), "said once, or whoever has nothing more to send would never sleep");
    assert!(port.tx.word(1, NAME, 0, 1));
}

#[test]
fn a_page_that_comes_back_between_two_tries_is_not_forgotten() {
    let mut port = port();
    let mut returning = Reader::of(&port, 2);
    assert!(send(&mut port, 2, SMALL));
    let _lent = lend_all(&mut port);
    assert!(!send(&mut port, 1, SMALL), "no page");
    returning.give_back();
    // It is looked for, and found, for another message, which needs a larger one.
    assert!(!send(&mut port, 3, LARGE), "no page that is large enough");
    assert!(!port.arm(true), "it sleeps beside a free page");
    assert!(send(&mut port, 1, SMALL));
    assert!(!send(&mut port, 3, LARGE) && port.arm(true), "nothing more came back");
}

#[test]
fn what_a_reader_had_read_before_there_was_no_page_is_no_reason_to_try_again() {
    let mut port = port();
    let mut reader = Reader::of(&port, 1);
    for _ in 0..20 {
        assert!(send(&mut port, 1, 8));
    }
    // It has said so, of that many.
    while reader.pull().is_some() {}
    let _lent = lend_all(&mut port);
    assert!(!send(&mut port, 1, SMALL), "no page");
    // It may be that what it has read makes a page come back, which is seen by looking once.
    if !port.arm(true) {
        assert!(!send(&mut port, 1, SMALL), "no page");
        assert!(port.arm(true), "it never sleeps");
    }
    port.disarm();
    assert!(!send(&mut port, 1, SMALL) && port.arm(true));
}

#[test]
fn the_page_of_a_multicast_may_be_free_when_that_ends() {
    let mut port = port();
    let mut returning = Reader::of(&port, 1);
    port.multicast(true);
    assert!(send(&mut port, 1, SMALL));
    let _lent = lend_all(&mut port);
    returning.give_back();
    // Another message than that of the multicast.
    assert!(!send(&mut port, 1, SMALL - 8), "the multicast has its page still");
    port.multicast(false);
    assert!(!port.arm(true), "it sleeps beside a free page");
    assert!(send(&mut port, 1, SMALL));
}

#[test]
fn what_was_with_the_dead_is_there_for_those_who_wait() {
    let mut port = port();
    assert!(send(&mut port, 3, LARGE));
    let _lent = lend_all(&mut port);
    assert!(!send(&mut port, 1, LARGE) && port.arm(true), "nothing can go on");
    port.disarm();
    end(&port.tx.home.link, Rank(3));
    port.peer_down(Rank(3));
    assert!(!port.arm(true), "it sleeps beside free pages");
    assert!(send(&mut port, 1, LARGE));
}

#[test]
fn whoever_left_has_closed_its_lanes_and_whoever_died_has_not() {
    let mut port = port();
    let link = port.tx.home.link.clone();
    // It has left the job, and ended; a client of it has left and its process lives; it has ended without a word.
    link.arena.leave(Rank(1));
    end(&link, Rank(1));
    link.arena.client_leaves(Rank(2), ClientId(0));
    end(&link, Rank(3));
    (1..4).for_each(|rank| port.peer_down(Rank(rank)));
    let ends = [Fault::PeerClosed(Rank(1)), Fault::PeerClosed(Rank(2)), Fault::PeerLost(Rank(3))];
    for (target, end) in (1..4).zip(ends) {
        assert_eq!(port.tx.lane(target).map(|_| ()), Err(end));
    }
}
