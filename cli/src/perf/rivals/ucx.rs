//! UCX, by its own benchmark.

use super::{is_tcp, output, patience, says, subject, version};
use crate::perf::{Args, Plan, jobs};
use posthaste::launcher::Launch;
use std::net::{Ipv4Addr, TcpListener};

const PROGRAM: &str = "ucx_perftest";

/// Rank 0 serves, rank 1 asks as soon as it can; each stays on its core.
const SCRIPT: &str = r#"
port=$1; near=$2; far=$3; shift 3
if [ "$POSTHASTE_RANK" = 0 ]; then exec ucx_perftest -c "$near" -p "$port" >/dev/null; fi
for wait in 1 2 3 4 5 6 7 8 9 10; do
    sleep 0.2
    said=$(ucx_perftest 127.0.0.1 -c "$far" -p "$port" -f -v "$@" 2>&1) && echo "$said" && exit 0
done
echo "$said" >&2
exit 1
"#;

/// Where the figure is in what it prints.
#[derive(Clone, Copy)]
enum Column {
    /// Microseconds.
    Latency = 1,
    /// Of 2^20 bytes a second.
    Bandwidth = 4,
    /// A second.
    Rate = 6,
}

#[derive(Debug)]
pub struct Ucx {
    pub name: String,
}

impl Ucx {
    pub fn find() -> Result<Ucx, String> {
        if says(PROGRAM, "-h").is_none() {
            return Err(format!("there is no `{PROGRAM}` (Debian: ucx-utils)"));
        }
        let told = says("ucx_info", "-v").unwrap_or_default();
        Ok(Ucx { name: format!("UCX {}", version(&told)).trim_end().to_owned() })
    }

    /// What it comes to for a row, if it has a counterpart.
    pub fn measure(&self, args: &Args, plan: Plan) -> Option<Result<f64, String>> {
        if plan.ranks != 2 || !plan.bench.has_counterparts() {
            return None;
        }
        let (test, column) = match subject(plan) {
            "am_latency" => ("ucp_am_lat", Column::Latency),
            "am_rate" => ("ucp_am_bw", Column::Rate),
            "am_bandwidth" | "long_bandwidth" => ("ucp_am_bw", Column::Bandwidth),
            "put_latency" => ("ucp_put_lat", Column::Latency),
            "put_rate" => ("ucp_put_bw", Column::Rate),
            "get_rate" => ("ucp_get", Column::Rate),
            "put_bandwidth" => ("ucp_put_bw", Column::Bandwidth),
            "get_bandwidth" => ("ucp_get", Column::Bandwidth),
            _ => return None,
        };
        Some(self.run(args, plan, test).and_then(|text| read(&text, column)))
    }

    fn run(&self, args: &Args, plan: Plan, test: &str) -> Result<String, String> {
        // It counts and does not look at the clock: about as many as fit.
        let (each, speed) = if is_tcp(plan) { (8e-6, 3e9) } else { (0.4e-6, 8e9) };
        let times = ((args.seconds / (each + plan.size as f64 / speed)) as u64).max(20);
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|socket| socket.local_addr());
        let port = free.map_err(|error| error.to_string())?.port();
        let [near, far] = jobs::cores();
        let line = [
            "-c".to_owned(),
            SCRIPT.to_owned(),
            "sh".to_owned(),
            port.to_string(),
            near.to_string(),
            far.to_string(),
            "-t".to_owned(),
            test.to_owned(),
            "-s".to_owned(),
            plan.size.to_string(),
            "-n".to_owned(),
            times.to_string(),
            "-w".to_owned(),
            (times / 10 + 1).to_string(),
        ];
        let transports = if is_tcp(plan) { "tcp,self" } else { "posix,self" };
        let launch =
            Launch::program("/bin/sh").args(line).env("UCX_TLS", transports).env("UCX_NET_DEVICES", "lo");
        output(launch, 2, patience(args))
    }
}

/// The last line is a list of numbers.
fn read(text: &str, column: Column) -> Result<f64, String> {
    let line = text.lines().rfind(|line| line.contains(','));
    let field = line.and_then(|line| line.split(',').nth(column as usize));
    let value: Option<f64> = field.and_then(|field| field.trim().parse().ok());
    let value = value.ok_or_else(|| format!("it is not understood: {text}"))?;
    Ok(match column {
        Column::Latency => value,
        Column::Bandwidth => value * f64::from(1 << 20) / 1e9,
        Column::Rate => value / 1e6,
    })
}
