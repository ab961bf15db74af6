//! Lets a process go on by one instruction at a time, between two of its marks.

use super::Count;
use crate::say::say;
use nix::errno::Errno;
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use std::collections::HashMap;
use std::io::BufRead;

/// The signal with which a process says that counting begins, and that it ends. It does nothing to a process that nobody
/// follows.
pub const MARK: Signal = Signal::SIGURG;

/// What an instruction is counted as besides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Plain,
    Locked,
    SystemCall,
}

/// Follows a process's first thread until it ends, and says what it executed between its marks. It begins with the end of a
/// line: by then the process must allow it.
pub fn follow(process: i32) -> Result<(), String> {
    let allowed = std::io::stdin().lock().read_line(&mut String::new());
    allowed.map_err(|error| format!("nobody says that process {process} may be followed: {error}"))?;
    let pid = Pid::from_raw(process);
    ptrace::seize(pid, ptrace::Options::empty())
        .map_err(|error| format!("this system does not let process {process} be followed: {error}"))?;
    say("ready");
    follow_on(pid).map_err(|error| format!("process {process} can no longer be followed: {error}"))
}

fn follow_on(pid: Pid) -> Result<(), Errno> {
    let mut kinds = HashMap::new();
    loop {
        match waitpid(pid, Some(WaitPidFlag::__WALL))? {
            WaitStatus::Exited(..) | WaitStatus::Signaled(..) => return Ok(()),
            WaitStatus::Stopped(_, MARK) => {
                let Some(count) = steps(pid, &mut kinds)? else { return Ok(()) };
                match serde_json::to_string(&count) {
                    Ok(text) => say(text),
                    Err(_) => return Err(Errno::EINVAL),
                }
                ptrace::cont(pid, None)?;
            }
            WaitStatus::Stopped(_, signal) => ptrace::cont(pid, signal)?,
            _ => ptrace::cont(pid, None)?,
        }
    }
}

/// Counts until the next mark; nothing if the process ends before.
fn steps(pid: Pid, kinds: &mut HashMap<u64, Kind>) -> Result<Option<Count>, Errno> {
    let mut count = Count::default();
    let mut pass_on = None;
    loop {
        let at = ptrace::getregs(pid)?.rip;
        let kind = match kinds.get(&at) {
            Some(kind) => *kind,
            None => *kinds.entry(at).or_insert(kind_of(&code(pid, at)?)),
        };
        ptrace::step(pid, pass_on.take())?;
        match waitpid(pid, Some(WaitPidFlag::__WALL))? {
            WaitStatus::Exited(..) | WaitStatus::Signaled(..) => return Ok(None),
            WaitStatus::Stopped(_, MARK) => return Ok(Some(count)),
            WaitStatus::Stopped(_, Signal::SIGTRAP) => {
                count.instructions += 1.0;
                count.locked += f64::from(u8::from(kind == Kind::Locked));
                count.system_calls += f64::from(u8::from(kind == Kind::SystemCall));
            }
            WaitStatus::Stopped(_, signal) => pass_on = Some(signal),
            _ => {}
        }
    }
}

/// The bytes at a place, as many as can be read of the longest instruction.
fn code(pid: Pid, at: u64) -> Result<Vec<u8>, Errno> {
    let word = |at: u64| ptrace::read(pid, at as ptrace::AddressType).map(i64::to_ne_bytes);
    let mut bytes = word(at)?.to_vec();
    // The last instruction of a mapping may end before that.
    bytes.extend(word(at + 8).into_iter().flatten());
    Ok(bytes)
}

/// What an instruction is, by its first bytes: see the Intel manual, volume 2, chapter 2.1.
fn kind_of(code: &[u8]) -> Kind {
    let is_prefix = |byte: &u8| {
        matches!(byte, 0xf0 | 0xf2 | 0xf3 | 0x2e | 0x36 | 0x3e | 0x26 | 0x64 | 0x65 | 0x66 | 0x67)
    };
    let prefixes = code.iter().take_while(|byte| is_prefix(byte)).count();
    let (prefixes, rest) = code.split_at(prefixes);
    let rest = match rest {
        // Which registers are meant, and how wide they are.
        [0x40..=0x4f, rest @ ..] => rest,
        rest => rest,
    };
    match rest {
        _ if prefixes.contains(&0xf0) => Kind::Locked,
        // Exchanges lock their memory unasked; of two registers they do not.
        [0x86 | 0x87, operands, ..] if operands >> 6 != 3 => Kind::Locked,
        // The fence of all memory.
        [0x0f, 0xae, 0xf0, ..] => Kind::Locked,
        [0x0f, 0x05, ..] => Kind::SystemCall,
        _ => Kind::Plain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_are_told_apart_by_their_bytes() {
        for (code, kind) in [
            // lock xadd [rdi], eax; lock cmpxchg [rsi], rdx; xchg [rdi], rax; mfence
            (&[0xf0, 0x0f, 0xc1, 0x07][..], Kind::Locked),
            (&[0xf0, 0x48, 0x0f, 0xb1, 0x16], Kind::Locked),
            (&[0x48, 0x87, 0x07], Kind::Locked),
            (&[0x64, 0xf0, 0x48, 0xff, 0x04, 0x25], Kind::Locked),
            (&[0x0f, 0xae, 0xf0], Kind::Locked),
            // xchg rax, rdi; mov rax, [rdi]; lfence; syscall; nothing that could be read
            (&[0x48, 0x87, 0xf8], Kind::Plain),
            (&[0x48, 0x8b, 0x07], Kind::Plain),
            (&[0x0f, 0xae, 0xe8], Kind::Plain),
            (&[0x0f, 0x05], Kind::SystemCall),
            (&[], Kind::Plain),
        ] {
            assert_eq!(kind_of(code), kind, "{code:x?}");
        }
    }
}
