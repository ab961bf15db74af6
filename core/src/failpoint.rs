//! Named points at which a test can have the process killed, as by `kill -9`.
//!
//! A release build without the feature `failpoints` contains none of this.

/// Dies here if `POSTHASTE_TEST_FAILPOINT` is `name` or `name:N` (the Nth passage), on every rank or, with `@R` at
/// its end, on rank R alone.
#[macro_export]
macro_rules! failpoint {
    ($name:literal) => {
        #[cfg(any(debug_assertions, feature = "failpoints"))]
        $crate::failpoint::reached($name);
    };
}

/// Called by [`failpoint!`].
#[cfg(any(debug_assertions, feature = "failpoints"))]
pub fn reached(name: &str) {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};
    static PLAN: OnceLock<Option<(String, AtomicU64)>> = OnceLock::new();
    let plan = PLAN.get_or_init(|| {
        let text = std::env::var("POSTHASTE_TEST_FAILPOINT").ok()?;
        let (text, rank) = text.split_once('@').unwrap_or((&text, ""));
        if !rank.is_empty() && std::env::var("POSTHASTE_RANK").as_deref() != Ok(rank) {
            return None;
        }
        let (name, count) = text.rsplit_once(':').unwrap_or((text, "1"));
        Some((name.to_owned(), AtomicU64::new(count.parse().unwrap_or(1))))
    });
    if let Some((wanted, left)) = plan
        && wanted == name
        && left.fetch_sub(1, Ordering::Relaxed) == 1
    {
        // What a kill from outside does: no destructor, no unwinding, no flush.
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        loop {
            std::thread::park();
        }
    }
}
