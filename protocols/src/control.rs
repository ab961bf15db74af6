//! Control messages: sixteen bytes that get past everything else (D14).

use crate::operation::Pending;
use posthaste_core::context::Face;
use posthaste_core::control::CONTROL_BYTES;
use posthaste_core::engine::ControlSent;
use posthaste_core::{
    Context, ControlId, Endpoint, Handle, Messager, Rank, RegisterError, Scope, SendError, TrySendError,
};
use std::sync::Arc;

/// A registered control: sixteen bytes, out of band of sends. Controls of one pair arrive in the order in which they were
/// sent; before or after which message, put or get they do is left open, so that one may get past a long queue of those.
/// It needs no credit, and nothing is counted for a flush or a fence. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Control<F = Handle> {
    face: F,
    id: ControlId,
}

impl<F: Face> Control<F> {
    /// The name that all ranks know, as a number.
    #[must_use]
    pub fn id(&self) -> ControlId {
        self.id
    }

    /// The same control sent through an owned context.
    #[must_use]
    pub fn on<'c>(&self, context: &'c Context) -> Control<&'c Context> {
        Control { face: context, id: self.id }
    }

    fn target(&self, rank: Rank) -> Endpoint {
        Endpoint::new(rank, self.face.shared().me().context)
    }

    /// Sends sixteen bytes; waits while many controls to that rank wait for room.
    ///
    /// # Errors
    /// If the rank is unknown or gone. A control that the target has not registered, or whose handler panics, is told to
    /// this rank's error handler.
    ///
    /// # Cancel safety
    /// Cancel safe: dropped before it is ready, the control was not sent, unless another thread used the context at that
    /// moment: then it may have been.
    pub async fn send(&self, rank: Rank, payload: [u8; CONTROL_BYTES]) -> Result<(), SendError> {
        let (target, id) = (self.target(rank), self.id);
        loop {
            let send = move |scope: &mut Scope<'_>| scope.control(target, id, payload, true);
            let sent = match self.face.enter(|engine| send(&mut engine.scope())) {
                Ok(sent) => sent?,
                Err(_) => {
                    let posted = self.face.post(send);
                    std::future::poll_fn(|cx| posted.poll(cx)).await?
                }
            };
            let ControlSent::Later(ticket) = sent else { return Ok(()) };
            let mut pending = Pending::new(Handle::of(&self.face), ticket, None, None);
            std::future::poll_fn(|cx| pending.poll(&self.face, cx)).await?;
        }
    }

    /// Sends sixteen bytes now or not at all; never waits.
    ///
    /// # Errors
    /// With the payload: there is no room now, or the context is in use by another thread, or the rank is unknown or gone.
    pub fn try_send(
        &self,
        rank: Rank,
        payload: [u8; CONTROL_BYTES],
    ) -> Result<(), TrySendError<[u8; CONTROL_BYTES]>> {
        let target = self.target(rank);
        match self.face.enter(|engine| self.send_in(&mut engine.scope(), target, payload)) {
            Ok(sent) => sent,
            Err(_) => Err(TrySendError::Full(payload)),
        }
    }

    /// Sends from inside a handler; never waits.
    ///
    /// # Errors
    /// With the payload: there is no room now, or the target is unknown or gone.
    pub fn send_in(
        &self,
        scope: &mut Scope<'_>,
        target: Endpoint,
        payload: [u8; CONTROL_BYTES],
    ) -> Result<(), TrySendError<[u8; CONTROL_BYTES]>> {
        match scope.control(target, self.id, payload, false) {
            Ok(ControlSent::Done) => Ok(()),
            Ok(_) => Err(TrySendError::Full(payload)),
            Err(error) => Err(TrySendError::Failed { error, payload }),
        }
    }
}

/// Registers a control: the handler runs inside `advance`, for each one, with the rank that sent it. It must be short and
/// must not block. What comes before it is registered waits for that.
///
/// # Errors
/// If the name is taken or impossible.
pub fn register<H>(
    messager: &dyn Messager,
    face: Handle,
    name: &str,
    handler: H,
) -> Result<Control, RegisterError>
where
    H: Fn(Rank, [u8; CONTROL_BYTES], &mut Scope<'_>) + Send + Sync + 'static,
{
    let handler = move |scope: &mut Scope<'_>, source: Endpoint, payload: [u8; CONTROL_BYTES]| {
        handler(source.rank, payload, scope);
    };
    let id = messager.register_control(name, Arc::new(handler))?;
    Ok(Control { face, id })
}
