//! Operations that wait for long. Members may have called different ones without any message that tells of it: each waits for
//! the others, or one for leave to send what the other awaits in fewer bytes. So whoever has waited for a while says once what
//! it has called.

use super::executor::Hub;
use super::group_state::{Notice, Slot};
use super::outlet::Way;
use super::state::State;
use super::wire::call_words;
use posthaste_core::{Scope, Ticket, Value};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

/// What has waited through one such time says so.
const PATIENCE: Duration = Duration::from_millis(100);

/// Goes off when operations are to be looked at.
struct Alarm {
    hub: Arc<Hub>,
    at: u64,
    ticket: Ticket,
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        if let Some(handle) = self.hub.handle() {
            handle.post_run(move |scope| self.look(scope));
        }
    }
}

impl Alarm {
    fn look(self: Arc<Self>, scope: &mut Scope<'_>) {
        let Some(handle) = self.hub.handle() else { return };
        let waker = Waker::from(self.clone());
        match handle.slots().poll(self.ticket, &mut Context::from_waker(&waker)) {
            Poll::Ready(Ok(_)) => self.hub.look_at_waiting(scope),
            // The job is left.
            Poll::Ready(Err(_)) => {}
            Poll::Pending if handle.now_ms() >= self.at => {
                scope.complete(self.ticket, Ok(Value::Unit));
            }
            Poll::Pending => {}
        }
    }
}

impl Hub {
    /// An operation has to wait.
    #[inline]
    pub(super) fn watch(self: &Arc<Self>, scope: &mut Scope<'_>, state: &mut State) {
        if !state.watched {
            self.set_alarm(scope, state);
        }
    }

    #[cold]
    fn set_alarm(self: &Arc<Self>, scope: &mut Scope<'_>, state: &mut State) {
        let Some(handle) = self.handle() else { return };
        // It waits for nobody else.
        let Ok(ticket) = scope.operation(Some(self.me)) else { return };
        state.watched = true;
        let at = handle.deadline_after(PATIENCE);
        handle.set_deadline(at, ticket);
        let alarm = Arc::new(Alarm { hub: self.clone(), at, ticket });
        handle.post_run(move |scope| alarm.look(scope));
    }

    /// Of each operation that was found waiting before, those whom it waits for are told what it is. Whoever has come to one is
    /// not kept waiting for the others any longer.
    fn look_at_waiting(self: &Arc<Self>, scope: &mut Scope<'_>) {
        let mut state = self.lock();
        state.watched = false;
        let mut again = false;
        let mut go_on = Vec::new();
        let State { groups, peers, .. } = &mut *state;
        let mut way = Way { hub: self, scope: &mut *scope, peers };
        for (at, group) in groups.iter_mut() {
            for operation in group.base..group.next() {
                let Some(Slot::Running(op)) = group.slot(operation) else { continue };
                op.looks = op.looks.saturating_add(1);
                again |= op.looks == 1;
                if op.looks != 2 {
                    continue;
                }
                let called = Notice::Called { mark: op.mark, bytes: call_words(op.call).1 };
                let (awaited, uncleared) = (op.run.awaited(), op.run.uncleared());
                for place in awaited {
                    way.notice(group, at, operation, place, called);
                }
                for place in uncleared {
                    way.notice(group, at, operation, place, Notice::Ask);
                }
                if let Some(Slot::Running(op)) = group.slot(operation)
                    && op.run.give_up_room()
                {
                    go_on.push((at, operation));
                }
            }
        }
        for (at, operation) in go_on {
            state = self.go_on(scope, state, at, operation);
        }
        if again {
            self.set_alarm(scope, &mut state);
        }
    }
}
