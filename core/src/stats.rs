//! Counters of one context.

/// What a context has done so far; plain numbers, read through `stats()`.
///
/// # Examples
/// ```
/// # use posthaste_core::inprocess::InProcessFabric;
/// # use posthaste_core::messager::ClientParts;
/// # use posthaste_core::sysdep::Personality;
/// # use posthaste_core::{Client, ClientId, JobShape, LinuxSysdep, Messager, Rank};
/// # use std::sync::Arc;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let shape = JobShape { ranks: 1, clients: 1, contexts: 1 };
/// # let client = Client::new(ClientParts {
/// #     id: ClientId(0),
/// #     devices: vec![InProcessFabric::new(shape).device(ClientId(0), Rank(0))],
/// #     sysdep: Arc::new(LinuxSysdep::new(Personality::one_node(Rank(0), shape), None)),
/// #     config: Default::default(),
/// #     spin: None,
/// #     driver_thread: false,
/// # })?;
/// # client.open().await?;
/// use posthaste_core::{ContextId, Protocol, Scope, protocol::Incoming};
/// # struct Sink;
/// # impl Protocol for Sink {
/// #     fn name(&self) -> &str {
/// #         "sink"
/// #     }
/// #     fn on_message(&self, _scope: &mut Scope<'_>, _message: Incoming<'_>) {}
/// # }
/// let sink = client.register(Arc::new(Sink))?;
/// let context = &client.contexts()[0];
/// client.inject(ContextId(0), context.me(), sink, b"five!")?;
/// while context.stats().messages_received < 1 {
///     client.advance();
/// }
/// assert_eq!((context.stats().bytes_sent, context.stats().bytes_received), (5, 5));
/// # client.close().await;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Users' messages sent.
    pub messages_sent: u64,
    /// Their payload bytes.
    pub bytes_sent: u64,
    /// Users' messages dispatched.
    pub messages_received: u64,
    /// Their payload bytes.
    pub bytes_received: u64,
    /// Operations that had to wait in an injection FIFO.
    pub queued: u64,
    /// Puts and gets that went through descriptors (inline ones are not counted: that would cost more than they do).
    pub one_sided: u64,
    /// Messages that went straight to their places.
    pub rendezvous: u64,
    /// Of these, those whose place the receiver had given before it was asked.
    pub rendezvous_ahead: u64,
    /// Replays started.
    pub replays: u64,
    /// Handlers that panicked.
    pub panics: u64,
    /// Ranks lost or left.
    pub peers_lost: u64,
    /// Everything that `advance` found to do.
    pub events: u64,
    /// Times a driver went to sleep.
    pub sleeps: u64,
}

impl Stats {
    #[inline(always)]
    pub(crate) fn sent(&mut self, bytes: u64) {
        self.messages_sent += 1;
        self.bytes_sent += bytes;
    }

    #[inline(always)]
    pub(crate) fn received(&mut self, bytes: u64) {
        self.received_many(1, bytes);
    }

    /// So many messages of so many bytes each.
    #[inline(always)]
    pub(crate) fn received_many(&mut self, messages: u64, bytes: u64) {
        self.messages_received += messages;
        self.bytes_received += messages * bytes;
    }
}
