//! Lines on standard output, as a program in a pipeline prints them.

use std::fmt::Display;
use std::io::{ErrorKind, Write, stderr, stdout};

/// Of a program that nobody reads any more: as if SIGPIPE had ended it.
const UNREAD: i32 = 141;

/// Prints a line. Ends the program if nobody reads it any more, or if it cannot be written, which it says then.
pub fn say(line: impl Display) {
    let mut out = stdout().lock();
    if let Err(error) = writeln!(out, "{line}").and_then(|()| out.flush()) {
        if error.kind() == ErrorKind::BrokenPipe {
            std::process::exit(UNREAD);
        }
        complain(format_args!("cannot write to standard output: {error}"));
        std::process::exit(1);
    }
}

/// Prints what is wrong as a line on standard error, which nobody may read any more.
pub fn complain(line: impl Display) {
    let _ = writeln!(stderr(), "posthaste: {line}");
}
