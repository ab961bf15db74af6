//! What an agent is told to start, and how it tells a failure.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::time::Duration;

use zeroize::Zeroizing;

use crate::env::MAX_RANKS;
use crate::key::{JobId, JobKey};
use crate::outcome::{Cause, RankEnd};
use crate::placement::Part;
use crate::values::{nodes, nodes_text};

/// All that an agent needs to know.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) part: Part,
    pub(crate) contexts: u32,
    pub(crate) clients: u32,
    pub(crate) arena_bytes: u64,
    pub(crate) bind: bool,
    pub(crate) keep_going: bool,
    /// How often a rank that fails may be started again.
    pub(crate) restarts: u32,
    pub(crate) grace: Duration,
    pub(crate) directory: PathBuf,
    pub(crate) program: PathBuf,
    pub(crate) args: Vec<OsString>,
    pub(crate) envs: Vec<(OsString, OsString)>,
}

impl Order {
    pub(crate) fn encode(&self) -> Zeroizing<Vec<u8>> {
        let strings = self.args.iter().chain(self.envs.iter().flat_map(|(name, value)| [name, value]));
        // Reserved in full, so that no partial copy of the key is left behind by growth.
        let size: usize =
            1024 + 12 * self.part.nodes.len() + strings.map(|text| text.len() + 8).sum::<usize>();
        let size = size + self.part.rendezvous.len() + self.directory.as_os_str().len();
        let mut out = Writer(Zeroizing::new(Vec::with_capacity(size + self.program.as_os_str().len())));
        out.bytes(self.part.job.as_bytes());
        out.bytes(self.part.key.as_bytes());
        out.bytes(nodes_text(&self.part.nodes).as_bytes());
        out.bytes(self.part.rendezvous.as_bytes());
        let (bind, keep_going) = (self.bind.into(), self.keep_going.into());
        for number in [self.part.node, self.contexts, self.clients, bind, keep_going, self.restarts] {
            out.number(number.into());
        }
        out.number(self.arena_bytes);
        out.number(u64::try_from(self.grace.as_millis()).unwrap_or(u64::MAX));
        out.bytes(self.directory.as_os_str().as_bytes());
        out.bytes(self.program.as_os_str().as_bytes());
        out.number(self.args.len() as u64);
        self.args.iter().for_each(|text| out.bytes(text.as_bytes()));
        out.number(self.envs.len() as u64);
        for (name, value) in &self.envs {
            out.bytes(name.as_bytes());
            out.bytes(value.as_bytes());
        }
        out.0
    }

    /// None for anything but a whole order.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut from = Reader(bytes);
        let job = JobId::from_bytes(from.bytes()?.try_into().ok()?);
        let key = Zeroizing::new(<[u8; 32]>::try_from(from.bytes()?).ok()?);
        let key = JobKey::from_bytes(*key);
        let nodes = nodes(std::str::from_utf8(from.bytes()?).ok()?, MAX_RANKS)?;
        let rendezvous = std::str::from_utf8(from.bytes()?).ok()?.to_owned();
        let node = from.small()?;
        let (contexts, clients) = (from.small()?, from.small()?);
        let (bind, keep_going, restarts) = (from.small()? == 1, from.small()? == 1, from.small()?);
        let arena_bytes = from.number()?;
        let grace = Duration::from_millis(from.number()?);
        let directory = from.text()?.into();
        let program = from.text()?.into();
        let args = (0..from.count()?).map(|_| from.text()).collect::<Option<_>>()?;
        let envs = (0..from.count()?).map(|_| Some((from.text()?, from.text()?))).collect::<Option<_>>()?;
        let part = Part { job, key, nodes, node, rendezvous };
        let order = Self {
            part,
            contexts,
            clients,
            arena_bytes,
            bind,
            keep_going,
            restarts,
            grace,
            directory,
            program,
            args,
            envs,
        };
        from.0.is_empty().then_some(order)
    }
}

/// A failure as it travels: what it was, and the process.
pub(crate) fn encode_failure(cause: &Cause, pid: Option<u32>) -> Vec<u8> {
    let mut out = Writer(Zeroizing::new(Vec::new()));
    let (kind, number, text) = match cause {
        Cause::Exit(code) => (1, *code, ""),
        Cause::Signal(signal) => (2, *signal, ""),
        Cause::NotStarted(why) => (3, 0, &why[..]),
        Cause::HostLost(why) => (4, 0, &why[..]),
    };
    out.number(kind);
    out.number(u64::from(number.cast_unsigned()));
    out.number(pid.map_or(0, u64::from));
    out.bytes(text.as_bytes());
    out.0.to_vec()
}

pub(crate) fn decode_failure(bytes: &[u8]) -> Option<(Cause, Option<u32>)> {
    let mut from = Reader(bytes);
    let (kind, number, pid) = (from.number()?, from.small()?.cast_signed(), from.small()?);
    let mut text = || Some(String::from_utf8_lossy(from.bytes()?).escape_debug().to_string());
    let cause = match kind {
        1 => Cause::Exit(number),
        2 => Cause::Signal(number),
        3 => Cause::NotStarted(text()?),
        4 => Cause::HostLost(text()?),
        _ => return None,
    };
    Some((cause, (pid != 0).then_some(pid)))
}

/// The process that has ended, as it travels.
pub(crate) fn encode_pid(pid: u32) -> [u8; 4] {
    pid.to_le_bytes()
}

pub(crate) fn decode_pid(bytes: &[u8]) -> Option<u32> {
    bytes.try_into().ok().map(u32::from_le_bytes)
}

/// The end of a rank as it travels.
pub(crate) fn encode_end(end: RankEnd) -> Vec<u8> {
    let (kind, number) = match end {
        RankEnd::Exit(code) => (1, code),
        RankEnd::Signal(signal) => (2, signal),
        RankEnd::NotStarted | RankEnd::External | RankEnd::Elsewhere | RankEnd::Lost => (3, 0),
    };
    let mut out = Writer(Zeroizing::new(Vec::new()));
    out.number(kind);
    out.number(u64::from(number.cast_unsigned()));
    out.0.to_vec()
}

pub(crate) fn decode_end(bytes: &[u8]) -> Option<RankEnd> {
    let mut from = Reader(bytes);
    match (from.number()?, from.small()?.cast_signed()) {
        (1, code) => Some(RankEnd::Exit(code)),
        (2, signal) => Some(RankEnd::Signal(signal)),
        (3, _) => Some(RankEnd::NotStarted),
        _ => None,
    }
}

struct Writer(Zeroizing<Vec<u8>>);

impl Writer {
    fn number(&mut self, number: u64) {
        self.0.extend_from_slice(&number.to_le_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn number(&mut self) -> Option<u64> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*bytes))
    }

    fn small(&mut self) -> Option<u32> {
        self.number()?.try_into().ok()
    }

    /// How many things follow, each of which takes eight bytes at least.
    fn count(&mut self) -> Option<usize> {
        let count = usize::try_from(self.number()?).ok()?;
        (count <= self.0.len() / 8).then_some(count)
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = usize::try_from(self.number()?).ok()?;
        let (bytes, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(bytes)
    }

    fn text(&mut self) -> Option<OsString> {
        Some(OsString::from_vec(self.bytes()?.to_vec()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_goes_round_and_pieces_of_it_are_none() {
        let order = Order {
            part: Part {
                job: JobId::from_bytes([1; 16]),
                key: JobKey::from_bytes([2; 32]),
                nodes: vec![0, 0, 1],
                node: 1,
                rendezvous: "host:1".into(),
            },
            contexts: 2,
            clients: 3,
            arena_bytes: 1 << 40,
            bind: true,
            keep_going: false,
            restarts: 9,
            grace: Duration::from_millis(1500),
            directory: "/srv/a b".into(),
            program: OsString::from_vec(b"/bin/\xff".to_vec()).into(),
            args: vec!["-c".into(), "".into()],
            envs: vec![("A".into(), "b=c".into())],
        };
        let bytes = order.encode();
        let again = Order::decode(&bytes).unwrap();
        assert_eq!(format!("{order:?}"), format!("{again:?}"));
        assert_eq!(again.part.key.as_bytes(), &[2; 32]);
        for cut in 0..bytes.len() {
            assert!(Order::decode(&bytes[..cut]).is_none(), "cut at {cut}");
        }
        assert!(!format!("{order:?}").contains("2, 2, 2"));
    }

    #[test]
    fn failures_and_ends_go_round() {
        for cause in [
            Cause::Exit(-1),
            Cause::Exit(7),
            Cause::Signal(9),
            Cause::NotStarted("why".into()),
            Cause::HostLost("gone".into()),
        ] {
            for pid in [None, Some(7)] {
                let bytes = encode_failure(&cause, pid);
                assert_eq!(decode_failure(&bytes), Some((cause.clone(), pid)));
            }
        }
        for end in [RankEnd::Exit(3), RankEnd::Signal(11), RankEnd::NotStarted] {
            assert_eq!(decode_end(&encode_end(end)), Some(end));
        }
        assert_eq!((decode_end(&[9; 16]), decode_failure(&[1; 7])), (None, None));
        assert_eq!((decode_pid(&encode_pid(77)), decode_pid(&[1; 5])), (Some(77), None));
    }
}
