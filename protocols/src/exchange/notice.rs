//! Sending records from anywhere without waiting: one for which there is no room stays with the engine until there is.

use super::ExchangeProtocol;
use super::board::Effects;
use super::custody::Answer;
use bytes::Bytes;
use posthaste_core::context::Shared;
use posthaste_core::engine::{Given, Payload, SendArgs};
use posthaste_core::sync::lock;
use posthaste_core::{Endpoint, Fault, Handle, ProtocolId, Rank, Scope, SendError, Ticket, Value};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

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

/// How soon something is tried once more for which there was no memory.
pub(crate) const AGAIN: Duration = Duration::from_millis(50);

/// A record that waits.
struct Waiting {
    protocol: Arc<ExchangeProtocol>,
    ticket: Ticket,
    what: Mutex<Option<What>>,
}

enum What {
    /// There was no memory for it: it is to be tried again.
    Memory { to: Rank, record: Bytes, again: Again, answer: Option<Answer> },
    /// The engine has it until there is room, and this is what it answers.
    Room { _answers: Answer },
}

impl ExchangeProtocol {
    fn handle(&self) -> Option<Handle> {
        Some(Handle::new(self.outlet.get()?.context.upgrade()?))
    }

    /// Does what follows from a change of the board, where there is no scope at hand.
    pub fn apply(self: &Arc<Self>, mut effects: Effects) {
        std::mem::take(&mut effects.wake).into_iter().for_each(Waker::wake);
        std::mem::take(&mut effects.unused).into_iter().for_each(super::board::Unused::give_back);
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

    /// Has a record sent to those whom it answers.
    pub fn notify_answers(self: &Arc<Self>, answers: Vec<Answer>, record: Bytes) {
        if answers.is_empty() {
            return;
        }
        if let Some(handle) = self.handle() {
            let protocol = self.clone();
            handle.post_run(move |scope| {
                for answer in answers {
                    protocol.notify_one(scope, answer.to, record.clone(), Some(answer));
                }
            });
        }
    }

    fn notify(
        self: &Arc<Self>,
        scope: &mut Scope<'_>,
        ranks: impl IntoIterator<Item = Rank>,
        record: &Bytes,
    ) {
        for rank in ranks {
            self.notify_one(scope, rank, record.clone(), None);
        }
    }

    fn wait_for(self: &Arc<Self>, scope: &mut Scope<'_>, ticket: Ticket, what: What) {
        Arc::new(Waiting { protocol: self.clone(), ticket, what: Mutex::new(Some(what)) }).look(scope);
    }

    fn notify_one(self: &Arc<Self>, scope: &mut Scope<'_>, to: Rank, record: Bytes, answer: Option<Answer>) {
        let Some(outlet) = self.outlet.get() else { return };
        let target = Endpoint::new(to, scope.me().context);
        let args = SendArgs { target, protocol: outlet.id, cookie: 0, info: &[], relaxed: false };
        match scope.give(&args, Payload::Owned(record.clone())) {
            Ok(Given::Done) => {}
            Ok(Given::Queued(ticket)) => scope.detach(ticket),
            Ok(Given::Kept(ticket, deposit)) => {
                deposit.leave();
                match answer {
                    Some(answer) => self.wait_for(scope, ticket, What::Room { _answers: answer }),
                    None => scope.detach(ticket),
                }
            }
            // The peer waits for it, however long there is no memory.
            Err((SendError::Fault(Fault::OutOfMemory(what)), _)) => {
                tracing::debug!(%to, what, "notice put off");
                match self.handle().map(|handle| Again::towards(to, &handle, scope)).transpose() {
                    Ok(None) => {}
                    Ok(Some(again)) => {
                        self.wait_for(scope, again.ticket, What::Memory { to, record, again, answer });
                    }
                    Err(fault) => tracing::warn!(%to, %fault, "notice not sent"),
                }
            }
            // Whoever is gone need not be told.
            Err((error, _)) => tracing::debug!(%to, %error, "notice not sent"),
        }
    }
}

/// When to try once more what lacked memory. Its ticket ends before if the peer does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Again {
    pub ticket: Ticket,
    /// In milliseconds of the context's clock.
    at: u64,
}

impl Again {
    /// In a while, unless that peer is gone by then.
    pub fn towards(to: Rank, handle: &Handle, scope: &mut Scope<'_>) -> Result<Again, Fault> {
        let again = Again { ticket: scope.operation(Some(to))?, at: handle.deadline_after(AGAIN) };
        scope.deadline(again.at, again.ticket);
        Ok(again)
    }

    /// Whether it is time; then the ticket is given back.
    pub fn has_come(self, handle: &Handle, scope: &mut Scope<'_>) -> bool {
        let has_come = handle.now_ms() >= self.at;
        if has_come && !handle.slots().detach(self.ticket) {
            // Nobody else ends it.
            scope.complete(self.ticket, Ok(Value::Unit));
        }
        has_come
    }
}

impl Waiting {
    fn look(self: Arc<Self>, scope: &mut Scope<'_>) {
        let Some(handle) = self.protocol.handle() else { return };
        let waker = Waker::from(self.clone());
        let mut what = lock(&self.what);
        // Once it has ended, its ticket may be another's.
        let Some(waiting) = &*what else { return };
        let polled = handle.slots().poll(self.ticket, &mut Context::from_waker(&waker));
        let has_come = |scope: &mut Scope<'_>| match waiting {
            What::Memory { again, .. } => again.has_come(&handle, scope),
            What::Room { .. } => false,
        };
        if polled.is_pending() && !has_come(scope) {
            return;
        }
        let ended = what.take();
        drop(what);
        // Whoever is gone need not be told.
        if let (Poll::Pending | Poll::Ready(Ok(_)), Some(What::Memory { to, record, answer, .. })) =
            (polled, ended)
        {
            self.protocol.notify_one(scope, to, record, answer);
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
