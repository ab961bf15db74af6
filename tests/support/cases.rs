//! Cases that run in several settings: over shared memory, over sockets, on two nodes, and driven by a thread.
//!
//! A program of such cases has no harness of the compiler's, which would have it built once for every setting. A case
//! registers itself by [`case!`]; the program's `main` says which settings the cases of a module run in, and a case's name
//! begins with its setting: `tcp::calls::m_d07_…`.

use libtest_mimic::{Arguments, Trial};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::OnceLock;

/// What a case runs in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// Over shared memory.
    Shm,
    /// Over sockets.
    Tcp,
    /// On two nodes: over memory within, over sockets between them.
    Nodes,
    /// Over shared memory, where a thread of its own drives each rank's contexts, rather than the runtime that joins.
    Thread,
}

impl Setting {
    fn name(self) -> &'static str {
        match self {
            Setting::Shm => "shm",
            Setting::Tcp => "tcp",
            Setting::Nodes => "nodes",
            Setting::Thread => "thread",
        }
    }
}

/// By every way that there is between ranks.
pub const EVERY_WAY: &[Setting] = &[Setting::Shm, Setting::Tcp, Setting::Nodes];
/// With a thread that drives besides, for what has to do with that.
pub const EVERYWHERE: &[Setting] = &[Setting::Shm, Setting::Tcp, Setting::Nodes, Setting::Thread];

/// A function that is a test, as [`case!`] registers it.
pub struct Case {
    /// Its module, with the program's name.
    pub module: &'static str,
    /// Its name.
    pub name: &'static str,
    /// Itself.
    pub run: fn(),
}

inventory::collect!(Case);

/// Registers a function of the module as a case of the program.
#[allow(unused_macros, reason = "not every program has cases")]
macro_rules! case {
    ($name:ident) => {
        inventory::submit! {
            $crate::support::cases::Case { module: module_path!(), name: stringify!($name), run: $name }
        }
    };
}
#[allow(unused_imports, reason = "not every program has cases")]
pub(crate) use case;

thread_local! {
    static OF_THIS_THREAD: Cell<Option<Setting>> = const { Cell::new(None) };
}
/// That of the only case which a process runs: whatever thread asks.
static OF_THE_PROCESS: OnceLock<Setting> = OnceLock::new();

/// The setting of the case that runs on this thread, or is the only one of the process. None: the program has no cases.
pub fn setting() -> Option<Setting> {
    OF_THIS_THREAD.get().or_else(|| OF_THE_PROCESS.get().copied())
}

/// A case's name, with its setting, from its path without.
pub fn name_of(test: &str) -> String {
    setting().map_or_else(|| test.to_owned(), |setting| format!("{}::{test}", setting.name()))
}

/// Runs the cases that the arguments ask for, of the modules in the settings of their row.
///
/// # Panics
/// If a module with cases has no row, or a row no cases.
pub fn main(rows: &[(&str, &'static [Setting])]) -> ExitCode {
    let arguments = Arguments::from_args();
    if let Some((setting, _)) =
        arguments.filter.as_ref().filter(|_| arguments.exact).and_then(|name| name.split_once("::"))
    {
        let setting = EVERYWHERE.iter().find(|other| other.name() == setting);
        setting.into_iter().for_each(|setting| _ = OF_THE_PROCESS.set(*setting));
    }
    let (mut trials, mut seen) = (Vec::new(), BTreeSet::new());
    for case in inventory::iter::<Case> {
        let module = case.module.split_once("::").map_or(case.module, |(_, module)| module);
        let row = rows.iter().find(|(name, _)| *name == module);
        let (_, settings) = row.unwrap_or_else(|| panic!("it is not said what the cases of {module} run in"));
        seen.insert(module);
        for setting in *settings {
            trials.push(Trial::test(format!("{}::{module}::{}", setting.name(), case.name), move || {
                OF_THIS_THREAD.set(Some(*setting));
                (case.run)();
                Ok(())
            }));
        }
    }
    let idle: Vec<_> = rows.iter().map(|(name, _)| *name).filter(|name| !seen.contains(name)).collect();
    assert!(idle.is_empty(), "these have no cases: {idle:?}");
    trials.sort_by(|a, b| a.name().cmp(b.name()));
    libtest_mimic::run(&arguments, trials).exit_code()
}
