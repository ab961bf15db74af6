//! What the machine itself can do, measured by bare loops without the library.
//!
//! Every limit is a loop with two real processes (see [`process`]) where two are involved, as fast as it can
//! be written. Which way is the fastest differs between machines and sizes, so most limits try several
//! ways first and then measure the best ones in turn (see [`contest`]). [`Measurement::detail`] names the way.
//!
//! [`run`] forks and pins the calling thread while it runs. It is meant for a process of its own; the forked
//! children neither allocate nor take locks, so that other threads (those of a test runner) do no harm.

mod atomics;
mod blocks;
mod contest;
mod copy;
mod descriptors;
mod lanes;
mod memcpy;
mod pingpong;
mod pipeline;
mod process;
mod sockets;
mod ticker;
mod wake;

pub use blocks::irregular;
use std::fmt;

/// The names [`run`] knows.
pub const NAMES: &[&str] = &[
    "pingpong_two_lines",
    "two_copy_pipeline",
    "memcpy_to_shared",
    "memcpy_from_shared",
    "descriptor_loop",
    "eventfd_asyncfd_wake",
    "ticker_alone",
    "lanes",
    "strided_copy",
    "layout_strided",
    "layout_irregular",
    "layout_transpose",
    "vector_add",
    "contended_add",
    "bare_updates",
    "tcp_pingpong",
    "tcp_stream",
    "tcp_aead_stream",
];

/// What a limit is measured with. Each uses those that mean something to it.
#[derive(Clone, Debug)]
pub struct LimitArgs {
    /// Bytes of a message or of one copy.
    pub size: usize,
    /// Descriptors in a pattern, blocks of a layout, or lanes.
    pub count: usize,
    /// Roughly how long to measure.
    pub seconds: f64,
    /// Where this process and the one it forks run: two different cores.
    pub cores: [usize; 2],
}

/// A figure and what it is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Measurement {
    /// The limit, in [`Self::unit`].
    pub value: f64,
    /// `us`, `M/s` or `GB/s` (10^9 bytes).
    pub unit: &'static str,
    /// The way that was the fastest, and what else is worth knowing.
    pub detail: String,
}

/// Why there is no figure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LimitError {
    /// [`run`] knows no such limit.
    Unknown(String),
    /// The arguments do not fit the limit.
    Argument(&'static str),
    /// A system call failed.
    System(&'static str, rustix::io::Errno),
    /// The two processes did not get on within the time.
    TimedOut,
    /// The second process ended before its time.
    PeerDied,
    /// The bytes that arrived are not those that were sent.
    WrongData,
}

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(name) => write!(f, "no limit is called `{name}`; there are {}", NAMES.join(", ")),
            Self::Argument(what) => f.write_str(what),
            Self::System(call, error) => write!(f, "{call}: {error}"),
            Self::TimedOut => f.write_str("the limit's second process did not answer in time"),
            Self::PeerDied => f.write_str("the limit's second process ended too early"),
            Self::WrongData => f.write_str("the limit's loop delivered wrong data"),
        }
    }
}

impl std::error::Error for LimitError {}

/// Measures the limit called `name`.
///
/// # Errors
///
/// An unknown name, arguments out of range, a failed system call, or a second process that fails.
pub fn run(name: &str, args: &LimitArgs) -> Result<Measurement, LimitError> {
    if !(args.seconds > 0.0 && args.seconds <= 3600.0) {
        return Err(LimitError::Argument("seconds must be above 0 and at most 3600"));
    }
    if args.cores[0] == args.cores[1] {
        return Err(LimitError::Argument("a limit needs two different cores"));
    }
    let _affinity = process::RestoreAffinity::save()?;
    match name {
        "pingpong_two_lines" => pingpong::run(args),
        "two_copy_pipeline" => pipeline::run(args),
        "memcpy_to_shared" => memcpy::run(args, memcpy::Direction::ToShared),
        "memcpy_from_shared" => memcpy::run(args, memcpy::Direction::FromShared),
        "descriptor_loop" => descriptors::run(args),
        "eventfd_asyncfd_wake" => wake::run(args),
        "ticker_alone" => ticker::run(args),
        "lanes" => lanes::run(args),
        "strided_copy" => blocks::strided(args, true),
        "layout_strided" => blocks::strided(args, false),
        "layout_irregular" => blocks::scattered(args),
        "layout_transpose" => blocks::transpose(args),
        "contended_add" => atomics::add(args),
        "bare_updates" => atomics::updates(args),
        "vector_add" => blocks::add(args),
        "tcp_pingpong" => sockets::pingpong(args),
        "tcp_stream" => sockets::stream(args),
        "tcp_aead_stream" => sockets::sealed(args),
        _ => Err(LimitError::Unknown(name.to_owned())),
    }
}

/// Words of a stream that look like random ones, and are the same each time (Steele, Lea and Flood 2014).
pub fn random_words(stream: u64) -> impl Iterator<Item = u64> {
    let mut state = stream << 40;
    std::iter::repeat_with(move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    })
}

/// The middle one of the figures, sorted in place.
fn median(figures: &mut [f64]) -> f64 {
    quantile(figures, 0.5)
}

/// The figure with the part `q` of them at or below it, sorted in place. NaN without figures.
fn quantile(figures: &mut [f64], q: f64) -> f64 {
    figures.sort_by(f64::total_cmp);
    let rank = (figures.len() as f64 * q).ceil() as usize;
    figures.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests;
