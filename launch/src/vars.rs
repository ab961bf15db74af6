//! The known environment variables, and the collection of those that are set.

use std::collections::BTreeMap;

use crate::error::EnvError;
use crate::shown::SETTINGS;

/// Every variable of the product starts with this.
pub(crate) const PREFIX: &str = "POSTHASTE_";
/// Hooks of tests start with this and are never refused.
pub(crate) const TEST_PREFIX: &str = "POSTHASTE_TEST_";

pub(crate) const JOB: &str = "POSTHASTE_JOB";
pub(crate) const RANK: &str = "POSTHASTE_RANK";
pub(crate) const SIZE: &str = "POSTHASTE_SIZE";
pub(crate) const CONTEXTS: &str = "POSTHASTE_CONTEXTS";
pub(crate) const CLIENTS: &str = "POSTHASTE_CLIENTS";
pub(crate) const KEY: &str = "POSTHASTE_KEY";
pub(crate) const FDS: &str = "POSTHASTE_FDS";
pub(crate) const BROKER: &str = "POSTHASTE_BROKER";
pub(crate) const NODES: &str = "POSTHASTE_NODES";
pub(crate) const RENDEZVOUS: &str = "POSTHASTE_RENDEZVOUS";
pub(crate) const RESTART: &str = "POSTHASTE_RESTART";
pub(crate) const LIFELINE: &str = "POSTHASTE_LIFELINE";

pub(crate) const LANE_BYTES: &str = "POSTHASTE_LANE_BYTES";
pub(crate) const CREDITS: &str = "POSTHASTE_CREDITS";
pub(crate) const CREDIT_BYTES: &str = "POSTHASTE_CREDIT_BYTES";
pub(crate) const ANSWER_BYTES: &str = "POSTHASTE_ANSWER_BYTES";
pub(crate) const SPIN_US: &str = "POSTHASTE_SPIN_US";
pub(crate) const MEMORY_LIMIT: &str = "POSTHASTE_MEMORY_LIMIT";
pub(crate) const SEGMENT: &str = "POSTHASTE_SEGMENT";
pub(crate) const DRIVER: &str = "POSTHASTE_DRIVER";
pub(crate) const CORES: &str = "POSTHASTE_CORES";
pub(crate) const DEVICE: &str = "POSTHASTE_DEVICE";
pub(crate) const TCP_MODE: &str = "POSTHASTE_TCP_MODE";
pub(crate) const TCP_INTERFACE: &str = "POSTHASTE_TCP_INTERFACE";
pub(crate) const TCP_PORTS: &str = "POSTHASTE_TCP_PORTS";
pub(crate) const TCP_TIMEOUT: &str = "POSTHASTE_TCP_TIMEOUT";
pub(crate) const JOIN_TIMEOUT: &str = "POSTHASTE_JOIN_TIMEOUT";
pub(crate) const OVERSEND: &str = "POSTHASTE_OVERSEND";
pub(crate) const RENDEZVOUS_BYTES: &str = "POSTHASTE_RENDEZVOUS_BYTES";
pub(crate) const STAGE_BYTES: &str = "POSTHASTE_STAGE_BYTES";
pub(crate) const PATTERN_SLOTS: &str = "POSTHASTE_PATTERN_SLOTS";
pub(crate) const KEY_FILE: &str = "POSTHASTE_KEY_FILE";

/// What the launcher sets for each rank.
pub(crate) const JOB_VARIABLES: [&str; 12] =
    [JOB, RANK, SIZE, CONTEXTS, CLIENTS, KEY, FDS, BROKER, NODES, RENDEZVOUS, RESTART, LIFELINE];
/// Those that a user sets, too, where another launcher starts the ranks.
const LOOSE_VARIABLES: [&str; 4] = [CONTEXTS, CLIENTS, KEY, RENDEZVOUS];
/// The product's variables that are set, all of them known.
pub(crate) struct Vars(BTreeMap<&'static str, String>);

impl Vars {
    /// Picks the product's variables out of an environment.
    pub(crate) fn collect(env: impl IntoIterator<Item = (String, String)>) -> Result<Self, EnvError> {
        let mut found = BTreeMap::new();
        for (name, value) in env {
            if !name.starts_with(PREFIX) || name.starts_with(TEST_PREFIX) {
                continue;
            }
            let Some(known) = known(&name) else {
                return Err(EnvError::Unknown { nearest: nearest(&name), name });
            };
            if found.insert(known, value).is_some() {
                return Err(EnvError::Repeated { name });
            }
        }
        Ok(Self(found))
    }

    /// The product's variables of this process.
    ///
    /// A name or value that is no text becomes text with replacement characters, which no variable accepts.
    pub(crate) fn of_process() -> Result<Self, EnvError> {
        Self::collect(process_variables())
    }

    pub(crate) fn take(&mut self, name: &'static str) -> Option<String> {
        self.0.remove(name)
    }

    /// The first variable that is set and that shows a launcher of ours.
    pub(crate) fn any_of_job(&self) -> Option<&'static str> {
        let shows = |name: &&'static str| !LOOSE_VARIABLES.contains(name) && self.0.contains_key(name);
        JOB_VARIABLES.into_iter().find(shows)
    }
}

impl Drop for Vars {
    fn drop(&mut self) {
        if let Some(key) = self.0.get_mut(KEY) {
            zeroize::Zeroize::zeroize(key);
        }
    }
}

/// This process's variables that start with the prefix.
pub(crate) fn process_variables() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os().filter_map(|(name, value)| {
        let name = name.to_string_lossy();
        name.starts_with(PREFIX).then(|| (name.into_owned(), value.to_string_lossy().into_owned()))
    })
}

fn all_known() -> impl Iterator<Item = &'static str> {
    JOB_VARIABLES.into_iter().chain(SETTINGS.into_iter().map(|(name, _)| name))
}

fn known(name: &str) -> Option<&'static str> {
    all_known().find(|known| *known == name)
}

/// The known name most like this one; a right beginning counts most, so that `SPIN` finds `SPIN_US` and not `SIZE`.
fn nearest(name: &str) -> &'static str {
    // A hostile name must not cost quadratic time.
    let own: String = name.chars().skip(PREFIX.len()).take(64).collect();
    let likeness = |known: &str| strsim::jaro_winkler(&known[PREFIX.len()..], &own);
    all_known().max_by(|a, b| likeness(a).total_cmp(&likeness(b))).unwrap_or(JOB)
}
