//! Delivery to a stream or to spawned tasks: messages wait for their consumer, and credit keeps them few.

use crate::handler::ActiveMessage;
use crate::message::{Message, OwnedMessage};
use futures::{FutureExt, Stream};
use posthaste_core::budget;
use posthaste_core::context::{Face, poll_until};
use posthaste_core::engine::Work;
use posthaste_core::protocol::{Credit, Flow, Incoming, Protocol};
use posthaste_core::sync::{lock, replace_waker};
use posthaste_core::{Handle, Messager, RegisterError, Scope};
use std::collections::VecDeque;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

#[derive(Debug, Default)]
struct Queue {
    messages: VecDeque<(OwnedMessage, Credit, usize)>,
    waker: Option<Waker>,
    closed: bool,
}

#[derive(Debug)]
struct StreamProtocol {
    name: String,
    queue: Mutex<Queue>,
}

impl Protocol for StreamProtocol {
    fn name(&self) -> &str {
        &self.name
    }

    fn flow(&self) -> Flow {
        Flow::Credited
    }

    fn on_message(&self, scope: &mut Scope<'_>, message: Incoming<'_>) {
        let context = scope.me().context.index();
        let message = Message::new(message);
        let credit = message.credit();
        let mut queue = lock(&self.queue);
        if queue.closed {
            drop(queue);
            scope.consumed(credit);
            return;
        }
        queue.messages.push_back((message.into_owned(), credit, context));
        if let Some(waker) = queue.waker.take() {
            drop(queue);
            scope.started_task();
            waker.wake();
        }
    }

    fn on_close(&self) {
        let mut queue = lock(&self.queue);
        queue.closed = true;
        let waker = queue.waker.take();
        // A task that is woken may be dropped there, and with it whoever reads the stream.
        drop(queue);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// The messages of one name, as they arrive: in order per sender.
///
/// A sender may have a bounded number of messages and bytes outstanding here (the job's credits); taking a message
/// gives its credit back. A slow consumer thus slows the senders of this name and nobody else. Once it is dropped, what comes is
/// thrown away, which senders are not told; the name stays taken.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use futures::StreamExt;
/// let (line, lines) = job.stream("line")?;
/// for text in ["one", "two", "three"] {
///     line.send(job.rank(), text).await?;
/// }
/// // It is a `Stream` as well.
/// let texts: Vec<String> = lines.take(3).map(|message| message.text()).collect().await;
/// assert_eq!(texts, ["one", "two", "three"]);
/// # job.leave().await
/// # }
/// ```
#[derive(Debug)]
pub struct MessageStream {
    protocol: Arc<StreamProtocol>,
    contexts: Vec<Handle>,
}

impl MessageStream {
    /// The next message; `None` once the job was left. It does not end when senders die or leave: others may still send.
    ///
    /// # Cancel safety
    /// Cancel safe: a message is taken only when the future is ready.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (number, mut numbers) = job.stream("number")?;
    /// number.send(job.rank(), 42_u64.to_ne_bytes()).await?;
    /// let message = numbers.recv().await.expect("the job goes on");
    /// assert_eq!((message.source(), message.read::<u64>(0)), (job.rank(), Some(42)));
    /// # job.leave().await
    /// # }
    /// ```
    pub fn recv(&mut self) -> impl Future<Output = Option<OwnedMessage>> + '_ {
        std::future::poll_fn(move |cx| self.poll_recv(cx))
    }

    /// The next message, if one is here.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (note, mut notes) = job.stream("note")?;
    /// assert!(notes.try_recv().is_none(), "nothing was sent");
    /// note.send(job.rank(), "here").await?;
    /// job.flush(job.rank()).await?; // it has been handed to the stream
    /// assert_eq!(notes.try_recv().map(|message| message.text()).as_deref(), Some("here"));
    /// # job.leave().await
    /// # }
    /// ```
    pub fn try_recv(&mut self) -> Option<OwnedMessage> {
        let taken = lock(&self.protocol.queue).messages.pop_front();
        taken.map(|taken| self.consume(taken))
    }

    fn consume(&self, (message, credit, context): (OwnedMessage, Credit, usize)) -> OwnedMessage {
        if let Some(handle) = self.contexts.get(context)
            && handle.enter(|engine| engine.scope().consumed(credit)).is_err()
        {
            handle.post_work(Work::Consumed(credit));
        }
        message
    }

    /// Polls for the next message.
    pub fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Option<OwnedMessage>> {
        let protocol = &self.protocol;
        let taken = poll_until(
            &self.contexts[0],
            cx,
            || {
                let mut queue = lock(&protocol.queue);
                match queue.messages.pop_front() {
                    Some(taken) => Some(Some(taken)),
                    None if queue.closed => Some(None),
                    None => None,
                }
            },
            |waker| {
                let before = replace_waker(&mut lock(&protocol.queue).waker, waker);
                drop(before);
            },
        );
        taken.map(|taken| taken.map(|taken| self.consume(taken)))
    }
}

impl Stream for MessageStream {
    type Item = OwnedMessage;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<OwnedMessage>> {
        self.get_mut().poll_recv(cx)
    }
}

impl Drop for MessageStream {
    fn drop(&mut self) {
        // Nobody will take them: their senders get their credit, and so will those of later ones.
        let mut queue = lock(&self.protocol.queue);
        queue.closed = true;
        let left = queue.waker.take();
        drop(queue);
        drop(left);
        while self.try_recv().is_some() {}
    }
}

/// Registers a message that is delivered to a stream.
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
/// use posthaste_protocols::stream;
/// let messager = job.messager();
/// let face = messager.contexts()[0].clone();
/// let (note, mut notes) = stream::register_stream(&**messager, face, "note")?;
/// note.send(job.rank(), "kept until it is taken").await?;
/// assert_eq!(notes.recv().await.map(|note| note.len()), Some(22));
/// # job.leave().await
/// # }
/// ```
pub fn register_stream(
    messager: &dyn Messager,
    face: Handle,
    name: &str,
) -> Result<(ActiveMessage, MessageStream), RegisterError> {
    let protocol = Arc::new(StreamProtocol { name: name.to_owned(), queue: Mutex::default() });
    let id = messager.register(protocol.clone())?;
    let stream = MessageStream { protocol, contexts: messager.contexts().to_vec() };
    Ok((ActiveMessage::new(face, id), stream))
}

struct Spawned<H> {
    name: String,
    limit: usize,
    handler: H,
    runtime: tokio::runtime::Handle,
    contexts: Arc<[Handle]>,
    state: Arc<Mutex<SpawnState>>,
}

/// A message, its credit, and the context that it came to.
type Waiting = (OwnedMessage, Credit, usize);

#[derive(Default)]
struct SpawnState {
    waiting: VecDeque<Waiting>,
    running: usize,
    closed: bool,
}

/// What a handler's task gives back when it ends, however it ends.
struct Running {
    contexts: Arc<[Handle]>,
    /// That of its message.
    context: usize,
    credit: Credit,
    state: Arc<Mutex<SpawnState>>,
    /// Its place among those that run is still to be given up.
    counts: bool,
}

impl Running {
    /// The handler has ended: its task goes on with the next message in the same place, or gives that up if none waits. In one
    /// step: in between, a message might be started beside it, or come and find no place.
    fn next(mut self) -> Option<Waiting> {
        self.counts = false;
        let mut state = lock(&self.state);
        let next = state.waiting.pop_front();
        if next.is_none() {
            state.running -= 1;
        }
        drop(state);
        next
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.contexts[self.context].post_work(Work::Consumed(self.credit));
        if self.counts {
            // Its runtime has ended, and nobody would start those that wait.
            let mut state = lock(&self.state);
            state.running -= 1;
            let left = if state.running == 0 { std::mem::take(&mut state.waiting) } else { VecDeque::new() };
            drop(state);
            for (_message, credit, context) in left {
                self.contexts[context].post_work(Work::Consumed(credit));
            }
        }
    }
}

impl<H, T> Spawned<H>
where
    H: Fn(OwnedMessage) -> T + Clone + Send + Sync + 'static,
    T: Future<Output = ()> + Send + 'static,
{
    /// Starts as many handlers as the limit allows. Each task goes on with the next waiting message.
    fn start(&self) {
        loop {
            let next = {
                let mut state = lock(&self.state);
                if state.running >= self.limit || state.closed {
                    return;
                }
                let Some(next) = state.waiting.pop_front() else { return };
                state.running += 1;
                next
            };
            let (state, contexts, name) = (self.state.clone(), self.contexts.clone(), self.name.clone());
            let running = move |(message, credit, context): Waiting| {
                let (contexts, state) = (contexts.clone(), state.clone());
                (message, Running { contexts, context, credit, state, counts: true })
            };
            // It counts from here on: of a runtime that has ended, the task is dropped before it begins.
            let first = running(next);
            // The user's, as much as the handler is.
            let Ok(handler) = std::panic::catch_unwind(AssertUnwindSafe(|| self.handler.clone())) else {
                tracing::error!(name = self.name, "a spawned message handler panicked when it was cloned");
                continue;
            };
            self.runtime.spawn(async move {
                let mut next = Some(first);
                while let Some((message, its)) = next {
                    // Handlers that are ready at once let other tasks have their turn.
                    std::future::poll_fn(budget::proceed).await;
                    // A panic ends this message's handler, not the ones that wait behind it.
                    let handled = AssertUnwindSafe(async { handler(message).await }).catch_unwind().await;
                    if handled.is_err() {
                        tracing::error!(name, "a spawned message handler panicked");
                    }
                    budget::spend(budget::MESSAGE);
                    next = its.next().map(&running);
                }
            });
        }
    }
}

impl<H, T> Protocol for Spawned<H>
where
    H: Fn(OwnedMessage) -> T + Clone + Send + Sync + 'static,
    T: Future<Output = ()> + Send + 'static,
{
    fn name(&self) -> &str {
        &self.name
    }

    fn flow(&self) -> Flow {
        Flow::Credited
    }

    fn on_message(&self, scope: &mut Scope<'_>, message: Incoming<'_>) {
        let context = scope.me().context.index();
        let message = Message::new(message);
        let credit = message.credit();
        lock(&self.state).waiting.push_back((message.into_owned(), credit, context));
        scope.started_task();
        self.start();
    }

    fn on_close(&self) {
        let mut state = lock(&self.state);
        state.closed = true;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        drop(waiting);
    }
}

/// Registers a message whose async handler runs in a task of its own, at most `limit` at once; messages beyond wait,
/// and their senders for credit.
///
/// # Errors
/// If the name is taken or impossible.
///
/// # Panics
/// Outside a Tokio runtime.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::{Messager, OwnedMessage};
/// use posthaste_protocols::stream;
/// let done = job.counter();
/// let count = done.clone();
/// let face = job.messager().contexts()[0].clone();
/// // Two handlers at once at most; each may wait for whatever it likes.
/// let work = stream::register_spawned(&**job.messager(), face, "work", 2, move |message: OwnedMessage| {
///     let count = count.clone();
///     async move {
///         tokio::task::yield_now().await;
///         count.add(message.len() as u64);
///     }
/// })?;
/// for _ in 0..5 {
///     work.send(job.rank(), "ten bytes!").await?;
/// }
/// done.reach(50).await;
/// assert_eq!(done.value(), 50);
/// # job.leave().await
/// # }
/// ```
pub fn register_spawned<H, T>(
    messager: &dyn Messager,
    face: Handle,
    name: &str,
    limit: usize,
    handler: H,
) -> Result<ActiveMessage, RegisterError>
where
    H: Fn(OwnedMessage) -> T + Clone + Send + Sync + 'static,
    T: Future<Output = ()> + Send + 'static,
{
    let protocol = Spawned {
        name: name.to_owned(),
        limit: limit.max(1),
        handler,
        runtime: tokio::runtime::Handle::current(),
        contexts: messager.contexts().into(),
        state: Arc::default(),
    };
    let id = messager.register(Arc::new(protocol))?;
    Ok(ActiveMessage::new(face, id))
}
