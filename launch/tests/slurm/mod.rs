//! Slurm's daemons for this host alone, started by a test, where they are installed.

use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// A program in the path.
pub fn in_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let sbin = [PathBuf::from("/usr/sbin"), PathBuf::from("/sbin")];
    std::env::split_paths(&path).chain(sbin).map(|folder| folder.join(name)).find(|program| program.is_file())
}

/// Says that a test is skipped, also where the output of tests is captured.
pub fn skipped(test: &str, why: &str) {
    // The harness captures what the macros print, and shows it for failures only.
    std::io::stderr().write_all(format!("skipped: {test}: {why}\n").as_bytes()).unwrap();
}

/// Slurm's daemons for this host, which end with this, or by themselves.
pub struct Cluster {
    pub srun: PathBuf,
    folder: TempDir,
    daemons: Vec<Child>,
}

impl Cluster {
    /// None, and says so, where Slurm is not installed or does not run.
    pub fn start(test: &str) -> Option<Self> {
        let programs = (in_path("srun"), in_path("slurmctld"), in_path("slurmd"));
        let (Some(srun), Some(control), Some(node)) = programs else {
            skipped(test, "srun, slurmctld or slurmd is not installed (Debian: slurm-wlm)");
            return None;
        };
        let folder = TempDir::new().unwrap();
        let config = folder.path().join("slurm.conf");
        std::fs::write(&config, configuration(folder.path())).unwrap();
        let mut cluster = Self { srun, folder, daemons: Vec::new() };
        for (name, daemon) in [("control", &control), ("node", &node)] {
            let log = std::fs::File::create(cluster.folder.path().join(name)).unwrap();
            let mut command = Command::new("timeout");
            command.args(["-k", "1", "300"]).arg(daemon).arg("-D").arg("-f").arg(&config);
            command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
            cluster.daemons.push(command.spawn().unwrap());
        }
        let began = Instant::now();
        while !cluster.is_up() {
            if began.elapsed() > Duration::from_secs(30) {
                let log =
                    |name| std::fs::read_to_string(cluster.folder.path().join(name)).unwrap_or_default();
                let errors = [log("control"), log("node")].concat();
                let errors: Vec<&str> = errors.lines().filter(|line| line.contains("error")).collect();
                skipped(test, &format!("Slurm's daemons do not run here: {}", errors.join("; ")));
                return None;
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        Some(cluster)
    }

    fn is_up(&self) -> bool {
        self.says(&self.srun, &["true"]).is_some()
    }

    /// What one of Slurm's programs answers within ten seconds, if it ends well.
    fn says(&self, program: &Path, arguments: &[&str]) -> Option<Vec<u8>> {
        let mut command = Command::new("timeout");
        command.arg("10").arg(program).args(arguments).env("SLURM_CONF", self.config()).stdin(Stdio::null());
        command.output().ok().filter(|output| output.status.success()).map(|output| output.stdout)
    }

    /// Whether tasks can be given this kind of key-value space: a list of kinds names those whose library is missing too.
    pub fn offers(&self, kind: &str, test: &str) -> bool {
        let offers = self.says(&self.srun, &[&format!("--mpi={kind}"), "true"]).is_some();
        if !offers {
            let library = "for pmix it needs libpmix.so (Debian: libpmix-dev)";
            skipped(test, &format!("srun does not run with --mpi={kind}; {library}"));
        }
        offers
    }

    /// What its programs find in `SLURM_CONF`.
    pub fn config(&self) -> PathBuf {
        self.folder.path().join("slurm.conf")
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // A task of a test that failed would outlive the daemons.
        let _ = self.says(Path::new("scancel"), &["--state=RUNNING"]);
        let began = Instant::now();
        let busy = || self.says(Path::new("squeue"), &["--noheader"]).is_some_and(|jobs| !jobs.is_empty());
        while began.elapsed() < Duration::from_secs(10) && busy() {
            std::thread::sleep(Duration::from_millis(100));
        }
        for mut daemon in self.daemons.drain(..) {
            // It passes the signal on.
            let pid = rustix::process::Pid::from_child(&daemon);
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            let _ = daemon.wait();
        }
    }
}

/// One node, no authentication, everything in one folder.
fn configuration(folder: &Path) -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let name = name.split('.').next().unwrap();
    let user = Command::new("id").arg("-un").output().unwrap().stdout;
    let user = String::from_utf8(user).unwrap();
    let folder = folder.display();
    // Steps of one name on one host get into each other's way, even under two clusters.
    let first = 1000 * (1 + std::process::id() % 60_000);
    let sockets = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let [control, node] = sockets.map(|socket| socket.local_addr().unwrap().port());
    for state in ["control-state", "node-state"] {
        std::fs::create_dir(format!("{folder}/{state}")).unwrap();
    }
    format!(
        "ClusterName=posthaste\nSlurmctldHost={name}(127.0.0.1)\nSlurmctldPort={control}\nSlurmdPort={node}\n\
         SlurmUser={user}\nSlurmdUser={user}\nAuthType=auth/none\nCredType=cred/none\nMpiDefault=none\n\
         ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nJobAcctGatherType=jobacct_gather/none\n\
         SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\nReturnToService=2\n\
         StateSaveLocation={folder}/control-state\nSlurmdSpoolDir={folder}/node-state\n\
         TmpFS={folder}\nFirstJobId={first}\nSlurmctldPidFile={folder}/control.pid\nSlurmdPidFile={folder}/node.pid\nSwitchType=switch/none\n\
         SlurmdParameters=config_overrides\nNodeName={name} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN\n\
         PartitionName=all Nodes=ALL Default=YES MaxTime=5 State=UP OverSubscribe=YES\n"
    )
}
