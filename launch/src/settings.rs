//! What a user may tune through the environment.

use std::time::Duration;

use crate::error::EnvError;
use crate::vars::{CORES, CREDITS, DRIVER, LANE_BYTES, MEMORY_LIMIT, SEGMENT, SPIN_US, Vars};

/// Who waits for the doorbell while no future is being polled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Driver {
    /// A task of the runtime (`task`).
    #[default]
    Task,
    /// A thread of its own (`thread`).
    Thread,
}

/// What a user may tune; every variable is optional.
///
/// | variable | values | default |
/// |---|---|---|
/// | `POSTHASTE_LANE_BYTES` | a power of two, 1024 to 1048576 | 16384 |
/// | `POSTHASTE_CREDITS` | 1 to 65536 | 1024 |
/// | `POSTHASTE_SPIN_US` | 0 to 10000 microseconds | the library decides |
/// | `POSTHASTE_MEMORY_LIMIT` | bytes, at least 1, with K, M or G for powers of 1024 | none |
/// | `POSTHASTE_SEGMENT` | virtual bytes per rank, as above | the library decides |
/// | `POSTHASTE_DRIVER` | `task` or `thread` | `task` |
/// | `POSTHASTE_CORES` | 1 to 65536 cores that the ranks of the host share; set by a launcher that binds | what the process may use |
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Settings {
    /// Bytes of one lane (`POSTHASTE_LANE_BYTES`).
    pub lane_bytes: usize,
    /// Requests that may be under way per source and class (`POSTHASTE_CREDITS`).
    pub credits: u32,
    /// How long a poll may spin (`POSTHASTE_SPIN_US`); none: the library decides.
    pub spin: Option<Duration>,
    /// Bytes that the job may commit on this host (`POSTHASTE_MEMORY_LIMIT`).
    pub memory_limit: Option<u64>,
    /// Virtual bytes of a rank's part of the arena (`POSTHASTE_SEGMENT`).
    pub segment: Option<u64>,
    /// Who waits for the doorbell (`POSTHASTE_DRIVER`).
    pub driver: Driver,
    /// Cores that the ranks of this host share (`POSTHASTE_CORES`); none: those that the process may use.
    pub cores: Option<usize>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            lane_bytes: 16384,
            credits: 1024,
            spin: None,
            memory_limit: None,
            segment: None,
            driver: Driver::Task,
            cores: None,
        }
    }
}

impl Settings {
    /// Reads the settings of this process; they need no job.
    ///
    /// # Errors
    /// A setting has a value it cannot have, or a variable that starts with `POSTHASTE_` is unknown.
    pub fn from_process() -> Result<Self, EnvError> {
        Self::take(&mut Vars::of_process()?)
    }

    /// Reads the settings out of any environment.
    ///
    /// # Errors
    /// As [`from_process`](Self::from_process).
    pub fn parse(env: impl IntoIterator<Item = (String, String)>) -> Result<Self, EnvError> {
        Self::take(&mut Vars::collect(env)?)
    }

    pub(crate) fn take(vars: &mut Vars) -> Result<Self, EnvError> {
        let default = Self::default();
        let size = "a number of bytes, at least 1, optionally with the suffix K, M or G";
        Ok(Self {
            lane_bytes: read(vars, LANE_BYTES, "a power of two from 1024 to 1048576", |text| {
                number(text, 1024, 1 << 20)
                    .filter(|bytes| bytes.is_power_of_two())
                    .map(|bytes| bytes as usize)
            })?
            .unwrap_or(default.lane_bytes),
            credits: read(vars, CREDITS, "a number from 1 to 65536", |text| {
                number(text, 1, 65536).map(|credits| credits as u32)
            })?
            .unwrap_or(default.credits),
            spin: read(vars, SPIN_US, "a number of microseconds from 0 to 10000", |text| {
                number(text, 0, 10_000).map(Duration::from_micros)
            })?,
            memory_limit: read(vars, MEMORY_LIMIT, size, bytes)?,
            segment: read(vars, SEGMENT, size, bytes)?,
            driver: read(vars, DRIVER, "`task` or `thread`", |text| match text {
                "task" => Some(Driver::Task),
                "thread" => Some(Driver::Thread),
                _ => None,
            })?
            .unwrap_or_default(),
            cores: read(vars, CORES, "a number from 1 to 65536", |text| {
                number(text, 1, 65536).map(|cores| cores as usize)
            })?,
        })
    }
}

/// Takes and reads one variable; none if it is not set.
pub(crate) fn read<T>(
    vars: &mut Vars,
    name: &'static str,
    expected: &'static str,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<Option<T>, EnvError> {
    let Some(text) = vars.take(name) else { return Ok(None) };
    match parse(&text) {
        Some(value) => Ok(Some(value)),
        None => Err(EnvError::Invalid { name, seen: excerpt(&text), expected }),
    }
}

/// Decimal digits only: no sign, no blanks.
pub(crate) fn number(text: &str, least: u64, most: u64) -> Option<u64> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    text.parse().ok().filter(|value| (least..=most).contains(value))
}

fn bytes(text: &str) -> Option<u64> {
    let (digits, shift) = match text.as_bytes().last()? {
        b'K' | b'k' => (&text[..text.len() - 1], 10),
        b'M' | b'm' => (&text[..text.len() - 1], 20),
        b'G' | b'g' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    number(digits, 1, u64::MAX)?.checked_mul(1 << shift)
}

/// A value as an error shows it: at most 80 characters, control characters escaped.
fn excerpt(text: &str) -> String {
    let mut shown: String = text.chars().take(80).flat_map(char::escape_debug).collect();
    if text.chars().nth(80).is_some() {
        shown.push('…');
    }
    shown
}
