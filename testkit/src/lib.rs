//! Test equipment of Posthaste; never published.
//!
//! * [`sim`]: a seeded simulated world. Everything that happens in it follows from its seed.
//! * [`conformance`]: one suite of tests for every device, generic over a [`Harness`](conformance::Harness).
//! * [`proxy`]: passes TCP connections on, and splits, delays, changes and cuts them on the way.
//! * [`fuzz`]: what bytes from outside may do to lanes, dispatch and the environment, for any bytes.
//! * [`watchdog`]: ends a test process that hangs, and says where it was.
#![forbid(unsafe_code)]

pub mod conformance;
pub mod fuzz;
#[cfg(target_os = "linux")]
pub mod proxy;
pub mod random;
pub mod sim;
pub mod watchdog;
