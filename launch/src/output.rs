//! What ranks print: passed on with a label, or kept.

use std::fmt;
use std::io::{self, Read, Write};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use crate::job::lock;

/// Where a stream of the ranks goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Output {
    /// To the launcher's own stream; through the launcher if lines are labelled.
    #[default]
    Inherit,
    /// Into memory, without a limit; see [`RunningJob::output`](crate::RunningJob::output).
    Capture,
    /// Nowhere.
    Null,
}

/// Which of the two streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stream {
    Out = 0,
    Err = 1,
}

/// Takes a piece of what a rank prints.
type Take = dyn Fn(u32, Stream, &[u8]) + Send + Sync;

/// Who is given what ranks print, in pieces as they come.
#[derive(Clone)]
pub(crate) struct Relay(pub(crate) Arc<Take>);

impl fmt::Debug for Relay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Relay")
    }
}

/// A line longer than this is passed on in pieces, so that a rank cannot fill the launcher's memory.
const LONGEST_LINE: usize = 64 << 10;

/// How long what a rank prints waits for the rest of what the rank before it, under the same number, has printed. That one
/// is dead, but a process that it left behind may hold its output open.
const SUCCESSION: Duration = Duration::from_millis(500);

/// One that reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Reader {
    rank: u32,
    stream: Stream,
    /// In the order of their beginnings.
    number: u64,
    /// Another one of the same stream has waited for it in vain.
    given_up: bool,
}

#[derive(Debug, Default)]
struct Active {
    readers: Vec<Reader>,
    begun: u64,
}

/// The readers of all streams of a job.
#[derive(Debug)]
pub(crate) struct Readers {
    active: Mutex<Active>,
    ended: Condvar,
    captured: Vec<[Mutex<Vec<u8>>; 2]>,
}

impl Readers {
    pub(crate) fn new(ranks: usize) -> Arc<Self> {
        let captured = (0..ranks).map(|_| Default::default()).collect();
        Arc::new(Self { active: Mutex::default(), ended: Condvar::new(), captured })
    }

    /// Reads a stream to its end on a thread of its own, passing lines on with a label.
    pub(crate) fn label(
        self: &Arc<Self>,
        rank: u32,
        stream: Stream,
        from: impl Read + Send + 'static,
    ) -> io::Result<()> {
        let mut lines = Labeller::new(rank);
        self.read(rank, stream, from, move |_, bytes| {
            let text = match bytes {
                Some(bytes) => lines.feed(bytes),
                None => lines.finish(),
            };
            print(stream, text);
            lines.clear();
        })
    }

    /// Reads a stream to its end on a thread of its own, passing pieces on.
    pub(crate) fn relay(
        self: &Arc<Self>,
        rank: u32,
        stream: Stream,
        from: impl Read + Send + 'static,
        relay: Relay,
    ) -> io::Result<()> {
        self.read(rank, stream, from, move |_, bytes| {
            if let Some(bytes) = bytes {
                (relay.0)(rank, stream, bytes);
            }
        })
    }

    /// Reads a stream to its end on a thread of its own, keeping everything.
    pub(crate) fn capture(
        self: &Arc<Self>,
        rank: u32,
        stream: Stream,
        from: impl Read + Send + 'static,
    ) -> io::Result<()> {
        self.read(rank, stream, from, move |readers, bytes| {
            lock(&readers.captured[rank as usize][stream as usize])
                .extend_from_slice(bytes.unwrap_or_default());
        })
    }

    /// What was captured so far.
    pub(crate) fn captured(&self, rank: u32, stream: Stream) -> Vec<u8> {
        self.captured
            .get(rank as usize)
            .map(|streams| lock(&streams[stream as usize]).clone())
            .unwrap_or_default()
    }

    /// Waits until every stream has ended; a process that a rank left behind may hold one open for longer.
    pub(crate) fn wait(&self, most: Duration) {
        // Who waits for one that does not end reads after that time.
        let most = most + SUCCESSION;
        let active = lock(&self.active);
        let left = self.ended.wait_timeout_while(active, most, |active| !active.readers.is_empty());
        if left.is_ok_and(|(active, _)| !active.readers.is_empty()) {
            tracing::warn!(
                "a process left behind by a rank still holds its output; no longer waiting for it"
            );
        }
    }

    /// Waits for those that read the same before.
    fn succeed(&self, reader: Reader) {
        let precedes = |other: &Reader| {
            let same = (other.rank, other.stream) == (reader.rank, reader.stream);
            same && other.number < reader.number && !other.given_up
        };
        let waits = |active: &mut Active| active.readers.iter().any(precedes);
        // After that long they go on side by side, and those that come later do not wait for the one that did not end.
        if let Ok((mut active, _)) = self.ended.wait_timeout_while(lock(&self.active), SUCCESSION, waits) {
            active.readers.iter_mut().filter(|other| precedes(other)).for_each(|other| other.given_up = true);
        }
    }

    /// Calls `sink` with each piece, and with none at the end.
    fn read(
        self: &Arc<Self>,
        rank: u32,
        stream: Stream,
        mut from: impl Read + Send + 'static,
        mut sink: impl FnMut(&Self, Option<&[u8]>) + Send + 'static,
    ) -> io::Result<()> {
        let reader = {
            let mut active = lock(&self.active);
            active.begun += 1;
            let reader = Reader { rank, stream, number: active.begun, given_up: false };
            active.readers.push(reader);
            reader
        };
        let reading = Reading { readers: Arc::clone(self), reader };
        std::thread::Builder::new().name(format!("output of {rank}")).stack_size(128 << 10).spawn(
            move || {
                let readers = &reading.readers;
                readers.succeed(reader);
                let mut buffer = vec![0; 8 << 10];
                loop {
                    match from.read(&mut buffer) {
                        Ok(0) => break,
                        Ok(count) => sink(readers, Some(&buffer[..count])),
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                        Err(error) => {
                            tracing::warn!(rank, %error, "a rank's output could not be read");
                            break;
                        }
                    }
                }
                sink(readers, None);
            },
        )?;
        Ok(())
    }
}

/// Takes a reader out, however its thread ends.
struct Reading {
    readers: Arc<Readers>,
    reader: Reader,
}

impl Drop for Reading {
    fn drop(&mut self) {
        lock(&self.readers.active).readers.retain(|reader| reader.number != self.reader.number);
        self.readers.ended.notify_all();
    }
}

fn write_all(to: &mut impl Write, text: &[u8]) -> io::Result<()> {
    to.write_all(text)?;
    to.flush()
}

/// Writes to this process's own stream, and at once. A launcher whose own output is closed goes on reading, or the ranks
/// would wait for ever.
pub(crate) fn print(stream: Stream, text: &[u8]) {
    let _ = match stream {
        Stream::Out => write_all(&mut io::stdout().lock(), text),
        Stream::Err => write_all(&mut io::stderr().lock(), text),
    };
}

/// Puts a label before each line of a stream that comes in pieces.
pub(crate) struct Labeller {
    label: Vec<u8>,
    /// The start of a line whose end has not come.
    partial: Vec<u8>,
    ready: Vec<u8>,
}

impl Labeller {
    pub(crate) fn new(rank: u32) -> Self {
        Self { label: format!("[{rank}] ").into_bytes(), partial: Vec::new(), ready: Vec::new() }
    }

    /// The whole lines that are there now, labelled.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> &[u8] {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.partial.extend_from_slice(piece);
            if piece.ends_with(b"\n") || self.partial.len() >= LONGEST_LINE {
                self.end_line();
            }
        }
        &self.ready
    }

    /// What is left when the stream has ended.
    pub(crate) fn finish(&mut self) -> &[u8] {
        if !self.partial.is_empty() {
            self.end_line();
        }
        &self.ready
    }

    pub(crate) fn clear(&mut self) {
        self.ready.clear();
    }

    fn end_line(&mut self) {
        self.ready.extend_from_slice(&self.label);
        self.ready.append(&mut self.partial);
        if !self.ready.ends_with(b"\n") {
            self.ready.push(b'\n');
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_cut_anywhere_come_out_whole_and_labelled() {
        let text = b"one\n\ntwo three\nlast";
        for cut in 0..=text.len() {
            let mut lines = Labeller::new(7);
            let mut out = Vec::new();
            for piece in [&text[..cut], &text[cut..]] {
                out.extend_from_slice(lines.feed(piece));
                lines.clear();
            }
            out.extend_from_slice(lines.finish());
            assert_eq!(out, b"[7] one\n[7] \n[7] two three\n[7] last\n", "cut at {cut}");
        }
    }

    #[test]
    fn what_a_rank_prints_comes_behind_what_its_predecessor_has() {
        /// Gives its text late.
        struct Slow(Option<&'static [u8]>);
        impl Read for Slow {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                let Some(text) = self.0.take() else { return Ok(0) };
                std::thread::sleep(Duration::from_millis(50));
                buffer[..text.len()].copy_from_slice(text);
                Ok(text.len())
            }
        }
        let readers = Readers::new(2);
        readers.capture(1, Stream::Out, Slow(Some(b"first "))).unwrap();
        readers.capture(1, Stream::Err, &b"aside"[..]).unwrap();
        readers.capture(1, Stream::Out, &b"second "[..]).unwrap();
        readers.capture(1, Stream::Out, &b"third"[..]).unwrap();
        readers.wait(Duration::from_secs(100));
        assert_eq!(readers.captured(1, Stream::Out), b"first second third");
        assert_eq!(readers.captured(1, Stream::Err), b"aside");
    }

    #[test]
    fn a_predecessor_whose_output_does_not_end_keeps_nobody_waiting_for_ever() {
        /// Ends when the other end of the channel does.
        struct Stuck(std::sync::mpsc::Receiver<()>);
        impl Read for Stuck {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                let _never_sent = self.0.recv();
                Ok(0)
            }
        }
        let readers = Readers::new(1);
        let (end, stuck) = std::sync::mpsc::channel();
        readers.capture(0, Stream::Out, Stuck(stuck)).unwrap();
        readers.capture(0, Stream::Out, &b"second "[..]).unwrap();
        while readers.captured(0, Stream::Out).is_empty() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let (end_of_third, third) = std::sync::mpsc::channel();
        readers.capture(0, Stream::Out, Stuck(third)).unwrap();
        readers.capture(0, Stream::Out, &b"fourth"[..]).unwrap();
        // The launcher has no rank left, and looks once more what was printed.
        readers.wait(Duration::from_millis(300));
        assert_eq!(readers.captured(0, Stream::Out), b"second fourth");
        drop((end, end_of_third));
    }

    #[test]
    fn an_endless_line_is_passed_on_in_pieces() {
        let mut lines = Labeller::new(0);
        let mut out = 0;
        for _ in 0..100 {
            out += lines.feed(&[b'x'; 8 << 10]).len();
            lines.clear();
            assert!(lines.partial.len() < LONGEST_LINE);
        }
        assert!(out > 700 << 10);
    }
}
