//! A memory control group that is smaller than what the job asks for.

use crate::support::{case, options, others, run, sealed, soon, unseal};
use posthaste::{Error, Fault, MemoryError, Message, Rank, RmaError, Scope};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The limit of the group.
const LIMIT: u64 = 96 << 20;
/// Where the ranks are told of it.
const VARIABLE: &str = "POSTHASTE_TEST_CGROUP";

/// A control group for the ranks of one job; goes when it is dropped.
struct Group(PathBuf);

impl Group {
    /// Makes a group below that of this process, whichever version the memory controller has.
    fn make() -> Result<Group, String> {
        let own = std::fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
        let mut why = vec!["no memory controller".to_owned()];
        for line in own.lines() {
            let mut parts = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
            let (root, limit) = match controllers {
                "" => ("/sys/fs/cgroup", "memory.max"),
                _ if controllers.split(',').any(|name| name == "memory") => {
                    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
                }
                _ => continue,
            };
            // Where this process's group may not have groups below it, one beside it will do.
            for parent in [path, path.rsplit_once('/').map_or("", |(parent, _)| parent)] {
                let name = format!("posthaste-test-{}", std::process::id());
                let folder = Path::new(root).join(parent.trim_start_matches('/')).join(name);
                if let Err(error) = std::fs::create_dir(&folder) {
                    why.push(format!("{}: {error}", folder.display()));
                    continue;
                }
                let group = Group(folder);
                let set = std::fs::write(group.0.join(limit), LIMIT.to_string());
                // Nobody may be saved by swapping; where that is not limited by itself there is no such file.
                for swap in ["memory.swap.max", "memory.memsw.limit_in_bytes"] {
                    let bytes = if swap == "memory.swap.max" { 0 } else { LIMIT };
                    let _no_swap = std::fs::write(group.0.join(swap), bytes.to_string());
                }
                match set {
                    Ok(()) => return Ok(group),
                    Err(error) => why.push(format!("{}: {error}", group.0.join(limit).display())),
                }
            }
        }
        Err(why.join("; "))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let end = Instant::now() + Duration::from_secs(10);
        // A group is busy until the kernel has cleaned up behind its last process.
        while std::fs::remove_dir(&self.0).is_err() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

case!(fault_memory_over_the_control_groups_limit_is_a_typed_error_and_nobody_is_killed);
fn fault_memory_over_the_control_groups_limit_is_a_typed_error_and_nobody_is_killed() {
    let rank = std::env::var_os("POSTHASTE_JOB").is_some();
    let group = if rank { Err(String::new()) } else { Group::make() };
    if let Err(why) = &group
        && !rank
    {
        eprintln!("skipped: no control group can be made here: {why}");
        return;
    }
    let folder = group.as_ref().map_or(String::new(), |group| group.0.display().to_string());
    let inside = options()
        .env(VARIABLE, &folder)
        .after_shell_command(&format!("echo $$ > ${VARIABLE}/cgroup.procs || exit 9"));
    let printed = run(2, inside, async |job| {
        if job.messager().sysdep().headroom().cgroup.is_none_or(|left| left > LIMIT) {
            println!("skipped: the limit of {} is not seen", std::env::var(VARIABLE).unwrap());
            return;
        }
        let arrived = job.counter();
        let count = arrived.clone();
        let message = job
            .register("sealed", move |m: Message, _: &mut Scope| {
                assert!(unseal(&m.bytes()).is_some());
                count.add(1);
            })
            .unwrap();
        // Far too much, on one rank: told there by the limit's name, on the other as that rank's lack.
        let wanted = if job.rank() == Rank(1) { LIMIT as usize + 1 } else { 4096 };
        let error = job.shmalloc::<u8>(wanted).await.unwrap_err();
        match (job.rank().0, &error) {
            (1, Error::Rma(RmaError::Memory(MemoryError::Cgroup { wanted, left }))) => {
                assert_eq!(*wanted, (LIMIT + 1).next_multiple_of(4096));
                assert!(*left < LIMIT, "{left}");
                assert!(error.to_string().contains("memory cgroup"), "{error}");
            }
            (0, Error::Rma(RmaError::Fault(Fault::OutOfMemory(_)))) => {}
            _ => panic!("{error:?}"),
        }
        // Both at once, and again and again, until nothing is left.
        let mut windows = Vec::new();
        let error = loop {
            match job.shmalloc::<u8>(5 << 20).await {
                Ok(window) => windows.push(window),
                Err(error) => break error,
            }
            assert!(windows.len() < 20, "more than there is");
        };
        assert!(windows.len() >= 4, "refused after {}: {error}", windows.len());
        let memory = matches!(
            error,
            Error::Rma(RmaError::Memory(MemoryError::Cgroup { .. }) | RmaError::Fault(Fault::OutOfMemory(_)))
        );
        assert!(memory, "{error:?}");
        println!("{} windows of 5 MiB on each of 2 ranks fit into {} MiB", windows.len(), LIMIT >> 20);
        // All of what was given is there, and the job goes on with what little is left.
        let to = job.rank().next(2);
        for (number, window) in windows.iter().enumerate() {
            for page in 0..(5 << 20) / 4096 {
                window.put(to, page * 4096, number as u8 + 1).await.unwrap();
            }
        }
        let mut sent = 0;
        for number in 0..300u64 {
            let len = [40, 3000, 70_000, 200_000][number as usize % 4];
            match message.send(to, sealed(number, len)).await {
                Ok(()) => sent += 1,
                Err(error) => {
                    let lack = matches!(error, posthaste::SendError::Fault(Fault::OutOfMemory(_)));
                    assert!(error.to_string().contains("memory cgroup"), "{error}");
                    assert!(lack && len > 60, "{error:?} for {len} bytes");
                }
            }
        }
        let told = job.all_gather(&u64::to_ne_bytes(sent)).await.unwrap();
        let theirs = u64::from_ne_bytes(told[to.index()][..].try_into().unwrap());
        soon("the messages", arrived.reach(theirs)).await;
        for (number, window) in windows.iter().enumerate() {
            assert_eq!(window.load(4096 * 1000), Some(number as u8 + 1));
        }
        assert_eq!(job.stats().panics, 0);
        // What is given back can be had again.
        let before = windows.len();
        for window in windows {
            window.free().await.unwrap();
        }
        for _ in 0..before - 1 {
            let window = job.shmalloc::<u8>(5 << 20).await.unwrap();
            window.put(to, 1, 1).await.unwrap();
            window.free().await.unwrap();
        }
        for to in others(&job) {
            job.flush(to).await.unwrap();
        }
        job.barrier().await.unwrap();
    });
    for line in printed.iter().flat_map(|text| text.lines()) {
        if line.contains("skipped: ") || line.contains("windows of") {
            eprintln!("{line}");
        }
    }
}
