//! `posthaste info`: what the library can do on this host, and what stands in its way.

use crate::run::fail;
use crate::say::say;
use comfy_table::{Table, presets};
use posthaste::components::core::{LinuxSysdep, MAX_INFO, Personality, engine::EngineConfig};
use posthaste::components::tcp::{AddressBook, JobKey, TcpConfig, TcpDevice};
use posthaste::{Caps, Device, JobShape, Messager, Rank, Sysdep};
use posthaste_launch::{HostFds, MAX_RANKS, Settings};
use rustix::process::{PidfdFlags, Resource, getpid, getrlimit, pidfd_open};
use serde::Serialize;
use serde_json::json;
use std::fs::read_to_string;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The arguments of `posthaste info`.
#[derive(clap::Args)]
pub struct Args {
    /// Print JSON instead of tables.
    #[arg(long)]
    json: bool,
    /// In a job, started by any launcher: by which device each rank reaches each other.
    #[arg(long)]
    job: bool,
}

#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    Ok,
    Warn,
}

/// One thing that was looked at.
#[derive(Serialize)]
struct Check {
    name: &'static str,
    status: Status,
    value: String,
    /// What to do about it; empty if nothing has to be done.
    advice: String,
}

impl Check {
    fn new(name: &'static str, ok: bool, value: impl Into<String>, advice: &str) -> Self {
        let status = if ok { Status::Ok } else { Status::Warn };
        Self { name, status, value: value.into(), advice: if ok { String::new() } else { advice.to_owned() } }
    }
}

/// Prints what was found. Exit code 0; 1 if a device cannot be opened, 2 for a wrong setting.
pub fn main(args: &Args) -> i32 {
    if args.job {
        return crate::routes::main(args.json);
    }
    let settings = match Settings::from_process() {
        Ok(settings) => settings,
        Err(error) => return fail(&error, 2),
    };
    let mut devices = Vec::new();
    // What can be opened is shown, whatever cannot.
    let opened = match add_devices(&mut devices) {
        Ok(()) => 0,
        Err(error) => fail(&error, 1),
    };
    let (checks, limits, settings) = (checks(), limits(), in_force(&settings));
    if args.json {
        let devices: Vec<_> = devices.iter().map(caps_json).collect();
        let pairs = |rows: Vec<[String; 2]>| -> serde_json::Map<String, serde_json::Value> {
            rows.into_iter().map(|[name, value]| (name, value.into())).collect()
        };
        let all = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "devices": devices,
            "limits": pairs(limits),
            "checks": checks,
            "settings": pairs(settings.into_iter().map(|[name, value, _]| [name, value]).collect()),
        });
        say(all);
        return opened;
    }
    say(concat!("posthaste ", env!("CARGO_PKG_VERSION"), "\n\nDevices"));
    let mut head = vec!["".to_owned()];
    head.extend(devices.iter().map(|caps| caps.name.to_owned()));
    print(&head, caps_rows(&devices));
    say("\nLimits");
    print(&["limit", "value"], limits);
    say("\nThis host");
    let rows = checks.into_iter().map(|check| {
        let status = if matches!(check.status, Status::Ok) { "ok" } else { "warn" };
        [check.name.to_owned(), status.to_owned(), check.value, check.advice]
    });
    print(&["check", "", "found", "advice"], rows);
    say("\nSettings in force");
    print(&["variable", "value", "from"], settings);
    opened
}

fn print<R>(head: &[impl ToString], rows: impl IntoIterator<Item = R>)
where
    R: IntoIterator<Item = String>,
{
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY).set_header(head.iter().map(ToString::to_string));
    for row in rows {
        table.add_row(row.into_iter().collect::<Vec<_>>());
    }
    say(table);
}

/// What the devices can do: that of a job of one rank in this process, and the one over sockets, opened on the loopback
/// interface. One that cannot be opened keeps no other one from being found.
fn add_devices(found: &mut Vec<Caps>) -> Result<(), posthaste::Error> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let of_job = async {
            let job = posthaste::solo().await?;
            found.extend(job.messager().devices().iter().map(|device| *device.caps()));
            job.leave().await
        };
        let of_job = of_job.await;
        let shape = JobShape { ranks: 1, clients: 1, contexts: 1 };
        let config = TcpConfig::new(Rank(0), shape, [0; 16], JobKey::new([0; 32]));
        let sockets = TcpDevice::new(config, Arc::new(AddressBook::new(shape.ranks)));
        let sockets = sockets.map(|device| found.push(*device.caps()));
        of_job.and(sockets.map_err(|error| posthaste::JoinError::from(error).into()))
    })
}

fn caps_rows(devices: &[Caps]) -> Vec<Vec<String>> {
    let row = |name: &str, value: &dyn Fn(&Caps) -> String| {
        std::iter::once(name.to_owned()).chain(devices.iter().map(value)).collect::<Vec<_>>()
    };
    let flag = |set: bool| if set { "yes".to_owned() } else { "no".to_owned() };
    let from = |len: usize| if len == usize::MAX { "no length".to_owned() } else { bytes(len as u64) };
    vec![
        row("longest payload inside a packet", &|caps| bytes(caps.max_inline as u64)),
        row("longest payload in one piece", &|caps| bytes(caps.max_eager as u64)),
        row("fragment of a longer one", &|caps| bytes(caps.fragment as u64)),
        row("puts without the target's help", &|caps| flag(caps.native_put)),
        row("gets without the target's help", &|caps| flag(caps.native_get)),
        row("atomics without the target's help", &|caps| flag(caps.native_atomics)),
        row("windows can be mapped", &|caps| flag(caps.mappable)),
        row("loans (sends without a copy)", &|caps| flag(caps.loans)),
        row("packets stay in order", &|caps| flag(caps.ordered)),
        row("atomicity of puts and gets", &|caps| bytes(caps.atomicity as u64)),
        row("messages ask for their place from", &|caps| from(caps.rendezvous)),
        row("owned payloads are kept, not copied, from", &|caps| from(caps.keeps)),
        row("gets are answered out of held memory", &|caps| flag(caps.held_gets)),
        row("tells that a rank has left", &|caps| flag(caps.tells_leave)),
        row("cost (the lowest is taken)", &|caps| caps.cost.to_string()),
    ]
}

fn caps_json(caps: &Caps) -> serde_json::Value {
    json!({
        "name": caps.name, "max_inline": caps.max_inline, "max_eager": caps.max_eager, "fragment": caps.fragment,
        "native_put": caps.native_put, "native_get": caps.native_get, "native_atomics": caps.native_atomics,
        "mappable": caps.mappable, "rendezvous": caps.rendezvous, "keeps": caps.keeps, "held_gets": caps.held_gets,
        "tells_leave": caps.tells_leave,
        "loans": caps.loans, "ordered": caps.ordered, "atomicity": caps.atomicity, "cost": caps.cost,
    })
}

fn limits() -> Vec<[String; 2]> {
    [
        ("ranks of a job", MAX_RANKS.to_string()),
        ("message", bytes(EngineConfig::default().max_message)),
        ("message info", bytes(MAX_INFO as u64)),
        ("protocols of a client", posthaste::components::core::protocol::MAX_PROTOCOLS.to_string()),
        ("name of a protocol", bytes(posthaste::components::core::protocol::MAX_NAME as u64)),
    ]
    .map(|(name, value)| [name.to_owned(), value])
    .into()
}

fn checks() -> Vec<Check> {
    let shape = JobShape { ranks: 1, clients: 1, contexts: 1 };
    let sysdep = LinuxSysdep::new(Personality::one_node(Rank(0), shape), None);
    let headroom = sysdep.headroom();
    let low = 512 << 20;
    let cgroup = headroom.cgroup.map_or("no limit".to_owned(), |left| format!("{} left", bytes(left)));
    let mut checks = vec![
        kernel(),
        Check::new(
            "cores",
            sysdep.cores() > 1,
            sysdep.cores().to_string(),
            "with one core, ranks take turns: latencies are those of the scheduler",
        ),
        Check::new(
            "memory available",
            headroom.host > low,
            bytes(headroom.host),
            "little memory: set POSTHASTE_MEMORY_LIMIT",
        ),
        Check::new(
            "memory cgroup",
            headroom.cgroup.is_none_or(|left| left > low),
            cgroup,
            "raise memory.max or set POSTHASTE_MEMORY_LIMIT",
        ),
        descriptors(),
        arena(),
        Check::new(
            "membarrier (global expedited)",
            sysdep.fence_is_asymmetric(),
            if sysdep.fence_is_asymmetric() { "available" } else { "refused" },
            "every message pays for a fence: allow membarrier in the seccomp profile (Linux 4.16 or later, x86-64)",
        ),
        Check::new(
            "pidfd",
            pidfd_open(getpid(), PidfdFlags::empty()).is_ok(),
            if pidfd_open(getpid(), PidfdFlags::empty()).is_ok() { "available" } else { "refused" },
            "the death of a rank with living children is noticed late: allow pidfd_open (Linux 5.3 or later)",
        ),
    ];
    checks.extend([fence(&sysdep), dev_shm(), huge_pages(), governor(), hypervisor()].into_iter().flatten());
    checks
}

fn kernel() -> Check {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    Check::new(
        "kernel",
        version >= (5, 3),
        release,
        "older than 5.3: some fast paths have only their fallbacks",
    )
}

/// How many ranks the limit on open files allows, here as the launcher.
fn descriptors() -> Check {
    let name = "open files (RLIMIT_NOFILE)";
    let limit = getrlimit(Resource::Nofile);
    let Some(current) = limit.current else { return Check::new(name, true, "no limit", "") };
    let open = std::fs::read_dir("/proc/self/fd").map_or(3, |entries| entries.count() as u64);
    // The launcher holds two per rank (four with --label) and some 50 of its own; a rank two per peer and fewer.
    let ranks = |each: u64| (current.saturating_sub(open + 50) / each).min(u64::from(MAX_RANKS));
    let value = format!("{current}: about {} ranks, {} with --label", ranks(2), ranks(4));
    let most = limit.maximum.map_or("unlimited".to_owned(), |most| most.to_string());
    Check::new(name, ranks(4) >= 64, value, &format!("for larger jobs: ulimit -n {most}"))
}

fn arena() -> Check {
    let advice = "memfd is refused: allow memfd_create in the seccomp profile";
    match HostFds::new(1, 1 << 20) {
        Ok(fds) => {
            let kind = fds.kind().to_string();
            Check::new("arena", kind.contains("memfd"), kind, advice)
        }
        Err(error) => Check::new("arena", false, error.to_string(), advice),
    }
}

/// What a barrier on all cores costs while another core works for this process.
fn fence(sysdep: &LinuxSysdep) -> Option<Check> {
    if !sysdep.fence_is_asymmetric() || sysdep.cores() < 2 {
        return None;
    }
    let ends = AtomicBool::new(false);
    let mut times: Vec<Duration> = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        // Until that thread has a core of its own.
        std::thread::sleep(Duration::from_millis(2));
        let times = (0..7).map(|_| {
            let since = Instant::now();
            sysdep.heavy_fence();
            since.elapsed()
        });
        let times = times.collect();
        ends.store(true, Ordering::Relaxed);
        times
    });
    times.sort_unstable();
    let median = times[times.len() / 2];
    Some(Check::new(
        "barrier on a busy core",
        median < Duration::from_micros(50),
        format!("{:.1} µs", median.as_secs_f64() * 1e6),
        "busy cores are hard to interrupt here, and the first wake-ups of each rank are late: in a virtual machine, \
         have the host post its interrupts (APICv, AVIC)",
    ))
}

fn dev_shm() -> Option<Check> {
    let stat = rustix::fs::statvfs("/dev/shm").ok()?;
    let free = stat.f_bavail * stat.f_frsize;
    Some(Check::new(
        "/dev/shm free",
        free > 64 << 20,
        bytes(free),
        "matters only where memfd is refused: mount it larger (docker run --shm-size)",
    ))
}

fn huge_pages() -> Option<Check> {
    let text = read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled").ok()?;
    let chosen = text.split(['[', ']']).nth(1)?.to_owned();
    let advice = "every touched page costs 2 MiB, and small windows as much: \
                  echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled";
    Some(Check::new("huge pages for shared memory", !matches!(&*chosen, "always" | "force"), chosen, advice))
}

fn governor() -> Option<Check> {
    let governor = read_to_string("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").ok()?;
    let governor = governor.trim().to_owned();
    let advice = "latencies vary with the clock: cpupower frequency-set -g performance";
    Some(Check::new("cpu governor", governor != "powersave", governor, advice))
}

fn hypervisor() -> Option<Check> {
    let text = read_to_string("/proc/cpuinfo").ok()?;
    let flags = text.lines().find(|line| line.starts_with("flags"))?;
    let guest = flags.split_whitespace().any(|flag| flag == "hypervisor");
    let value = if guest { "virtual machine" } else { "bare metal" };
    let advice = "neighbours on the host show in the tail latencies; pin the vCPUs if you can";
    Some(Check::new("machine", !guest, value, advice))
}

/// Variable, value, and where the value is from.
fn in_force(settings: &Settings) -> Vec<[String; 3]> {
    let from = |name: &str| if std::env::var_os(name).is_some() { "environment" } else { "default" };
    let rows = settings.in_force().map(|(name, value)| {
        let value = value.unwrap_or_else(|| "not set".to_owned());
        [name.to_owned(), value, from(name).to_owned()]
    });
    rows.collect()
}

/// A number of bytes for people.
fn bytes(count: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let unit = (0..units.len() - 1).find(|unit| count < 1 << (10 * (unit + 1))).unwrap_or(units.len() - 1);
    let whole = count >> (10 * unit);
    if count == whole << (10 * unit) {
        format!("{whole} {}", units[unit])
    } else {
        format!("{:.1} {}", count as f64 / (1u64 << (10 * unit)) as f64, units[unit])
    }
}
