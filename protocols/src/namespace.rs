//! A messager in front of another one, for libraries that share a client with their user and with each other.

use async_trait::async_trait;
use posthaste_core::control::ControlHandler;
use posthaste_core::ids::ControlId;
use posthaste_core::memory::SharedSlice;
use posthaste_core::protocol::{Accept, ArrivedWord, ArrivedWords, FirstPacket, Flow, Incoming, Protocol};
use posthaste_core::{
    ContextId, Device, Endpoint, Fault, Handle, JobShape, Messager, ProtocolId, Rank, RegisterError, Scope,
    SendError,
};
use std::sync::Arc;

/// A [`Messager`] that puts every protocol which is registered through it under a prefix, so that two libraries in one
/// client can both call a message `done`. All else is that of the messager behind it; what is registered here can be
/// sent there and the other way round, by its [`ProtocolId`].
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::Messager;
/// use posthaste_protocols::{Namespace, handler};
/// let done = job.register("done", |_: posthaste::Message, _: &mut posthaste::Scope| {})?;
/// // A library's message of the same name is another one.
/// let library = Namespace::new(&**job.messager(), "library");
/// let face = library.contexts()[0].clone();
/// let its = handler::register(&library, face, "done", 0, |_, _| {})?;
/// assert_ne!(done.id(), its.id());
/// # job.leave().await
/// # }
/// ```
pub struct Namespace<'m> {
    behind: &'m dyn Messager,
    prefix: String,
}

impl std::fmt::Debug for Namespace<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Namespace").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

impl<'m> Namespace<'m> {
    /// Names are to begin with `prefix` and a colon. All ranks must choose the same prefix.
    #[must_use]
    pub fn new(behind: &'m dyn Messager, prefix: &str) -> Self {
        Self { behind, prefix: prefix.to_owned() }
    }
}

#[async_trait]
impl Messager for Namespace<'_> {
    fn inject(
        &self,
        context: ContextId,
        target: Endpoint,
        protocol: ProtocolId,
        payload: &[u8],
    ) -> Result<bool, SendError> {
        self.behind.inject(context, target, protocol, payload)
    }

    fn advance(&self) -> usize {
        self.behind.advance()
    }

    fn contexts(&self) -> &[Handle] {
        self.behind.contexts()
    }

    fn peers(&self) -> JobShape {
        self.behind.peers()
    }

    fn devices(&self) -> &[Arc<dyn Device>] {
        self.behind.devices()
    }

    fn register(&self, protocol: Arc<dyn Protocol>) -> Result<ProtocolId, RegisterError> {
        let name = protocol.name();
        if name.is_empty() {
            return Err(RegisterError::BadName(name.to_owned()));
        }
        let name = format!("{}:{name}", self.prefix);
        self.behind.register(Arc::new(Prefixed { name, protocol }))
    }

    fn register_control(&self, name: &str, handler: ControlHandler) -> Result<ControlId, RegisterError> {
        if name.is_empty() {
            return Err(RegisterError::BadName(name.to_owned()));
        }
        self.behind.register_control(&format!("{}:{name}", self.prefix), handler)
    }

    /// Leaves the job, for everybody who uses the messager behind this one.
    async fn close(&self) {
        self.behind.close().await;
    }
}

/// A protocol under another name.
struct Prefixed {
    name: String,
    protocol: Arc<dyn Protocol>,
}

impl Protocol for Prefixed {
    fn name(&self) -> &str {
        &self.name
    }

    fn schema(&self) -> u64 {
        self.protocol.schema()
    }

    fn flow(&self) -> Flow {
        self.protocol.flow()
    }

    fn chooses_buffer(&self) -> bool {
        self.protocol.chooses_buffer()
    }

    fn overtakes_held(&self) -> bool {
        self.protocol.overtakes_held()
    }

    fn takes_requests(&self) -> bool {
        self.protocol.takes_requests()
    }

    fn may_be_refused(&self, message: &Incoming<'_>) -> bool {
        self.protocol.may_be_refused(message)
    }

    fn accept(&self, scope: &mut Scope<'_>, first: &FirstPacket<'_>) -> Accept {
        self.protocol.accept(scope, first)
    }

    fn place(&self, first: &FirstPacket<'_>) -> Option<Vec<SharedSlice>> {
        self.protocol.place(first)
    }

    fn on_placed(&self, scope: &mut Scope<'_>, message: Incoming<'_>) {
        self.protocol.on_placed(scope, message);
    }

    fn on_message(&self, scope: &mut Scope<'_>, message: Incoming<'_>) {
        self.protocol.on_message(scope, message);
    }

    fn on_word(&self, scope: &mut Scope<'_>, word: &ArrivedWord) {
        self.protocol.on_word(scope, word);
    }

    fn on_words(&self, scope: &mut Scope<'_>, words: &mut ArrivedWords<'_>) {
        self.protocol.on_words(scope, words);
    }

    fn on_peer_down(&self, rank: Rank, fault: Fault) {
        self.protocol.on_peer_down(rank, fault);
    }

    fn on_peer_drained(&self, context: ContextId, rank: Rank, incarnation: u32) {
        self.protocol.on_peer_drained(context, rank, incarnation);
    }

    fn on_peer_up(&self, scope: &mut Scope<'_>, rank: Rank, incarnation: u32) {
        self.protocol.on_peer_up(scope, rank, incarnation);
    }

    fn on_close(&self) {
        self.protocol.on_close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use posthaste_core::device::Body;

    /// A protocol that answers everything otherwise than one does that says nothing of it.
    struct Contrary;

    impl Protocol for Contrary {
        fn name(&self) -> &str {
            "contrary"
        }

        fn takes_requests(&self) -> bool {
            false
        }

        fn may_be_refused(&self, _message: &Incoming<'_>) -> bool {
            false
        }

        fn place(&self, _first: &FirstPacket<'_>) -> Option<Vec<SharedSlice>> {
            Some(Vec::new())
        }

        fn on_message(&self, _scope: &mut Scope<'_>, _message: Incoming<'_>) {}
    }

    #[test]
    fn what_a_protocol_says_of_itself_holds_under_another_name() {
        let prefixed = Prefixed { name: "library/contrary".into(), protocol: Arc::new(Contrary) };
        let source = Endpoint::new(Rank(0), ContextId(0));
        let (body, protocol) = (Body::Short(&[]), ProtocolId(16));
        let message = Incoming { source, info: &[], body, protocol, life: 0, cookie: 1 };
        assert!(!prefixed.takes_requests() && !prefixed.may_be_refused(&message));
        assert!(prefixed.place(&FirstPacket { source, info: &[], total: 0 }).is_some());
    }
}
