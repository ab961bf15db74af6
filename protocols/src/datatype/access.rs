//! Layouts of memory that is not mapped here: its owner scatters and gathers, by the program that it is sent.

use super::encode::{read_number, write_number};
use super::error::Side;
use super::{Datatype, Layout, Machine, Source, Target};
use crate::message::Message;
use bytes::Bytes;
use posthaste_core::engine::Payload;
use posthaste_core::exposed::{Exposed, is_exposed};
use posthaste_core::memory::SharedSlice;
use posthaste_core::protocol::{FirstPacket, Flow, Incoming, Protocol};
use posthaste_core::{
    Client, ClientId, Device, Fault, Handle, MAX_INFO, Messager, ProtocolId, Rank, RegisterError, Scope,
};
use std::borrow::Cow;
use std::sync::{Arc, Weak};

const NAME: &str = "posthaste.layouts";
/// Bytes that a put moves at a time if its owner keeps them first: enough to make little of what a request costs, and few
/// enough for the cache.
const KEPT: u64 = 256 << 10;
/// And if they go where they belong as they come in.
const PLACED: u64 = 1 << 20;
/// Bytes that a get moves at a time: few enough for the cache, and several of them are on their way.
const CHUNK: u64 = 64 << 10;
/// Blocks from this mean length on go where they belong as they come in.
const WORTH_PLACING: u64 = 512;
/// Or so many times what its program takes.
const PER_PROGRAM: u64 = 16;

/// Most bytes that one get with such a program asks for: what a peer can make this rank keep for an answer is in
/// proportion to what it has sent.
pub(crate) fn chunk(program: usize) -> u64 {
    CHUNK.max(PER_PROGRAM * program as u64)
}

/// Most bytes that one put to a layout with such a program moves: each carries the program, which is to stay the smaller part.
pub(crate) fn put_chunk(to: &Layout<'_>, program: usize) -> u64 {
    let worth = if to.datatype.mean_chunk() >= WORTH_PLACING { PLACED } else { KEPT };
    worth.max(PER_PROGRAM * program as u64)
}

const PUT: u64 = 1;
const GET: u64 = 2;
/// Added to the kind: the program is in the info.
const WITHIN: u64 = 4;

/// Which bytes of which layout a request is about.
///
/// ```text
///   info      kind | incarnation | place | length | base | count | first | bytes | the program, or its length
///   payload   the program, if it is not in the info | for puts: the bytes
/// ```
/// Numbers are of variable length, as in programs.
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
    /// The info of a put, and whether the program is in it; else it comes before the bytes.
    pub(crate) fn put_info(&self, program: &[u8]) -> (Vec<u8>, bool) {
        self.info(PUT, program)
    }

    /// The info of a get, and whether the program is in it; else it is the payload.
    pub(crate) fn get_info(&self, program: &[u8]) -> (Vec<u8>, bool) {
        self.info(GET, program)
    }

    /// The info, and whether the program is in it.
    fn info(&self, kind: u64, program: &[u8]) -> (Vec<u8>, bool) {
        let Request { place, len, base, count, first, bytes, incarnation } = *self;
        let mut info = Vec::with_capacity(MAX_INFO);
        // The kind takes one byte with and without the addition.
        for number in [kind | WITHIN, incarnation.into(), place, len, base, count, first, bytes] {
            write_number(&mut info, number);
        }
        let within = info.len() + program.len() <= MAX_INFO;
        if within {
            info.extend_from_slice(program);
        } else {
            info[0] = kind as u8;
            write_number(&mut info, program.len() as u64);
        }
        (info, within)
    }

    /// Kind, request, and where the program is.
    fn parse(info: &[u8]) -> Option<(u64, Request, Program<'_>)> {
        let mut rest = info;
        let mut number = || read_number(&mut rest);
        let kind = number()?;
        let incarnation = number()?.try_into().ok()?;
        let (place, len, base, count) = (number()?, number()?, number()?, number()?);
        let (first, bytes) = (number()?, number()?);
        let request = Request { place, len, base, count, first, bytes, incarnation };
        if kind & WITHIN != 0 {
            return Some((kind & !WITHIN, request, Program::Here(rest)));
        }
        let program = Program::Ahead(number()?);
        rest.is_empty().then_some((kind, request, program))
    }
}

/// Where a request has its program.
enum Program<'m> {
    Here(&'m [u8]),
    /// So many bytes of the payload, before everything else.
    Ahead(u64),
}

/// Puts and gets between layouts where memory is not mapped: one per client, registered before it is opened.
///
/// A peer that sends nonsense is answered with a fault: its program is checked, the memory must be one that this rank
/// shares, and what one request moves is limited.
#[derive(Clone, Copy, Debug)]
pub struct LayoutAccess {
    id: ProtocolId,
    client: ClientId,
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
        let (incarnation, exposed) = (client.incarnation_of(me), client.exposed().clone());
        let owner = Owner { me, incarnation, device, exposed };
        Ok(LayoutAccess { id: client.register(Arc::new(owner))?, client: client.id() })
    }

    /// The protocol by which peers are asked.
    pub(crate) fn id(&self) -> ProtocolId {
        self.id
    }

    /// The client that it is registered with: others have other numbers for it.
    pub(crate) fn client(&self) -> ClientId {
        self.client
    }
}

/// This rank as the owner of memory: what peers ask of it.
struct Owner {
    me: Rank,
    incarnation: u32,
    device: Option<Weak<dyn Device>>,
    exposed: Arc<Exposed>,
}

impl Protocol for Owner {
    fn name(&self) -> &str {
        NAME
    }

    // Credit would have to be waited for, past which other puts would get.
    fn flow(&self) -> Flow {
        Flow::Inline
    }

    // Puts that are no messages do, too.
    fn overtakes_held(&self) -> bool {
        true
    }

    // A put is one of several as a rule, and nobody may be left to put it again.
    fn may_be_refused(&self, message: &Incoming<'_>) -> bool {
        !matches!(Request::parse(message.info), Some((PUT, ..)))
    }

    // A program that is in the info is short.
    fn place(&self, first: &FirstPacket<'_>) -> Option<Vec<SharedSlice>> {
        let (PUT, request, Program::Here(program)) = Request::parse(first.info)? else { return None };
        let memory = self.mapped(&request)?;
        let mut machine = self.machine(&request, program).ok()?;
        let fits = first.total == request.bytes && machine.mean_chunk() >= WORTH_PLACING;
        fits.then(|| machine.places(memory, request.bytes)).flatten()
    }

    fn on_placed(&self, scope: &mut Scope<'_>, message: Incoming<'_>) {
        if let Some(to) = message.reply() {
            scope.reply(to, Ok(Payload::Borrowed(&[])));
        }
    }

    fn on_message(&self, scope: &mut Scope<'_>, message: Incoming<'_>) {
        let Some(to) = message.reply() else { return };
        match self.answer(&Message::new(message)) {
            Ok(answer) => scope.reply(to, Ok(Payload::Owned(answer))),
            Err(fault) => scope.reply(to, Err(fault)),
        }
    }
}

impl Owner {
    /// The memory that a request is about, if it is the device's.
    fn mapped(&self, request: &Request) -> Option<SharedSlice> {
        let device = self.device.as_ref().and_then(Weak::upgrade)?;
        device.map(self.me, request.place, request.len)
    }

    /// Hands out the memory that a request is about, if it is there.
    fn reach<R>(&self, request: &Request, access: impl FnOnce(Target<'_>) -> R) -> Result<R, Fault> {
        let mut reached = None;
        if is_exposed(request.place) {
            let (len, mut access) = (request.len.try_into().unwrap_or(usize::MAX), Some(access));
            self.exposed.reach(request.place, len, &mut |bytes| {
                reached = access.take().map(|access| access(bytes.into()));
            });
        } else {
            reached = self.mapped(request).map(|memory| access(memory.into()));
        }
        reached.ok_or(Fault::NoSuchMemory(self.me))
    }

    /// A machine at the first byte of a request.
    fn machine(&self, request: &Request, program: &[u8]) -> Result<Machine, Fault> {
        let undecodable = || Fault::Undecodable(self.me);
        if request.incarnation != self.incarnation {
            // What is there now is another incarnation's.
            return Err(Fault::NoSuchMemory(self.me));
        }
        let datatype = Datatype::from_bytes(program).map_err(|error| {
            tracing::warn!(%error, "a program was refused");
            undecodable()
        })?;
        let layout = Layout::new(&datatype, request.count).at(request.base);
        let size = layout.check(Side::Target, request.len).map_err(|_| undecodable())?;
        let inside = request.first <= size && (1..=size - request.first).contains(&request.bytes);
        // No more than the memory has: a layout without overlaps.
        if !inside || size > request.len {
            return Err(undecodable());
        }
        let mut machine = Machine::new(&layout).map_err(|_| undecodable())?;
        machine.skip(request.first);
        Ok(machine)
    }

    /// What a peer asks for is done at once, so that nothing that it sends behind it is there before.
    fn answer(&self, message: &Message<'_>) -> Result<Bytes, Fault> {
        let undecodable = || Fault::Undecodable(self.me);
        let (kind, request, program) = Request::parse(message.info()).ok_or_else(undecodable)?;
        let payload = message.source_bytes();
        let (program, data) = split(&payload, program).ok_or_else(undecodable)?;
        // Before the memory's lock is taken, if it has one.
        let mut machine = self.machine(&request, &program)?;
        match kind {
            PUT if data.len() as u64 == request.bytes => {
                let put = self.reach(&request, |memory| machine.scatter(memory, data).map(drop))?;
                put.map_err(|_| undecodable())?;
                Ok(Bytes::new())
            }
            GET if data.is_empty() && request.bytes <= chunk(program.len()) => {
                let mut bytes = vec![0; request.bytes as usize];
                let got = self.reach(&request, |memory| machine.gather(&memory, &mut bytes).map(drop))?;
                got.map_err(|_| undecodable())?;
                Ok(bytes.into())
            }
            _ => Err(undecodable()),
        }
    }
}

/// The program, as a private copy if it is in the payload, and the rest of that.
fn split<'m>(payload: &Source<'m>, program: Program<'m>) -> Option<(Cow<'m, [u8]>, Source<'m>)> {
    let len = payload.len() as u64;
    let program = match program {
        Program::Here(program) => return Some((program.into(), *payload)),
        Program::Ahead(len) => len,
    };
    let rest = len.checked_sub(program)?;
    match payload {
        Source::Private(bytes) => {
            let (program, data) = bytes.split_at_checked(program as usize)?;
            Some((program.into(), Source::Private(data)))
        }
        Source::Shared(slice) => {
            Some((slice.slice(0, program)?.to_vec().into(), Source::Shared(slice.slice(program, rest)?)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use posthaste_core::device::Body;
    use posthaste_core::inprocess::InProcessFabric;
    use posthaste_core::{ClientId, ContextId, Endpoint, JobShape};

    const ME: Rank = Rank(1);

    fn owner(device: Option<Weak<dyn Device>>) -> Owner {
        Owner { me: ME, incarnation: 0, device, exposed: Arc::default() }
    }

    /// What a peer is answered.
    fn ask(device: &Weak<dyn Device>, info: &[u8], payload: &[u8]) -> Result<Vec<u8>, Fault> {
        let source = Endpoint::new(Rank(0), ContextId(0));
        let body = Body::Short(payload);
        let message =
            Message::new(Incoming { source, info, body, protocol: ProtocolId(9), life: 0, cookie: 1 });
        owner(Some(device.clone())).answer(&message).map(|answer| answer.to_vec())
    }

    #[test]
    fn programs_are_the_smaller_part_of_what_is_sent() {
        let blocks: Vec<_> = (0..200_000).map(|block| (3 * block + block * block % 2, 1)).collect();
        let irregular = Datatype::of::<u64>().indexed(&blocks).expect("small");
        let program = irregular.to_bytes().len();
        assert!(program as u64 > KEPT, "{program}");
        assert!(put_chunk(&Layout::new(&irregular, 1), program) >= 16 * program as u64);
        assert_eq!(put_chunk(&Layout::new(&Datatype::of::<u64>(), 1), 20), KEPT);
    }

    #[test]
    fn a_get_may_be_asked_for_again_and_a_put_may_not() {
        let owner = owner(None);
        let place = Request { place: 0, len: 64, base: 0, count: 1, first: 0, bytes: 8, incarnation: 0 };
        for (kind, may_be_refused) in [(GET, true), (PUT, false)] {
            let (info, _) = place.info(kind, &Datatype::of::<u64>().to_bytes());
            let source = Endpoint::new(Rank(0), ContextId(0));
            let (body, protocol) = (Body::Short(&[]), ProtocolId(9));
            let message = Incoming { source, info: &info, body, protocol, life: 0, cookie: 1 };
            assert_eq!(owner.may_be_refused(&message), may_be_refused);
        }
    }

    #[test]
    fn long_blocks_are_placed_and_nothing_else_is() {
        let fabric = InProcessFabric::new(JobShape { ranks: 2, clients: 1, contexts: 1 });
        let device = fabric.device(ClientId(0), ME);
        let own = device.allocate(64 << 10).expect("there is memory");
        let memory = device.map(ME, own.offset, own.len).expect("it is mapped");
        let owner = owner(Some(Arc::downgrade(&device)));
        let long = Datatype::of::<u8>().vector(8, 1000, 2000).expect("small");
        let short = Datatype::of::<u8>().vector(8, 500, 1000).expect("small");
        let request = Request {
            place: own.offset,
            len: own.len,
            base: 8,
            count: 1,
            first: 1500,
            bytes: 3000,
            incarnation: 0,
        };
        let placed = |kind, request: &Request, datatype: &Datatype, total| {
            let (info, within) = request.info(kind, &datatype.to_bytes());
            assert!(within, "a short program fits");
            let source = Endpoint::new(Rank(0), ContextId(0));
            let slices = owner.place(&FirstPacket { source, info: &info, total })?;
            let offset = |slice: &SharedSlice| slice.as_ptr() as usize - memory.as_ptr() as usize;
            Some(slices.iter().map(|slice| (offset(slice), slice.len())).collect::<Vec<_>>())
        };
        let expected = vec![(2508, 500), (4008, 1000), (6008, 1000), (8008, 500)];
        assert_eq!(placed(PUT, &request, &long, 3000), Some(expected));
        assert_eq!(placed(PUT, &request, &short, 3000), None);
        assert_eq!(placed(PUT, &request, &long, 2999), None);
        assert_eq!(placed(GET, &request, &long, 3000), None);
        // Long blocks in the mean, but where the bytes go there are short ones: a list of their places would be longer than
        // they are.
        let blocks: Vec<_> = (0..20).map(|block| (2 * block, 1)).chain([(40, 40_000)]).collect();
        let uneven = Datatype::of::<u8>().indexed(&blocks).expect("small");
        assert!(uneven.mean_chunk() >= WORTH_PLACING);
        let some = |first, bytes| Request { first, bytes, ..request };
        assert_eq!(placed(PUT, &some(0, 20), &uneven, 20), None);
        assert_eq!(placed(PUT, &some(0, 2000), &uneven, 2000).map(|places| places.len()), Some(21));
        let two = vec![(8, 1), (10, 1)];
        assert_eq!(placed(PUT, &some(0, 2), &uneven, 2), Some(two));
        for wrong in [
            Request { base: own.len - 14_999, ..request },
            Request { count: u64::MAX, ..request },
            Request { first: 5001, ..request },
            Request { place: 1 << 50, ..request },
            Request { incarnation: 1, ..request },
        ] {
            assert_eq!(placed(PUT, &wrong, &long, 3000), None, "{wrong:?}");
        }
        let (info, _) = request.info(PUT, &long.to_bytes());
        let source = Endpoint::new(Rank(0), ContextId(0));
        for len in 0..info.len() {
            assert!(owner.place(&FirstPacket { source, info: &info[..len], total: 3000 }).is_none(), "{len}");
        }
    }

    #[test]
    fn memory_that_no_device_has_is_reached_within_its_bounds_while_it_is_there() {
        let owner = owner(None);
        let memory = owner.exposed.add(vec![0_u8; 32]);
        let program = Datatype::of::<u16>().vector(4, 1, 2).expect("small").to_bytes();
        let all = Request {
            place: memory.place(),
            len: 32,
            base: 16,
            count: 1,
            first: 3,
            bytes: 5,
            incarnation: 0,
        };
        let ask = |request: &Request, info: Vec<u8>, payload: &[u8]| {
            let (source, body) = (Endpoint::new(Rank(0), ContextId(0)), Body::Short(payload));
            let first = FirstPacket { source, info: &info, total: request.bytes };
            assert!(owner.place(&first).is_none(), "nothing is placed there");
            let message = Incoming { source, info: &info, body, protocol: ProtocolId(9), life: 0, cookie: 1 };
            owner.answer(&Message::new(message)).map(|answer| answer.to_vec())
        };
        let put = |request: &Request| ask(request, request.put_info(&program).0, &[1, 2, 3, 4, 5]);
        let get = |request: &Request| ask(request, request.get_info(&program).0, &[]);
        assert_eq!((put(&all), get(&all)), (Ok(vec![]), Ok(vec![1, 2, 3, 4, 5])));
        assert_eq!(
            memory.with(|bytes| bytes[16..].to_vec()),
            [0, 0, 0, 0, 0, 1, 0, 0, 2, 3, 0, 0, 4, 5, 0, 0]
        );
        let (refused, gone) = (Err(Fault::Undecodable(ME)), Err(Fault::NoSuchMemory(ME)));
        for (wrong, told) in [
            (Request { base: 19, ..all }, &refused),
            (Request { len: 33, ..all }, &gone),
            (Request { len: u64::MAX, ..all }, &gone),
            (Request { place: all.place + 1, ..all }, &gone),
            (Request { place: u64::MAX, ..all }, &gone),
            (Request { incarnation: 1, ..all }, &gone),
        ] {
            assert_eq!((&put(&wrong), &get(&wrong)), (told, told), "{wrong:?}");
        }
        let bytes = memory.into_inner();
        assert_eq!((put(&all), get(&all)), (gone.clone(), gone));
        assert_eq!(bytes[..16], [0; 16]);
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
        // The program in the info, as it is sent if it fits; and ahead of the bytes.
        let within = |kind, request: &Request, program: &[u8]| {
            let (info, within) = request.info(kind, program);
            assert!(within, "a short program fits");
            info
        };
        let ahead = |kind, request: &Request, len: u64| {
            let mut info = within(kind, request, &[]);
            info[0] = kind as u8;
            write_number(&mut info, len);
            info
        };
        let info = |kind, request: &Request| ahead(kind, request, program.len() as u64);
        let payload = [&program[..], &[1, 2, 3, 4, 5]].concat();
        assert_eq!(ask(&weak, &within(PUT, &fits, &program), &[5, 4, 3, 2, 1]), Ok(Vec::new()));
        assert_eq!(ask(&weak, &within(GET, &fits, &program), &[]), Ok(vec![5, 4, 3, 2, 1]));
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
        assert_eq!(ask(&weak, &ahead(PUT, &fits, u64::MAX), &payload), refused);
        let whole = info(PUT, &fits);
        for len in 0..whole.len() {
            assert_eq!(ask(&weak, &whole[..len], &payload), refused, "info cut after {len} bytes");
        }
        assert_eq!(ask(&weak, &[&whole[..], &[0]].concat(), &payload), refused);
        let whole = within(PUT, &fits, &program);
        for len in 0..whole.len() {
            assert_eq!(ask(&weak, &whole[..len], &[1, 2, 3, 4, 5]), refused, "info cut after {len} bytes");
        }
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
        assert_eq!(ask(&weak, &within(GET, &much, &again), &[]), refused);
        // Nothing at all, for which no program is looked at closely, whatever it is.
        for nothing in [Request { count: 0, first: 0, bytes: 0, ..fits }, Request { bytes: 0, ..fits }] {
            assert_eq!(ask(&weak, &within(GET, &nothing, &program), &[]), refused, "{nothing:?}");
            assert_eq!(ask(&weak, &within(PUT, &nothing, &program), &[]), refused, "{nothing:?}");
        }
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
        let answer = ask(&weak, &within(GET, &all, &flat), &[]).expect("as much as may be");
        assert_eq!(answer.len() as u64, most);
        let more = Request { bytes: most + 1, ..all };
        assert_eq!(ask(&weak, &within(GET, &more, &flat), &[]), refused);
        drop(device);
        drop(fabric);
        assert_eq!(ask(&weak, &info(PUT, &fits), &payload), Err(Fault::NoSuchMemory(ME)));
    }
}
