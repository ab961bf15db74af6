//! Control messages (D14): sixteen bytes, out of band of sends, ordered only against other controls.
//!
//! Ranks agree on one by its name, whose hash travels with every control: it needs no declaration, which would have to
//! precede it in the order of sends.

use crate::engine::Scope;
use crate::error::RegisterError;
use crate::ids::{ControlId, Endpoint};
use crate::protocol::MAX_NAME;
use crate::sync::{Mutex, lock};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Length of a control's payload in bytes.
pub const CONTROL_BYTES: usize = 16;
/// Most controls that a client can register.
pub const MAX_CONTROLS: usize = 4096;

/// What a control means on this rank: runs inside `advance`, must be short and must not block. A panic is caught, and
/// told to the sender's error handler.
pub type ControlHandler = Arc<dyn Fn(&mut Scope<'_>, Endpoint, [u8; CONTROL_BYTES]) + Send + Sync>;

impl ControlId {
    /// The name by which ranks know a control, as a number: FNV-1a of 64 bits.
    ///
    /// # Examples
    /// ```
    /// use posthaste_core::ControlId;
    ///
    /// // All ranks know a control by its name, without having told each other.
    /// assert_eq!(ControlId::of("stop"), ControlId::of("stop"));
    /// assert_ne!(ControlId::of("stop"), ControlId::of("go"));
    /// ```
    #[must_use]
    pub fn of(name: &str) -> ControlId {
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        ControlId(hash)
    }
}

struct Entry {
    name: String,
    handler: ControlHandler,
}

/// The controls of one client, shared by its contexts.
#[derive(Default)]
pub struct Controls {
    entries: Mutex<Vec<(ControlId, Entry)>>,
    version: AtomicU64,
}

impl std::fmt::Debug for Controls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Controls").field("version", &self.version).finish_non_exhaustive()
    }
}

impl Controls {
    /// Registers a control.
    ///
    /// # Errors
    /// If the name is taken, empty or too long, or the table is full.
    pub fn register(&self, name: &str, handler: ControlHandler) -> Result<ControlId, RegisterError> {
        if name.is_empty() || name.len() > MAX_NAME {
            return Err(RegisterError::BadName(name.to_owned()));
        }
        let id = ControlId::of(name);
        let mut entries = lock(&self.entries);
        match entries.binary_search_by_key(&id, |(id, _)| *id) {
            Ok(at) => return Err(RegisterError::Taken(entries[at].1.name.clone())),
            Err(_) if entries.len() >= MAX_CONTROLS => return Err(RegisterError::TooMany(MAX_CONTROLS)),
            Err(at) => entries.insert(at, (id, Entry { name: name.to_owned(), handler })),
        }
        // Release pairs with the acquire of `version`: whoever sees the new version finds the entry.
        self.version.store(entries.len() as u64, Ordering::Release);
        Ok(id)
    }

    /// Takes all out when the client is closed: their handlers may lead back to it.
    #[must_use]
    pub(crate) fn retire(&self) -> impl Sized {
        std::mem::take(&mut *lock(&self.entries))
    }

    /// Grows with every registration.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// The handler of a control.
    #[must_use]
    pub fn find(&self, id: ControlId) -> Option<ControlHandler> {
        let entries = lock(&self.entries);
        let at = entries.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        Some(entries[at].1.handler.clone())
    }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;

    #[test]
    fn controls_are_found_by_what_their_names_become() {
        let controls = Controls::default();
        let handler: ControlHandler = Arc::new(|_, _, _| {});
        let names: Vec<String> = (0..100).map(|n| format!("control {n}")).collect();
        let ids: Vec<_> =
            names.iter().map(|name| controls.register(name, handler.clone()).expect("free")).collect();
        assert!(ids.iter().all(|id| controls.find(*id).is_some()));
        assert!(controls.find(ControlId(7)).is_none());
        assert_eq!(controls.version(), 100);
        assert_eq!(
            controls.register("control 7", handler.clone()),
            Err(RegisterError::Taken("control 7".into()))
        );
        assert_eq!(controls.register("", handler), Err(RegisterError::BadName(String::new())));
    }
}
