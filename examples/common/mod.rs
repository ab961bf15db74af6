//! What all examples do alike: arguments, errors, exit codes.

use clap::Parser;
use std::io::{ErrorKind, Write, stderr, stdout};
use std::process::ExitCode;

/// Any error, of the library or of the example's own check.
pub type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

/// Prints a line, as `println!` does but for a reader that has gone (`| head`): that one misses the rest, and the program goes
/// on.
macro_rules! say {
    ($($text:tt)*) => { $crate::common::print(format_args!($($text)*)) };
}
pub(crate) use say;

pub fn print(line: std::fmt::Arguments<'_>) {
    if let Err(error) = writeln!(stdout(), "{line}")
        && error.kind() != ErrorKind::BrokenPipe
    {
        complain(&format!("cannot write to standard output: {error}"));
    }
}

/// In one piece: other ranks may complain at the same time.
fn complain(line: &str) {
    // If nobody hears that either, there is nobody to tell.
    let _ = stderr().write_all(format!("{line}\n").as_bytes());
}

/// Reads the arguments and runs the program. Wrong arguments are told in one line, before any rank is started, and end
/// with code 2; an error ends with code 1.
pub fn run<A: Parser>(program: impl FnOnce(A) -> Result<()>) -> ExitCode {
    let name = A::command().get_name().to_owned();
    let arguments = match A::try_parse() {
        Ok(arguments) => arguments,
        Err(told) if !told.use_stderr() => {
            say!("{}", told.to_string().trim_end()); // `--help`
            return ExitCode::SUCCESS;
        }
        Err(wrong) => {
            let text = wrong.to_string();
            let first = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
            complain(&format!("{name}: {first}; see {name} --help"));
            return ExitCode::from(2);
        }
    };
    match program(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format!("{name}: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// The part of `0..len` that falls to one of `parts`, in order and as even as can be.
#[allow(dead_code, reason = "not every example splits a range")]
pub fn share(len: usize, parts: usize, part: usize) -> std::ops::Range<usize> {
    part * len / parts..(part + 1) * len / parts
}
