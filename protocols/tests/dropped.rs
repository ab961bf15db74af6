//! What is given up half-way leaves nothing in the tables of its context.

#[allow(dead_code, reason = "these tests need a part of it")]
mod support;

use futures::poll;
use posthaste_core::context::Face;
use posthaste_core::{Context, Messager};
use posthaste_protocols::window::{Region, RemoteRegion};
use std::pin::pin;
use support::{Setup, run};

#[test]
fn memory_that_nobody_waits_for_any_more_has_no_entry() {
    run(1, Setup::new(), async |member| {
        let client = &*member.client;
        let region = Region::allocate(client, 64).await.unwrap();
        // Whoever owns the context does what others post when it comes there next.
        let context = Context::new(&client.contexts()[0]).unwrap();
        let entries = || {
            let count = |engine: &mut posthaste_core::engine::Engine| {
                let mut scope = engine.scope();
                let table = scope.table();
                (table.remote.len(), table.local.len())
            };
            context.enter(count).ok().unwrap()
        };
        let before = entries();
        {
            let mut opened = pin!(RemoteRegion::open(client, &member.layouts, region.key()));
            let mut allocated = pin!(Region::allocate(client, 64));
            assert!(poll!(&mut opened).is_pending() && poll!(&mut allocated).is_pending());
        }
        context.advance();
        context.advance();
        assert_eq!(entries(), before);
        // And with what was there all along, nothing is left of it either.
        let opened = posthaste_core::context::drive(
            &context,
            RemoteRegion::open(client, &member.layouts, region.key()),
        )
        .await;
        assert_eq!(entries(), (before.0 + 1, before.1));
        drop(opened);
        drop(region);
        context.advance();
        assert_eq!(entries(), (before.0, before.1 - 1));
    });
}
