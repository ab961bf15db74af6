//! The head's connection to one agent.

use std::collections::BTreeMap;
use std::io::{self, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use zeroize::Zeroizing;

use crate::hosts::file::Hosts;
use crate::hosts::wire::{Frame, Kind, VERSION, read_frame, read_greeting, write_frame};
use crate::job::lock;
use crate::output::{Labeller, Output, Stream, print};

/// How long a remote shell may take to end once its agent has.
const PATIENCE: Duration = Duration::from_secs(2);

/// How long to wait for the last words of a remote shell that has ended.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// What the head hears of an agent, or of the one who started it.
pub(crate) enum Event {
    Said(u32, Frame),
    /// There is no more to hear, and why.
    Over(u32, String),
    Signal(crate::signals::Forwarded),
}

/// What is written to it is printed as this process's own complaints.
struct Printed;

impl Write for Printed {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        print(Stream::Err, text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Where ranks' output goes.
#[derive(Clone, Copy)]
pub(crate) struct Printing {
    pub(crate) label: bool,
    pub(crate) out: Output,
    pub(crate) err: Output,
}

/// An agent, and its remote shell, which does not outlive this value.
pub(crate) struct Link {
    pub(crate) host: String,
    child: Child,
    /// Its end ends the agent's ranks.
    input: Arc<Mutex<Option<ChildStdin>>>,
    pub(crate) started: bool,
    /// What its ranks are to hear when it has said that they run: they may do so already.
    early: Vec<Signal>,
    pub(crate) over: bool,
    /// Its sender is dropped when all that the remote shell has said besides has been passed on.
    said: Receiver<()>,
}

impl Link {
    /// Starts an agent; once it has said what it is, it is given the order.
    pub(crate) fn start(
        hosts: &Hosts,
        silence: Duration,
        node: u32,
        order: Zeroizing<Vec<u8>>,
        printing: Printing,
        events: Sender<Event>,
    ) -> io::Result<Self> {
        let listed = &hosts.hosts[node as usize];
        let (host, destination) = (listed.name.clone(), listed.destination());
        let missing = || io::Error::new(io::ErrorKind::InvalidInput, "the remote shell's command is empty");
        let remote_shell = hosts.remote_shell_with(silence);
        let (program, args) = remote_shell.split_first().ok_or_else(missing)?;
        let mut command = Command::new(program);
        command.args(args).arg(&destination).args(&hosts.agent);
        // The terminal's Ctrl-C is the head's to pass on: a remote shell that it ends would take its ranks along unasked.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped());
        // A remote shell may have streams that it is given never wait, also for those who share them with it.
        command.stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let input = Arc::new(Mutex::new(child.stdin.take()));
        let (output, errors) = (child.stdout.take(), child.stderr.take());
        let (saying, said) = channel();
        let link = Self {
            host,
            child,
            input: Arc::clone(&input),
            started: false,
            early: Vec::new(),
            over: false,
            said,
        };
        let (Some(output), Some(mut errors)) = (output, errors) else {
            return Err(io::Error::other("a pipe is missing"));
        };
        let passes_on = std::thread::Builder::new().name(format!("errors of agent {node}"));
        passes_on.spawn(move || {
            let _until_its_end: Sender<()> = saying;
            // A stream that cannot be read has ended.
            let _ = io::copy(&mut errors, &mut Printed);
        })?;
        let reader = std::thread::Builder::new().name(format!("agent {node}"));
        reader.spawn(move || {
            let why = match listen(node, output, &input, order, printing, &events) {
                Ok(()) => "its agent, or the remote shell, has ended".to_owned(),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    "its agent, or the remote shell, has ended".to_owned()
                }
                Err(error) => error.to_string(),
            };
            // The head may have stopped listening.
            let _ = events.send(Event::Over(node, why));
        })?;
        Ok(link)
    }

    /// Its ranks run.
    pub(crate) fn starts(&mut self) {
        self.started = true;
        for signal in std::mem::take(&mut self.early) {
            self.signal(signal);
        }
    }

    /// Sends the ranks a signal that does not end them, as soon as they are known to run.
    pub(crate) fn pass_on(&mut self, signal: Signal) {
        if self.started {
            self.signal(signal);
        } else if !self.early.contains(&signal) {
            // As with a process: what is pending is pending once.
            self.early.push(signal);
        }
    }

    /// Sends the ranks a signal. An agent that is gone needs none.
    pub(crate) fn signal(&self, signal: Signal) {
        if let Some(input) = &mut *lock(&self.input) {
            let _ = write_frame(input, Kind::Signal, signal.as_raw().cast_unsigned(), &[]);
        }
    }

    /// Lets the agent go, and waits for its remote shell, which is killed if it stays; how it ended.
    pub(crate) fn finish(&mut self) -> Option<ExitStatus> {
        self.close();
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            if let Ok(Some(status)) = self.child.try_wait() {
                // What it has left behind may hold the stream open.
                let _all_or_enough = self.said.recv_timeout(LAST_WORDS);
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.kill();
        None
    }

    fn close(&self) {
        // Whoever holds it is writing the order, to a remote shell that is about to be killed if it does not read.
        if let Ok(mut input) = self.input.try_lock() {
            *input = None;
        }
    }

    /// Ends the remote shell, and with it, by the end of its input, the agent.
    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.close();
        self.kill();
    }
}

fn listen(
    node: u32,
    output: ChildStdout,
    input: &Mutex<Option<ChildStdin>>,
    order: Zeroizing<Vec<u8>>,
    printing: Printing,
    events: &Sender<Event>,
) -> io::Result<()> {
    let mut output = BufReader::new(output);
    let version = read_greeting(&mut output)?;
    if version != VERSION {
        return Err(io::Error::other(format!(
            "its agent is of version {version} and this launcher of {VERSION}: install the same on all hosts"
        )));
    }
    match &mut *lock(input) {
        // An agent that does not take it has ended, or says why.
        Some(input) => drop(write_frame(input, Kind::Order, node, &order)),
        None => return Ok(()),
    }
    drop(order);
    let mut lines = Lines { printing, labellers: BTreeMap::new() };
    while let Some(frame) = read_frame(&mut output)? {
        match frame.kind {
            Kind::Out => lines.print(frame.number, Stream::Out, &frame.body),
            Kind::Err => lines.print(frame.number, Stream::Err, &frame.body),
            _ => {
                if frame.kind == Kind::Done {
                    lines.finish();
                }
                if events.send(Event::Said(node, frame)).is_err() {
                    break;
                }
            }
        }
    }
    lines.finish();
    Ok(())
}

/// What ranks print, on its way to the head's own streams.
struct Lines {
    printing: Printing,
    labellers: BTreeMap<(u32, Stream), Labeller>,
}

impl Lines {
    fn print(&mut self, rank: u32, stream: Stream, bytes: &[u8]) {
        let output = if stream == Stream::Out { self.printing.out } else { self.printing.err };
        if output == Output::Null {
            return;
        }
        if !self.printing.label {
            return print(stream, bytes);
        }
        let lines = self.labellers.entry((rank, stream)).or_insert_with(|| Labeller::new(rank));
        print(stream, lines.feed(bytes));
        lines.clear();
    }

    fn finish(&mut self) {
        for ((_, stream), mut lines) in std::mem::take(&mut self.labellers) {
            print(stream, lines.finish());
        }
        let _ = io::stdout().flush();
    }
}
