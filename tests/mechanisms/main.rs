//! A test for each mechanism, named after it, between real processes; and a test for each error that a user can
//! cause.

#[path = "../support/mod.rs"]
mod support;

mod calls;
mod collectives;
mod collectives2;
mod components;
mod contexts;
mod early;
mod errors;
mod memory;
mod multisend;
mod pages;
mod replay;
mod sends;
mod streams;
