//! A device that only sends, made here, under the messager that all devices are under: everything works, over sends (D01).

use async_trait::async_trait;
use futures::future::join_all;
use futures::task::AtomicWaker;
use posthaste_core::control::CONTROL_BYTES;
use posthaste_core::descriptor::Op;
use posthaste_core::device::{Allocation, Source, Sources, Stop, Verdict};
use posthaste_core::device::{Body, Doorbell, Inject, Injected, Loan, Packet, PeerNews, Port, Sink};
use posthaste_core::engine::{EngineConfig, FifoOptions};
use posthaste_core::inprocess::InProcessFabric;
use posthaste_core::memory::SharedSlice;
use posthaste_core::messager::ClientParts;
use posthaste_core::sysdep::Personality;
use posthaste_core::{Caps, Client, ClientId, ContextId, Descriptor, Device, DeviceError, Endpoint, Handle};
use posthaste_core::{JobShape, LinuxSysdep, MemoryError, Messager, ProtocolId, Rank, Scope};
use posthaste_protocols::pattern::record;
use posthaste_protocols::persistent::Registration;
use posthaste_protocols::{Algorithm, CollectiveError, Collectives, ConnectionManager, Datatype, Exchange};
use posthaste_protocols::{
    Fifo, Layout, LayoutAccess, ManyToMany, Message, Part, Persistent, Reduce, Region,
};
use posthaste_protocols::{RemoteRegion, ServiceOptions, control, flush, handler, service};
use std::collections::VecDeque;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

/// Packets that fit between two ranks, and bytes in each.
const ROOM: usize = 4;
const LONGEST: usize = 200;

/// Values that follow from their seed and the rank that has them (SplitMix64, Steele et al. 2014).
fn values(seed: u64, rank: usize, len: usize) -> Vec<u64> {
    let mix = |at: u64| {
        let z = (seed << 40 | (rank as u64) << 32 | at).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z ^ (z >> 27)
    };
    (0..len as u64).map(mix).collect()
}

/// A packet on its way.
struct Sent {
    protocol: ProtocolId,
    kind: u8,
    cookie: u64,
    info: Vec<u8>,
    bytes: Vec<u8>,
}

#[derive(Default)]
struct Bell {
    rung: AtomicBool,
    sleeper: AtomicWaker,
}

impl Bell {
    fn ring(&self) {
        self.rung.store(true, Ordering::SeqCst);
        self.sleeper.wake();
    }
}

impl Doorbell for Bell {
    fn poll_ring(&self, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        self.sleeper.register(cx.waker());
        if self.rung.swap(false, Ordering::SeqCst) { Poll::Ready(Ok(())) } else { Poll::Pending }
    }
}

/// What the ranks have in common: a queue from each to each, and a bell for each.
struct Wires {
    ranks: usize,
    queues: Vec<Mutex<VecDeque<Sent>>>,
    bells: Vec<Arc<Bell>>,
    /// Packets that went over them.
    count: AtomicU64,
}

impl Wires {
    fn new(ranks: usize) -> Arc<Wires> {
        let queues = (0..ranks * ranks).map(|_| Mutex::default()).collect();
        Arc::new(Wires {
            ranks,
            queues,
            bells: (0..ranks).map(|_| Arc::default()).collect(),
            count: AtomicU64::new(0),
        })
    }

    fn queue(&self, from: usize, to: usize) -> &Mutex<VecDeque<Sent>> {
        &self.queues[from * self.ranks + to]
    }
}

/// The device: sends, and what memory the rank has is its own.
struct Ribbon {
    wires: Arc<Wires>,
    me: Rank,
    caps: Caps,
    memory: Arc<dyn Device>,
}

#[async_trait]
impl Device for Ribbon {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn reaches(&self, rank: Rank) -> bool {
        rank.index() < self.wires.ranks
    }

    fn port(&self, context: ContextId) -> Result<Box<dyn Port>, DeviceError> {
        assert_eq!(context, ContextId(0));
        Ok(Box::new(RibbonPort { wires: self.wires.clone(), me: self.me.index(), held: false }))
    }

    fn doorbell(&self, _context: ContextId) -> Arc<dyn Doorbell> {
        self.wires.bells[self.me.index()].clone()
    }

    fn allocate(&self, len: u64) -> Result<Allocation, MemoryError> {
        self.memory.allocate(len)
    }

    fn free(&self, allocation: Allocation) {
        self.memory.free(allocation);
    }

    fn map(&self, rank: Rank, offset: u64, len: u64) -> Option<SharedSlice> {
        (rank == self.me).then(|| self.memory.map(Rank(0), offset, len))?
    }

    async fn open(&self, _news: PeerNews) -> Result<(), DeviceError> {
        Ok(())
    }

    async fn close(&self) {}
}

struct RibbonPort {
    wires: Arc<Wires>,
    me: usize,
    /// Something was offered and is held by the engine, which looks at it again by itself.
    held: bool,
}

impl Inject for RibbonPort {
    fn inject(&mut self, run: &[Descriptor], sources: &Sources<'_>) -> Injected {
        for (taken, descriptor) in run.iter().enumerate() {
            if descriptor.op == Op::Nop {
                continue;
            }
            assert_eq!(descriptor.op, Op::Send, "it only sends");
            let to = descriptor.rank.index();
            let mut queue = self.wires.queue(self.me, to).lock().unwrap();
            if queue.len() == ROOM {
                return Injected { taken, stop: Stop::Full, complete: true };
            }
            let bytes = match sources.resolve(descriptor) {
                Some(Source::Private(bytes)) => bytes.to_vec(),
                Some(Source::Shared(slice)) => slice.to_vec(),
                other => panic!("it lends nothing: {other:?}"),
            };
            assert!(bytes.len() <= LONGEST, "{} bytes", bytes.len());
            let info = if descriptor.info_len == 0 { &[][..] } else { sources.info };
            let Descriptor { protocol, kind, cookie, .. } = *descriptor;
            queue.push_back(Sent { protocol, kind, cookie, info: info.to_vec(), bytes });
            self.wires.count.fetch_add(1, Ordering::Relaxed);
            self.wires.bells[to].ring();
        }
        Injected { taken: run.len(), stop: Stop::Done, complete: true }
    }

    fn loan(&mut self, _len: usize) -> Option<Loan> {
        None
    }
}

impl Port for RibbonPort {
    fn advance(&mut self, budget: usize, sink: &mut dyn Sink) -> usize {
        let (wires, mut events) = (self.wires.clone(), 0);
        self.held = false;
        for from in 0..wires.ranks {
            let queue = wires.queue(from, self.me);
            // What comes meanwhile waits for the next turn.
            let waiting = queue.lock().unwrap().len();
            for _ in 0..waiting.min(budget.saturating_sub(events)) {
                let Some(sent) = queue.lock().unwrap().pop_front() else { break };
                let mut packet = Packet {
                    source: Endpoint::new(Rank(from as u32), ContextId(0)),
                    protocol: sent.protocol,
                    kind: sent.kind,
                    cookie: sent.cookie,
                    info: &sent.info,
                    body: Body::Short(&sent.bytes),
                };
                if sink.packet(self, &mut packet) == Verdict::Hold {
                    queue.lock().unwrap().push_front(sent);
                    self.held = true;
                    break;
                }
                events += 1;
                // It may wait for room.
                wires.bells[from].ring();
            }
        }
        events
    }

    fn arm(&mut self, _waiting_for_room: bool) -> bool {
        // All ranks are tasks of one thread, and a bell that was rung stays so: nothing is missed.
        true
    }

    fn disarm(&mut self) {}

    fn peer_down(&mut self, _rank: Rank) {}
}

/// A rank.
struct Member {
    rank: Rank,
    size: usize,
    handle: Handle,
    client: Arc<Client>,
    collectives: Collectives,
    layouts: LayoutAccess,
    many: ManyToMany,
    persistent: Persistent,
}

/// Runs the body on every rank, all on one thread; returns how many packets there were.
fn run<B: AsyncFn(Member)>(ranks: u32, body: B) -> u64 {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let wires = Wires::new(ranks as usize);
        let shape = JobShape { ranks, clients: 1, contexts: 1 };
        let mut members = Vec::new();
        for rank in (0..ranks).map(Rank) {
            let alone = InProcessFabric::new(JobShape { ranks: 1, clients: 1, contexts: 1 });
            let ribbon = Ribbon {
                wires: wires.clone(),
                me: rank,
                caps: Caps::send_only("ribbon", LONGEST),
                memory: alone.device(ClientId(0), Rank(0)),
            };
            let parts = ClientParts {
                id: ClientId(0),
                devices: vec![Arc::new(ribbon)],
                sysdep: Arc::new(LinuxSysdep::new(Personality::one_node(rank, shape), None)),
                config: EngineConfig::default(),
                spin: Some(Duration::ZERO),
                driver_thread: false,
            };
            let client = Client::new(parts).unwrap();
            let (exchange, layouts) = (Exchange::new(&client).unwrap(), LayoutAccess::new(&client).unwrap());
            // As for ranks that share no memory.
            let nodes: Vec<u32> = (0..ranks).collect();
            let collectives = Collectives::new(&client, &nodes).unwrap();
            let collectives = collectives.with_windows(&client, &exchange, &layouts).unwrap();
            let many = ManyToMany::new(&client).unwrap();
            let persistent = Registration::new(&client).unwrap();
            client.open().await.unwrap();
            let (handle, client) = (client.contexts()[0].clone(), Arc::new(client));
            let persistent = persistent.with(client.clone());
            let size = ranks as usize;
            members.push(Member { rank, size, handle, client, collectives, layouts, many, persistent });
        }
        let clients: Vec<_> = members.iter().map(|member| member.client.clone()).collect();
        let all = join_all(members.into_iter().map(|member| body(member)));
        assert!(tokio::time::timeout(Duration::from_secs(100), all).await.is_ok(), "some rank does not end");
        for client in clients {
            client.close().await;
        }
        wires.count.load(Ordering::Relaxed)
    })
}

/// What is there soon, or never.
async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    let late = Duration::from_secs(40);
    tokio::time::timeout(late, future).await.unwrap_or_else(|_| panic!("{what} does not end"))
}

async fn until(what: &str, so: impl Fn() -> bool) {
    soon(what, async {
        while !so() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

/// Who sent a message, its info and its payload.
type Heard = (Rank, Vec<u8>, Vec<u8>);

#[test]
fn a_device_that_only_sends_gives_messages_of_every_kind() {
    let packets = run(3, async |member| {
        let Member { rank, size, handle, client, collectives, many, .. } = member;
        let heard: Arc<Mutex<Vec<Heard>>> = Arc::default();
        let log = heard.clone();
        let note = move |m: Message<'_>, _: &mut Scope<'_>| {
            log.lock().unwrap().push((m.source(), m.info().to_vec(), m.bytes().to_vec()));
        };
        let say = handler::register(&*client, handle.clone(), "say", 0, note).unwrap();
        let told = Arc::new(AtomicU64::new(0));
        let count = told.clone();
        let tell = move |_: Rank, bytes: [u8; CONTROL_BYTES], _: &mut Scope<'_>| {
            count.fetch_add(u64::from(bytes[0]), Ordering::Relaxed);
        };
        let control = control::register(&*client, handle.clone(), "control", tell).unwrap();
        let twice = |number: u64, _: Rank| async move { 2 * number };
        let double =
            service::register_async(&*client, handle.clone(), "double", ServiceOptions::default(), twice);
        let double = double.unwrap();
        let world = collectives.world();
        soon("a barrier", world.barrier()).await.unwrap();
        let right = rank.next(size);
        let lens = [0, 8, LONGEST, LONGEST + 1, 50_000];
        for len in lens {
            say.send(right, vec![len as u8; len]).info(&[7; 112]).await.unwrap();
        }
        until("the messages", || heard.lock().unwrap().len() == lens.len()).await;
        let left = rank.previous(size);
        let expected: Vec<_> = lens.iter().map(|len| (left, vec![7; 112], vec![*len as u8; *len])).collect();
        assert_eq!(std::mem::take(&mut *heard.lock().unwrap()), expected);
        soon("a barrier", world.barrier()).await.unwrap();
        say.multicast((0..3).map(Rank), vec![9; 3_000]).await.unwrap();
        until("the multicasts", || heard.lock().unwrap().len() == size).await;
        assert!(heard.lock().unwrap().iter().all(|(_, _, bytes)| *bytes == [9; 3_000]));
        control.send(right, [5; CONTROL_BYTES]).await.unwrap();
        until("the control", || told.load(Ordering::Relaxed) == 5).await;
        assert_eq!(soon("a reply", double.call(right, 21)).await.unwrap(), 42);
        let fifo = Fifo::open(&handle, FifoOptions::default()).await.unwrap();
        soon("a send through a FIFO", fifo.send(&say, right, vec![1; 5_000])).await.unwrap();
        until("it", || heard.lock().unwrap().len() == size + 1).await;
        let connection = ConnectionManager::new(1).open().await.id();
        let parts: Vec<_> =
            (0..3).map(|from| Part { source: Rank(from), offset: 1000 * from as usize, len: 1000 }).collect();
        let receive = many.receive(connection, 3000, &parts).unwrap();
        let buffers = (0..3).map(|to| (Rank(to), vec![(10 * rank.0 + to) as u8; 1000].into()));
        soon("many-to-many", many.send(connection, buffers)).await.unwrap();
        let received = soon("many-to-many", receive).await.unwrap().into_whole().unwrap();
        let expected: Vec<u8> = (0..3).flat_map(|from| vec![(10 * from + rank.0) as u8; 1000]).collect();
        assert_eq!(received, expected);
        soon("a barrier", world.barrier()).await.unwrap();
    });
    assert!(packets > 1000, "{packets}");
}

#[test]
fn a_device_that_only_sends_gives_memory_and_patterns() {
    run(3, async |member| {
        let Member { rank, size, handle, client, collectives, layouts, .. } = member;
        let (world, right, left) = (collectives.world(), rank.next(size), rank.previous(size));
        let window = soon("a window", world.shmalloc::<u64>(1000)).await.unwrap();
        let mine = values(1, rank.index(), 500);
        window.put_slice(right, 0, &mine).await.unwrap();
        assert_eq!(soon("a get", window.get_slice(right, 0, 500)).await.unwrap(), mine);
        assert!(soon("an old value", window.fetch_add(Rank(0), 999, 1)).await.unwrap() < 3);
        let element = Datatype::of::<u64>();
        let (sparse, dense) = (element.vector(100, 1, 2).unwrap(), element.contiguous(100).unwrap());
        let (to, from) = (Layout::new(&sparse, 1).at(8 * 500), Layout::new(&dense, 1));
        soon("a typed put", window.put_typed(right, &to, &mine[..100], &from)).await.unwrap();
        soon("a flush", flush::flush(&handle, right)).await.unwrap();
        soon("a barrier", world.barrier()).await.unwrap();
        let theirs = values(1, left.index(), 500);
        let own = window.to_vec();
        assert_eq!(own[..500], theirs);
        assert!((0..100).all(|at| own[500 + 2 * at] == theirs[at] && own[501 + 2 * at] == 0));
        assert_eq!(own[999], if rank == Rank(0) { 3 } else { 0 });
        soon("a barrier", world.barrier()).await.unwrap();
        let region = Region::allocate(&client, 4000).await.unwrap();
        let keys: Vec<u64> = {
            let key = region.key();
            let words = [u64::from(key.rank.0), key.offset, key.len, u64::from(key.incarnation)];
            soon("the keys", world.all_gather(&words)).await.unwrap()
        };
        let [of, offset, len, incarnation] = keys.chunks(4).nth(right.index()).unwrap().try_into().unwrap();
        let key = posthaste_protocols::RegionKey {
            rank: Rank(of as u32),
            offset,
            len,
            incarnation: incarnation as u32,
        };
        let remote = RemoteRegion::open(&client, &layouts, key).await.unwrap();
        soon("a put", remote.put_slice(3000, &[rank.0 as u8; 1000])).await.unwrap();
        let to = Layout::new(&sparse, 1).at(8);
        soon("a typed put", remote.put_typed(&to, &mine[..100], &from)).await.unwrap();
        let back = remote.get_typed(&to, vec![0_u64; 100], &from);
        assert_eq!(soon("a typed get", back).await.unwrap(), mine[..100]);
        soon("a barrier", world.barrier()).await.unwrap();
        let mut bytes = vec![0; 1000];
        region.read(3000, &mut bytes).unwrap();
        assert_eq!(bytes, [left.0 as u8; 1000]);
        region.read(8 + 16 * 61, &mut bytes[..8]).unwrap();
        assert_eq!(bytes[..8], theirs[61].to_ne_bytes());
        let pattern = record(&handle, |r| {
            r.put_signal(&window, right, 0, region.slice(0..2000), window.signal_add(998, 1))?;
            r.get(&window, left, 998, region.slice(2000..2008))
        });
        let pattern = pattern.await.unwrap();
        for step in 1..=5u64 {
            region.write(0, &[step as u8 + rank.0 as u8; 2000]).unwrap();
            soon("a replay", pattern.replay()).await.unwrap();
            soon("the signal", window.wait_until(998, |count| count == step)).await.unwrap();
            assert_eq!(window.to_vec()[..250], [u64::from_ne_bytes([step as u8 + left.0 as u8; 8]); 250]);
            soon("a barrier", world.barrier()).await.unwrap();
        }
        soon("freeing", window.free()).await.unwrap();
    });
}

#[test]
fn a_device_that_only_sends_gives_collectives_by_every_schedule() {
    run(5, async |member| {
        let (world, rank) = (member.collectives.world(), member.rank.index());
        for (turn, len) in [1, 300, 40_000].into_iter().enumerate() {
            let of = |rank: usize| values(turn as u64, rank, len);
            let total =
                (0..5).map(of).reduce(|a, b| a.iter().zip(b).map(|(a, b)| a.wrapping_add(b)).collect());
            let everybody: Vec<u64> = (0..5).flat_map(of).collect();
            let mut done = 0;
            for algorithm in Algorithm::ALL {
                let group = world.schedule(algorithm);
                match soon("a sum", group.all_reduce(&of(rank), &Reduce::sum())).await {
                    Ok(sum) => assert_eq!(Some(sum), total, "{algorithm:?}"),
                    Err(CollectiveError::NotOffered { .. }) => continue,
                    Err(error) => panic!("{error}"),
                }
                done += 1;
            }
            assert!(done >= 5);
            assert_eq!(soon("a gathering", world.all_gather(&of(rank))).await.unwrap(), everybody);
            assert_eq!(soon("news", world.broadcast(3, &of(rank))).await.unwrap(), of(3));
        }
        let mut sum = member.persistent.all_reduce::<u64>(&world, 200, &Reduce::sum()).await.unwrap();
        for step in 0..10 {
            let mut values = [step + rank as u64; 200];
            soon("a persistent sum", sum.run(&mut values)).await.unwrap();
            assert_eq!(values, [5 * step + 10; 200]);
        }
        let half = soon("a split", world.split(Some(rank as u32 % 2), 0)).await.unwrap().unwrap();
        assert_eq!(half.size(), if rank.is_multiple_of(2) { 3 } else { 2 });
        soon("a barrier", world.barrier()).await.unwrap();
    });
}
