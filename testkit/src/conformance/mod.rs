//! One suite of tests that every device has to pass, over core's public interface.
//!
//! A [`Harness`] makes a world of ranks over some device and lets time pass in it; the tests are plain functions
//! that are generic over it. [`conformance_suite!`](crate::conformance_suite) makes a `#[test]` of each:
//!
//! ```text
//! posthaste_testkit::conformance_suite!(mod one_slot, seeds 0..8, |seed| SimHarness::new(seed, SimOptions::tiny()));
//! ```
//! A failure prints its seed; `POSTHASTE_TEST_SEED=n` runs that seed alone, `POSTHASTE_TEST_SEEDS=n` runs `n` of them.

pub mod atomics;
pub mod controls;
pub mod endings;
pub mod fifos;
pub mod flow;
pub mod harnesses;
pub mod kept;
pub mod messages;
pub mod mixtures;
pub mod one_sided;
mod outbox;
pub mod patterns;
mod probe;
pub mod protocols;
pub mod rendezvous;
pub mod requests;
pub mod soak;
pub mod streams;
mod world;

pub use harnesses::{InProcessHarness, SimHarness, describe, tell};
pub use outbox::{Message, Outbox};
pub use probe::{Log, Probe, Received};
pub use world::{Memory, World};

use crate::watchdog::Watchdog;
use posthaste_core::engine::EngineConfig;
use posthaste_core::{Client, Rank};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// What a test wants its world to be.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Number of ranks.
    pub ranks: u32,
    /// Contexts per rank.
    pub contexts: u16,
    /// Settings of the engines.
    pub config: EngineConfig,
}

/// Makes one world over some device and moves it. All clients live in this process and no driver runs.
pub trait Harness {
    /// Makes the world: one client per rank, its device opened, lost peers reported to the contexts as
    /// [`Work::Peer`](posthaste_core::engine::Work::Peer). Called once.
    fn start(&mut self, setup: &Setup) -> Vec<Arc<Client>>;

    /// Lets something happen: ranks that are not paused may advance. May wait for a moment if the device needs time.
    fn step(&mut self, paused: &BTreeSet<Rank>);

    /// Crashes a rank: it does nothing any more, and the others learn of it sooner or later. It is paused from now on.
    fn kill(&mut self, rank: Rank);

    /// Everybody's state, for a test that does not finish.
    fn describe(&self) -> String;

    /// What the random choices of the tests follow from.
    fn seed(&self) -> u64 {
        0
    }

    /// Settings that tests start from.
    fn config(&self) -> EngineConfig {
        EngineConfig::default()
    }

    /// Steps after which a test that waits has failed.
    fn patience(&self) -> u64 {
        2_000_000
    }

    /// Steps in which everything that could happen has most likely happened.
    fn a_while(&self) -> u64 {
        2_000
    }
}

/// Says which seed failed.
struct SeedNote<'a>(&'a str, u64);

impl Drop for SeedNote<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{} failed; repeat it with POSTHASTE_TEST_SEED={}", self.0, self.1);
        }
    }
}

fn number_from(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

/// Runs a test with each seed, under a watchdog.
pub fn run_seeds<H: Harness>(name: &str, seeds: Range<u64>, make: impl Fn(u64) -> H, test: impl Fn(H)) {
    let _dog =
        Watchdog::start(name, Duration::from_secs(300), || "no state: it hangs inside a step".to_owned());
    let seeds = match (number_from("POSTHASTE_TEST_SEED"), number_from("POSTHASTE_TEST_SEEDS")) {
        (Some(seed), _) => seed..seed + 1,
        (None, Some(count)) if seeds.end - seeds.start > 1 => seeds.start..seeds.start + count,
        _ => seeds,
    };
    for seed in seeds {
        let _note = SeedNote(name, seed);
        test(make(seed));
    }
}

/// Makes a module with one `#[test]` per test of the suite.
///
/// `$make` is a function from a seed to a [`Harness`].
#[macro_export]
macro_rules! conformance_suite {
    (mod $name:ident, seeds $seeds:expr, $make:expr) => {
        $crate::conformance_suite! { @tests $name, $seeds, $make;
            messages::a_multicast_overtakes_nothing_that_waits,
            messages::every_size_arrives_once_and_in_order,
            messages::every_length_of_info_arrives,
            messages::protocols_keep_their_common_order,
            messages::contexts_do_not_mix,
            messages::handlers_send_from_inside,
            messages::handlers_send_to_their_own_rank,
            messages::refused_sends_give_the_payload_back,
            flow::a_slow_receiver_slows_its_sender_only,
            flow::one_credit_allows_one_outstanding_message,
            flow::bytes_are_credited_too,
            flow::waiting_senders_have_no_more_bytes_outstanding_than_there_are,
            flow::waiters_for_one_credit_all_get_their_turn,
            flow::flush_ends_when_everything_was_handled,
            flow::who_gives_up_waiting_takes_nothing_along,
            kept::nothing_passes_what_is_kept_for_want_of_room,
            kept::nothing_of_its_protocol_passes_what_is_kept_for_want_of_credit,
            kept::whoever_sleeps_for_room_is_woken_to_ask_for_credit,
            kept::what_is_taken_back_is_never_sent_and_costs_nothing,
            kept::what_is_kept_for_a_lost_peer_can_be_taken_back,
            kept::what_is_kept_behind_a_replay_stays_behind_it,
            kept::a_replay_passes_nothing_that_is_kept,
            requests::every_request_is_answered_with_its_own_answer,
            requests::one_credit_allows_one_outstanding_request,
            requests::a_panicking_handler_is_reported_and_the_rank_goes_on,
            requests::a_panicking_credited_handler_gives_its_credit_back,
            requests::a_panic_is_told_by_the_protocol_that_it_was_in,
            requests::an_answer_that_is_too_long_is_told_as_that,
            protocols::unknown_protocols_are_held_until_they_are_registered,
            protocols::unknown_protocols_are_refused_once_ready,
            protocols::held_messages_are_refused_when_ready_is_declared,
            protocols::a_mismatched_type_is_refused_as_such,
            protocols::numbers_may_differ_between_ranks,
            protocols::a_relaxed_message_does_not_overtake_what_tells_of_its_protocol,
            streams::a_first_packet_handler_may_take_less,
            streams::a_credited_first_packet_handler_may_take_less,
            streams::the_longest_message_arrives_and_a_longer_one_is_refused,
            streams::a_panicking_first_packet_handler_is_contained,
            one_sided::put_then_get,
            one_sided::put_then_put_in_program_order,
            one_sided::get_then_put_sees_the_old_bytes,
            one_sided::put_then_send_has_the_data_there,
            one_sided::regions_are_put_and_got,
            one_sided::long_accesses_in_both_directions_keep_their_order,
            one_sided::out_of_range_is_refused,
            one_sided::memory_that_does_not_exist_is_told,
            atomics::operations_do_what_they_say_in_program_order,
            atomics::nothing_is_lost_between_ranks_and_the_owner,
            atomics::they_are_done_before_what_is_sent_behind_them,
            atomics::impossible_ones_are_refused,
            atomics::a_lost_target_ends_them,
            patterns::replays_read_the_payload_afresh,
            patterns::a_pattern_reaches_several_targets,
            patterns::replays_queue_behind_what_waits,
            patterns::sections_are_freed_and_reused,
            patterns::recorded_sends_are_replayed,
            patterns::alike_sends_are_replayed_whole_and_in_order,
            patterns::alike_sends_wait_until_their_protocol_is_registered,
            patterns::alike_sends_end_where_a_handler_cuts_their_sender_off,
            mixtures::random_mixtures_do_what_they_say,
            mixtures::long_messages_cross_with_puts,
            mixtures::rows_of_recorded_words_go_where_each_says,
            mixtures::recorded_messages_wait_for_credit,
            mixtures::a_replay_gets_all_the_credit_that_there_is,
            mixtures::recorded_words_pass_those_whose_handler_panics,
            mixtures::a_replay_to_a_lost_peer_ends_and_the_others_part_is_done,
            fifos::fifos_keep_their_own_order_and_mix_with_all_others,
            fifos::what_waits_in_a_fifo_for_a_lost_peer_ends,
            fifos::what_waits_for_a_lost_peer_in_a_fifo_that_is_not_served_keeps_nobody_waiting,
            fifos::what_finds_no_room_in_a_fifo_keeps_its_order_or_is_taken_back,
            fifos::what_waits_for_credit_goes_through_its_fifo_in_its_turn,
            fifos::what_waits_for_room_in_a_fifo_and_then_for_credit_keeps_its_order,
            fifos::what_waits_in_a_fifo_for_an_unknown_name_holds_up_nobody,
            fifos::a_fifo_that_replays_have_made_longer_has_as_much_room_for_messages_as_ever,
            fifos::a_long_message_goes_on_though_its_fifo_is_disabled,
            fifos::who_waits_for_one_rank_waits_for_no_other,
            fifos::a_flush_is_not_ahead_of_what_leaves_a_fifo,
            fifos::a_fifo_whose_target_has_no_room_lets_its_context_sleep,
            controls::controls_arrive_once_and_in_order,
            controls::a_control_gets_past_what_is_queued,
            controls::controls_that_wait_for_a_place_keep_their_order,
            controls::unknown_controls_wait_and_are_refused_once_ready,
            controls::unknown_controls_of_a_lost_peer_are_dropped,
            controls::a_control_to_a_lost_peer_is_told,
            rendezvous::long_messages_go_straight_to_their_places,
            rendezvous::messages_that_are_kept_use_up_the_places,
            rendezvous::places_are_given_before_they_are_asked_for,
            rendezvous::a_place_that_was_given_to_a_lost_sender_is_free_again,
            rendezvous::two_places_that_were_given_to_a_lost_sender_are_free_again,
            rendezvous::who_leaves_amid_a_long_message_takes_what_goes_to_its_places,
            rendezvous::a_receiver_lost_at_any_moment_ends_the_send,
            rendezvous::a_sender_lost_at_any_moment_gives_the_place_back,
            endings::a_lost_peer_ends_what_depends_on_it,
            endings::what_a_lost_peer_sent_is_a_prefix,
            endings::a_stream_that_breaks_off_is_dropped,
            endings::long_accesses_to_a_lost_peer_end_once,
            endings::a_clean_leave_is_told_apart,
            endings::what_would_write_ends_with_the_departure,
            endings::who_leaves_amid_a_long_message_begins_no_other,
            endings::who_departs_goes_on_to_answer,
            endings::a_replay_of_a_fifo_ends_with_the_departure,
            endings::a_long_message_ends_with_the_departure,
            endings::shutdown_ends_everything,
            soak::everything_at_once,
        }
    };
    (@tests $name:ident, $seeds:expr, $make:expr; $($module:ident :: $test:ident),* $(,)?) => {
        mod $name {
            #[allow(unused_imports, reason = "the expressions of the suite may need them")]
            use super::*;
            $(
                #[test]
                fn $test() {
                    let name = concat!(stringify!($name), "::", stringify!($test));
                    $crate::conformance::run_seeds(name, $seeds, $make, $crate::conformance::$module::$test);
                }
            )*
        }
    };
}
