//! The lane: records arrive whole and in order, and their bytes are overwritten only after the credit for them.

use crate::memory::{Memory, lane};
use crate::model;
use loom::thread;
use posthaste_core::MAX_INFO;
use posthaste_core::memory::Words;
use posthaste_core::sync::Ordering;
use posthaste_shm::lane::{Consumer, Header, KIND_SHORT, KIND_WORDS, LightFence, Look, Peek, Producer};

const FENCE: LightFence = LightFence::Full;

/// A record of three words: its header, and the number twice as payload (in the info bytes, as tiny rings leave no
/// room for a body).
pub fn push(producer: &mut Producer<Memory>, number: u64) -> bool {
    let header = Header { kind: KIND_SHORT, info_len: 16, protocol: number as u16, len: 0, cookie: false };
    let mut info = [0; 16];
    info[..8].copy_from_slice(&number.to_ne_bytes());
    info[8..].copy_from_slice(&(!number).to_ne_bytes());
    producer.push(header, 0, &info, |_, _| {})
}

/// Takes the next record, checks that it is whole, and says whether the writer wants to be rung.
pub fn pull(consumer: &mut Consumer<Memory>) -> Option<(u64, bool)> {
    let header = match consumer.peek() {
        Peek::Empty => return None,
        Peek::Record(header) => header,
        Peek::Corrupt => panic!("corrupt lane"),
    };
    let mut info = [0; MAX_INFO];
    consumer.record(header, &mut info, |_, _| {});
    let (number, complement) = (&info[..8], &info[8..16]);
    let number = u64::from_ne_bytes(number.try_into().expect("8 bytes"));
    assert_eq!(complement, (!number).to_ne_bytes(), "torn payload");
    assert_eq!(header.protocol, number as u16, "header and payload of different records");
    Some((number, consumer.consume(header, FENCE)))
}

/// Sends `count` records through a ring after `warm` others. The first `ahead` of them are written before there is a
/// second thread.
fn stream(ring: usize, warm: u64, ahead: u64, count: u64) {
    model(move || {
        let (control, ring) = lane(ring);
        let mut producer = Producer::open(control.clone(), ring.clone());
        let mut consumer = Consumer::new(control, ring);
        for number in 1..=warm {
            assert!(push(&mut producer, number), "an empty ring has room");
            assert_eq!(pull(&mut consumer).map(|(number, _)| number), Some(number));
        }
        for number in warm + 1..=warm + ahead {
            assert!(push(&mut producer, number), "room for those ahead");
        }
        let writer = thread::spawn(move || {
            let mut next = warm + ahead + 1;
            for _ in ahead..count + 1 {
                if next > warm + count {
                    break;
                }
                if push(&mut producer, next) {
                    next += 1;
                } else {
                    thread::yield_now();
                }
            }
            (producer, next)
        });
        let mut expected = warm + 1;
        for _ in 0..count {
            match pull(&mut consumer) {
                Some((number, _)) => {
                    assert_eq!(number, expected, "out of order");
                    expected += 1;
                }
                None => thread::yield_now(),
            }
        }
        let (mut producer, mut next) = writer.join().expect("no panic");
        // The rest, one after the other: nothing is lost and the ring never jams.
        while expected <= warm + count {
            if next <= warm + count && push(&mut producer, next) {
                next += 1;
            }
            assert_eq!(pull(&mut consumer).map(|(number, _)| number), Some(expected));
            expected += 1;
        }
        assert_eq!(pull(&mut consumer), None);
    });
}

/// From the beginning of the ring over its end, where no record fits and a wrap mark is left: payload is never torn,
/// order is kept, and the second lap does not meet headers of the first.
#[test]
fn records_are_whole_and_in_order_over_the_end_of_the_ring() {
    stream(8, 0, 0, 4);
}

/// Starting short of the end: every record of the model needs the credit for an earlier one, and the end of the ring
/// is passed twice.
#[test]
fn credit_lets_bytes_be_overwritten_only_after_they_were_read() {
    stream(8, 1, 0, 5);
}

/// A full ring of five records, in which one credit covers two: the bytes of both were read before it.
#[test]
fn one_credit_covers_two_records() {
    stream(16, 0, 5, 6);
}

/// A larger ring, in which the writer is two records ahead.
#[test]
fn several_records_are_under_way() {
    stream(16, 3, 0, 5);
}

/// A reader that lies about its head makes the writer neither overrun its own records nor panic, and does not keep
/// it from sleeping: heads beyond the tail and behind the last good one are not taken over.
#[test]
fn a_garbage_head_is_not_taken_over() {
    model(|| {
        let (control, ring) = lane(8);
        let mut producer = Producer::open(control.clone(), ring.clone());
        let mut consumer = Consumer::new(control.clone(), ring);
        for number in 1..=2 {
            assert!(push(&mut producer, number));
            assert!(pull(&mut consumer).is_some());
        }
        // Head and tail are at 48 bytes; one record fits behind the wrap, not two.
        assert!(push(&mut producer, 3));
        let liar = thread::spawn(move || {
            control.store(16, u64::MAX, Ordering::Release);
            control.store(16, 8, Ordering::Release);
            control.store(16, 96, Ordering::Release);
        });
        for _ in 0..3 {
            assert!(!push(&mut producer, 4), "the third record would be overwritten");
            assert!(!producer.reader_moved(), "the reader did not move");
        }
        liar.join().expect("no panic");
        assert_eq!(pull(&mut consumer).map(|(number, _)| number), Some(3));
        assert!(push(&mut producer, 4), "an honest head is believed again");
        assert_eq!(pull(&mut consumer).map(|(number, _)| number), Some(4));
    });
}

/// Words that share a record arrive whole and in order, over the end of the ring and behind what came before.
#[test]
fn words_of_one_record_arrive_whole_and_in_order() {
    model(|| {
        let (control, ring) = lane(16);
        let mut producer = Producer::open(control.clone(), ring.clone());
        let mut consumer = Consumer::new(control, ring);
        let push = |producer: &mut Producer<Memory>, first: u64, count: usize| {
            producer.push_words(1, count, |ring, at| {
                (0..count).for_each(|word| ring.store(at + word, first + word as u64, Ordering::Relaxed));
            })
        };
        // So that the records meet bytes of a former lap.
        for word in 0..6 {
            assert!(producer.push_word(1, 0, word));
            assert!(matches!(consumer.look(), Look::Word { payload, .. } if payload == word));
            consumer.consume_words(1, FENCE);
        }
        let writer = thread::spawn(move || {
            // The second one does not fit at the end of the ring.
            assert!(push(&mut producer, 6, 2), "there is room");
            assert!(push(&mut producer, 8, 3), "there is room");
        });
        let mut seen = 6;
        while seen < 11 {
            assert!(!matches!(consumer.look(), Look::Word { .. }), "this is no single word");
            let header = match consumer.peek() {
                Peek::Empty => {
                    thread::yield_now();
                    continue;
                }
                Peek::Record(header) => header,
                Peek::Corrupt => panic!("corrupt lane"),
            };
            assert_eq!((header.kind, header.protocol), (KIND_WORDS, 1));
            for word in 0..header.len as usize / 8 {
                let (_, payload) = consumer
                    .record(header, &mut [0; MAX_INFO], |ring, at| ring.load(at + word, Ordering::Relaxed));
                assert_eq!(payload, seen);
                seen += 1;
            }
            consumer.consume(header, FENCE);
        }
        writer.join().expect("no panic");
    });
}

/// Records of one word, with and without a cookie, among others: the quick way in and out is the same lane.
#[test]
fn words_arrive_whole_and_in_order() {
    model(|| {
        let (control, ring) = lane(16);
        let mut producer = Producer::open(control.clone(), ring.clone());
        let mut consumer = Consumer::new(control, ring);
        let writer = thread::spawn(move || {
            assert!(producer.push_word(1, 0, 11));
            assert!(producer.push_word(2, 22, !22));
            assert!(push(&mut producer, 3));
        });
        let mut seen = 0;
        while seen < 3 {
            match consumer.look() {
                Look::Empty => loom::thread::yield_now(),
                Look::Word { protocol, cookie, payload } => {
                    seen += 1;
                    assert_eq!(u64::from(protocol), seen);
                    assert_eq!((cookie, payload), if seen == 1 { (0, 11) } else { (22, !22) });
                    consumer.consume_word(cookie != 0, FENCE);
                }
                Look::Short { .. } => panic!("no record of the model is such a one"),
                Look::Other => {
                    seen += 1;
                    assert_eq!(pull(&mut consumer).map(|(number, _)| number), Some(seen));
                }
            }
        }
        writer.join().expect("no panic");
    });
}

/// Short payloads without info, with and without a cookie, over the end of the ring: the quick way in and out is the same
/// lane.
#[test]
fn short_payloads_arrive_whole_and_in_order() {
    model(|| {
        // The shortest ring in which a record may have a payload.
        let (control, ring) = lane(128);
        let mut producer = Producer::open(control.clone(), ring.clone());
        let mut consumer = Consumer::new(control, ring);
        let payload = |number: u64| [number.to_ne_bytes(), (!number).to_ne_bytes()].concat();
        let look = |consumer: &mut Consumer<Memory>| match consumer.look() {
            // The end of the ring is behind it then.
            Look::Other if matches!(consumer.peek(), Peek::Record(_)) => consumer.look(),
            found => found,
        };
        let check = |consumer: &mut Consumer<Memory>, number: u64| match look(consumer) {
            Look::Empty => false,
            Look::Short { protocol, cookie, len } => {
                assert_eq!(u64::from(protocol), number, "out of order");
                assert_eq!(cookie, number.is_multiple_of(2).then_some(number));
                let mut bytes = vec![0; len];
                consumer.payload(cookie.is_some(), &mut bytes);
                assert_eq!(bytes, payload(number), "torn payload");
                consumer.consume_short(cookie.is_some(), len, FENCE);
                true
            }
            other => panic!("{other:?}"),
        };
        let push = move |producer: &mut Producer<Memory>, number: u64| {
            let cookie = if number.is_multiple_of(2) { number } else { 0 };
            producer.push_short(number as u16, cookie, &payload(number))
        };
        // Short of the end, where what follows meets headers of its own lap only.
        for number in 1..=35 {
            assert!(push(&mut producer, number));
            assert!(check(&mut consumer, number));
        }
        let writer = thread::spawn(move || {
            assert!(push(&mut producer, 36), "there is room");
            assert!(push(&mut producer, 37), "there is room");
        });
        for number in 36..=37 {
            while !check(&mut consumer, number) {
                thread::yield_now();
            }
        }
        writer.join().expect("no panic");
    });
}
