//! Ranks over TCP in one process, each with its driver: everybody sleeps on the doorbell, so a lost ring would hang.
#![allow(dead_code, reason = "each test program uses a part of it")]

use super::{client, config};
use posthaste_core::context::{Face, poll_ticket};
use posthaste_core::device::RemoteMemory;
use posthaste_core::engine::{EngineConfig, Given, Payload, Rma, SendArgs};
use posthaste_core::protocol::Flow;
use posthaste_core::slot::Outcome;
use posthaste_core::{
    Client, ContextId, Device, Endpoint, Fault, JobShape, ProtocolId, Rank, Scope, SendError, Ticket,
};
use posthaste_tcp::{AddressBook, Limits, Mode, TcpConfig, TcpDevice};
use posthaste_testkit::conformance::{Log, Probe};
use std::future::poll_fn;
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub const ECHO: u16 = 0;
pub const LOG: u16 = 1;
pub const SILENT: u16 = 2;
/// Bytes of each rank's memory.
pub const MEMORY: u64 = 128 << 10;

pub fn at(rank: u32) -> Endpoint {
    Endpoint::new(Rank(rank), ContextId(0))
}

/// One rank of a job of a test.
pub struct Member {
    pub device: Arc<TcpDevice>,
    pub client: Arc<Client>,
    pub errors: Arc<Mutex<Vec<Fault>>>,
    /// First byte of its memory.
    pub memory: u64,
}

impl Member {
    /// Opens a rank: `echo` answers with the message, `log` records it, `silent` does nothing.
    pub async fn open(config: TcpConfig, book: Arc<AddressBook>, log: &Log) -> Member {
        let (rank, shape) = (config.rank, config.shape);
        let device = Arc::new(TcpDevice::new(config, book).expect("a free port"));
        let client =
            client(device.clone(), rank, shape, EngineConfig { fifo_slots: 4, ..EngineConfig::default() });
        let echo = Probe::new("echo", |scope, message| {
            let to = message.reply().expect("it is a request");
            let answer = match message.body {
                posthaste_core::device::Body::Owned(bytes) => Payload::Owned(bytes.clone()),
                posthaste_core::device::Body::Short(bytes) => Payload::Borrowed(bytes),
                posthaste_core::device::Body::Lease(_) => unreachable!("there are no pages"),
            };
            scope.reply(to, Ok(answer));
        });
        for probe in [echo.flow(Flow::Replied), Probe::recording("log", log), Probe::new("silent", |_, _| {})]
        {
            use posthaste_core::Messager;
            client.register(Arc::new(probe)).expect("the name is free");
        }
        let errors = Arc::new(Mutex::new(Vec::new()));
        let told = errors.clone();
        client.on_error(move |fault| told.lock().expect("no panic").push(fault));
        let memory = device.allocate(MEMORY).expect("there is room").offset;
        client.open().await.expect("the device opens");
        Member { device, client, errors, memory }
    }

    /// Runs the closure on the engine as soon as nobody else is at it.
    pub async fn enter<R>(&self, run: impl FnMut(&mut Scope<'_>) -> R) -> R {
        self.enter_context(0, run).await
    }

    async fn enter_context<R>(&self, context: usize, mut run: impl FnMut(&mut Scope<'_>) -> R) -> R {
        use posthaste_core::Messager;
        loop {
            if let Ok(result) = self.client.contexts()[context].enter(|engine| run(&mut engine.scope())) {
                return result;
            }
            tokio::task::yield_now().await;
        }
    }

    pub async fn ends(&self, ticket: Ticket) -> Outcome {
        self.ends_in(0, ticket).await
    }

    async fn ends_in(&self, context: usize, ticket: Ticket) -> Outcome {
        use posthaste_core::Messager;
        let handle = &self.client.contexts()[context];
        poll_fn(|cx| poll_ticket(handle, cx, ticket)).await
    }

    /// Sends and waits until the message is on its way; with an answer wanted, gives what to wait for.
    pub async fn send(
        &self,
        to: u32,
        protocol: u16,
        info: &[u8],
        payload: &[u8],
        request: bool,
    ) -> Result<Option<Ticket>, SendError> {
        self.send_from(0, at(to), protocol, info, payload, request).await
    }

    /// As `send`, from any context to any.
    pub async fn send_from(
        &self,
        from: usize,
        target: Endpoint,
        protocol: u16,
        info: &[u8],
        payload: &[u8],
        request: bool,
    ) -> Result<Option<Ticket>, SendError> {
        let mut cookie = None;
        if request {
            let ticket = self
                .enter_context(from, |scope| {
                    let ticket = scope.operation(Some(target.rank))?;
                    scope.note_request(ticket, ProtocolId(protocol), payload.len());
                    Ok::<_, Fault>(ticket)
                })
                .await?;
            cookie = Some(ticket);
        }
        let word = cookie.map_or(0, Ticket::to_word);
        let args = SendArgs { target, protocol: ProtocolId(protocol), cookie: word, info, relaxed: false };
        let given = self.enter_context(from, |scope| {
            scope.give(&args, Payload::Borrowed(payload)).map_err(|(error, _)| error)
        });
        // It is not taken back before it has ended.
        let given = given.await?;
        if let Given::Queued(ticket) | Given::Kept(ticket, _) = given {
            self.ends_in(from, ticket).await?;
        }
        Ok(cookie)
    }

    /// Asks for an echo and waits for it.
    pub async fn call(&self, to: u32, payload: &[u8]) -> Result<Vec<u8>, SendError> {
        let ticket = self.send(to, ECHO, &[], payload, true).await?.expect("a request has a ticket");
        Ok(self.ends(ticket).await?.as_bytes().to_vec())
    }

    /// Its memory as others name it, to whom it is that rank.
    pub fn memory_of_rank(&self, rank: u32) -> RemoteMemory {
        RemoteMemory { rank: Rank(rank), offset: self.memory, len: MEMORY, mapped: None, incarnation: 0 }
    }

    /// Puts to, or gets from, the memory of another member, and waits for the end.
    pub async fn access(&self, of: &Member, to: u32, offset: u64, rma: Access<'_>) -> Outcome {
        let remote = of.memory_of_rank(to);
        let started = self
            .enter(|scope| {
                let key = scope.table().remote.insert(remote);
                let rma = match rma {
                    Access::Put(bytes) => Rma::Put(Payload::Borrowed(bytes)),
                    Access::Get(len) => Rma::Get(len),
                };
                let started = scope.rma(at(to), key, offset, rma);
                (key, started)
            })
            .await;
        let (key, started) = started;
        let outcome = match started {
            Ok(Some(ticket)) => self.ends(ticket).await,
            Ok(None) => Ok(posthaste_core::Value::Unit),
            Err(posthaste_core::RmaError::Fault(fault)) => Err(fault),
            Err(error) => panic!("{error}"),
        };
        self.enter(|scope| scope.table().remote.try_remove(key)).await;
        outcome
    }

    pub fn errors(&self) -> Vec<Fault> {
        self.errors.lock().expect("no panic").clone()
    }

    /// The errors, once there are so many: who waits is woken before the error handler is told, by another thread.
    pub async fn told(&self, count: usize) -> Vec<Fault> {
        while self.errors().len() < count {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        self.errors()
    }

    pub fn memory(&self, rank: u32) -> Vec<u8> {
        self.device.map(Rank(rank), self.memory, MEMORY).expect("its own").to_vec()
    }
}

impl Drop for Member {
    /// As the end of its process: its driver ends, and with it everything that the engine has.
    fn drop(&mut self) {
        use posthaste_core::Messager;
        self.client.contexts().iter().for_each(|context| context.shut_down());
    }
}

/// A put or a get.
#[derive(Clone, Copy)]
pub enum Access<'a> {
    Put(&'a [u8]),
    Get(u64),
}

/// A job of so many ranks.
pub async fn job(ranks: u32, mode: Mode, limits: Limits) -> (Vec<Member>, Log) {
    job_with(ranks, |rank, shape| config(rank, shape, mode, limits)).await
}

pub async fn job_with(ranks: u32, make: impl Fn(Rank, JobShape) -> TcpConfig) -> (Vec<Member>, Log) {
    let shape = JobShape { ranks, clients: 1, contexts: 1 };
    let book = Arc::new(AddressBook::new(ranks));
    let log = Log::default();
    let mut members = Vec::new();
    for rank in (0..ranks).map(Rank) {
        members.push(Member::open(make(rank, shape), book.clone(), &log).await);
    }
    (members, log)
}
