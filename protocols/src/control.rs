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
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// let stop = job.counter();
/// let count = stop.clone();
/// let control = job.register_control("stop", move |from, payload, _| {
///     assert_eq!((from.0, payload[15]), (0, 9));
///     count.add(1);
/// })?;
/// let mut payload = [0; 16]; // always sixteen bytes
/// payload[15] = 9;
/// // It gets past all messages that wait for room or credit.
/// control.send(job.rank(), payload).await?;
/// stop.reach(1).await;
/// assert_eq!(stop.value(), 1);
/// # job.leave().await
/// # }
/// ```
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
    /// Dropped while it waits, the control is not sent, unless its turn had come just then, or another thread used the context
    /// when it was begun: then it may have been.
    pub async fn send(&self, rank: Rank, payload: [u8; CONTROL_BYTES]) -> Result<(), SendError> {
        let (target, id, handle) = (self.target(rank), self.id, Handle::of(&self.face));
        // Owned at once: the future may be dropped before it hears of the ticket.
        let send = move |scope: &mut Scope<'_>| match scope.control(target, id, payload, true)? {
            ControlSent::Later(ticket) => Ok(Some(Pending::new(handle.clone(), ticket, None))),
            ControlSent::Done | ControlSent::Full => Ok::<_, SendError>(None),
        };
        let sent = match self.face.enter(|engine| send(&mut engine.scope())) {
            Ok(sent) => sent?,
            Err(_) => {
                let posted = self.face.post(send);
                std::future::poll_fn(|cx| posted.poll(cx)).await?
            }
        };
        let Some(mut pending) = sent else { return Ok(()) };
        std::future::poll_fn(|cx| pending.poll(&self.face, cx)).await?;
        Ok(())
    }

    /// Sends sixteen bytes now or not at all; never waits.
    ///
    /// # Errors
    /// With the payload: there is no room now, or the context is in use by another thread, or the rank is unknown or gone.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{Rank, TrySendError};
    /// let control = job.register_control("tick", |_, _, _| {})?;
    /// control.try_send(job.rank(), [1; 16]).expect("nothing stands in the way");
    /// let error = control.try_send(Rank(1000), [2; 16]).unwrap_err();
    /// assert!(matches!(error, TrySendError::Failed { payload: [2, ..], .. }));
    /// # job.leave().await
    /// # }
    /// ```
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
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{ContextId, Endpoint};
    /// let rounds = job.counter();
    /// let (count, back) = (rounds.clone(), rounds.clone());
    /// let pong = job.register_control("pong", move |_, _, _| back.add(100))?;
    /// let ping = job.register_control("ping", move |from, payload, scope| {
    ///     count.add(1);
    ///     // What has no room is given up: whoever asked asks again.
    ///     let _ = pong.send_in(scope, Endpoint::new(from, ContextId(0)), payload);
    /// })?;
    /// ping.send(job.rank(), [0; 16]).await?;
    /// rounds.reach(101).await;
    /// assert_eq!(rounds.value(), 101);
    /// # job.leave().await
    /// # }
    /// ```
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
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::Messager;
/// use posthaste_protocols::control;
/// let beats = job.counter();
/// let count = beats.clone();
/// let face = job.messager().contexts()[0].clone();
/// let beat = control::register(&**job.messager(), face, "beat", move |_, _, _| count.add(1))?;
/// beat.send(job.rank(), [0; 16]).await?;
/// beats.reach(1).await;
/// assert_eq!(beats.value(), 1);
/// # job.leave().await
/// # }
/// ```
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
