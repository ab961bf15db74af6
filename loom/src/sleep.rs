//! Falling asleep and being woken: the asymmetric Dekker handshake of an inbox with those who send to it, and of a
//! writer that waits for room with those who read from it.

use crate::lane::{pull, push};
use crate::memory::{Memory, block, lane};
use crate::{bounded, model};
use loom::sync::atomic::fence;
use loom::thread;
use posthaste_core::memory::Words;
use posthaste_core::sync::Ordering;
use posthaste_shm::inbox::Inbox;
use posthaste_shm::lane::{Consumer, LightFence, Producer, return_grant};
use posthaste_shm::ready::ReadySet;
use posthaste_shm::room::Room;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

// The asymmetric one, which loom gets to see as a fence.
const LIGHT: LightFence = LightFence::Compiler;

/// More preemptions than a model of two threads has.
const ALL: usize = 100;

/// The bell: nothing that the models' order depends on, so it is not loom's.
#[derive(Clone, Default)]
struct Bell(Arc<AtomicUsize>);

impl Bell {
    fn ring(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
    fn rings(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

/// The sleeper's fence.
fn heavy() {
    fence(Ordering::SeqCst);
}

/// A sender's part after its record, as in the port.
fn notify(producer: &Producer<Memory>, ready: &ReadySet<Memory>, source: usize, bell: &Bell) {
    if producer.reader_wants_notice(LIGHT) {
        ready.announce(source, || bell.ring());
    }
}

type Lanes = Vec<(Memory, Memory)>;

/// Takes up announced lanes and drains all polled ones.
fn advance(inbox: &mut Inbox<Memory, ()>, lanes: &Lanes) -> usize {
    inbox.collect(|source| (lanes[source].0.clone(), lanes[source].1.clone(), ()));
    let mut count = 0;
    for source in inbox.polled().to_vec() {
        let lane = inbox.lane(source).expect("polled");
        while pull(&mut lane.consumer).is_some() {
            count += 1;
        }
    }
    count
}

/// The end of a model: whoever sleeps was rung if there was something for him, and finds all of it.
fn settle(slept: bool, bell: &Bell, inbox: &mut Inbox<Memory, ()>, lanes: &Lanes, left: usize) {
    if slept {
        assert!(left == 0 || bell.rings() > 0, "lost wake-up");
        inbox.disarm();
    }
    assert_eq!(advance(inbox, lanes), left, "records that nobody looks for");
}

/// Writers send one record each to an inbox that looks `looks` times and then tries to fall asleep. With `polled`, the
/// reader knows and polls the lanes already; otherwise it has to find them.
fn wake_up(writers: usize, polled: bool, looks: usize, preemptions: usize, fence: fn()) {
    wake_up_of(writers, polled, looks, preemptions, Sleeper::Fences(fence));
}

/// How a reader falls asleep.
#[derive(Clone, Copy)]
enum Sleeper {
    /// Behind this fence.
    Fences(fn()),
    /// Behind none at first, and behind this one later if nobody has rung.
    Settles(fn()),
    /// Behind none that senders are covered by; it rings its own bell after a while.
    RingsItself,
}

impl Sleeper {
    fn sleep(self, inbox: &mut Inbox<Memory, ()>, bell: &Bell, mut busy: impl FnMut() -> bool) -> bool {
        match self {
            Sleeper::Fences(fence) => inbox.arm(fence, busy),
            Sleeper::Settles(fence) => {
                inbox.arm_unsettled(|| {}, &mut busy) && (bell.rings() > 0 || inbox.settle(fence, busy))
            }
            Sleeper::RingsItself => {
                inbox.keep_all();
                inbox.arm(|| {}, busy)
            }
        }
    }
}

fn wake_up_of(writers: usize, polled: bool, looks: usize, preemptions: usize, sleeper: Sleeper) {
    bounded(preemptions, move || {
        let block = block();
        let lanes: Lanes = (0..writers).map(|_| lane(8)).collect();
        let bell = Bell::default();
        let mut inbox = Inbox::new(ReadySet::new(block.clone(), writers), writers);
        let mut opened: Vec<_> = lanes.iter().map(|_| None).collect();
        if polled {
            for (source, (control, ring)) in lanes.iter().enumerate() {
                let mut producer = Producer::open(control.clone(), ring.clone());
                assert!(push(&mut producer, 1));
                notify(&producer, &ReadySet::new(block.clone(), writers), source, &bell);
                opened[source] = Some(producer);
            }
            assert_eq!(advance(&mut inbox, &lanes), writers);
            assert_eq!(bell.rings(), 0, "an endpoint that is awake is not rung");
        }
        let threads: Vec<_> = opened
            .into_iter()
            .enumerate()
            .map(|(source, producer)| {
                let (block, bell) = (block.clone(), bell.clone());
                let (control, ring) = lanes[source].clone();
                thread::spawn(move || {
                    let mut producer = producer.unwrap_or_else(|| Producer::open(control, ring));
                    assert!(push(&mut producer, 2));
                    notify(&producer, &ReadySet::new(block, writers), source, &bell);
                })
            })
            .collect();
        let mut found = 0;
        for _ in 0..looks {
            found += advance(&mut inbox, &lanes);
        }
        let slept = sleeper.sleep(&mut inbox, &bell, || false);
        for thread in threads {
            thread.join().expect("no panic");
        }
        assert!(bell.rings() <= writers, "each sender rings once for a sleep");
        if let Sleeper::RingsItself = sleeper {
            bell.ring();
        }
        settle(slept, &bell, &mut inbox, &lanes, writers - found);
    });
}

/// A reader whose heavy fence is dear falls asleep without, and makes it when the sleep has lasted: it is woken, or it finds
/// what it was not told of then.
#[test]
fn a_sleep_that_is_settled_later_loses_nothing() {
    for (polled, looks) in [(true, 0), (true, 1), (false, 0), (false, 1)] {
        wake_up_of(1, polled, looks, ALL, Sleeper::Settles(heavy));
    }
    wake_up_of(2, true, 0, 3, Sleeper::Settles(heavy));
}

/// The model above can fail.
#[test]
#[should_panic(expected = "lost wake-up")]
fn a_sleep_that_is_never_settled_loses_a_wake_up() {
    wake_up_of(1, true, 0, ALL, Sleeper::Settles(|| {}));
}

/// Others look while a sleep is not settled, as futures do: what they find ends it, as in the engine, and another one begins.
/// What they take away tells no sender that its lane is polled when it is not.
#[test]
fn looks_during_a_sleep_that_is_not_settled_lose_nothing() {
    bounded(4, || {
        let block = block().in_order();
        let lanes = vec![lane(16)];
        let bell = Bell::default();
        let mut inbox = Inbox::new(ReadySet::new(block.clone(), 1), 1);
        let mut producer = Producer::open(lanes[0].0.clone(), lanes[0].1.clone());
        let ready = ReadySet::new(block, 1);
        assert!(push(&mut producer, 1));
        notify(&producer, &ready, 0, &bell);
        assert_eq!(advance(&mut inbox, &lanes), 1);
        assert!(inbox.arm_unsettled(|| {}, || false));
        let writer = {
            let bell = bell.clone();
            thread::spawn(move || {
                assert!(push(&mut producer, 2));
                notify(&producer, &ready, 0, &bell);
                (producer, ready)
            })
        };
        let (mut found, mut armed) = (0, true);
        for _ in 0..2 {
            let events = advance(&mut inbox, &lanes);
            found += events;
            if events > 0 {
                inbox.disarm();
                armed = false;
            }
            armed = armed || inbox.arm_unsettled(|| {}, || false);
        }
        let slept = armed && inbox.settle(heavy, || false);
        let (mut producer, ready) = writer.join().expect("no panic");
        let rings = bell.rings();
        if slept && found < 1 {
            assert!(rings > 0, "lost wake-up");
        }
        // All is over; who sleeps and was not rung is rung for the next record.
        assert!(push(&mut producer, 3));
        notify(&producer, &ready, 0, &bell);
        assert!(!slept || bell.rings() > 0, "lost wake-up");
        inbox.disarm();
        assert_eq!(found + advance(&mut inbox, &lanes), 2, "records that nobody looks for");
    });
}

/// A reader that is refused the heavy fence, and rings its own bell, finds what it was not told of, whether it polled the lane
/// before or has yet to meet it.
#[test]
fn a_reader_that_rings_itself_finds_all_without_a_heavy_fence() {
    for (polled, looks) in [(true, 0), (true, 1), (false, 0), (false, 1)] {
        wake_up_of(1, polled, looks, ALL, Sleeper::RingsItself);
    }
    wake_up_of(2, true, 0, 3, Sleeper::RingsItself);
}

/// The first message of all: the writer opens the lane, the reader finds it through the ready bitmap, whether the
/// bit comes before or after it arms.
#[test]
fn a_new_lane_is_found_by_a_reader_that_falls_asleep() {
    wake_up(1, false, 0, ALL, heavy);
}

/// The same with a reader that looks before it falls asleep, so that the lane may be found, polled and left again.
#[test]
fn a_new_lane_is_found_and_left_again() {
    wake_up(1, false, 1, ALL, heavy);
}

/// A polled lane: its writer sets no bit until the reader says that it is about to sleep.
#[test]
fn a_polled_lane_wakes_its_reader() {
    wake_up(1, true, 1, ALL, heavy);
}

/// Two senders at once: the reader is woken, by exactly one of them, and finds both records.
#[test]
fn one_of_two_senders_rings() {
    wake_up(2, false, 0, 5, heavy);
}

/// As above, with lanes that are polled.
#[test]
fn one_of_two_polled_senders_rings() {
    wake_up(2, true, 0, 3, heavy);
}

/// The models above can fail: without the heavy fence the wake-up of a polled lane is lost.
#[test]
#[should_panic(expected = "lost wake-up")]
fn without_the_heavy_fence_a_polled_lane_is_lost() {
    wake_up(1, true, 0, ALL, || {});
}

/// As above for a lane that is announced by its bit.
#[test]
#[should_panic(expected = "lost wake-up")]
fn without_the_heavy_fence_a_bit_is_lost() {
    wake_up(1, false, 0, ALL, || {});
}

/// A sleeper that was woken and falls asleep again misses nothing: two records, each of which may come before, between
/// or after its two sleeps.
#[test]
fn a_second_sleep_loses_nothing() {
    bounded(5, || {
        let block = block().in_order();
        let lanes = vec![lane(16)];
        let bell = Bell::default();
        let mut inbox = Inbox::new(ReadySet::new(block.clone(), 1), 1);
        let mut producer = Producer::open(lanes[0].0.clone(), lanes[0].1.clone());
        let writer = {
            let bell = bell.clone();
            thread::spawn(move || {
                let ready = ReadySet::new(block, 1);
                for number in 1..=2 {
                    assert!(push(&mut producer, number));
                    notify(&producer, &ready, 0, &bell);
                }
            })
        };
        let mut found = 0;
        let mut slept = inbox.arm(heavy, || false);
        let mut heard = 0;
        if !slept || bell.rings() > heard {
            heard = bell.rings();
            if slept {
                inbox.disarm();
            }
            found += advance(&mut inbox, &lanes);
            slept = inbox.arm(heavy, || false);
        }
        writer.join().expect("no panic");
        if slept && found < 2 {
            assert!(bell.rings() > heard, "lost wake-up");
        }
        inbox.disarm();
        assert_eq!(found + advance(&mut inbox, &lanes), 2);
    });
}

/// A quiet lane is dropped from the polled ones while its writer sends: the record is seen by the last look, or
/// announced.
#[test]
fn a_demoted_lane_is_announced() {
    demote(heavy);
}

/// And the model of it can fail.
#[test]
#[should_panic(expected = "records that nobody looks for")]
fn without_the_heavy_fence_a_demoted_lane_is_lost() {
    demote(|| {});
}

fn demote(fence: fn()) {
    model(move || {
        let block = block();
        let lanes = vec![lane(8)];
        let bell = Bell::default();
        let mut inbox = Inbox::new(ReadySet::new(block.clone(), 1), 1);
        let mut producer = Producer::open(lanes[0].0.clone(), lanes[0].1.clone());
        assert!(push(&mut producer, 1));
        notify(&producer, &ReadySet::new(block.clone(), 1), 0, &bell);
        assert_eq!(advance(&mut inbox, &lanes), 1);
        inbox.lane(0).expect("found").quiet = u32::MAX;
        let writer = thread::spawn(move || {
            assert!(push(&mut producer, 2));
            notify(&producer, &ReadySet::new(block, 1), 0, &Bell::default());
        });
        inbox.demote(fence);
        writer.join().expect("no panic");
        assert_eq!(advance(&mut inbox, &lanes), 1, "records that nobody looks for");
    });
}

/// What a writer that found no room waits for.
#[derive(Clone, Copy)]
enum Wanted {
    Credit,
    Page,
}

/// A writer falls asleep as its reader gives it room, or a page.
fn wait_for_room(wanted: Wanted, sleeper: Sleeper) {
    wait_for_room_again(wanted, sleeper, 1);
}

/// The same of one that was rung for nothing until its last sleep: it shows each time anew that it waits, and tries nothing in
/// between.
fn wait_for_room_again(wanted: Wanted, sleeper: Sleeper, sleeps: usize) {
    model(move || {
        let (control, ring) = lane(8);
        let block = block();
        let bell = Bell::default();
        let mut producer = Producer::open(control.clone(), ring.clone());
        let mut consumer = Consumer::new(control.clone(), ring);
        assert!(push(&mut producer, 1) && push(&mut producer, 2));
        assert!(!push(&mut producer, 3), "full");
        let mut room = Room::default();
        room.miss(&producer, 0);
        let mut inbox: Inbox<Memory, ()> = Inbox::new(ReadySet::new(block.clone(), 1), 1);
        let reader = {
            let bell = bell.clone();
            thread::spawn(move || {
                let told = match wanted {
                    Wanted::Credit => pull(&mut consumer).expect("sent").1,
                    Wanted::Page => return_grant(&control, 0, 1, LIGHT),
                };
                if told {
                    ReadySet::new(block, 1).ring_if_asleep(|| bell.ring());
                }
                consumer
            })
        };
        // As in the port: shown first, looked at again behind the fence.
        let mut slept = true;
        for again in (0..sleeps).rev() {
            producer.set_waiting(true);
            slept = sleeper.sleep(&mut inbox, &bell, || {
                // A page that has come back counts.
                let returns = match wanted {
                    Wanted::Credit => 0,
                    Wanted::Page => producer.returned(0),
                };
                room.may_go_on(&mut producer, returns)
            });
            if !slept {
                break;
            }
            if again > 0 {
                inbox.disarm();
                producer.set_waiting(false);
            }
        }
        let mut consumer = reader.join().expect("no panic");
        assert!(!slept || bell.rings() == 1, "lost wake-up");
        match wanted {
            Wanted::Credit => {
                assert_eq!(pull(&mut consumer).map(|(number, _)| number), Some(2));
                assert!(push(&mut producer, 3), "room");
            }
            Wanted::Page => assert_eq!(producer.returned(0), 1),
        }
    });
}

/// A full ring: the writer sees the credit, or the reader sees that it waits.
#[test]
fn a_writer_that_waits_for_room_is_woken() {
    wait_for_room(Wanted::Credit, Sleeper::Fences(heavy));
    wait_for_room(Wanted::Credit, Sleeper::Settles(heavy));
}

/// No page: the same, with the return of a grant.
#[test]
fn a_writer_that_waits_for_a_page_is_woken() {
    wait_for_room(Wanted::Page, Sleeper::Fences(heavy));
    wait_for_room(Wanted::Page, Sleeper::Settles(heavy));
}

/// Its reader gives it room while it is rung for nothing, between two sleeps.
#[test]
fn a_writer_that_is_rung_for_nothing_sees_the_room_that_was_made_meanwhile() {
    wait_for_room_again(Wanted::Credit, Sleeper::Fences(heavy), 2);
    wait_for_room_again(Wanted::Page, Sleeper::Fences(heavy), 2);
}

/// The models above can fail.
#[test]
#[should_panic(expected = "lost wake-up")]
fn without_the_heavy_fence_room_is_lost() {
    wait_for_room(Wanted::Credit, Sleeper::Fences(|| {}));
}

/// As above.
#[test]
#[should_panic(expected = "lost wake-up")]
fn without_the_heavy_fence_a_page_is_lost() {
    wait_for_room(Wanted::Page, Sleeper::Fences(|| {}));
}

/// A task waits on memory that a peer writes at once, without a record: the peer sees that it sleeps, or it sees what was
/// written.
fn wait_on_memory(sleeper: Sleeper) {
    model(move || {
        let (word, block) = (lane(8).0, block());
        let bell = Bell::default();
        let mut inbox: Inbox<Memory, ()> = Inbox::new(ReadySet::new(block.clone(), 1), 1);
        let writer = {
            let (word, bell) = (word.clone(), bell.clone());
            thread::spawn(move || {
                word.store(0, 1, Ordering::Release);
                LIGHT.issue();
                ReadySet::new(block, 1).ring_for_memory(|| bell.ring());
            })
        };
        // As in the engine: shown first, looked at again behind the fence.
        inbox.watch(true);
        let slept = sleeper.sleep(&mut inbox, &bell, || false) && word.load(0, Ordering::Acquire) == 0;
        writer.join().expect("no panic");
        assert!(!slept || bell.rings() == 1, "lost wake-up");
        assert_eq!(word.load(0, Ordering::Acquire), 1);
    });
}

/// An atomic operation, or a put with a signal, on a word that is waited on.
#[test]
fn a_writer_of_memory_wakes_who_waits_on_it() {
    wait_on_memory(Sleeper::Fences(heavy));
    wait_on_memory(Sleeper::Settles(heavy));
}

/// And the model of it can fail.
#[test]
#[should_panic(expected = "lost wake-up")]
fn without_the_heavy_fence_a_write_of_memory_is_lost() {
    wait_on_memory(Sleeper::Fences(|| {}));
}

/// Who has rung and is stopped before it says so takes back no promise of a later sleep; and one that is stopped before it rings
/// takes none of this one, so that the next sender rings.
#[test]
fn who_is_late_to_say_that_it_has_rung_takes_no_later_promise() {
    model(|| {
        let (block, bell) = (block().in_order(), Bell::default());
        let own = ReadySet::new(block.clone(), 1);
        own.arm(1);
        let senders: Vec<_> = (0..2)
            .map(|_| {
                let (block, bell) = (block.clone(), bell.clone());
                thread::spawn(move || ReadySet::new(block, 1).ring_if_asleep(|| bell.ring()))
            })
            .collect();
        // Woken by the first of them, or by anything else; and asleep again, with nobody left to ring for it.
        own.disarm();
        let rung_for_the_first = bell.rings();
        own.arm(2);
        senders.into_iter().for_each(|sender| sender.join().expect("no panic"));
        assert!(own.is_armed() || bell.rings() > rung_for_the_first, "a promise was taken without a ring");
    });
}
