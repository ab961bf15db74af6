//! What a device is made of: addresses, ports, memory.

mod support;

use posthaste_core::device::PeerEvent;
use posthaste_core::inprocess::InProcessFabric;
use posthaste_core::{ClientId, ContextId, Device, DeviceError, Fault, JobShape, MemoryError, Rank};
use posthaste_tcp::{AddressBook, Limits, Memory, Mode, TcpConfig, TcpDevice};
use std::cell::RefCell;
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use support::job::{Access, job_with};
use support::near::near;
use support::{config, runtime};
use tokio::runtime::Runtime;

const SHAPE: JobShape = JobShape { ranks: 2, clients: 1, contexts: 1 };

fn of(rank: u32) -> TcpConfig {
    config(Rank(rank), SHAPE, Mode::HandshakeOnly, Limits::default())
}

fn make(config: TcpConfig) -> Result<TcpDevice, DeviceError> {
    TcpDevice::new(config, Arc::new(AddressBook::new(2)))
}

#[test]
fn it_listens_where_it_is_told_and_enters_itself_in_the_book() {
    let book = Arc::new(AddressBook::new(2));
    let device = TcpDevice::new(of(1), book.clone()).expect("a free port");
    assert!(device.address().ip().is_loopback());
    let entry = book.get(Rank(1)).expect("entered");
    assert_eq!((entry.address, entry.incarnation), (device.address(), 1));
    assert_eq!(book.get(Rank(0)), None);
    let mut taken = of(0);
    taken.bind = device.address();
    assert!(matches!(make(taken), Err(DeviceError::Os { .. })), "the port is taken");
    assert!(matches!(make(of(2)), Err(DeviceError::Mismatch { .. })), "there is no such rank");
}

#[test]
fn a_range_of_ports_is_tried_in_order() {
    // A range in which at least the first port is taken.
    let first = make(of(0)).expect("a free port");
    let port = first.address().port();
    let mut config = of(1);
    config.ports = Some(port..=port.saturating_add(50));
    let second = make(config).expect("one of them is free");
    assert!(second.address().port() > port && second.address().port() <= port.saturating_add(50));
    let mut config = of(1);
    config.ports = Some(port..=port);
    assert!(make(config).is_err(), "none of them is free");
}

#[test]
fn what_is_pending_ends_before_peers_can_see_that_the_runtime_does() {
    let heard = |end: fn(&TcpDevice, Runtime)| {
        let (device, runtime) = (make(of(0)).expect("a free port"), runtime());
        let (told, address) = (Arc::new(Mutex::new(Vec::new())), device.address());
        let news = told.clone();
        let news = Arc::new(move |rank, event| {
            let listens = TcpStream::connect(address).is_ok();
            news.lock().expect("nobody panics").push((rank, event, listens));
        });
        runtime.block_on(device.open(news)).expect("the device opens");
        runtime.block_on(tokio::task::yield_now());
        end(&device, runtime);
        assert!(TcpStream::connect(address).is_err(), "nobody listens any more");
        std::mem::take(&mut *told.lock().expect("nobody panics"))
    };
    let ended = (Rank(0), PeerEvent::down(Fault::Shutdown), true);
    assert_eq!(heard(|_, runtime| drop(runtime)), [ended]);
    // Whoever ends it knows that.
    assert_eq!(heard(|device, _| device.abort()), []);
}

#[test]
fn each_context_has_one_port() {
    let device = make(of(0)).expect("a free port");
    assert!(device.port(ContextId(0)).is_ok());
    assert!(matches!(device.port(ContextId(0)), Err(DeviceError::Mismatch { .. })), "it is taken");
    assert!(matches!(device.port(ContextId(1)), Err(DeviceError::Mismatch { .. })), "there is none");
}

#[test]
fn memory_is_the_ranks_own() {
    let mut config = of(0);
    config.memory = Memory::Own(64 << 10);
    let device = make(config).expect("a free port");
    let taken = device.allocate(5000).expect("there is room");
    let memory = device.map(Rank(0), taken.offset, taken.len).expect("its own");
    assert_eq!(memory.sum_words(), 0);
    assert!(device.map(Rank(1), taken.offset, taken.len).is_none(), "another rank's cannot be mapped");
    assert!(device.map(Rank(0), 64 << 10, 1).is_none());
    assert!(matches!(device.allocate(1 << 20), Err(MemoryError::Segment { .. })));
    device.free(taken);
    let fabric = InProcessFabric::new(SHAPE);
    let other = fabric.device(ClientId(0), Rank(0));
    let mut config = of(0);
    config.memory = Memory::Of(other.clone());
    let device = make(config).expect("a free port");
    let taken = device.allocate(100).expect("there is room");
    other.map(Rank(0), taken.offset, 8).expect("the same memory").write_u64(0, 77);
    assert_eq!(device.map(Rank(0), taken.offset, 8).expect("the same memory").read_u64(0), 77);
}

#[cfg_attr(feature = "portable", ignore = "only connecting needs I/O there")]
#[test]
fn a_runtime_without_io_is_an_error() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    let device = make(of(0)).expect("a free port");
    let outside = futures_now(device.open(Arc::new(|_, _| {})));
    assert!(matches!(outside, Err(DeviceError::Os { .. })), "{outside:?}");
    let _inside = runtime.enter();
    let opened = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        futures_now(device.open(Arc::new(|_, _| {})))
    }));
    assert!(!matches!(opened, Ok(Ok(()))), "there is no I/O");
}

/// Jobs come and go, by a close and by a crash; nothing stays open.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn descriptors_come_back() {
    use posthaste_core::Messager;
    let open = || std::fs::read_dir("/proc/self/fd").expect("it can be read").count();
    let mut before = 0;
    for round in 0..40 {
        let (members, _log) =
            job_with(3, |rank, shape| config(rank, shape, Mode::Encrypted, Limits::default())).await;
        for (from, to) in [(0, 1), (1, 2), (2, 0)] {
            members[from].call(to, b"hello").await.expect("it lives");
        }
        if round % 2 == 0 {
            members[0].client.close().await;
        } else {
            members[0].device.abort();
        }
        drop(members);
        // Tasks and drivers end when the runtime comes to them.
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        if round == 5 {
            before = open();
        }
    }
    // Other tests of this program have descriptors, too.
    let (mut after, began) = (open(), std::time::Instant::now());
    while after >= before + 40 && began.elapsed() < Duration::from_secs(20) {
        tokio::time::sleep(Duration::from_millis(20)).await;
        after = open();
    }
    assert!(after < before + 40, "{before} descriptors became {after}");
}

/// What a future gives that does not wait.
fn futures_now<T>(future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    match future.as_mut().poll(&mut cx) {
        std::task::Poll::Ready(value) => value,
        std::task::Poll::Pending => panic!("it waits"),
    }
}

#[tokio::test]
async fn it_works_over_ipv6() {
    if std::net::TcpListener::bind("[::1]:0").is_err() {
        eprintln!("skipped: there is no IPv6 on this host");
        return;
    }
    let (members, _log) = job_with(2, |rank, shape| {
        let mut config = config(rank, shape, Mode::Encrypted, Limits::default());
        config.bind = "[::1]:0".parse().expect("an address");
        config
    })
    .await;
    assert!(members[0].device.address().is_ipv6());
    assert_eq!(members[0].call(1, b"six").await.expect("it lives"), b"six");
    members[1].access(&members[0], 0, 0, Access::Put(b"there")).await.expect("it lives");
    assert_eq!(members[0].memory(0)[..5], *b"there");
}

/// Whoever drops a device has nothing left of it, whatever it was in the middle of.
#[test]
fn nothing_is_left_of_devices_that_were_dropped() {
    let runtime = runtime();
    let weak = RefCell::new(Vec::new());
    for round in 0..2 {
        runtime.block_on(async {
            let shape = JobShape { ranks: 2, clients: 1, contexts: 1 };
            let fabric = InProcessFabric::new(shape);
            let (members, _) = job_with(2, |rank, shape| {
                let own = near(fabric.device(ClientId(0), rank), rank);
                weak.borrow_mut().push(Arc::downgrade(&own));
                let mut config = config(rank, shape, Mode::HandshakeOnly, Limits::default());
                config.memory = Memory::Of(own);
                config
            })
            .await;
            if round == 1 {
                members[0].call(1, b"ping").await.expect("nothing breaks");
            }
        });
        runtime.block_on(async {
            for _ in 0..1000 {
                if weak.borrow().iter().all(|device| device.strong_count() == 0) {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
        let left = weak.borrow().iter().filter(|device| device.strong_count() > 0).count();
        assert_eq!(left, 0, "devices are left in round {round}");
    }
}
