//! What all examples do alike: arguments, errors, exit codes.

use clap::Parser;
use std::process::ExitCode;

/// Any error, of the library or of the example's own check.
pub type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

/// Reads the arguments and runs the program. Wrong arguments are told in one line, before any rank is started, and end
/// with code 2; an error ends with code 1.
pub fn run<A: Parser>(program: impl FnOnce(A) -> Result<()>) -> ExitCode {
    let name = A::command().get_name().to_owned();
    let arguments = match A::try_parse() {
        Ok(arguments) => arguments,
        Err(told) if !told.use_stderr() => {
            println!("{}", told.to_string().trim_end()); // `--help`
            return ExitCode::SUCCESS;
        }
        Err(wrong) => {
            let text = wrong.to_string();
            let first = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
            eprintln!("{name}: {first}; see {name} --help");
            return ExitCode::from(2);
        }
    };
    match program(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{name}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The part of `0..len` that falls to one of `parts`, in order and as even as can be.
#[allow(dead_code, reason = "not every example splits a range")]
pub fn share(len: usize, parts: usize, part: usize) -> std::ops::Range<usize> {
    part * len / parts..(part + 1) * len / parts
}
