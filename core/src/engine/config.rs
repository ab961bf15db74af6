//! What the job fixes for its contexts.

/// The most credits that any rank may give its senders; see [`EngineConfig::credits`].
pub const MOST_CREDITS: u32 = 1 << 16;

/// Settings of a context that the job fixes.
///
/// # Examples
/// ```
/// use posthaste_core::engine::EngineConfig;
///
/// // A context that keeps little for its peers.
/// let small = EngineConfig { credits: 16, credit_bytes: 1 << 20, ..EngineConfig::default() };
/// assert!(small.credits < EngineConfig::default().credits);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct EngineConfig {
    /// Messages that a sender may have outstanding per peer and credited protocol. A receiver cuts off who has more than
    /// [`MOST_CREDITS`] here, so that ranks may differ in this up to that.
    pub credits: u32,
    /// Payload bytes likewise. The same on all ranks: a receiver cuts off who goes far beyond it.
    pub credit_bytes: u64,
    /// Slots of a target's injection FIFO that awaited sends may fill. A replay has those who wait go before it whatever this says.
    pub fifo_slots: usize,
    /// Longest message in bytes; at least 8.
    pub max_message: u64,
    /// Puts, gets and replays go over sends though the device could carry them out itself.
    pub oversend: bool,
    /// Bytes that a peer may have been asked for by gets over sends and that are not here yet; it keeps as many for
    /// them. The same on all ranks; at least 128.
    pub get_window: u64,
    /// From this length in bytes on, a message asks its receiver for a place and goes straight there, whatever the device
    /// says ([`Caps::rendezvous`](crate::Caps::rendezvous)); `u64::MAX` for never. At least 64.
    pub rendezvous_bytes: Option<u64>,
    /// Bytes of this rank's memory that messages may land in at a time, until they are read; longer ones, and those for
    /// which there is no place, go as streams.
    pub landing_bytes: u64,
    /// Bytes of answers that may wait for one peer: as long as more wait, further requests of that peer are not carried out
    /// but answered [`Fault::Busy`](crate::Fault::Busy).
    pub answer_bytes: u64,
    /// Recorded descriptors that a context has room for, 64 bytes each: one per operation, and up to three for message
    /// info.
    pub pattern_slots: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            credits: 1024,
            credit_bytes: 16 << 20,
            fifo_slots: 256,
            max_message: 1 << 32,
            oversend: false,
            get_window: 4 << 20,
            rendezvous_bytes: None,
            landing_bytes: 256 << 20,
            answer_bytes: 256 << 20,
            pattern_slots: 256 << 10,
        }
    }
}
