//! Sending records from anywhere without waiting: one for which there is no room is sent when there is.

use super::ExchangeProtocol;
use super::board::Effects;
use super::custody::Answer;
use bytes::Bytes;
use posthaste_core::context::Shared;
use posthaste_core::engine::{Payload, SendArgs, Sent, Wait};
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

/// A record that waits for room in the queue towards a rank, or for memory.
struct Waiting {
    protocol: Arc<ExchangeProtocol>,
    to: Rank,
    record: Bytes,
    ticket: Ticket,
    wait: Wait,
    /// There was no memory.
    again: Option<Again>,
    /// What it is an answer to, until that goes on.
    answer: Mutex<Option<Answer>>,
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
                    protocol.notify_one(scope, answer.to, record.clone(), Wait::Await, Some(answer));
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
            self.notify_one(scope, rank, record.clone(), Wait::Await, None);
        }
    }

    fn wait_for(
        self: &Arc<Self>,
        ticket: Ticket,
        (to, record, wait): (Rank, Bytes, Wait),
        again: Option<Again>,
        answer: Option<Answer>,
    ) -> Arc<Waiting> {
        let (protocol, answer) = (self.clone(), Mutex::new(answer));
        Arc::new(Waiting { protocol, to, record, ticket, wait, again, answer })
    }

    fn notify_one(
        self: &Arc<Self>,
        scope: &mut Scope<'_>,
        to: Rank,
        record: Bytes,
        wait: Wait,
        answer: Option<Answer>,
    ) {
        let Some(outlet) = self.outlet.get() else { return };
        let target = Endpoint::new(to, scope.me().context);
        let args = SendArgs { target, protocol: outlet.id, cookie: 0, info: &[], relaxed: false };
        match scope.send(&args, Payload::Owned(record.clone()), wait) {
            Ok(Sent::Queued(ticket)) => scope.detach(ticket),
            Ok(Sent::Later(ticket, wait, _)) => {
                self.wait_for(ticket, (to, record, wait), None, answer).look(scope);
            }
            Ok(Sent::Done | Sent::Full(_)) => {}
            // The peer waits for it, however long there is no memory.
            Err((SendError::Fault(Fault::OutOfMemory(what)), _)) => {
                tracing::debug!(%to, what, "notice put off");
                match self.handle().map(|handle| Again::towards(to, &handle, scope)).transpose() {
                    Ok(None) => {}
                    Ok(Some(again)) => {
                        let what = (to, record, Wait::Await);
                        self.wait_for(again.ticket, what, Some(again), answer).look(scope);
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
        match handle.slots().poll(self.ticket, &mut Context::from_waker(&waker)) {
            Poll::Ready(Ok(_)) => self.go_on(scope),
            Poll::Pending if self.again.is_some_and(|again| again.has_come(&handle, scope)) => {
                self.go_on(scope)
            }
            // Whoever is gone need not be told.
            Poll::Ready(Err(_)) | Poll::Pending => {}
        }
    }
}

impl Waiting {
    fn go_on(&self, scope: &mut Scope<'_>) {
        let answer = lock(&self.answer).take();
        self.protocol.notify_one(scope, self.to, self.record.clone(), self.wait, answer);
    }
}

impl Wake for Waiting {
    fn wake(self: Arc<Self>) {
        if let Some(handle) = self.protocol.handle() {
            handle.post_run(move |scope| self.look(scope));
        }
    }
}
