//! Both ends of a lane over memory that the other end writes as it likes.

use super::Input;
use posthaste_core::MAX_INFO;
use posthaste_core::memory::Words;
use posthaste_shm::batch::{Batch, MOST_BYTES};
use posthaste_shm::lane::{
    CONTROL_WORDS, Consumer, Header, KIND_BATCH, KIND_PAGE, KIND_SHORT, KIND_WORDS, LightFence, Look, Peek,
    Producer, WORD_GROUP, max_short, most_words,
};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::Ordering;

/// Words of this thread alone; an access outside of them is a panic.
#[derive(Clone, Debug)]
struct Plain(Rc<RefCell<Vec<u64>>>);

impl Plain {
    fn new(words: usize) -> Self {
        Self(Rc::new(RefCell::new(vec![0; words])))
    }
}

impl Words for Plain {
    fn words(&self) -> usize {
        self.0.borrow().len()
    }

    fn load(&self, index: usize, _: Ordering) -> u64 {
        self.0.borrow()[index]
    }

    fn store(&self, index: usize, value: u64, _: Ordering) {
        self.0.borrow_mut()[index] = value;
    }

    fn swap(&self, index: usize, value: u64) -> u64 {
        std::mem::replace(&mut self.0.borrow_mut()[index], value)
    }

    fn compare_exchange(&self, index: usize, current: u64, value: u64) -> u64 {
        let word = &mut self.0.borrow_mut()[index];
        if *word == current { std::mem::replace(word, value) } else { *word }
    }

    fn fetch_or(&self, index: usize, bits: u64) -> u64 {
        let word = &mut self.0.borrow_mut()[index];
        std::mem::replace(word, *word | bits)
    }

    fn prefetch(&self, index: usize) {
        assert!(index < self.words(), "outside of the memory");
    }

    fn write_bytes(&self, index: usize, bytes: &[u8]) {
        let words = &mut self.0.borrow_mut()[index..][..bytes.len().div_ceil(8)];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks(8)) {
            let mut whole = word.to_ne_bytes();
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(whole);
        }
    }

    fn read_bytes(&self, index: usize, bytes: &mut [u8]) {
        let words = &self.0.borrow()[index..][..bytes.len().div_ceil(8)];
        for (word, bytes) in words.iter().zip(bytes.chunks_mut(8)) {
            bytes.copy_from_slice(&word.to_ne_bytes()[..bytes.len()]);
        }
    }
}

/// The reader of a lane whose ring and control pages say anything: what it takes for a record lies within the ring and
/// within what a record may be, and it ends.
pub fn lane_reader(data: &[u8]) {
    let mut input = Input(data);
    let words = 128 << (input.byte() % 3);
    let (control, ring) = (Plain::new(CONTROL_WORDS), Plain::new(words));
    let mut consumer = Consumer::new(control.clone(), ring.clone());
    let ring_bytes = words as u64 * 8;
    let most = max_short(ring_bytes);
    // The writer writes a few words wherever it likes, the reader reads; then again.
    for _ in 0..256 {
        if input.is_empty() {
            break;
        }
        for _ in 0..input.byte() % 16 {
            let place = usize::from(input.byte()) | usize::from(input.byte()) << 8;
            let word = input.word();
            match place >> 15 {
                0 => ring.store(place % words, word, Ordering::Relaxed),
                _ => control.store(place % CONTROL_WORDS, word, Ordering::Relaxed),
            }
        }
        // Stale words may look like records for ever; a real reader has a budget as well.
        for _ in 0..64 {
            if let Look::Word { protocol, cookie, payload } = consumer.look() {
                let mut payloads = [0; WORD_GROUP];
                // A group of them, as a reader takes those without a cookie, or this one.
                let count = if cookie == 0 { consumer.words(protocol, &mut payloads) } else { 0 };
                assert!(cookie != 0 || (count > 0 && payloads[0] == payload), "{count} words");
                if count > 1 {
                    consumer.consume_words(count, LightFence::Full);
                } else {
                    consumer.consume_word(cookie != 0, LightFence::Full);
                }
                continue;
            }
            if let Look::Short { cookie, len, .. } = consumer.look() {
                assert!(len <= most, "{len} bytes");
                let header = consumer.peek();
                assert!(
                    matches!(header, Peek::Record(header) if header.len as usize == len
                        && header.cookie == cookie.is_some() && header.info_len == 0),
                    "{header:?}"
                );
                consumer.payload(cookie.is_some(), &mut vec![0; len]);
                consumer.consume_short(cookie.is_some(), len, LightFence::Full);
                continue;
            }
            let Peek::Record(header) = consumer.peek() else { break };
            assert!(usize::from(header.info_len) <= MAX_INFO, "{header:?}");
            let mut info = [0; MAX_INFO];
            consumer.prefetch_next_head(header);
            consumer.prefetch_next(header);
            let (_cookie, len) = consumer.record(header, &mut info, |ring, at| match header.kind {
                KIND_SHORT | KIND_WORDS => {
                    let words = header.kind == KIND_WORDS;
                    assert!(!words || (1..=most_words(ring_bytes)).contains(&(header.len as usize / 8)));
                    assert!(!words || header.len.is_multiple_of(8), "{header:?}");
                    let mut bytes = vec![0; header.len as usize];
                    ring.read_bytes(at, &mut bytes);
                    bytes.len()
                }
                KIND_PAGE | KIND_BATCH => {
                    // The page, its grant and how many messages it has.
                    let words = if header.kind == KIND_PAGE { 2 } else { 3 };
                    let [offset, _, count] =
                        [0, 1, words - 1].map(|word| ring.load(at + word, Ordering::Relaxed));
                    if let Some(batch) = Batch::new(count, u64::from(header.len)) {
                        assert!(
                            batch.bytes() <= MOST_BYTES && batch.count() == count,
                            "{batch:?} at {offset}"
                        );
                    }
                    0
                }
                other => panic!("a record of kind {other}"),
            });
            assert!(header.kind == KIND_WORDS || len <= most, "{header:?}");
            consumer.consume(header, LightFence::Full);
        }
    }
}

/// The writer of a lane whose reader tells anything: it writes within the ring, and the reader it was made for reads
/// what was written as long as it tells the truth.
pub fn lane_writer(data: &[u8]) {
    let mut input = Input(data);
    let words = 128 << (input.byte() % 3);
    let (control, ring) = (Plain::new(CONTROL_WORDS), Plain::new(words));
    let mut producer = Producer::open(control.clone(), ring.clone());
    let most = max_short(words as u64 * 8);
    for _ in 0..256 {
        if input.is_empty() {
            break;
        }
        for _ in 0..input.byte() % 4 {
            let (place, word) = (usize::from(input.byte()), input.word());
            control.store(place % CONTROL_WORDS, word, Ordering::Relaxed);
        }
        let info = [7; MAX_INFO];
        let info = &info[..usize::from(input.byte()) % (MAX_INFO + 1)];
        let len = usize::from(input.byte()) * 16 % (most + 1);
        let cookie = u64::from(input.byte() % 2);
        let header = Header {
            kind: KIND_SHORT,
            info_len: info.len() as u8,
            protocol: 20,
            len: len as u32,
            cookie: cookie != 0,
        };
        let bytes = vec![input.byte(); len];
        if info.is_empty() {
            producer.push_short(header.protocol, cookie, &bytes);
        } else {
            producer.push(header, cookie, info, |ring, at| ring.write_bytes(at, &bytes));
        }
        std::hint::black_box((producer.reader_moved(), producer.returned(usize::from(input.byte()) % 64)));
    }
}
