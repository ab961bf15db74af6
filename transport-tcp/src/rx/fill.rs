//! A payload on its way from a socket to where it belongs.

#[cfg(all(unix, not(feature = "portable")))]
use crate::frame::HEADER;
use crate::frame::Header;
use posthaste_core::descriptor::Info;
use posthaste_core::memory::SharedSlice;
#[cfg(all(unix, not(feature = "portable")))]
use posthaste_core::memory::{MOST_PARTS, read_behind, read_scattered};
use std::io;
use std::net::TcpStream;

/// A rest of a payload that is longer is read straight to where it belongs. Not one of this length: of puts up to it no reader sees
/// a part of a word, and the kernel writes bytes.
const DIRECT: usize = 4 << 10;
/// So are slices of this mean length. Of shorter ones, what the kernel does for each costs more than a copy out of a near cache.
#[cfg(all(unix, not(feature = "portable")))]
const SCATTERED: usize = 1 << 10;
/// Pieces of a smaller mean length take longer to be read to their places than to be sent.
const SHORT_PIECES: usize = 16 << 10;
/// Bytes of slices that are named to the kernel at once: it looks at all of them, however little there is to read.
#[cfg(all(unix, not(feature = "portable")))]
const AT_ONCE: usize = 128 << 10;

/// A payload that arrives piece by piece.
pub(super) enum Fill {
    /// A message, into memory of its own.
    Message { header: Header, info: Info, bytes: Vec<u8>, len: usize },
    /// A put or an answer, into this rank's memory.
    Memory { memory: SharedSlice, at: usize, put: bool },
    /// The next part of an answer, behind those that have come.
    Answer { bytes: Vec<u8>, len: usize },
    /// A put of memory that is not there.
    Absent { left: usize },
    /// A message, into memory that its protocol has named, of which so many slices are full, and so many bytes are missing.
    Placed { header: Header, info: Info, slices: Vec<SharedSlice>, full: usize, missing: usize },
}

impl Fill {
    pub fn missing(&self) -> usize {
        match self {
            Fill::Message { bytes, len, .. } | Fill::Answer { bytes, len } => len - bytes.len(),
            Fill::Memory { memory, at, .. } => memory.len() - at,
            Fill::Absent { left } => *left,
            Fill::Placed { missing, .. } => *missing,
        }
    }

    /// Whether it is part of what this side has asked for.
    pub fn is_answer(&self) -> bool {
        matches!(self, Fill::Answer { .. } | Fill::Memory { put: false, .. })
    }

    /// It goes to so many places that this takes longer than it takes the other side to send it.
    pub fn is_scattered(&self) -> bool {
        let Fill::Placed { slices, full, missing, .. } = self else { return false };
        // The first may be full in part.
        *missing < SHORT_PIECES * (slices.len() - full).saturating_sub(1)
    }

    /// Takes as much as it misses; returns how much.
    pub fn take(&mut self, data: &[u8]) -> usize {
        let mut count = self.missing().min(data.len());
        match self {
            Fill::Message { bytes, .. } | Fill::Answer { bytes, .. } => {
                bytes.extend_from_slice(&data[..count]);
            }
            Fill::Memory { memory, at, .. } => {
                if count < memory.len() - *at {
                    // Words are kept whole: what is shown of a word is all of it.
                    let odd = (memory.as_ptr() as usize + *at + count) % 8;
                    count -= odd.min(count);
                }
                if let Some(part) = memory.slice(*at as u64, count as u64) {
                    part.write(&data[..count]);
                }
                *at += count;
            }
            Fill::Absent { left } => *left -= count,
            Fill::Placed { slices, full, .. } => {
                let mut rest = &data[..count];
                for slice in &slices[*full..] {
                    let now = slice.len().min(rest.len());
                    slice.write(&rest[..now]);
                    rest = &rest[now..];
                    if rest.is_empty() {
                        break;
                    }
                }
                self.came(count);
            }
        }
        count
    }

    /// So many bytes are in the slices that a protocol has named.
    pub fn came(&mut self, mut count: usize) {
        let Fill::Placed { slices, full, missing, .. } = self else { return };
        *missing -= count;
        while let Some(slice) = slices.get_mut(*full) {
            let now = slice.len().min(count);
            count -= now;
            match slice.slice(now as u64, (slice.len() - now) as u64) {
                Some(rest) if !rest.is_empty() => {
                    *slice = rest;
                    return;
                }
                _ => *full += 1,
            }
        }
    }
    /// How much [`read`](Self::read) would read of the payload, and how much behind it, if that is worth a system call of
    /// its own. Behind it is what precedes the payload of another frame of its kind, so that this one can be read straight
    /// to where it belongs, too.
    #[cfg(all(unix, not(feature = "portable")))]
    pub fn direct(&self) -> Option<(usize, usize)> {
        let missing = self.missing();
        let (asked, behind, worth) = match self {
            Fill::Message { bytes, info, .. } => {
                let room = bytes.capacity() - bytes.len();
                let behind = if room < missing { 0 } else { HEADER + info.as_bytes().len() };
                (room.min(missing), behind, missing > DIRECT)
            }
            Fill::Answer { bytes, .. } => {
                let room = bytes.capacity() - bytes.len();
                (room.min(missing), if room < missing { 0 } else { HEADER }, missing > DIRECT)
            }
            Fill::Memory { .. } => (missing, HEADER, missing > DIRECT),
            Fill::Absent { .. } => return None,
            Fill::Placed { info, slices, full, .. } => {
                let left = &slices[*full..];
                let (asked, first) = at_once(left);
                let behind = if first.len() < left.len() { 0 } else { HEADER + info.as_bytes().len() };
                // As in `is_scattered`.
                (asked, behind, missing >= SCATTERED * (left.len() - 1).max(1))
            }
        };
        worth.then_some((asked, behind))
    }

    /// The same where memory of others cannot be read to, and a vector has to be filled before it is.
    #[cfg(not(all(unix, not(feature = "portable"))))]
    pub fn direct(&self) -> Option<(usize, usize)> {
        let missing = self.missing();
        match self {
            Fill::Message { .. } | Fill::Answer { .. } if missing > DIRECT => Some((missing, 0)),
            _ => None,
        }
    }

    /// Reads once, straight to where the payload belongs, and what there is beyond it into `behind`, both as long as
    /// [`direct`](Self::direct) says. Returns the number of bytes of both.
    #[cfg(all(unix, not(feature = "portable")))]
    pub fn read(&mut self, behind: &mut [u8], stream: &TcpStream) -> io::Result<usize> {
        match self {
            Fill::Message { bytes, len, .. } | Fill::Answer { bytes, len } => {
                let asked = *len - bytes.len();
                read_behind(bytes, asked, behind, stream)
            }
            Fill::Memory { memory, at, .. } => {
                let left = memory.len() - *at;
                let Some(rest) = memory.slice(*at as u64, left as u64) else { return Ok(0) };
                let count = rest.read_from(behind, stream)?;
                *at += count.min(left);
                Ok(count)
            }
            Fill::Placed { slices, full, missing, .. } => {
                let most = *missing;
                let count = read_scattered(at_once(&slices[*full..]).1, behind, stream)?;
                self.came(count.min(most));
                Ok(count)
            }
            Fill::Absent { .. } => Ok(0),
        }
    }

    /// The same there.
    #[cfg(not(all(unix, not(feature = "portable"))))]
    pub fn read(&mut self, _behind: &mut [u8], mut stream: &TcpStream) -> io::Result<usize> {
        use std::io::Read;
        let (Fill::Message { bytes, len, .. } | Fill::Answer { bytes, len }) = self else { return Ok(0) };
        let had = bytes.len();
        bytes.resize(*len, 0);
        let read = stream.read(&mut bytes[had..]);
        bytes.truncate(had + *read.as_ref().unwrap_or(&0));
        read
    }
}

/// The first of some slices, as many as are read to at once, and their length together.
#[cfg(all(unix, not(feature = "portable")))]
fn at_once(slices: &[SharedSlice]) -> (usize, &[SharedSlice]) {
    let mut bytes = 0;
    let many = slices.iter().take(MOST_PARTS).take_while(|slice| {
        let more = bytes < AT_ONCE;
        bytes += if more { slice.len() } else { 0 };
        more
    });
    let count = many.count();
    (bytes, &slices[..count])
}

#[cfg(all(test, unix, not(feature = "portable")))]
mod tests {
    use super::*;
    use posthaste_core::Rank;
    use posthaste_core::inprocess::Arena;
    use std::io::Write;
    use std::net::TcpListener;

    #[test]
    fn puts_whose_words_are_to_be_whole_are_not_left_to_the_kernel() {
        let arena = Arena::new(1, 1 << 20);
        for (len, is_direct) in [(8, false), (4095, false), (4096, false), (4097, true), (1 << 20, true)] {
            let memory = arena.slice(Rank(0), 0, len).expect("inside");
            let fill = Fill::Memory { memory, at: 0, put: true };
            assert_eq!(fill.direct().is_some(), is_direct, "{len} bytes");
        }
    }

    #[test]
    fn a_part_of_a_put_ends_with_a_whole_word() {
        let arena = Arena::new(1, 1 << 20);
        for (start, len) in (0..8).flat_map(|start| [8, 50, 400].map(|len: usize| (start, len))) {
            for came in 1..=len {
                let memory = arena.slice(Rank(0), start as u64, len as u64).expect("inside");
                memory.write(&vec![0; len]);
                let mut fill = Fill::Memory { memory, at: 0, put: true };
                let taken = fill.take(&vec![1; came]);
                // What is not the whole of it ends where a word does, if it has come to one.
                let begun_word = if came < len { (start + came) % 8 } else { 0 };
                let expected = came.saturating_sub(begun_word);
                assert_eq!((taken, fill.missing()), (expected, len - expected), "{came} of {len} at {start}");
                let written = memory.to_vec();
                let (shown, hidden) = written.split_at(expected);
                assert!(shown.iter().all(|byte| *byte == 1) && hidden.iter().all(|byte| *byte == 0));
            }
        }
    }

    #[test]
    fn slices_are_filled_in_order_however_much_comes_at_a_time() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let mut peer = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
        let (stream, _) = listener.accept().expect("it has connected");
        let arena = Arena::new(1, 8 << 20);
        // More of them, and more bytes, than are named to the kernel at once; with gaps, and not in the order of the memory.
        let lens: Vec<u64> = (0..2000).map(|at| 1030 + at % 97).collect();
        let starts: Vec<u64> = (0..2000).map(|at| (at * 7 % 2000) * 1500).collect();
        let slice = |at: usize| arena.slice(Rank(0), starts[at], lens[at]).expect("inside");
        let slices: Vec<SharedSlice> = (0..2000).map(slice).collect();
        let total: usize = lens.iter().sum::<u64>() as usize;
        let next = [0xa5; HEADER];
        let sent: Vec<u8> = (0..total).map(|at| (at * 31 + at / 7919) as u8).collect();
        let (whole, info) = (sent.clone(), Info::new(&[]).expect("short"));
        let writer = std::thread::spawn(move || {
            let mut rest = &whole[..];
            for len in [1, 1029, 3, 300_000, 700_001].into_iter().cycle() {
                let (now, later) = rest.split_at(rest.len().min(len));
                peer.write_all(now).expect("it reads");
                rest = later;
                if rest.is_empty() {
                    break;
                }
            }
            peer.write_all(&next).expect("it reads");
        });
        let header = Header { len: (total as u32).into(), ..Header::control(0, 0, 0) };
        let mut fill = Fill::Placed { header, info, slices, full: 0, missing: total };
        let mut behind = Vec::new();
        let mut most = 0;
        while fill.missing() > 0 {
            let Some((asked, room)) = fill.direct() else {
                // Too little is left of too many, which is so where what came ended near the end.
                let mut some = vec![0; fill.missing().min(5000)];
                let count = io::Read::read(&mut &stream, &mut some).expect("nothing breaks");
                assert_eq!(fill.take(&some[..count]), count);
                continue;
            };
            most = most.max(asked);
            let mut buffer = [0; HEADER];
            let count = fill.read(&mut buffer[..room], &stream).expect("nothing breaks");
            assert!(count > 0 && count <= asked + room);
            behind.extend_from_slice(&buffer[..count.saturating_sub(asked)]);
        }
        assert!((AT_ONCE..AT_ONCE + 2000).contains(&most), "{most} bytes at a time");
        writer.join().expect("no panic");
        let mut stream = &stream;
        io::Read::read_to_end(&mut stream, &mut behind).expect("nothing breaks");
        assert_eq!(behind, next);
        let got: Vec<u8> = (0..2000).flat_map(|at| slice(at).to_vec()).collect();
        assert!(got == sent, "a byte is at the wrong place");
    }
}
