//! The end of a peer, as protocols hear of it that keep their books with one of a client's contexts.

use posthaste_core::{Fault, Handle, Rank, Scope};

/// A context has told of the end of a peer, by this cause. What is to be done about it is done in the context that has the
/// books, once that knows as well: it may still have what the peer sent before. It counts what that context knows: another
/// one may tell late of an incarnation in whose place there is one by now that was cut off, and lives.
pub(crate) fn on_end(
    books: Handle,
    rank: Rank,
    cause: Fault,
    take_in: impl FnOnce(&mut Scope<'_>, Fault) + Send + 'static,
) {
    books.post_run(move |scope| match scope.fault_of(rank) {
        None => {}
        // It knows of no peers any more.
        Some(Fault::Shutdown) => take_in(scope, cause),
        Some(known) => take_in(scope, known),
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::first_of;
    use posthaste_core::Messager;
    use posthaste_core::context::Face;
    use posthaste_core::sync::lock;
    use std::sync::{Arc, Mutex};

    #[test]
    fn what_the_context_with_the_books_knows_counts() {
        let client = first_of(2, 1);
        let handle = client.contexts()[0].clone();
        let taken: Arc<Mutex<Vec<Fault>>> = Arc::default();
        let tell = |cause| {
            let into = taken.clone();
            on_end(handle.clone(), Rank(1), cause, move |_, cause| lock(&into).push(cause));
            std::mem::take(&mut *lock(&taken))
        };
        let (lost, corrupt) = (Fault::PeerLost(Rank(1)), Fault::PeerCorrupt(Rank(1)));
        assert_eq!(tell(lost), [], "it still has what the peer sent before");
        handle
            .enter(|engine| engine.scope().cut_off(Rank(1)))
            .unwrap_or_else(|_| panic!("nobody else is here"));
        assert_eq!(tell(lost), [corrupt], "that was another incarnation, or comes in its turn");
        assert_eq!(tell(corrupt), [corrupt]);
    }
}
