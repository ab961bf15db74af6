//! Random records against oracles, and garbage.

use super::*;
use posthaste_core::memory::SharedSlice;

fn memory(len: usize) -> SharedSlice {
    let words: &'static mut [u64] = vec![0u64; len / 8].leak();
    // SAFETY: leaked memory stays valid and is used through the slice only.
    unsafe { SharedSlice::from_raw(words.as_mut_ptr().cast(), len) }
}

#[test]
fn random_records_arrive_as_an_oracle_says() {
    for (seed, ring) in [(1u64, 1024u64), (2, 4096), (3, 16384)] {
        let (control, ring_memory) = (memory(CONTROL_BYTES as usize), memory(ring as usize));
        let mut producer = Producer::open(control, ring_memory);
        let mut consumer = Consumer::new(control, ring_memory);
        let mut oracle = std::collections::VecDeque::new();
        let mut state = seed;
        let mut random = move |n: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % n
        };
        let (mut received, mut looked) = (0, 0);
        for step in 0..200_000u64 {
            if random(2) == 0 {
                let len = random(max_short(ring) as u64 + 1) as u32 / (1 + random(40) as u32);
                let info_len = if random(2) == 0 { 0 } else { random(113) };
                let info: Vec<u8> = (0..info_len).map(|i| (i + step) as u8).collect();
                let payload: Vec<u8> = (0..len).map(|i| (u64::from(i) * 3 + step) as u8).collect();
                let mut cookie = random(3);
                let mut header = Header {
                    kind: KIND_SHORT,
                    info_len: info.len() as u8,
                    protocol: step as u16,
                    len,
                    cookie: cookie != 0,
                };
                let (mut info, mut payload) = (info, payload);
                if random(8) == 0 {
                    // Three words, whatever the length of each message.
                    header = Header { kind: KIND_BATCH, info_len: 0, cookie: false, ..header };
                    payload = (0..24).map(|i| (i * 5 + step) as u8).collect();
                    (cookie, info) = (0, Vec::new());
                }
                let plain = header.kind == KIND_SHORT && info.is_empty();
                let pushed = if plain && random(2) == 0 {
                    producer.push_short(header.protocol, cookie, &payload)
                } else {
                    producer.push(header, cookie, &info, |ring, at| ring.write_bytes(at, &payload))
                };
                if pushed {
                    oracle.push_back((header, cookie, info, payload));
                } else {
                    assert!(!oracle.is_empty(), "an empty ring has room for any record");
                }
            } else if let (true, Look::Short { protocol, cookie, len }) = (random(4) > 0, consumer.look()) {
                let (header, expected_cookie, info, expected) = oracle.pop_front().expect("sent");
                let mut payload = vec![0; len];
                consumer.payload(cookie.is_some(), &mut payload);
                assert_eq!(header.kind, KIND_SHORT);
                assert_eq!((protocol, cookie.unwrap_or(0)), (header.protocol, expected_cookie));
                assert_eq!((payload, info), (expected, Vec::new()), "at step {step}");
                consumer.consume_short(cookie.is_some(), len, LightFence::Full);
                received += 1;
                looked += 1;
            } else {
                match consumer.peek() {
                    Peek::Empty => assert!(oracle.is_empty()),
                    Peek::Corrupt => panic!("corrupt at step {step}"),
                    Peek::Record(header) => {
                        let expected = oracle.pop_front().expect("sent");
                        let mut info = [0; MAX_INFO];
                        let len = if header.kind == KIND_BATCH { 24 } else { header.len as usize };
                        let mut payload = vec![0; len];
                        let (cookie, ()) =
                            consumer.record(header, &mut info, |ring, at| ring.read_bytes(at, &mut payload));
                        let info = info[..header.info_len as usize].to_vec();
                        assert_eq!((header, cookie, info, payload), expected);
                        consumer.consume(header, LightFence::Full);
                        received += 1;
                    }
                }
            }
        }
        assert!(received > 50_000 && looked > 10_000, "{received} records, {looked} of them at a look");
    }
}

#[test]
fn what_is_corrupt_is_found_so_again() {
    let (control, ring) = (memory(CONTROL_BYTES as usize), memory(1024));
    let mut producer = Producer::open(control, ring);
    let mut consumer = Consumer::new(control, ring);
    assert!(producer.push_word(9, 0, 7));
    let Peek::Record(header) = consumer.peek() else { panic!("it was pushed") };
    consumer.consume(header, LightFence::Full);
    // The end of a lap behind which nothing begins, as no writer leaves it: its first word is written before.
    Words::store(&ring, 2, KIND_WRAP, Ordering::Release);
    Words::store(&ring, 0, 0, Ordering::Release);
    for _ in 0..3 {
        assert!(matches!(consumer.peek(), Peek::Corrupt) && consumer.has_any());
    }
}

#[test]
fn groups_of_words_arrive_as_an_oracle_says() {
    for size in [1024u64, 2048, 16384] {
        let (control, ring) = (memory(CONTROL_BYTES as usize), memory(size as usize));
        let mut producer = Producer::open(control, ring);
        let mut consumer = Consumer::new(control, ring);
        let (mut sent, mut seen, mut state) = (0u64, 0u64, size);
        let mut random = move |n: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % n
        };
        while seen < 300_000 {
            match random(4) {
                0 => sent += u64::from(producer.push_word(9, 0, sent)),
                1 => {
                    let count = 1 + random(most_words(size) as u64);
                    let pushed = producer.push_words(9, count as usize, |ring, at| {
                        for word in 0..count {
                            Words::store(ring, at + word as usize, sent + word, Ordering::Relaxed);
                        }
                    });
                    assert!(pushed || seen < sent, "an empty ring has room");
                    sent += if pushed { count } else { 0 };
                }
                _ => match consumer.look() {
                    Look::Empty => assert_eq!(seen, sent),
                    Look::Word { protocol, .. } if random(2) == 0 => {
                        let mut payloads = [0; WORD_GROUP];
                        let found = consumer.words(protocol, &mut payloads);
                        let taken = 1 + random(found as u64) as usize;
                        for payload in &payloads[..taken] {
                            assert_eq!(*payload, seen);
                            seen += 1;
                        }
                        consumer.consume_words(taken, LightFence::Full);
                    }
                    Look::Word { payload, .. } => {
                        assert_eq!(payload, seen);
                        seen += 1;
                        consumer.consume_word(false, LightFence::Full);
                    }
                    Look::Short { .. } => panic!("a word is no other payload"),
                    Look::Other => {
                        let Peek::Record(header) = consumer.peek() else { panic!("no record at {seen}") };
                        let count = header.len as usize / 8;
                        let (_, payloads) = consumer.record(header, &mut [0; MAX_INFO], |ring, at| {
                            let read = |word| Words::load(ring, at + word, Ordering::Relaxed);
                            (0..count).map(read).collect::<Vec<u64>>()
                        });
                        assert!(header.kind == KIND_WORDS || count == 1, "{header:?}");
                        for payload in payloads {
                            assert_eq!(payload, seen);
                            seen += 1;
                        }
                        consumer.consume(header, LightFence::Full);
                    }
                },
            }
        }
    }
}

#[test]
fn garbage_is_told_and_never_read_out_of_bounds() {
    let mut state = 99u64;
    for _ in 0..200_000 {
        let (control, ring) = (memory_pool(0), memory_pool(1));
        for word in 0..128 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ring.write_u64(word * 8, if state & 3 == 0 { state >> 20 & 0xffff } else { state });
        }
        let mut consumer = Consumer::new(control, ring);
        for _ in 0..8 {
            let Peek::Record(header) = consumer.peek() else { break };
            let mut info = [0; MAX_INFO];
            consumer.prefetch_next_head(header);
            consumer.prefetch_next(header);
            consumer.record(header, &mut info, |ring, at| {
                if matches!(header.kind, KIND_SHORT | KIND_WORDS) {
                    ring.read_bytes(at, &mut vec![0; header.len as usize]);
                }
            });
            consumer.consume(header, LightFence::Full);
        }
    }
}

fn memory_pool(which: usize) -> SharedSlice {
    use std::sync::OnceLock;
    static POOL: OnceLock<[SharedSlice; 2]> = OnceLock::new();
    POOL.get_or_init(|| [memory(CONTROL_BYTES as usize), memory(1024)])[which]
}

#[test]
fn a_cookie_that_is_said_and_not_there_shortens_nothing() {
    let (control, ring) = (memory(CONTROL_BYTES as usize), memory(1024));
    let mut consumer = Consumer::new(control, ring);
    // The record of a word with a cookie of 0, which no writer writes, and a proper one behind it.
    ring.store(0, WORD_HEADER | 1 << 63 | 7 << 16, Ordering::Relaxed);
    ring.store(2, 11, Ordering::Relaxed);
    ring.store(4, WORD_HEADER | 7 << 16, Ordering::Relaxed);
    ring.store(5, 22, Ordering::Relaxed);
    assert_eq!(consumer.look(), Look::Other);
    let Peek::Record(header) = consumer.peek() else { panic!("its lengths are right") };
    let read = |ring: &SharedSlice, at: usize| ring.load(at, Ordering::Relaxed);
    assert_eq!(consumer.record(header, &mut [0; posthaste_core::MAX_INFO], read), (0, 11));
    consumer.consume(header, LightFence::Full);
    assert_eq!(consumer.look(), Look::Word { protocol: 7, cookie: 0, payload: 22 });
}

#[test]
fn no_request_of_a_row_lies_in_two_lines() {
    let (control, ring) = (memory(CONTROL_BYTES as usize), memory(1024));
    let mut producer = Producer::open(control, ring);
    // Whatever came before, words lie with their headers.
    assert!(producer.push_short(7, 1, &[2; 13]));
    assert!(producer.tail().is_multiple_of(16), "{}", producer.tail());
    let line = producer.tail().next_multiple_of(64);
    while producer.tail() < line {
        assert!(producer.push_word(7, 0, 1));
    }
    for number in 1..=8 {
        let begins = producer.tail();
        assert!(producer.push_word(7, number, 2));
        assert_eq!(begins / 64, (begins + 23) / 64, "request {number} begins at {begins}");
    }
}

#[test]
fn a_lane_that_is_read_no_more_promises_nothing() {
    use crate::{inbox::Inbox, ready::ReadySet};
    let [block, control, ring] = [512, CONTROL_BYTES as usize, 1024].map(memory);
    let mut producer = Producer::open(control, ring);
    let mut inbox = Inbox::new(ReadySet::new(block, 1), 1);
    ReadySet::new(block, 1).announce(0, || ());
    inbox.collect(|_| (control, ring, ()));
    assert_eq!(inbox.polled(), [0]);
    assert!(producer.push_word(9, 0, 7));
    assert!(inbox.glance(1));
    // What is wrong in it lies there for good.
    inbox.lane(0).expect("it was met").dead = true;
    assert!(!inbox.glance(1) && !inbox.has_any(0));
}

/// Memory that tells which lines were asked for.
#[derive(Clone)]
struct Asked {
    memory: SharedSlice,
    lines: std::rc::Rc<std::cell::RefCell<Vec<usize>>>,
}

impl Asked {
    fn new(len: usize) -> Asked {
        Asked { memory: memory(len), lines: Default::default() }
    }

    fn take(&self) -> Vec<usize> {
        self.lines.take()
    }
}

impl Words for Asked {
    fn words(&self) -> usize {
        self.memory.words()
    }
    fn load(&self, index: usize, order: Ordering) -> u64 {
        self.memory.load(index, order)
    }
    fn store(&self, index: usize, value: u64, order: Ordering) {
        self.memory.store(index, value, order);
    }
    fn swap(&self, index: usize, value: u64) -> u64 {
        self.memory.swap(index, value)
    }
    fn compare_exchange(&self, index: usize, current: u64, value: u64) -> u64 {
        self.memory.compare_exchange(index, current, value)
    }
    fn fetch_or(&self, index: usize, bits: u64) -> u64 {
        self.memory.fetch_or(index, bits)
    }
    fn write_bytes(&self, index: usize, bytes: &[u8]) {
        self.memory.write_bytes(index, bytes);
    }
    fn read_bytes(&self, index: usize, bytes: &mut [u8]) {
        self.memory.read_bytes(index, bytes);
    }
    fn prefetch(&self, index: usize) {
        assert!(index < self.words(), "outside of the ring");
        self.lines.borrow_mut().push(index / LINE_WORDS);
    }
}

#[test]
fn the_next_record_is_asked_for_once_it_is_there() {
    let (control, ring) = (Asked::new(CONTROL_BYTES as usize), Asked::new(4096));
    let mut producer = Producer::open(control.clone(), ring.clone());
    let mut consumer = Consumer::new(control, ring.clone());
    let words = |count: usize, producer: &mut Producer<Asked>| {
        assert!(producer.push_words(7, count, |ring, at| ring.write_bytes(at, &vec![1; 8 * count])));
    };
    // 48 bytes, 96 bytes from there on, and the last one amid a line.
    words(4, &mut producer);
    let Peek::Record(first) = consumer.peek() else { panic!("a record") };
    consumer.prefetch_next_head(first);
    assert_eq!(ring.take(), [0], "where it is going to be");
    consumer.prefetch_next(first);
    assert_eq!(ring.take(), [], "what is still to be written is left to the writer");
    words(11, &mut producer);
    consumer.prefetch_next(first);
    assert_eq!(ring.take(), [1, 2], "those behind its head");
    consumer.consume(first, LightFence::Full);
    // From amid a line to the end of one; then around the end of the ring.
    words(100, &mut producer);
    let Peek::Record(second) = consumer.peek() else { panic!("a record") };
    consumer.prefetch_next(second);
    assert_eq!(ring.take(), (3..=14).collect::<Vec<_>>());
    consumer.consume(second, LightFence::Full);
    for _ in 0..40 {
        let Peek::Record(header) = consumer.peek() else { panic!("a record") };
        words(100, &mut producer);
        consumer.prefetch_next_head(header);
        consumer.prefetch_next(header);
        consumer.consume(header, LightFence::Full);
    }
    assert!(ring.take().contains(&0), "the ring begins anew");
}
