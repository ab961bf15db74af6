//! What a device can do, as data.

/// What a device publishes about itself. The messager and the protocols choose by these figures; no protocol
/// asks a device what *kind* of device it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Caps {
    /// Name for tables and errors.
    pub name: &'static str,
    /// Longest payload in bytes that travels inside one packet without a page.
    pub max_inline: usize,
    /// Longest payload in bytes that one send descriptor may carry; longer messages are streamed in fragments.
    pub max_eager: usize,
    /// Fragment length in bytes that suits the device best when a message is streamed.
    pub fragment: usize,
    /// Puts and gets are carried out without help from the target's software.
    pub native_put: bool,
    /// As `native_put`, for gets.
    pub native_get: bool,
    /// Atomic operations on words of memory are carried out without help from the target's software. Of a device that does
    /// not, and that has puts and gets of its own, packets take effect in one order with these.
    pub native_atomics: bool,
    /// Regions can be mapped, so that a put or a get of them may be a plain copy done by the caller.
    pub mappable: bool,
    /// The device can lend page memory to be filled by the caller.
    pub loans: bool,
    /// Packets of one (source, target) pair arrive in the order in which they were injected.
    pub ordered: bool,
    /// Smallest unit in bytes that concurrent puts and gets keep whole (W02).
    pub atomicity: usize,
    /// From this length in bytes on, a message is faster if it asks for a place and goes straight there; `usize::MAX` if it
    /// never is.
    pub rendezvous: usize,
    /// The value of a get may be given memory: held bytes, empty, whose capacity it takes once nobody else holds them.
    pub held_gets: bool,
    /// From this length in bytes on, a payload that may be kept ([`Sources::owned`](crate::device::Sources)) is not copied, but kept
    /// until it is written; `usize::MAX` if none ever is.
    pub keeps: usize,
    /// The device itself tells peers of an orderly leave, behind everything that was sent to them.
    pub tells_leave: bool,
    /// Cost rank: of the devices that reach a peer, the one with the lowest figure is taken.
    pub cost: u32,
}

impl Caps {
    /// The least a device may offer: ordered sends of `max_inline` bytes and nothing else.
    ///
    /// # Examples
    /// ```
    /// use posthaste_core::Caps;
    ///
    /// // A device says what it has beyond the least; the engine does the rest over sends.
    /// let mut caps = Caps::send_only("ribbon", 128);
    /// (caps.native_put, caps.cost) = (true, 10);
    /// assert!(caps.native_put && !caps.native_get);
    /// assert_eq!((caps.max_inline, caps.max_eager), (128, 128));
    /// ```
    #[must_use]
    pub const fn send_only(name: &'static str, max_inline: usize) -> Self {
        Self {
            name,
            max_inline,
            max_eager: max_inline,
            fragment: max_inline,
            native_put: false,
            native_get: false,
            native_atomics: false,
            mappable: false,
            loans: false,
            ordered: true,
            atomicity: 8,
            rendezvous: usize::MAX,
            held_gets: false,
            keeps: usize::MAX,
            tells_leave: false,
            cost: 1000,
        }
    }
}
