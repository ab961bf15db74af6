//! The conformance suite over the in-process device and over the simulated world.

use posthaste_core::engine::EngineConfig;
use posthaste_core::inprocess::Limits;
use posthaste_testkit::conformance::{InProcessHarness, SimHarness};
use posthaste_testkit::conformance_suite;
use posthaste_testkit::sim::SimOptions;

fn one_credit() -> EngineConfig {
    EngineConfig { credits: 1, ..EngineConfig::default() }
}

fn over_send() -> EngineConfig {
    EngineConfig { oversend: true, ..EngineConfig::default() }
}

/// A window in which a get of a page does not fit.
fn tiny_over_send() -> EngineConfig {
    EngineConfig { credits: 1, get_window: 200, ..over_send() }
}

conformance_suite!(mod in_process, seeds 0..1, |_| InProcessHarness::new(Limits::default()));
conformance_suite!(mod in_process_tiny, seeds 0..1, |_| {
    let limits = Limits { packets_per_pair: 1, max_inline: 80, max_eager: 96, fragment: 17, ..Limits::default() };
    InProcessHarness::new(limits).with_config(one_credit())
});
conformance_suite!(mod simulated, seeds 0..6, |seed| SimHarness::new(seed, SimOptions::default()));
conformance_suite!(mod simulated_in_order, seeds 0..3, |seed| {
    SimHarness::new(seed, SimOptions { reorder: false, refuse: 0, stall: 0, ..SimOptions::default() })
});
conformance_suite!(mod simulated_tiny, seeds 100..106, |seed| SimHarness::new(seed, SimOptions::tiny()));
conformance_suite!(mod simulated_one_credit, seeds 200..204, |seed| {
    SimHarness::new(seed, SimOptions { lane_slots: 2, ..SimOptions::tiny() }).with_config(one_credit())
});
conformance_suite!(mod simulated_sends_only, seeds 300..303, |seed| {
    SimHarness::new(seed, SimOptions { native: false, ..SimOptions::default() })
});
conformance_suite!(mod simulated_sends_only_tiny, seeds 400..404, |seed| {
    SimHarness::new(seed, SimOptions { native: false, ..SimOptions::tiny() }).with_config(tiny_over_send())
});
conformance_suite!(mod simulated_over_send, seeds 500..502, |seed| {
    SimHarness::new(seed, SimOptions::default()).with_config(over_send())
});
conformance_suite!(mod in_process_over_send, seeds 0..1, |_| {
    InProcessHarness::new(Limits::default()).with_config(over_send())
});
conformance_suite!(mod in_process_over_send_tiny, seeds 0..1, |_| {
    let limits = Limits { packets_per_pair: 1, max_inline: 80, max_eager: 96, fragment: 17, ..Limits::default() };
    InProcessHarness::new(limits).with_config(tiny_over_send())
});
