//! What ranks print: passed on with a label, or kept.

use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

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

/// As many bytes as a pipe holds at most, unless its system has been told otherwise: what a rank has printed before its end is
/// among so many that are read after it.
const MOST_IN_A_PIPE: u64 = 1 << 20;
/// Bytes that are read at once.
const BUFFER: usize = 8 << 10;
/// How often whoever waits for the readers looks at them.
const LOOK: Duration = Duration::from_millis(20);

/// How long the launcher may wait for what ranks have printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hurry {
    /// As long as it takes.
    None,
    /// As long as a process that was left behind is waited for.
    Some,
    /// No longer.
    Great,
}

/// One that reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Reader {
    rank: u32,
    stream: Stream,
    /// In the order of their beginnings.
    number: u64,
    /// Another one of the same stream has waited for it in vain.
    given_up: bool,
    /// Since when it waits for something to read; none while what it has read is passed on, however slow that is taken.
    idle: Option<Instant>,
    /// When it last had passed on all that there was.
    emptied: Option<Instant>,
    /// Its last read had room for more.
    short: bool,
    /// Bytes that were read.
    read: u64,
}

impl Reader {
    /// Whether it has passed on all that ranks have written, which had ended by `end`.
    fn is_through(&self, end: Instant) -> bool {
        let idle = self.idle.is_some_and(|since| since.max(end).elapsed() >= LOOK);
        idle || self.emptied.is_some_and(|at| at >= end)
    }
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

    /// Waits, after the end of all ranks, until every stream has ended, however slowly what is printed is taken. A process that a
    /// rank left behind may hold one open: it is waited for no longer than `most`. Nor is anything once somebody is in a hurry.
    pub(crate) fn wait(&self, most: Duration, hurry: impl Fn() -> Hurry) {
        // Who waits for one that does not end reads after that time.
        let most = most + SUCCESSION;
        let (end, mut active) = (Instant::now(), lock(&self.active));
        let before: Vec<(u64, u64)> =
            active.readers.iter().map(|reader| (reader.number, reader.read)).collect();
        // For how many looks a reader has been through with what ranks have written; who goes on writing is none of them. Looks,
        // and not time: where this process gets no core, its readers get none, either.
        let patience = most.as_nanos().div_ceil(LOOK.as_nanos()) as u64;
        let mut through: Vec<(u64, u64)> = Vec::new();
        let of = |list: &[(u64, u64)], reader: &Reader| {
            list.iter().find(|(number, _)| *number == reader.number).map(|(_, looks)| *looks)
        };
        let (mut until, mut has_waited) = (None, false);
        while !active.readers.is_empty() {
            match hurry() {
                Hurry::None => {}
                Hurry::Some if *until.get_or_insert_with(|| Instant::now() + most) > Instant::now() => {}
                Hurry::Some | Hurry::Great => return,
            }
            let is_through = |number| {
                active.readers.iter().any(|reader| reader.number == number && reader.is_through(end))
            };
            // Who goes on reading after all was only kept from it.
            through.retain(|(number, _)| is_through(*number));
            for reader in active.readers.iter().filter(|reader| reader.is_through(end)) {
                match through.iter_mut().find(|(number, _)| *number == reader.number) {
                    Some((_, looks)) => *looks += u64::from(has_waited),
                    None => through.push((reader.number, 0)),
                }
            }
            let left_behind = |reader: &Reader| {
                let before = before.iter().find(|(number, _)| *number == reader.number);
                of(&through, reader).is_some_and(|looks| looks >= patience)
                    || reader.read - before.map_or(0, |(_, read)| *read) > MOST_IN_A_PIPE
            };
            if active.readers.iter().all(left_behind) {
                tracing::warn!(
                    "a process left behind by a rank still holds its output; no longer waiting for it"
                );
                return;
            }
            let Ok((next, waited)) = self.ended.wait_timeout(active, LOOK) else { return };
            (active, has_waited) = (next, waited.timed_out());
        }
    }

    /// Notes what a reader does: it waits for something to read, or has read so many bytes.
    fn note(&self, number: u64, read: Option<usize>) {
        let mut active = lock(&self.active);
        if let Some(reader) = active.readers.iter_mut().find(|reader| reader.number == number) {
            let now = Instant::now();
            match read {
                None => {
                    reader.idle = Some(now);
                    if reader.short {
                        reader.emptied = Some(now);
                    }
                }
                Some(read) => {
                    (reader.idle, reader.short) = (None, read < BUFFER);
                    reader.read += read as u64;
                }
            }
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
            let number = active.begun;
            let (given_up, idle, emptied, short, read) = (false, None, None, false, 0);
            let reader = Reader { rank, stream, number, given_up, idle, emptied, short, read };
            active.readers.push(reader);
            reader
        };
        let reading = Reading { readers: Arc::clone(self), reader };
        std::thread::Builder::new().name(format!("output of {rank}")).stack_size(128 << 10).spawn(
            move || {
                let readers = &reading.readers;
                readers.succeed(reader);
                let mut buffer = vec![0; BUFFER];
                loop {
                    readers.note(reader.number, None);
                    let read = from.read(&mut buffer);
                    readers.note(reader.number, Some(*read.as_ref().unwrap_or(&0)));
                    match read {
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

/// Writes to this process's own stream, and at once. A launcher whose own output is closed goes on reading, or the ranks
/// would wait for ever.
pub(crate) fn print(stream: Stream, text: &[u8]) {
    // What other parts of the program have printed comes before it, and nothing of theirs in its midst.
    match stream {
        Stream::Out => {
            let mut stdout = io::stdout().lock();
            let _ = stdout.flush();
            write_all(&stdout, text);
        }
        Stream::Err => write_all(&io::stderr().lock(), text),
    }
}

/// Whoever shares the open file may have made it one that never waits, as remote shells do.
fn write_all(to: &impl AsFd, mut text: &[u8]) {
    while !text.is_empty() {
        match rustix::io::write(to, text) {
            Ok(count) => text = &text[count..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                let waited = poll(&mut [PollFd::new(to, PollFlags::OUT)], None);
                if !matches!(waited, Ok(_) | Err(Errno::INTR)) {
                    return;
                }
            }
            Err(_) => return,
        }
    }
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
                std::thread::sleep(Duration::from_millis(5));
                buffer[..text.len()].copy_from_slice(text);
                Ok(text.len())
            }
        }
        let readers = Readers::new(2);
        readers.capture(1, Stream::Out, Slow(Some(b"first "))).unwrap();
        readers.capture(1, Stream::Err, &b"aside"[..]).unwrap();
        readers.capture(1, Stream::Out, &b"second "[..]).unwrap();
        readers.capture(1, Stream::Out, &b"third"[..]).unwrap();
        readers.wait(Duration::from_secs(100), || Hurry::None);
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
        readers.wait(Duration::from_millis(300), || Hurry::None);
        assert_eq!(readers.captured(0, Stream::Out), b"second fourth");
        drop((end, end_of_third));
    }

    #[test]
    fn whoever_takes_what_is_printed_slowly_gets_all_of_it() {
        let readers = Readers::new(1);
        let taken = Arc::new(Mutex::new(0));
        let count = Arc::clone(&taken);
        let slow = Relay(Arc::new(move |_, _, bytes: &[u8]| {
            std::thread::sleep(Duration::from_millis(300));
            *lock(&count) += bytes.len();
        }));
        readers.relay(0, Stream::Out, &[7; 40_000][..], slow).unwrap();
        // Each piece takes longer than a process that was left behind is waited for.
        readers.wait(Duration::ZERO, || Hurry::None);
        assert_eq!(*lock(&taken), 40_000);
    }

    #[test]
    fn what_goes_on_printing_when_all_ranks_have_ended_is_not_waited_for() {
        /// Never ends.
        struct Endless;
        impl Read for Endless {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                Ok(buffer.len())
            }
        }
        let readers = Readers::new(2);
        let nowhere = Relay(Arc::new(|_, _, _: &[u8]| {}));
        readers.relay(0, Stream::Out, Endless, nowhere).unwrap();
        readers.wait(Duration::from_secs(3600), || Hurry::None);
        // Is stuck where it passes on what it has read.
        let (_end, stuck) = std::sync::mpsc::channel::<()>();
        let stuck = Mutex::new(stuck);
        let stuck = Relay(Arc::new(move |_, _, _: &[u8]| assert!(lock(&stuck).recv().is_err())));
        readers.relay(1, Stream::Out, &b"text"[..], stuck).unwrap();
        // Whoever is told to end waits no longer than for one that was left behind, and not at all the second time.
        let began = Instant::now();
        readers.wait(Duration::from_millis(100), || Hurry::Some);
        assert!(began.elapsed() >= Duration::from_millis(100));
        readers.wait(Duration::from_secs(3600), || Hurry::Great);
    }

    #[test]
    fn what_is_printed_waits_where_its_reader_does_though_the_file_never_does() {
        let (from, to) = rustix::pipe::pipe().unwrap();
        rustix::io::ioctl_fionbio(&to, true).unwrap();
        let text: Vec<u8> = (0..1_000_000).map(|at| (at % 251) as u8).collect();
        let read = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            let mut all = Vec::new();
            std::fs::File::from(from).read_to_end(&mut all).unwrap();
            all
        });
        write_all(&to, &text);
        drop(to);
        assert!(read.join().unwrap() == text, "some of it was lost");
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
