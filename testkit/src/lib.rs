//! Test equipment of Posthaste; never published.
//!
//! * [`sim`]: a seeded simulated world. Everything that happens in it follows from its seed.
//! * [`conformance`]: one suite of tests for every device, generic over a [`Harness`](conformance::Harness).
//! * [`watchdog`]: ends a test process that hangs, and says where it was.
#![forbid(unsafe_code)]

pub mod conformance;
pub mod random;
pub mod sim;
pub mod watchdog;
