//! Protocols of tests, and what arrived by them.

use super::Message;
use posthaste_core::Endpoint;
use posthaste_core::device::Body;
use posthaste_core::engine::Scope;
use posthaste_core::protocol::{Accept, FirstPacket, Flow, Incoming, Protocol};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// A message as it arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// Where.
    pub at: Endpoint,
    /// From whom.
    pub source: Endpoint,
    /// The protocol's name.
    pub protocol: String,
    /// Message info.
    pub info: Vec<u8>,
    /// The payload.
    pub bytes: Vec<u8>,
}

/// What arrived, in order, on all ranks.
#[derive(Clone, Debug, Default)]
pub struct Log(Arc<Mutex<Vec<Received>>>);

impl Log {
    /// Adds a message that has arrived whole. Returns its payload.
    pub fn arrived(&self, at: Endpoint, protocol: &str, message: &Incoming<'_>) -> Vec<u8> {
        let bytes = bytes_of(&message.body);
        self.push(Received {
            at,
            source: message.source,
            protocol: protocol.to_owned(),
            info: message.info.to_vec(),
            bytes: bytes.clone(),
        });
        bytes
    }

    /// Adds an entry.
    pub fn push(&self, received: Received) {
        self.0.lock().expect("no panic under this lock").push(received);
    }

    /// Number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.lock().expect("no panic under this lock").len()
    }

    /// Whether nothing arrived.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All entries.
    #[must_use]
    pub fn all(&self) -> Vec<Received> {
        self.0.lock().expect("no panic under this lock").clone()
    }

    /// Takes all entries.
    #[must_use]
    pub fn take(&self) -> Vec<Received> {
        std::mem::take(&mut *self.0.lock().expect("no panic under this lock"))
    }

    /// The entries of one ordered pair.
    #[must_use]
    pub fn of(&self, source: Endpoint, at: Endpoint) -> Vec<Received> {
        self.all().into_iter().filter(|received| received.source == source && received.at == at).collect()
    }

    /// Checks one ordered pair against what was to be sent: each message once, in order, byte by byte.
    ///
    /// # Panics
    /// If it differs.
    pub fn check(&self, source: Endpoint, at: Endpoint, expected: &[Message]) {
        let got = self.of(source, at);
        for (number, (got, expected)) in got.iter().zip(expected).enumerate() {
            assert_eq!(got.info, expected.info, "info of message {number} from {source} to {at}");
            assert_eq!(
                got.bytes.len(),
                expected.payload.len(),
                "length of message {number} from {source} to {at}"
            );
            assert!(got.bytes == expected.payload, "bytes of message {number} from {source} to {at}");
        }
        assert_eq!(got.len(), expected.len(), "messages from {source} to {at}");
    }
}

/// Copies a body.
pub(super) fn bytes_of(body: &Body<'_>) -> Vec<u8> {
    body.to_bytes().to_vec()
}

type OnMessage = Box<dyn Fn(&mut Scope<'_>, Incoming<'_>) + Send + Sync>;
type OnFirst = Box<dyn Fn(&mut Scope<'_>, &FirstPacket<'_>) -> Accept + Send + Sync>;

/// A protocol of a test.
pub struct Probe {
    name: String,
    schema: u64,
    flow: Flow,
    takes_requests: bool,
    on_message: OnMessage,
    on_first: Option<OnFirst>,
    closed: Arc<AtomicUsize>,
}

impl std::fmt::Debug for Probe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Probe").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Probe {
    /// A protocol with that handler.
    pub fn new(
        name: &str,
        on_message: impl Fn(&mut Scope<'_>, Incoming<'_>) + Send + Sync + 'static,
    ) -> Self {
        Self {
            name: name.to_owned(),
            schema: 0,
            flow: Flow::Inline,
            takes_requests: true,
            on_message: Box::new(on_message),
            on_first: None,
            closed: Arc::default(),
        }
    }

    /// A protocol whose handler records.
    pub fn recording(name: &str, log: &Log) -> Self {
        let (log, protocol) = (log.clone(), name.to_owned());
        Self::new(name, move |scope, message| {
            log.arrived(scope.me(), &protocol, &message);
        })
    }

    /// With that flow control.
    #[must_use]
    pub fn flow(mut self, flow: Flow) -> Self {
        self.flow = flow;
        self
    }

    /// Its cookies are its own, and ask for nothing.
    #[must_use]
    pub fn without_requests(mut self) -> Self {
        self.takes_requests = false;
        self
    }

    /// With that type hash.
    #[must_use]
    pub fn schema(mut self, schema: u64) -> Self {
        self.schema = schema;
        self
    }

    /// With a first-packet handler.
    #[must_use]
    pub fn accept(
        mut self,
        on_first: impl Fn(&mut Scope<'_>, &FirstPacket<'_>) -> Accept + Send + Sync + 'static,
    ) -> Self {
        self.on_first = Some(Box::new(on_first));
        self
    }

    /// Counts the calls of `on_close`.
    #[must_use]
    pub fn closed(&self) -> Arc<AtomicUsize> {
        self.closed.clone()
    }
}

impl Protocol for Probe {
    fn name(&self) -> &str {
        &self.name
    }

    fn schema(&self) -> u64 {
        self.schema
    }

    fn flow(&self) -> Flow {
        self.flow
    }

    fn takes_requests(&self) -> bool {
        self.takes_requests
    }

    fn chooses_buffer(&self) -> bool {
        self.on_first.is_some()
    }

    fn accept(&self, scope: &mut Scope<'_>, first: &FirstPacket<'_>) -> Accept {
        match &self.on_first {
            Some(on_first) => on_first(scope, first),
            None => Accept::Whole,
        }
    }

    fn on_message(&self, scope: &mut Scope<'_>, message: Incoming<'_>) {
        (self.on_message)(scope, message);
    }

    fn on_close(&self) {
        self.closed.fetch_add(1, Ordering::Relaxed);
    }
}
