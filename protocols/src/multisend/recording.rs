//! Sends that are recorded as they are carried out (D25), and sends that are started again (D16).

use super::ManyToMany;
use crate::handler::ActiveMessage;
use crate::pattern::{Pattern, Replay, record, record_and_replay};
use crate::window::RegionSlice;
use posthaste_core::context::Face;
use posthaste_core::engine::PatternError;
use posthaste_core::{ConnectionId, Handle, Rank};

impl<F: Face> ActiveMessage<F> {
    /// Sends (part of) a region to all of these ranks, as [`multicast`](Self::multicast) does, and records that: each
    /// replay of the pattern sends what is in the region then. Ready when the messages are on their way.
    ///
    /// # Errors
    /// As for [`Recorder::multicast`](crate::Recorder::multicast) and for a replay.
    ///
    /// # Cancel safety
    /// Dropped later than at its first poll, the messages may be sent; the pattern is gone.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let news = job.register("news", |_: posthaste::Message, _: &mut posthaste::Scope| {})?;
    /// let source = job.region(8).await?;
    /// source.write(0, b"today's ")?;
    /// let again = news.multicast_recording(job.ranks(), &source).await?;
    /// source.write(0, b"newest! ")?;
    /// again.replay().await?;
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn multicast_recording(
        &self,
        targets: impl IntoIterator<Item = Rank>,
        payload: impl Into<RegionSlice>,
    ) -> Result<Pattern, PatternError> {
        let handle = Handle::of(self.face());
        record_and_replay(&handle, |recorder| recorder.multicast(self, targets, payload)).await
    }

    /// Makes a send that can be started any number of times: the same message to the same rank, with what is in
    /// (part of) a region at each start. `info`, up to 112 bytes, travels beside it each time.
    ///
    /// # Errors
    /// As for [`Recorder::send_with_info`](crate::Recorder::send_with_info).
    ///
    /// # Cancel safety
    /// Cancel safe: nothing is sent.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let count = job.counter();
    /// let counted = count.clone();
    /// let tick = job.register("tick", move |_: posthaste::Message, _: &mut posthaste::Scope| counted.add(1))?;
    /// let source = job.region(8).await?;
    /// let send = tick.restartable(job.rank(), b"", &source).await?;
    /// for number in 0..3u64 {
    ///     source.write(0, &number.to_ne_bytes())?;
    ///     send.start().await?;
    /// }
    /// count.reach(3).await;
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn restartable(
        &self,
        target: Rank,
        info: &[u8],
        payload: impl Into<RegionSlice>,
    ) -> Result<RestartableSend, PatternError> {
        let handle = Handle::of(self.face());
        let recording = record(&handle, |recorder| recorder.send_with_info(self, target, info, payload));
        Ok(RestartableSend { pattern: recording.await? })
    }
}

impl ManyToMany {
    /// Sends each rank (part of) a region of its own, as [`send`](Self::send) does, and records that.
    ///
    /// # Errors
    /// As for [`Recorder::many_to_many`](crate::Recorder::many_to_many) and for a replay.
    ///
    /// # Cancel safety
    /// Dropped later than at its first poll, the messages may be sent; the pattern is gone.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{ConnectionManager, Part};
    /// let many = job.many_to_many();
    /// let connection = ConnectionManager::new(1).open().await;
    /// let parts = [Part { source: job.rank(), offset: 0, len: 4 }];
    /// let source = job.region(4).await?;
    /// source.write(0, b"once")?;
    /// let receive = many.receive(connection.id(), 4, &parts)?;
    /// let pattern = many.send_recording(connection.id(), [(job.rank(), source.slice(0..4))]).await?;
    /// assert_eq!(receive.await?.into_whole()?, b"once");
    /// // The same again, with what is in the region now.
    /// source.write(0, b"more")?;
    /// let receive = many.receive(connection.id(), 4, &parts)?;
    /// pattern.replay().await?;
    /// assert_eq!(receive.await?.into_whole()?, b"more");
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn send_recording(
        &self,
        connection: ConnectionId,
        messages: impl IntoIterator<Item = (Rank, RegionSlice)>,
    ) -> Result<Pattern, PatternError> {
        record_and_replay(self.handle(), |recorder| recorder.many_to_many(self, connection, messages)).await
    }
}

/// A send that can be started again: the same descriptor, the payload read afresh.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// let (beat, mut beats) = job.stream("beat")?;
/// let state = job.region(8).await?;
/// let send = beat.restartable(job.rank(), b"beat", &state).await?;
/// for number in 1..=3_u64 {
///     state.write(0, &number.to_ne_bytes())?;
///     send.start().await?;
///     let message = beats.recv().await.expect("the job goes on");
///     assert_eq!(message.read::<u64>(0), Some(number));
/// }
/// # job.leave().await
/// # }
/// ```
#[derive(Debug)]
pub struct RestartableSend {
    pattern: Pattern,
}

impl RestartableSend {
    /// Sends the message, for the first time or once more. Any number may be under way.
    ///
    /// # Cancel safety
    /// See [`Replay`].
    #[inline]
    pub fn start(&self) -> Replay<'_, Handle> {
        self.pattern.replay()
    }

    /// The same through an owned context, which must be the one that made it.
    ///
    /// # Cancel safety
    /// See [`Replay`].
    #[inline]
    pub fn start_on<'s, F: Face>(&'s self, face: &'s F) -> Replay<'s, F> {
        self.pattern.replay_on(face)
    }
}
