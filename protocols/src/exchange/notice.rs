//! Sending records from anywhere without waiting: one for which there is no room is sent when there is.

use super::ExchangeProtocol;
use super::board::Effects;
use bytes::Bytes;
use posthaste_core::context::Shared;
use posthaste_core::engine::{Payload, SendArgs, Sent, Wait};
use posthaste_core::{Endpoint, Handle, ProtocolId, Rank, Scope, Ticket};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};

/// The way out of the exchange. Weak, because the context owns the protocol.
#[derive(Debug)]
pub(super) struct Outlet {
    pub context: Weak<Shared>,
    pub id: ProtocolId,
}

impl Outlet {
    /// Whether it is the way out of that endpoint.
    pub fn is_of(&self, endpoint: Endpoint) -> bool {
        self.context.upgrade().is_some_and(|context| context.me() == endpoint)
    }
}

/// A record that waits for room in the queue towards a rank.
struct Waiting {
    protocol: Arc<ExchangeProtocol>,
    to: Rank,
    record: Bytes,
    ticket: Ticket,
    wait: Wait,
}

impl ExchangeProtocol {
    fn handle(&self) -> Option<Handle> {
        Some(Handle::new(self.outlet.get()?.context.upgrade()?))
    }

    /// Does what follows from a change of the board, where there is no scope at hand.
    pub fn apply(self: &Arc<Self>, mut effects: Effects) {
        effects.wake.drain(..).for_each(Waker::wake);
        effects.unused.drain(..).for_each(super::board::Unused::give_back);
        if let Some(group) = effects.early {
            self.answer(group);
        }
        if !effects.relay.is_empty()
            && let Some(handle) = self.handle()
        {
            let protocol = self.clone();
            handle.post_run(move |scope| protocol.relay(scope, effects.relay));
        }
    }

    /// The same inside `advance`.
    pub fn apply_in(self: &Arc<Self>, scope: &mut Scope<'_>, source: Option<Rank>, mut effects: Effects) {
        let relay = std::mem::take(&mut effects.relay);
        if effects.corrupt
            && let Some(rank) = source
        {
            tracing::warn!(%rank, "impossible collective operation; the peer is cut off");
            scope.cut_off(rank);
        }
        self.apply(effects);
        if !relay.is_empty() {
            self.relay(scope, relay);
        }
    }

    fn relay(self: &Arc<Self>, scope: &mut Scope<'_>, to: Vec<Rank>) {
        let record = self.board().broken_record();
        if let Some(record) = record {
            self.notify(scope, to, &record);
        }
    }

    /// Has a record sent to all the others.
    pub fn notify_others(self: &Arc<Self>, record: Bytes) {
        let others = self.board().others().collect();
        self.notify_these(others, record);
    }

    /// Has a record sent to these ranks.
    pub fn notify_these(self: &Arc<Self>, others: Vec<Rank>, record: Bytes) {
        if let Some(handle) = self.handle() {
            let protocol = self.clone();
            handle.post_run(move |scope| protocol.notify(scope, others, &record));
        }
    }

    fn notify(
        self: &Arc<Self>,
        scope: &mut Scope<'_>,
        ranks: impl IntoIterator<Item = Rank>,
        record: &Bytes,
    ) {
        for rank in ranks {
            self.notify_one(scope, rank, record.clone(), Wait::Await);
        }
    }

    fn notify_one(self: &Arc<Self>, scope: &mut Scope<'_>, to: Rank, record: Bytes, wait: Wait) {
        let Some(outlet) = self.outlet.get() else { return };
        let target = Endpoint::new(to, scope.me().context);
        let args = SendArgs { target, protocol: outlet.id, cookie: 0, info: &[], relaxed: false };
        match scope.send(&args, Payload::Owned(record.clone()), wait) {
            Ok(Sent::Queued(ticket)) => scope.detach(ticket),
            Ok(Sent::Later(ticket, wait, _)) => {
                let protocol = self.clone();
                Arc::new(Waiting { protocol, to, record, ticket, wait }).look(scope);
            }
            Ok(Sent::Done | Sent::Full(_)) => {}
            // Whoever is gone need not be told.
            Err((error, _)) => tracing::debug!(%to, %error, "notice not sent"),
        }
    }
}

impl Waiting {
    fn look(self: Arc<Self>, scope: &mut Scope<'_>) {
        let Some(handle) = self.protocol.handle() else { return };
        let waker = Waker::from(self.clone());
        if let Poll::Ready(Ok(_)) = handle.slots().poll(self.ticket, &mut Context::from_waker(&waker)) {
            self.protocol.notify_one(scope, self.to, self.record.clone(), self.wait);
        }
    }
}

impl Wake for Waiting {
    fn wake(self: Arc<Self>) {
        if let Some(handle) = self.protocol.handle() {
            handle.post_run(move |scope| self.look(scope));
        }
    }
}
