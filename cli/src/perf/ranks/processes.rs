//! What ranks cost that do little, and how their end is noticed.

use super::*;
use posthaste::{CallError, Fault};

impl<F: ContextFace> Bench<F> {
    /// Processor time of idle ranks, in percent of one core, all together.
    pub(super) async fn idle_cpu(&self) -> Result<()> {
        self.barrier().await?;
        tokio::time::sleep(Duration::from_millis(200)).await;
        let before = cpu_seconds();
        let time = self.time.max(Duration::from_secs(1));
        tokio::time::sleep(time).await;
        let used = (cpu_seconds() - before) / time.as_secs_f64() * 100.0;
        let all = self.job.all_gather(&used.to_ne_bytes()).await?;
        if self.leads() {
            figure(all.iter().map(|blob| f64::from_ne_bytes(blob[..8].try_into().unwrap_or_default())).sum());
        }
        self.barrier().await
    }

    /// All ranks are there.
    pub(super) async fn joined(&self) -> Result<()> {
        self.barrier().await?;
        if self.leads() {
            figure(self.job.size() as f64);
        }
        Ok(())
    }

    /// From the kill of a rank to the end of a request to it: the 99th percentile of all ranks but this, in milliseconds.
    pub(super) async fn loss(&self) -> Result<()> {
        let never = self.job.service("never", |_: u64| std::future::pending::<u64>())?;
        let (ready, all_ready, _) = self.counting("ready")?;
        let pids = self.job.all_gather(&std::process::id().to_ne_bytes()).await?;
        if !self.leads() {
            ready.send(Rank(0), 0u64.to_ne_bytes()).await?;
            std::future::pending::<()>().await;
        }
        // Nobody is in a collective operation any more, which would end with the first kill.
        all_ready.reach_on(&self.face, self.job.size() as u64 - 1).await;
        let mut times = Vec::new();
        for rank in self.job.ranks().skip(1) {
            let pid = i32::from_ne_bytes(pids[rank.index()][..4].try_into().unwrap_or_default());
            let pid =
                rustix::process::Pid::from_raw(pid).ok_or_else(|| failed("a rank told no process id"))?;
            let request = tokio::time::timeout(PATIENCE, never.call(rank, 1));
            let kill = async {
                // Long enough for the request to be there and for this rank to have gone to sleep.
                tokio::time::sleep(Duration::from_millis(3)).await;
                let killed = Instant::now();
                rustix::process::kill_process(pid, rustix::process::Signal::KILL).map(|()| killed)
            };
            let waited = async {
                let end = request.await;
                (end, Instant::now())
            };
            let (killed, (end, ended)) = futures::join!(kill, waited);
            let lost = CallError::Fault(Fault::PeerLost(rank));
            match end {
                Ok(Err(error)) if error == lost => {
                    times.push(
                        ended.duration_since(killed.map_err(std::io::Error::from)?).as_secs_f64() * 1e3,
                    );
                }
                end => return Err(failed(format!("a request to a killed rank ended so: {end:?}"))),
            }
        }
        times.sort_by(f64::total_cmp);
        figure(times[(times.len() * 99).div_ceil(100) - 1]);
        Ok(())
    }

    /// Resident bytes per peer that is merely there, or that rank 0 talks with in both directions.
    pub(super) async fn memory(&self, talking: bool) -> Result<()> {
        let (message, arrived, _) = self.counting("touch")?;
        let others = self.job.size() as f64 - 1.0;
        // A rank of a job of two, otherwise the same, is what a silent peer is compared with.
        let before = resident_kib();
        if talking {
            if self.leads() {
                for rank in self.job.ranks().skip(1) {
                    for _ in 0..2000 {
                        message.send(rank, 1u64.to_ne_bytes()).await?;
                    }
                }
                arrived.reach_on(&self.face, 2000 * others as u64).await;
                figure((resident_kib() - before) / others);
            } else {
                arrived.reach_on(&self.face, 2000).await;
                for _ in 0..2000 {
                    message.send(Rank(0), 1u64.to_ne_bytes()).await?;
                }
            }
        } else if self.leads() {
            // The parent runs this with two ranks, too, and divides the difference.
            figure(before);
        }
        self.barrier().await
    }
}

/// How long a request that a rank cannot answer any more is waited for.
const PATIENCE: Duration = Duration::from_secs(30);

fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Resident memory that is the process's own or shared with its peers. Pages of the program file are left out: how many of
/// those are mapped depends on the kernel's cache and varies by more than all peers cost.
fn resident_kib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let counted = status.lines().filter(|line| line.starts_with("RssAnon:") || line.starts_with("RssShmem:"));
    let kib = |line: &str| line.split_whitespace().nth(1).and_then(|kib| kib.parse::<f64>().ok());
    counted.filter_map(kib).sum()
}
