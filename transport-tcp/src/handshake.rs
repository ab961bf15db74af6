//! The handshake: mutual authentication before any frame is read. Pure state, no input or output.
//!
//! ```text
//!   initiator                                   responder
//!      | -- hello: who, to whom, job, mode, psk, e --> |   checked field by field, then by its tag
//!      | <-- answer: e, ee, cipher ------------------- |   the responder has proven that it has the key
//!      | -- finish: record 0 -----------------------> |   the initiator has, now and not in a recording
//!      | <-- verdict: record 0 ----------------------- |   this connection counts, or why not
//! ```
//! It is Noise `NNpsk0` (25519, ChaCha20-Poly1305, BLAKE2s). The prologue is the whole clear part of the hello, which
//! names version, mode, job, both ranks with contexts and incarnations, and the sizes both have to agree on: whoever
//! changes any of it breaks the proof, so nothing can be talked down. The roles differ in Noise itself, so that a
//! reflected message proves nothing. The records' keys come from Noise's final state and differ by direction.
//!
//! In [`Mode::Insecure`] the same messages travel with empty proofs.

use crate::config::{JobKey, Limits, Mode, TcpConfig};
use crate::frame::VERSION;
use crate::record::{OVERHEAD, RecordKey, Suite};
use posthaste_core::{ContextId, Endpoint, JobShape, Rank};
use snow::{Builder, HandshakeState};
use thiserror::Error;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};
use zeroize::{Zeroize, Zeroizing};

const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
const MAGIC: [u8; 8] = *b"posthast";
/// An ephemeral key and a tag.
const PROOF: usize = 32 + 16;

/// Length of the initiator's first message in bytes.
pub const HELLO_LEN: usize = size_of::<Clear>() + PROOF;
/// Length of the responder's answer in bytes.
pub const ANSWER_LEN: usize = PROOF + 1;
/// Length of the initiator's proof in bytes.
pub const FINISH_LEN: usize = OVERHEAD + 1;
/// Length of the responder's verdict in bytes.
pub const VERDICT_LEN: usize = OVERHEAD + 1;

const FINISH: u8 = 0x46;

/// Why a handshake failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// It does not speak this protocol at all.
    #[error("not a Posthaste peer")]
    Stranger,
    /// Another version of it.
    #[error("version {0} where {VERSION} is spoken")]
    Version(u16),
    /// Another mode.
    #[error("another mode of protection")]
    Mode,
    /// Another job.
    #[error("another job")]
    Job,
    /// Sizes on which both have to agree differ.
    #[error("other sizes; all ranks of a job use the same")]
    Sizes,
    /// It is for another rank, or for an earlier or later life of this one.
    #[error("meant for another rank or another incarnation")]
    Addressee,
    /// There is no such rank or context.
    #[error("from a rank or context that does not exist")]
    Sender,
    /// The proof is wrong: another key, or something was changed on the way.
    #[error("the proof of the key is wrong")]
    Proof,
    /// The verdict makes no sense.
    #[error("an impossible verdict")]
    Verdict,
}

/// What becomes of a proven connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Verdict {
    /// It is the connection of this pair.
    Accept = 1,
    /// The responder is connecting, too, and its attempt wins; or it is still to hear of this incarnation of the
    /// initiator's rank. Not yet, in any case, and perhaps never.
    Yield = 2,
    /// There is, or was, one already; the pair's connection is never made twice in one life of both.
    Spent = 3,
    /// The responder leaves the job.
    Leaving = 4,
    /// The responder lives and knows the initiator, and lets it in when it has done something first, which takes as long as it
    /// takes: its context is to be moved, or it leaves and has yet to say something to the initiator's rank.
    Wait = 5,
}

impl Verdict {
    fn from_byte(byte: u8) -> Option<Verdict> {
        [Verdict::Accept, Verdict::Yield, Verdict::Spent, Verdict::Leaving, Verdict::Wait]
            .into_iter()
            .find(|verdict| *verdict as u8 == byte)
    }
}

/// The clear part of the hello.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Clear {
    magic: [u8; 8],
    version: U16,
    mode: u8,
    suites: u8,
    /// 1: the initiator's rank leaves the job, 0: it does not.
    leaves: u8,
    from_rank: U32,
    to_rank: U32,
    from_context: U16,
    to_context: U16,
    from_incarnation: U64,
    to_incarnation: U64,
    job: [u8; 16],
    client: U16,
    ranks: U32,
    contexts: U16,
    max_eager: U32,
    get_chunk: U32,
    get_window: U64,
}

/// Who this side is: the same for all its connections.
#[derive(Clone, Debug)]
pub struct Identity {
    rank: Rank,
    shape: JobShape,
    client: u16,
    incarnation: u64,
    job: [u8; 16],
    mode: Mode,
    key: JobKey,
    limits: Limits,
}

impl Identity {
    /// The identity that a configuration describes.
    #[must_use]
    pub fn new(config: &TcpConfig) -> Self {
        Self {
            rank: config.rank,
            shape: config.shape,
            client: config.client.0,
            incarnation: config.incarnation,
            job: config.job,
            mode: config.mode,
            key: config.key.clone(),
            limits: config.limits.checked(),
        }
    }

    /// The mode of all connections.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.mode
    }

    fn clear(&self, from: ContextId, to: Endpoint, to_incarnation: u64, leaves: bool) -> Clear {
        Clear {
            magic: MAGIC,
            version: VERSION.into(),
            mode: self.mode as u8,
            suites: Suite::offered(),
            leaves: leaves.into(),
            from_rank: self.rank.0.into(),
            to_rank: to.rank.0.into(),
            from_context: from.0.into(),
            to_context: to.context.0.into(),
            from_incarnation: self.incarnation.into(),
            to_incarnation: to_incarnation.into(),
            job: self.job,
            client: self.client.into(),
            ranks: self.shape.ranks.into(),
            contexts: self.shape.contexts.into(),
            max_eager: (self.limits.max_eager as u32).into(),
            get_chunk: (self.limits.get_chunk as u32).into(),
            get_window: (self.limits.get_window as u64).into(),
        }
    }

    fn noise(&self, prologue: &Clear, initiator: bool) -> Result<HandshakeState, HandshakeError> {
        // The pattern is a constant and the key has the right length, so that only the operating system's random
        // numbers could fail.
        let build = || {
            let builder = Builder::new(PATTERN.parse()?).psk(0, self.key.bytes())?;
            let builder = builder.prologue(prologue.as_bytes())?;
            if initiator { builder.build_initiator() } else { builder.build_responder() }
        };
        build().map_err(|_: snow::Error| HandshakeError::Proof)
    }
}

/// The keys of both directions, and what is encrypted with them.
pub struct Channel {
    pub(crate) tx: Option<RecordKey>,
    pub(crate) rx: Option<RecordKey>,
}

impl std::fmt::Debug for Channel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Channel").field("encrypted", &self.tx.is_some()).finish_non_exhaustive()
    }
}

impl Channel {
    fn insecure() -> Channel {
        Channel { tx: None, rx: None }
    }

    /// A record of one byte.
    fn say(&mut self, byte: u8) -> Result<[u8; FINISH_LEN], HandshakeError> {
        let mut record = vec![0, 0, byte];
        match &mut self.tx {
            Some(key) => key.seal(&mut record, 0).ok_or(HandshakeError::Proof)?,
            None => record.resize(FINISH_LEN, 0),
        }
        record.try_into().map_err(|_| HandshakeError::Proof)
    }

    fn hear(&mut self, record: &[u8; FINISH_LEN]) -> Result<u8, HandshakeError> {
        let mut record = *record;
        match &mut self.rx {
            Some(key) => match key.open(&mut record) {
                Ok(Some((range, _))) if range.len() == 1 => Ok(record[range.start]),
                _ => Err(HandshakeError::Proof),
            },
            None => Ok(record[2]),
        }
    }

    /// The responder's last word.
    ///
    /// # Errors
    /// If the cipher fails, which it does not for so short a record.
    pub fn verdict(&mut self, verdict: Verdict) -> Result<[u8; VERDICT_LEN], HandshakeError> {
        self.say(verdict as u8)
    }

    /// Reads the responder's last word.
    ///
    /// # Errors
    /// If it is not genuine.
    pub fn heard(&mut self, verdict: &[u8; VERDICT_LEN]) -> Result<Verdict, HandshakeError> {
        Verdict::from_byte(self.hear(verdict)?).ok_or(HandshakeError::Verdict)
    }

    /// What the connection goes on with: keys if it is encrypted, else none.
    #[must_use]
    pub fn settled(self, mode: Mode) -> Channel {
        if mode == Mode::Encrypted { self } else { Channel::insecure() }
    }
}

/// The keys of a connection whose handshake is done but for the last proof, and their cipher; none if it is insecure.
struct Keys(Option<(Suite, Zeroizing<[[u8; 32]; 2]>)>);

impl Keys {
    fn of(mut noise: HandshakeState, suite: Suite) -> Keys {
        let mut keys = Zeroizing::new([[0; 32]; 2]);
        let (mut first, mut second) = noise.dangerously_get_raw_split();
        (keys[0], keys[1]) = (first, second);
        first.zeroize();
        second.zeroize();
        Keys(Some((suite, keys)))
    }

    fn channel(&self, initiator: bool) -> Result<Channel, HandshakeError> {
        let Some((suite, keys)) = &self.0 else { return Ok(Channel::insecure()) };
        let [tx, rx] = if initiator { [0, 1] } else { [1, 0] };
        let key = |which: usize| RecordKey::new(*suite, &keys[which]).ok_or(HandshakeError::Proof);
        Ok(Channel { tx: Some(key(tx)?), rx: Some(key(rx)?) })
    }
}

/// The side that listens, once it has answered: a hundred bytes, until the last proof has come.
pub struct Responder(Keys);

impl std::fmt::Debug for Responder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Responder")
    }
}

impl Responder {
    /// Checks that the initiator has the key now, and not in a recording.
    ///
    /// # Errors
    /// If it has not.
    pub fn finished(&self, finish: &[u8; FINISH_LEN]) -> Result<Channel, HandshakeError> {
        let mut channel = self.0.channel(false)?;
        if channel.hear(finish)? == FINISH { Ok(channel) } else { Err(HandshakeError::Proof) }
    }
}

/// The side that connects.
pub struct Initiator(Option<Box<HandshakeState>>);

impl std::fmt::Debug for Initiator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Initiator")
    }
}

impl Initiator {
    /// Begins a handshake of this side's context with an endpoint, and says whether this rank leaves the job; also gives the first
    /// message.
    ///
    /// # Errors
    /// If there are no random numbers.
    pub fn hello(
        me: &Identity,
        from: ContextId,
        to: Endpoint,
        to_incarnation: u64,
        leaves: bool,
    ) -> Result<(Initiator, [u8; HELLO_LEN]), HandshakeError> {
        let clear = me.clear(from, to, to_incarnation, leaves);
        let mut hello = [0; HELLO_LEN];
        hello[..size_of::<Clear>()].copy_from_slice(clear.as_bytes());
        if me.mode == Mode::Insecure {
            return Ok((Initiator(None), hello));
        }
        let mut noise = me.noise(&clear, true)?;
        let proof = noise.write_message(&[], &mut hello[size_of::<Clear>()..]);
        if proof != Ok(PROOF) {
            return Err(HandshakeError::Proof);
        }
        Ok((Initiator(Some(Box::new(noise))), hello))
    }

    /// Checks the answer; gives the connection's keys and the last message of this side.
    ///
    /// # Errors
    /// If the responder has not proven that it has the key.
    pub fn answered(self, answer: &[u8; ANSWER_LEN]) -> Result<(Channel, [u8; FINISH_LEN]), HandshakeError> {
        let mut channel = match self.0 {
            None => Channel::insecure(),
            Some(mut noise) => {
                let mut suite = [0];
                let read = noise.read_message(answer, &mut suite);
                let suite = Suite::from_byte(suite[0]);
                match (read, suite) {
                    (Ok(1), Some(suite)) => Keys::of(*noise, suite).channel(true)?,
                    _ => return Err(HandshakeError::Proof),
                }
            }
        };
        let finish = channel.say(FINISH)?;
        Ok((channel, finish))
    }
}

/// Who a hello says it is from; proven when [`Responder::finished`] has agreed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The connecting endpoint.
    pub from: Endpoint,
    /// The life of its rank.
    pub incarnation: u64,
    /// The context of this rank that it wants.
    pub to: ContextId,
    /// Whether its rank leaves the job.
    pub leaves: bool,
}

/// The side that listens: checks a hello and answers it. Nothing has been allocated when it is refused by a field of
/// it, and nothing is kept when its proof is wrong.
///
/// # Errors
/// If the hello is not for this side, or its sender does not have the key.
pub fn respond(
    me: &Identity,
    hello: &[u8; HELLO_LEN],
) -> Result<(Claim, Responder, [u8; ANSWER_LEN]), HandshakeError> {
    let (clear, proof) = Clear::read_from_prefix(hello.as_slice()).map_err(|_| HandshakeError::Stranger)?;
    let claim = check(me, &clear)?;
    let mut answer = [0; ANSWER_LEN];
    if me.mode == Mode::Insecure {
        return Ok((claim, Responder(Keys(None)), answer));
    }
    let mut noise = me.noise(&clear, false)?;
    if noise.read_message(proof, &mut []) != Ok(0) {
        return Err(HandshakeError::Proof);
    }
    let suite = Suite::choose(clear.suites);
    if noise.write_message(&[suite as u8], &mut answer) != Ok(ANSWER_LEN) {
        return Err(HandshakeError::Proof);
    }
    Ok((claim, Responder(Keys::of(noise, suite)), answer))
}

fn check(me: &Identity, clear: &Clear) -> Result<Claim, HandshakeError> {
    if clear.magic != MAGIC {
        return Err(HandshakeError::Stranger);
    }
    if clear.version.get() != VERSION {
        return Err(HandshakeError::Version(clear.version.get()));
    }
    if clear.mode != me.mode as u8 {
        return Err(HandshakeError::Mode);
    }
    let leaves = match clear.leaves {
        0 => false,
        1 => true,
        _ => return Err(HandshakeError::Stranger),
    };
    let shape = (clear.ranks.get(), clear.contexts.get(), clear.client.get());
    if clear.job != me.job || shape != (me.shape.ranks, me.shape.contexts, me.client) {
        return Err(HandshakeError::Job);
    }
    let from = Endpoint::new(Rank(clear.from_rank.get()), ContextId(clear.from_context.get()));
    let to = Endpoint::new(Rank(clear.to_rank.get()), ContextId(clear.to_context.get()));
    let exists = |it: Endpoint| it.rank.0 < me.shape.ranks && it.context.0 < me.shape.contexts;
    if to.rank != me.rank || !exists(to) || clear.to_incarnation.get() != me.incarnation {
        return Err(HandshakeError::Addressee);
    }
    if !exists(from) || from == to {
        return Err(HandshakeError::Sender);
    }
    let mine = me.clear(from.context, to, 0, false);
    if (clear.max_eager, clear.get_chunk, clear.get_window)
        != (mine.max_eager, mine.get_chunk, mine.get_window)
    {
        return Err(HandshakeError::Sizes);
    }
    Ok(Claim { from, incarnation: clear.from_incarnation.get(), to: to.context, leaves })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(rank: u32, change: impl FnOnce(&mut TcpConfig)) -> Identity {
        let shape = JobShape { ranks: 3, clients: 1, contexts: 2 };
        let mut config = TcpConfig::new(Rank(rank), shape, [9; 16], JobKey::new([5; 32]));
        change(&mut config);
        Identity::new(&config)
    }

    fn to(rank: u32) -> Endpoint {
        Endpoint::new(Rank(rank), ContextId(1))
    }

    #[test]
    fn both_sides_agree() {
        for mode in [Mode::Insecure, Mode::HandshakeOnly, Mode::Encrypted] {
            let [a, b] = [0, 1].map(|rank| identity(rank, |config| config.mode = mode));
            let leaves = mode == Mode::Encrypted;
            let (initiator, hello) =
                Initiator::hello(&a, ContextId(0), to(1), 1, leaves).expect("random numbers");
            let (claim, theirs, answer) = respond(&b, &hello).expect("the same key");
            assert_eq!(claim.from, Endpoint::new(Rank(0), ContextId(0)));
            assert_eq!((claim.to, claim.incarnation, claim.leaves), (ContextId(1), 1, leaves));
            let (mut ours, finish) = initiator.answered(&answer).expect("the same key");
            let mut theirs = theirs.finished(&finish).expect("it is the one who began");
            let verdict = theirs.verdict(Verdict::Yield).expect("short enough");
            assert_eq!(ours.heard(&verdict), Ok(Verdict::Yield));
            assert_eq!(ours.settled(mode).tx.is_some(), mode == Mode::Encrypted);
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_with_its_reason() {
        let me = identity(1, |_| {});
        let refusal = |rank: u32, to_rank: u32, life: u64, change: &dyn Fn(&mut TcpConfig)| {
            let other = identity(rank, change);
            let (_, hello) =
                Initiator::hello(&other, ContextId(0), to(to_rank), life, false).expect("random");
            respond(&me, &hello).map(|_| ()).expect_err("refused")
        };
        assert_eq!(refusal(0, 1, 1, &|c| c.key = JobKey::new([6; 32])), HandshakeError::Proof);
        assert_eq!(refusal(0, 1, 1, &|c| c.job = [8; 16]), HandshakeError::Job);
        assert_eq!(refusal(0, 1, 1, &|c| c.shape.ranks = 4), HandshakeError::Job);
        assert_eq!(refusal(0, 1, 1, &|c| c.mode = Mode::Encrypted), HandshakeError::Mode);
        assert_eq!(refusal(0, 1, 1, &|c| c.mode = Mode::Insecure), HandshakeError::Mode);
        assert_eq!(refusal(0, 1, 1, &|c| c.limits.max_eager = 5000), HandshakeError::Sizes);
        assert_eq!(refusal(0, 2, 1, &|_| {}), HandshakeError::Addressee);
        assert_eq!(refusal(0, 1, 2, &|_| {}), HandshakeError::Addressee);
        assert_eq!(refusal(7, 1, 1, &|_| {}), HandshakeError::Sender);
        assert_eq!(respond(&me, &[0; HELLO_LEN]).map(|_| ()), Err(HandshakeError::Stranger));
    }

    #[test]
    fn every_changed_byte_breaks_the_proof() {
        let [a, b] = [0, 1].map(|rank| identity(rank, |config| config.mode = Mode::Encrypted));
        let (_, hello) = Initiator::hello(&a, ContextId(0), to(1), 1, false).expect("random");
        for at in 0..HELLO_LEN {
            let mut changed = hello;
            changed[at] ^= 0x10;
            assert!(respond(&b, &changed).is_err(), "byte {at} of the hello");
        }
        for at in 0..ANSWER_LEN {
            let (initiator, hello) = Initiator::hello(&a, ContextId(0), to(1), 1, false).expect("random");
            let (_, _, mut answer) = respond(&b, &hello).expect("the same key");
            answer[at] ^= 0x10;
            assert!(initiator.answered(&answer).is_err(), "byte {at} of the answer");
        }
        let (initiator, hello) = Initiator::hello(&a, ContextId(0), to(1), 1, false).expect("random");
        let (_, _, answer) = respond(&b, &hello).expect("the same key");
        let (_, finish) = initiator.answered(&answer).expect("the same key");
        let (_, replayed, _) = respond(&b, &hello).expect("a recorded hello is answered");
        assert!(replayed.finished(&finish).is_err(), "and its finish is stale");
    }
}
