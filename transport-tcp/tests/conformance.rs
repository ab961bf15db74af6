//! The conformance suite over TCP: several ranks in one process, over the loopback interface.

mod support;

use posthaste_core::engine::EngineConfig;
use posthaste_tcp::{Limits, Mode};
use posthaste_testkit::conformance_suite;
use support::TcpHarness;

/// Messages long enough to be told from short ones, and short enough that a test can fill every buffer.
fn usual() -> Limits {
    let socket_buffers = Some(64 << 10);
    Limits { max_eager: 16 << 10, fragment: 8 << 10, outgoing: 64 << 10, socket_buffers, ..Limits::default() }
}

/// One frame in the out-buffer, and nothing that fits into anything at once.
fn tiny() -> Limits {
    Limits {
        max_inline: 80,
        max_eager: 300,
        fragment: 64,
        outgoing: 1,
        read_buffer: 1,
        get_chunk: 64,
        get_window: 1,
        socket_buffers: Some(4096),
        ..Limits::default()
    }
}

fn one_credit() -> EngineConfig {
    EngineConfig { credits: 1, ..EngineConfig::default() }
}

conformance_suite!(mod insecure, seeds 0..1, |_| TcpHarness::new(
    Mode::Insecure,
    usual(),
    EngineConfig::default()
));
conformance_suite!(mod handshake_only, seeds 0..1, |_| TcpHarness::new(
    Mode::HandshakeOnly,
    usual(),
    EngineConfig::default()
));
conformance_suite!(mod encrypted, seeds 0..1, |_| TcpHarness::new(
    Mode::Encrypted,
    usual(),
    EngineConfig::default()
));
conformance_suite!(mod tiny_insecure, seeds 0..1, |_| TcpHarness::new(Mode::Insecure, tiny(), one_credit()));
conformance_suite!(mod tiny_encrypted, seeds 0..1, |_| TcpHarness::new(Mode::Encrypted, tiny(), one_credit()));
conformance_suite!(mod mixed, seeds 0..1, |_| TcpHarness::new(
    Mode::HandshakeOnly,
    usual(),
    EngineConfig::default()
)
.mixed());
conformance_suite!(mod tiny_mixed, seeds 0..1, |_| TcpHarness::new(Mode::Insecure, tiny(), one_credit())
    .mixed());
// The same over sends: no frame of a put or a get is ever sent.
conformance_suite!(mod over_send, seeds 0..1, |_| TcpHarness::new(
    Mode::HandshakeOnly,
    usual(),
    EngineConfig { oversend: true, ..EngineConfig::default() }
));
conformance_suite!(mod tiny_over_send, seeds 0..1, |_| TcpHarness::new(
    Mode::Insecure,
    tiny(),
    EngineConfig { oversend: true, get_window: 1000, ..one_credit() }
));
conformance_suite!(mod mixed_over_send, seeds 0..1, |_| TcpHarness::new(
    Mode::HandshakeOnly,
    usual(),
    EngineConfig { oversend: true, ..EngineConfig::default() }
)
.mixed());
// Long messages go straight to their places.
conformance_suite!(mod rendezvous, seeds 0..1, |_| TcpHarness::new(
    Mode::HandshakeOnly,
    usual(),
    EngineConfig { rendezvous_bytes: Some(5000), ..EngineConfig::default() }
));
conformance_suite!(mod tiny_rendezvous, seeds 0..1, |_| TcpHarness::new(
    Mode::Insecure,
    tiny(),
    EngineConfig { rendezvous_bytes: Some(100), ..one_credit() }
));
conformance_suite!(mod mixed_rendezvous_over_send, seeds 0..1, |_| TcpHarness::new(
    Mode::HandshakeOnly,
    usual(),
    EngineConfig { rendezvous_bytes: Some(500), oversend: true, ..EngineConfig::default() }
)
.mixed());
conformance_suite!(mod encrypted_rendezvous, seeds 0..1, |_| TcpHarness::new(
    Mode::Encrypted,
    usual(),
    EngineConfig { rendezvous_bytes: Some(5000), ..EngineConfig::default() }
));
conformance_suite!(mod tiny_encrypted_rendezvous, seeds 0..1, |_| TcpHarness::new(
    Mode::Encrypted,
    tiny(),
    EngineConfig { rendezvous_bytes: Some(100), ..one_credit() }
));
