//! Messages of one type: values that are sent as they lie in memory, or encoded by serde, and ranks that mean another type by
//! the same name refuse each other's.

use crate::buffer::Buffer;
use crate::codec::{decode, encode, encoded_schema, plain_schema};
use crate::handler::{self, ActiveMessage};
use crate::message::Message;
use crate::multisend::Multisend;
use crate::send::SendMessage;
use posthaste_core::context::Face;
use posthaste_core::{
    CallError, Context, Endpoint, Handle, Messager, ProtocolId, Rank, RegisterError, Scope, TrySendError,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::marker::PhantomData;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// A registered message of one plain-old-data type: its values are sent as they lie in memory. Cheap to clone.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::{Rank, Scope, TypedMessage};
/// use zerocopy::{FromBytes, Immutable, IntoBytes};
///
/// #[derive(FromBytes, IntoBytes, Immutable)]
/// #[repr(C)]
/// struct Step {
///     number: u32,
///     work: u32,
/// }
///
/// let work = job.counter();
/// let total = work.clone();
/// let step: TypedMessage<Step> = job.register_typed("step", move |step: Step, _: Rank, _: &mut Scope| {
///     total.add(u64::from(step.number * step.work));
/// })?;
/// step.send(job.rank(), &Step { number: 6, work: 7 }).await?;
/// work.reach(42).await;
/// assert_eq!(work.value(), 42);
/// # job.leave().await
/// # }
/// ```
#[derive(Debug)]
pub struct TypedMessage<T, F = Handle> {
    message: ActiveMessage<F>,
    value: PhantomData<fn(T)>,
}

/// A registered message of one type that serde encodes: strings, enums, collections. Cheap to clone.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::{EncodedMessage, Rank, Scope};
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize)]
/// enum Event {
///     Joined { name: String },
///     Said(Vec<String>),
/// }
///
/// let words = job.counter();
/// let count = words.clone();
/// let event: EncodedMessage<Event> = job.register_encoded("event", move |event: Event, _: Rank, _: &mut Scope| {
///     if let Event::Said(words) = event {
///         count.add(words.len() as u64);
///     }
/// })?;
/// event.send(job.rank(), &Event::Joined { name: "Ada".into() })?.await?;
/// event.send(job.rank(), &Event::Said(vec!["good".into(), "day".into()]))?.await?;
/// words.reach(2).await;
/// # job.leave().await
/// # }
/// ```
#[derive(Debug)]
pub struct EncodedMessage<T, F = Handle> {
    message: ActiveMessage<F>,
    value: PhantomData<fn(T)>,
}

/// What the messages of both kinds are alike in.
macro_rules! faces {
    ($name:ident) => {
        impl<T, F: Clone> Clone for $name<T, F> {
            fn clone(&self) -> Self {
                Self::new(self.message.clone())
            }
        }

        impl<T, F> $name<T, F> {
            fn new(message: ActiveMessage<F>) -> Self {
                Self { message, value: PhantomData }
            }

            /// The message beneath, which sends bytes: those of a value, or its receivers drop them.
            #[must_use]
            pub fn untyped(&self) -> &ActiveMessage<F> {
                &self.message
            }
        }

        impl<T, F: Face> $name<T, F> {
            /// This client's number for it.
            #[must_use]
            pub fn id(&self) -> ProtocolId {
                self.message.id()
            }

            /// The same message sent through an owned context, as by [`ActiveMessage::on`].
            #[must_use]
            pub fn on<'c>(&self, context: &'c Context) -> $name<T, &'c Context> {
                $name::new(self.message.on(context))
            }

            /// The same message sent through any face.
            #[must_use]
            pub fn with_face<G: Face>(&self, face: G) -> $name<T, G> {
                $name::new(self.message.with_face(face))
            }

            /// The same message sent through a context of one's choice, as by [`ActiveMessage::through`].
            #[must_use]
            pub fn through(&self, handle: &Handle) -> $name<T> {
                $name::new(self.message.through(handle))
            }
        }
    };
}

faces!(TypedMessage);
faces!(EncodedMessage);

impl<T: IntoBytes + Immutable, F: Face> TypedMessage<T, F> {
    /// Sends a value.
    ///
    /// # Cancel safety
    /// See [`SendMessage`].
    #[inline]
    pub fn send(&self, target: Rank, value: &T) -> SendMessage<'_, F> {
        self.message.send(target, Buffer::copy(value.as_bytes()))
    }

    /// Sends a value now or not at all; never waits.
    ///
    /// # Errors
    /// There is no room now, or the send cannot succeed. What comes back are the value's bytes.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let sum = job.counter();
    /// let total = sum.clone();
    /// let add = job.register_typed("add", move |number: u64, _, _: &mut posthaste::Scope| total.add(number))?;
    /// add.try_send(job.rank(), &42)?;
    /// sum.reach(42).await;
    /// # job.leave().await
    /// # }
    /// ```
    pub fn try_send(&self, target: Rank, value: &T) -> Result<(), TrySendError<Buffer>> {
        self.message.try_send(target, Buffer::copy(value.as_bytes()))
    }

    /// Sends a value to all of these ranks in one call, as [`ActiveMessage::multicast`] does.
    ///
    /// # Errors
    /// Of the future: the ranks that could not be sent to; all others were.
    pub fn multicast(&self, targets: impl IntoIterator<Item = Rank>, value: &T) -> Multisend<'_, F> {
        self.message.multicast(targets, Buffer::copy(value.as_bytes()))
    }

    /// Sends a value from inside a handler; never waits.
    ///
    /// # Errors
    /// There is no room now, or the send cannot succeed. What comes back are the value's bytes.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{ContextId, Endpoint, Rank, Scope};
    /// let sum = job.counter();
    /// let total = sum.clone();
    /// let add = job.register_typed("add", move |number: u64, _: Rank, _: &mut Scope| total.add(number))?;
    /// let twice = job.register_typed("twice", move |number: u64, from: Rank, scope: &mut Scope| {
    ///     add.send_in(scope, Endpoint::new(from, ContextId(0)), &(2 * number)).expect("there is room");
    /// })?;
    /// twice.send(job.rank(), &21).await?;
    /// sum.reach(42).await;
    /// # job.leave().await
    /// # }
    /// ```
    pub fn send_in(
        &self,
        scope: &mut Scope<'_>,
        target: Endpoint,
        value: &T,
    ) -> Result<(), TrySendError<Buffer>> {
        self.message.send_in(scope, target, Buffer::copy(value.as_bytes()))
    }
}

impl<T: Serialize, F: Face> EncodedMessage<T, F> {
    /// Sends a value, which is encoded at once: the future does not borrow it.
    ///
    /// # Errors
    /// [`CallError::Codec`] if the value cannot be encoded; what else there may be is the future's.
    ///
    /// # Cancel safety
    /// See [`SendMessage`].
    pub fn send(&self, target: Rank, value: &T) -> Result<SendMessage<'_, F>, CallError> {
        Ok(self.message.send(target, encode(value)?))
    }

    /// Sends a value to all of these ranks in one call, as [`ActiveMessage::multicast`] does; it is encoded once.
    ///
    /// # Errors
    /// [`CallError::Codec`] if the value cannot be encoded. Of the future: the ranks that could not be sent to; all others were.
    pub fn multicast(
        &self,
        targets: impl IntoIterator<Item = Rank>,
        value: &T,
    ) -> Result<Multisend<'_, F>, CallError> {
        Ok(self.message.multicast(targets, encode(value)?))
    }

    /// Sends a value now or not at all; never waits. False: there is no room now.
    ///
    /// # Errors
    /// If the value cannot be encoded, or the send cannot succeed.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{Rank, Scope};
    /// let heard = job.counter();
    /// let count = heard.clone();
    /// let note = job.register_encoded("note", move |_: Option<String>, _: Rank, _: &mut Scope| count.add(1))?;
    /// if !note.try_send(job.rank(), &Some("now or not at all".into()))? {
    ///     note.send(job.rank(), &None)?.await?; // this one waits
    /// }
    /// heard.reach(1).await;
    /// # job.leave().await
    /// # }
    /// ```
    pub fn try_send(&self, target: Rank, value: &T) -> Result<bool, CallError> {
        had_room(self.message.try_send(target, encode(value)?))
    }

    /// Sends a value from inside a handler; never waits. False: there is no room now.
    ///
    /// # Errors
    /// If the value cannot be encoded, or the send cannot succeed.
    pub fn send_in(&self, scope: &mut Scope<'_>, target: Endpoint, value: &T) -> Result<bool, CallError> {
        had_room(self.message.send_in(scope, target, encode(value)?))
    }
}

/// Whether a value was sent; its bytes are of no use to who has the value.
fn had_room(sent: Result<(), TrySendError<Buffer>>) -> Result<bool, CallError> {
    match sent.map_err(TrySendError::into_error) {
        Ok(()) => Ok(true),
        Err(None) => Ok(false),
        Err(Some(error)) => Err(error.into()),
    }
}

/// Registers a message of one plain-old-data type, whose handler runs inside `advance`, for each message, in order. Ranks of
/// another [`plain_schema`] refuse it. What is not as long as a value is dropped, with a warning in the log.
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
/// use posthaste_protocols::typed;
/// let sum = job.counter();
/// let total = sum.clone();
/// // A library that is given a messager registers so; `Job::register_typed` does the same.
/// let messager = job.messager();
/// let face = messager.contexts()[0].clone();
/// let add = typed::register_plain(&**messager, face, "add", move |number: u64, _, _| total.add(number))?;
/// add.send(job.rank(), &42).await?;
/// sum.reach(42).await;
/// # job.leave().await
/// # }
/// ```
pub fn register_plain<T, H>(
    messager: &dyn Messager,
    face: Handle,
    name: &str,
    handler: H,
) -> Result<TypedMessage<T>, RegisterError>
where
    T: FromBytes + IntoBytes + Immutable + 'static,
    H: Fn(T, Rank, &mut Scope<'_>) + Send + Sync + 'static,
{
    let known_as = name.to_owned();
    let typed = move |message: Message<'_>, scope: &mut Scope<'_>| match message.read::<T>(0) {
        Some(value) if message.len() == size_of::<T>() => handler(value, message.source(), scope),
        _ => {
            let (source, bytes) = (message.source(), message.len());
            tracing::warn!(name = known_as, %source, bytes, "message of the wrong length for its type");
        }
    };
    handler::register(messager, face, name, plain_schema::<T>(), typed).map(TypedMessage::new)
}

/// Registers a message of one type that serde encodes, whose handler runs inside `advance`, for each message, in order. Ranks
/// of another [`encoded_schema`] refuse it. What cannot be decoded is dropped, with a warning in the log.
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
/// use posthaste_protocols::typed;
/// let letters = job.counter();
/// let count = letters.clone();
/// // A library that is given a messager registers so; `Job::register_encoded` does the same.
/// let messager = job.messager();
/// let face = messager.contexts()[0].clone();
/// let each = move |words: Vec<String>, _: posthaste::Rank, _: &mut posthaste::Scope<'_>| {
///     count.add(words.iter().map(|word| word.len() as u64).sum());
/// };
/// let note = typed::register_encoded(&**messager, face, "note", each)?;
/// note.send(job.rank(), &vec!["two".into(), "words".into()])?.await?;
/// letters.reach(8).await;
/// # job.leave().await
/// # }
/// ```
pub fn register_encoded<T, H>(
    messager: &dyn Messager,
    face: Handle,
    name: &str,
    handler: H,
) -> Result<EncodedMessage<T>, RegisterError>
where
    T: Serialize + DeserializeOwned + 'static,
    H: Fn(T, Rank, &mut Scope<'_>) + Send + Sync + 'static,
{
    let known_as = name.to_owned();
    let encoded = move |message: Message<'_>, scope: &mut Scope<'_>| match decode::<T>(&message.bytes()) {
        Ok(value) => handler(value, message.source(), scope),
        Err(error) => {
            let source = message.source();
            tracing::warn!(name = known_as, %source, %error, "a message could not be decoded");
        }
    };
    handler::register(messager, face, name, encoded_schema::<T>(), encoded).map(EncodedMessage::new)
}
