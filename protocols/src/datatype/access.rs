//! Layouts of memory that is not mapped here: its owner scatters and gathers, by the program that it is sent.

use super::error::Side;
use super::{Datatype, Layout, Machine, Source};
use crate::buffer::Buffer;
use crate::message::Message;
use crate::service::{Call, Service, register_inline};
use bytes::Bytes;
use posthaste_core::{Client, Device, Fault, Handle, Messager, Rank, RegisterError, Scope};
use std::sync::{Arc, Weak};

const NAME: &str = "posthaste.layouts";
/// Bytes that a request moves: few enough for the cache, and several of them are on their way at a time.
const CHUNK: u64 = 64 << 10;
/// Or so many times what its program takes.
const PER_PROGRAM: u64 = 16;

/// Most bytes that one request with such a program moves: what a peer can make this rank keep for an answer is in
/// proportion to what it has sent.
pub(crate) fn chunk(program: usize) -> u64 {
    CHUNK.max(PER_PROGRAM * program as u64)
}

const PUT: u64 = 1;
const GET: u64 = 2;
/// Words of message info.
const WORDS: usize = 8;

/// Which bytes of which layout a request is about.
///
/// ```text
///   info      incarnation 32, kind 32 | length of the program | place | length | base | count | first | bytes
///   payload   program | for puts: the bytes
/// ```
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// The memory as its owner names it.
    pub place: u64,
    /// Its length in bytes.
    pub len: u64,
    /// Of the layout, from the beginning of the memory.
    pub base: u64,
    /// Elements of the layout.
    pub count: u64,
    /// Bytes of the layout that come before those of this request.
    pub first: u64,
    /// Bytes that are put or asked for.
    pub bytes: u64,
    /// The incarnation of the owner that has the memory.
    pub incarnation: u32,
}

impl Request {
    fn info(&self, kind: u64, program: u64) -> [u8; WORDS * 8] {
        let Request { place, len, base, count, first, bytes, incarnation } = *self;
        let kind = u64::from(incarnation) << 32 | kind;
        let mut info = [0; WORDS * 8];
        let words = [kind, program, place, len, base, count, first, bytes];
        for (into, word) in info.chunks_exact_mut(8).zip(words) {
            into.copy_from_slice(&word.to_le_bytes());
        }
        info
    }

    /// Kind, length of the program, and the rest.
    fn parse(info: &[u8]) -> Option<(u64, u64, Request)> {
        let words: &[u8; WORDS * 8] = info.try_into().ok()?;
        let mut words =
            words.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()));
        let mut word = || words.next().unwrap_or_default();
        let (kind, program) = (word(), word());
        let (place, len, base, count) = (word(), word(), word(), word());
        let (kind, incarnation) = (kind & u64::from(u32::MAX), (kind >> 32) as u32);
        let (first, bytes) = (word(), word());
        Some((kind, program, Request { place, len, base, count, first, bytes, incarnation }))
    }
}

/// Puts and gets between layouts where memory is not mapped: one per client, registered before it is opened.
///
/// A peer that sends nonsense is answered with a fault: its program is checked, the memory must be one that this rank
/// shares, and what one request moves is limited.
#[derive(Clone, Debug)]
pub struct LayoutAccess {
    service: Service<Bytes, Bytes>,
}

impl LayoutAccess {
    /// Registers it with a client.
    ///
    /// # Errors
    /// If it is registered already.
    pub fn new(client: &Client) -> Result<LayoutAccess, RegisterError> {
        let handle: Handle = client.contexts().first().cloned().ok_or(RegisterError::Closed)?;
        let me = handle.me().rank;
        // Devices know whom to tell of their peers, and so the protocols: this must not close the ring.
        let device = client.device_for(me).map(Arc::downgrade);
        let own = (me, client.incarnation_of(me));
        let handler = move |message: Message<'_>, _: &mut Scope<'_>| answer(&message, own, device.as_ref());
        Ok(LayoutAccess { service: register_inline(client, handle, NAME, handler)? })
    }

    /// Asks a peer to scatter bytes. The payload has the program before them.
    pub(crate) fn put(
        &self,
        rank: Rank,
        program: usize,
        payload: Bytes,
        request: &Request,
    ) -> Call<'_, Handle> {
        self.service.call_bytes(rank, payload).info(&request.info(PUT, program as u64))
    }

    /// Asks a peer to gather bytes, by this program.
    pub(crate) fn get(&self, rank: Rank, program: Bytes, request: &Request) -> Call<'_, Handle> {
        let info = request.info(GET, program.len() as u64);
        self.service.call_bytes(rank, program).info(&info)
    }
}

/// What a peer asks for is done at once, so that nothing that it sends behind it is there before.
fn answer(
    message: &Message<'_>,
    (me, incarnation): (Rank, u32),
    device: Option<&Weak<dyn Device>>,
) -> Result<Buffer, Fault> {
    let undecodable = || Fault::Undecodable(me);
    let (kind, program, request) = Request::parse(message.info()).ok_or_else(undecodable)?;
    if request.incarnation != incarnation {
        // What is there now is another incarnation's.
        return Err(Fault::NoSuchMemory(me));
    }
    let payload = message.source_bytes();
    let (program, data) = split(&payload, program).ok_or_else(undecodable)?;
    let most = chunk(program.len());
    let datatype = Datatype::from_bytes(&program).map_err(|error| {
        tracing::warn!(source = %message.source(), %error, "a program was refused");
        undecodable()
    })?;
    let layout = Layout::new(&datatype, request.count).at(request.base);
    let size = layout.check(Side::Target, request.len).map_err(|_| undecodable())?;
    let inside = request.first <= size && request.bytes <= size - request.first;
    // What a layout names is looked through to find the first byte: no more than the memory has.
    if !inside || request.bytes > most || size > request.len {
        return Err(undecodable());
    }
    let memory = device
        .and_then(Weak::upgrade)
        .and_then(|device| device.map(me, request.place, request.len))
        .ok_or(Fault::NoSuchMemory(me))?;
    let mut machine = Machine::new(&layout).map_err(|_| undecodable())?;
    machine.skip(request.first);
    match kind {
        PUT if data.len() as u64 == request.bytes => {
            machine.scatter(memory, data).map_err(|_| undecodable())?;
            Ok(Buffer::copy(&[]))
        }
        GET if data.is_empty() => {
            let mut bytes = vec![0; request.bytes as usize];
            machine.gather(memory, &mut bytes).map_err(|_| undecodable())?;
            Ok(bytes.into())
        }
        _ => Err(undecodable()),
    }
}

/// The program, as a private copy, and what is behind it.
fn split<'m>(payload: &Source<'m>, program: u64) -> Option<(Vec<u8>, Source<'m>)> {
    let len = payload.len() as u64;
    let rest = len.checked_sub(program)?;
    match payload {
        Source::Private(bytes) => {
            let (program, data) = bytes.split_at_checked(program as usize)?;
            Some((program.to_vec(), Source::Private(data)))
        }
        Source::Shared(slice) => {
            Some((slice.slice(0, program)?.to_vec(), Source::Shared(slice.slice(program, rest)?)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use posthaste_core::device::Body;
    use posthaste_core::inprocess::InProcessFabric;
    use posthaste_core::protocol::Incoming;
    use posthaste_core::{ClientId, ContextId, Endpoint, JobShape, ProtocolId};

    const ME: Rank = Rank(1);

    /// What a peer is answered.
    fn ask(device: &Weak<dyn Device>, info: &[u8], payload: &[u8]) -> Result<Vec<u8>, Fault> {
        let source = Endpoint::new(Rank(0), ContextId(0));
        let body = Body::Short(payload);
        let message =
            Message::new(Incoming { source, info, body, protocol: ProtocolId(9), life: 0, cookie: 1 });
        answer(&message, (ME, 0), Some(device)).map(|answer| answer.into_bytes().to_vec())
    }

    #[test]
    fn what_a_peer_asks_for_is_done_within_bounds_or_refused() {
        let fabric = InProcessFabric::new(JobShape { ranks: 2, clients: 1, contexts: 1 });
        let device = fabric.device(ClientId(0), ME);
        let own = device.allocate(4096).expect("there is memory");
        let memory = device.map(ME, own.offset, 4096).expect("it is mapped");
        let weak = Arc::downgrade(&device);
        let words = Datatype::of::<u16>().vector(4, 1, 2).expect("small");
        let program = words.to_bytes();
        let fits =
            Request { place: own.offset, len: 4096, base: 16, count: 2, first: 3, bytes: 5, incarnation: 0 };
        let info = |kind, request: &Request| request.info(kind, program.len() as u64);
        let payload = [&program[..], &[1, 2, 3, 4, 5]].concat();
        assert_eq!(ask(&weak, &info(PUT, &fits), &payload), Ok(Vec::new()));
        // The fourth byte of the layout is the second one of its second number.
        assert_eq!(memory.to_vec()[16..32], [0, 0, 0, 0, 0, 1, 0, 0, 2, 3, 0, 0, 4, 5, 0, 0]);
        assert_eq!(ask(&weak, &info(GET, &fits), &program), Ok(vec![1, 2, 3, 4, 5]));
        let refused = Err(Fault::Undecodable(ME));
        // The program is cut short or not one, the kind is unknown, the payload is not what it is said to be.
        assert_eq!(ask(&weak, &info(GET, &fits), &program[1..]), refused);
        assert_eq!(ask(&weak, &info(GET, &fits), &vec![7; program.len()]), refused);
        assert_eq!(ask(&weak, &info(3, &fits), &payload), refused);
        assert_eq!(ask(&weak, &info(GET, &fits), &payload), refused);
        assert_eq!(ask(&weak, &info(PUT, &fits), &payload[..payload.len() - 1]), refused);
        assert_eq!(ask(&weak, &info(PUT, &fits)[..63], &payload), refused);
        assert_eq!(ask(&weak, &fits.info(PUT, u64::MAX), &payload), refused);
        for beyond in [
            Request { base: 4096 - 27, ..fits },
            Request { base: u64::MAX, ..fits },
            Request { count: u64::MAX, ..fits },
            Request { first: 12, ..fits },
            Request { first: u64::MAX, ..fits },
        ] {
            assert_eq!(ask(&weak, &info(PUT, &beyond), &payload), refused, "{beyond:?}");
        }
        // Memory that this rank does not share.
        let elsewhere = Request { place: 1 << 50, ..fits };
        assert_eq!(ask(&weak, &info(PUT, &elsewhere), &payload), Err(Fault::NoSuchMemory(ME)));
        // Few bytes of memory, named so often that to look through them would take long.
        let pair = Datatype::of::<u8>().indexed(&[(0, 1), (2, 1)]).expect("small");
        let again = pair.hvector(1 << 40, 1, 0).expect("it overlaps itself").to_bytes();
        let much = Request { base: 0, count: 1, first: 1 << 40, bytes: 8, ..fits };
        assert_eq!(ask(&weak, &much.info(GET, again.len() as u64), &again), refused);
        // As much as an answer may have, and more.
        let large = device.allocate(1 << 20).expect("there is memory");
        let flat = Datatype::of::<u8>().to_bytes();
        let most = chunk(flat.len());
        let all = Request {
            place: large.offset,
            len: 1 << 20,
            base: 0,
            count: 1 << 20,
            first: 9,
            bytes: most,
            incarnation: 0,
        };
        let answer = ask(&weak, &all.info(GET, flat.len() as u64), &flat).expect("as much as may be");
        assert_eq!(answer.len() as u64, most);
        let more = Request { bytes: most + 1, ..all };
        assert_eq!(ask(&weak, &more.info(GET, flat.len() as u64), &flat), refused);
        drop(device);
        drop(fabric);
        assert_eq!(ask(&weak, &info(PUT, &fits), &payload), Err(Fault::NoSuchMemory(ME)));
    }
}
