//! What ranks cost that do little, and how their end is noticed.

use super::*;
use posthaste::{CallError, Fault, RmaError, SendError};

impl<F: ContextFace> Bench<F> {
    /// Processor time of idle ranks, in percent of one core, all together.
    pub(super) async fn idle_cpu(&self) -> Result<()> {
        self.barrier().await?;
        tokio::time::sleep(Duration::from_millis(200)).await;
        let before = cpu_seconds();
        let time = self.time.max(IDLE_LEAST);
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
            let request = tokio::time::timeout(PATIENCE, never.call(rank, 1));
            let waited = async {
                let end = request.await;
                (end, Instant::now())
            };
            let (killed, (end, ended)) = futures::join!(kill(&pids[rank.index()]), waited);
            let lost = CallError::Fault(Fault::PeerLost(rank));
            match end {
                Ok(Err(error)) if error == lost => {
                    times.push(ended.duration_since(killed?).as_secs_f64() * 1e3);
                }
                end => return Err(failed(format!("a request to a killed rank ended so: {end:?}"))),
            }
        }
        figure(last_hundredth(&mut times));
        Ok(())
    }

    /// The same amid traffic: messages, puts and requests of this rank to the victim are under way, several of each kind, and
    /// those of others. From the kill to the end of the last of this rank's, with an error.
    pub(super) async fn loss_busy(&self) -> Result<()> {
        let window = self.drive(self.job.shmalloc::<u8>(PIECE)).await?;
        let echo =
            self.job.service_inline("echo", |m: Message, _: &mut Scope| Ok(Buffer::copy(&m.bytes())))?;
        let (message, ..) = self.counting("message")?;
        let (aim, aimed, victim) = self.counting("aim")?;
        let (over, all_over, _) = self.counting("over")?;
        let (ready, all_ready, _) = self.counting("ready")?;
        let payload = Bytes::from(vec![5; PIECE]);
        let (message, window, echo, payload) = (&message, &window, &echo, &payload);
        let talk = |to: Rank| async move {
            let lost = Fault::PeerLost(to);
            let all = (0..UNDER_WAY).map(|_| async move {
                futures::try_join!(
                    until(SendError::Fault(lost), || message.send(to, payload.clone())),
                    until(RmaError::Fault(lost), || window.put_slice(to, 0, payload)),
                    until(CallError::Fault(lost), || echo.call_bytes(to, payload.clone())),
                )
            });
            let all = tokio::time::timeout(PATIENCE, futures::future::try_join_all(all)).await;
            all.map_err(|_| failed("operations towards a killed rank do not end"))?.map(drop)
        };
        let pids = self.job.all_gather(&std::process::id().to_ne_bytes()).await?;
        if !self.leads() {
            ready.send(Rank(0), 0u64.to_ne_bytes()).await?;
            for round in 1.. {
                aimed.reach_on(&self.face, round).await;
                talk(Rank(victim.load(std::sync::atomic::Ordering::Relaxed) as u32)).await?;
                over.send(Rank(0), round.to_ne_bytes()).await?;
            }
        }
        all_ready.reach_on(&self.face, self.job.size() as u64 - 1).await;
        let (mut times, mut others) = (Vec::new(), 0);
        for rank in self.job.ranks().skip(1) {
            for other in self.job.ranks().skip(rank.index() + 1).take(OTHERS) {
                aim.send(other, u64::from(rank.0).to_ne_bytes()).await?;
                others += 1;
            }
            let talked = async {
                talk(rank).await?;
                Result::<_>::Ok(Instant::now())
            };
            let (killed, ended) = futures::join!(kill(&pids[rank.index()]), talked);
            times.push(ended?.duration_since(killed?).as_secs_f64() * 1e3);
            let over = tokio::time::timeout(PATIENCE, all_over.reach_on(&self.face, others)).await;
            over.map_err(|_| failed("another rank's operations towards a killed one do not end"))?;
        }
        figure(last_hundredth(&mut times));
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

/// How long what a rank cannot answer any more is waited for.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long ranks are idle at least: what they do once in a while is to be in it.
const IDLE_LEAST: Duration = Duration::from_secs(5);
/// Bytes of a message, a put and a request of the traffic towards a rank that is killed, and how many of each are under way.
const PIECE: usize = 1024;
const UNDER_WAY: usize = 4;
/// Who else talks to it.
const OTHERS: usize = 2;

/// Kills the process whose id was told, in a while; when.
async fn kill(told: &[u8]) -> Result<Instant> {
    let pid = told.first_chunk().map_or(0, |pid| i32::from_ne_bytes(*pid));
    let pid = rustix::process::Pid::from_raw(pid).ok_or_else(|| failed("a rank told no process id"))?;
    // Long enough for what is under way to be there, and for whoever only waits to have gone to sleep.
    tokio::time::sleep(Duration::from_millis(3)).await;
    let killed = Instant::now();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).map_err(std::io::Error::from)?;
    Ok(killed)
}

/// Carries out an operation again and again, until it ends with this error.
async fn until<O, T, E>(end: E, operation: impl Fn() -> O) -> Result<()>
where
    O: Future<Output = std::result::Result<T, E>>,
    E: PartialEq + std::fmt::Debug,
{
    loop {
        match operation().await {
            Ok(_) => {}
            Err(error) if error == end => return Ok(()),
            Err(error) => {
                return Err(failed(format!("an operation towards a killed rank ended so: {error:?}")));
            }
        }
    }
}

/// The 99th percentile.
fn last_hundredth(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[(times.len() * 99).div_ceil(100) - 1]
}

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
