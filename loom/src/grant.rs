//! Page grants: a page is written again only after the lease on it has ended, from whichever thread.

use crate::memory::{Memory, lane};
use crate::model;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use posthaste_core::MAX_INFO;
use posthaste_core::memory::Words;
use posthaste_core::sync::Ordering;
use posthaste_shm::grants::{Grants, Slot};
use posthaste_shm::lane::{
    Consumer, Header, KIND_BATCH, KIND_PAGE, LightFence, Peek, Producer, return_grant,
};
use posthaste_shm::pages::{PagePool, Taken};

/// Bytes of a page.
const PAGE: u64 = 4096;

/// One page of the sender's pool; loom fails the model if reads and writes of it are not ordered.
#[derive(Clone)]
struct Page(Arc<UnsafeCell<u64>>);

impl Page {
    fn new() -> Self {
        Page(Arc::new(UnsafeCell::new(0)))
    }
    fn write(&self, value: u64) {
        // SAFETY: loom fails the model if anybody else is at the cell.
        self.0.with_mut(|page| unsafe { *page = value });
    }
    fn read(&self) -> u64 {
        // SAFETY: as above.
        self.0.with(|page| unsafe { *page })
    }
}

/// Sends the page under a life of grant 0.
fn grant(producer: &mut Producer<Memory>, life: u64) {
    let header = Header { kind: KIND_PAGE, info_len: 0, protocol: 0, len: 8, cookie: false };
    assert!(producer.push(header, 0, &[], |ring, at| {
        ring.store(at, 4096, Ordering::Relaxed);
        ring.store(at + 1, life, Ordering::Relaxed);
    }));
}

/// The life under which the reader got the page.
fn leased(consumer: &mut Consumer<Memory>) -> Option<u64> {
    let Peek::Record(header) = consumer.peek() else { return None };
    let mut info = [0; MAX_INFO];
    let (_, (offset, life)) = consumer.record(header, &mut info, |ring, at| {
        (ring.load(at, Ordering::Relaxed), ring.load(at + 1, Ordering::Relaxed))
    });
    assert_eq!(offset, 4096);
    consumer.consume(header, LightFence::Full);
    Some(life)
}

/// The lease is read by the reader and by another thread, which gives it back (twice: the store is idempotent) while
/// the writer looks for the page and writes it again. Neither read races with the second filling, the second life is
/// not taken for returned because the first was, and what is read is what was granted.
#[test]
fn a_page_is_reused_only_after_its_lease() {
    model(|| {
        let (control, ring) = lane(16);
        let mut producer = Producer::open(control.clone(), ring.clone());
        let mut consumer = Consumer::new(control.clone(), ring);
        let page = Page::new();
        page.write(100);
        grant(&mut producer, 1);
        let writer = {
            let page = page.clone();
            thread::spawn(move || {
                for _ in 0..2 {
                    if producer.returned(0) == 1 {
                        page.write(200);
                        grant(&mut producer, 2);
                        assert_ne!(producer.returned(0), 2, "nobody gave the second life back");
                        return (producer, true);
                    }
                    thread::yield_now();
                }
                (producer, false)
            })
        };
        let life = leased(&mut consumer).expect("granted");
        assert_eq!((life, page.read()), (1, 100));
        let holder = {
            let (page, control) = (page.clone(), control.clone());
            thread::spawn(move || {
                assert_eq!(page.read(), 100);
                return_grant(&control, 0, life, LightFence::Full);
                return_grant(&control, 0, life, LightFence::Full);
            })
        };
        holder.join().expect("no panic");
        let (producer, reused) = writer.join().expect("no panic");
        if reused {
            let life = leased(&mut consumer).expect("granted again");
            assert_eq!((life, page.read()), (2, 200));
            assert_eq!(producer.returned(0), 1, "a stale life is not the one that is out");
            return_grant(&control, 0, life, LightFence::Full);
            assert_eq!(producer.returned(0), 2);
        } else {
            assert_eq!(producer.returned(0), 1, "the return is not lost");
        }
    });
}

/// What the writer put into a page is there when the record that names it is.
#[test]
fn a_granted_page_is_filled() {
    model(|| {
        let (control, ring) = lane(16);
        let mut producer = Producer::open(control.clone(), ring.clone());
        let mut consumer = Consumer::new(control, ring);
        let page = Page::new();
        let filled = page.clone();
        let writer = thread::spawn(move || {
            filled.write(7);
            grant(&mut producer, 1);
        });
        if leased(&mut consumer).is_some() {
            assert_eq!(page.read(), 7);
        }
        writer.join().expect("no panic");
    });
}

/// What a batch of two messages lies in.
const BATCH: Header = Header { kind: KIND_BATCH, info_len: 0, protocol: 0, len: 0, cookie: false };

/// A sender of batches, as it keeps account of its one page.
struct Batches {
    producer: Producer<Memory>,
    grants: Grants,
    pool: PagePool,
    /// What is in the page: a cell for each message.
    cells: [Page; 2],
}

impl Batches {
    fn new(producer: Producer<Memory>, cells: [Page; 2]) -> Self {
        let mut pool = PagePool::new(4 * PAGE);
        for _ in 1..4 {
            assert!(pool.take(PAGE).is_some(), "a page that is in use for ever");
        }
        Self { producer, grants: Grants::new(1 << 20), pool, cells }
    }

    /// The page, if it is here, with a number: the one that it had, once it rests.
    fn slot(&mut self) -> Option<Slot> {
        let Batches { grants, pool, .. } = self;
        grants.take(PAGE, pool).or_else(|| {
            let (Taken::Warm(page) | Taken::Fresh(page)) = pool.take(PAGE)?;
            Some(Slot::new(grants.number(pool)?, page, true))
        })
    }

    /// Fills the page and sends it, if it is here.
    fn send(&mut self, first: u64) -> bool {
        let head = self.producer.consumed();
        let Batches { producer, grants, pool, .. } = self;
        grants.settle(head, |number| producer.returned(number), pool);
        let Some(slot) = self.slot() else { return false };
        for (message, cell) in self.cells.iter().enumerate() {
            cell.write(first + message as u64);
        }
        let word = self.grants.next_life() | u64::from(slot.number) << 40;
        let sent = self.producer.push(BATCH, 0, &[], |ring, at| {
            for (at_word, value) in [slot.page().offset, word, 2].into_iter().enumerate() {
                ring.store(at + at_word, value, Ordering::Relaxed);
            }
        });
        if sent {
            self.grants.grant(slot, self.producer.tail());
        }
        sent
    }
}

/// The page of a batch is filled again only when the last of its messages was copied out, though its reader stops after the
/// first: the record stays at the lane's head, and the grant goes back behind the last.
#[test]
fn the_page_of_a_batch_is_reused_only_after_its_last_message() {
    model(|| {
        let (control, ring) = lane(32);
        let producer = Producer::open(control.clone(), ring.clone());
        let mut consumer = Consumer::new(control.clone(), ring);
        let cells = [Page::new(), Page::new()];
        let mut batches = Batches::new(producer, cells.clone());
        assert!(batches.send(10), "there is room");
        let writer = thread::spawn(move || {
            for _ in 0..3 {
                if batches.send(20) {
                    return (batches, true);
                }
                thread::yield_now();
            }
            (batches, false)
        });
        let mut taken = 0;
        let mut take = |consumer: &mut Consumer<Memory>| -> Option<u64> {
            let Peek::Record(header) = consumer.peek() else { return None };
            let (_, [word, count]) = consumer.record(header, &mut [0; MAX_INFO], |ring, at| {
                [1, 2].map(|word| ring.load(at + word, Ordering::Relaxed))
            });
            let payload = cells[taken].read();
            taken += 1;
            if taken as u64 == count {
                taken = 0;
                return_grant(&control, (word >> 40) as usize, word & ((1 << 40) - 1), LightFence::Full);
                consumer.consume(header, LightFence::Full);
            }
            Some(payload)
        };
        assert_eq!(take(&mut consumer), Some(10));
        // A budget is used up here.
        thread::yield_now();
        assert_eq!(take(&mut consumer), Some(11));
        let (mut batches, sent) = writer.join().expect("no panic");
        assert!(sent || batches.send(20), "the return is not lost");
        assert_eq!((take(&mut consumer), take(&mut consumer)), (Some(20), Some(21)));
        assert_eq!(take(&mut consumer), None);
    });
}
