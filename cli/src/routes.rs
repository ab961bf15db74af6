//! `posthaste info --job`: in a job, by which device each of its ranks reaches each other.

use crate::run::fail;
use crate::say::{complain, say};
use comfy_table::{Table, presets};
use posthaste::{Error, Job, JoinError, Reduce};
use serde_json::json;

/// How many runs of ranks a line of the table has at most.
const RUNS: usize = 64;

/// Prints the table in rank 0. Exit code 0; 1 if the job cannot be joined or ends, 2 outside of a job.
pub fn main(as_json: bool) -> i32 {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error, 1),
    };
    match runtime.block_on(show(as_json)) {
        Ok(()) => 0,
        Err(Error::Join(JoinError::NoJob)) => {
            complain(
                "this process is not part of a job: start it as one, with \
                 `posthaste run -n 4 -- posthaste info --job` or by your launcher",
            );
            2
        }
        Err(error @ Error::Join(JoinError::Environment(_))) => fail(&error, 2),
        Err(error) => fail(&error, 1),
    }
}

/// What a rank says of itself.
#[derive(Debug, PartialEq)]
struct Said {
    host: String,
    node: u32,
    /// By which device it reaches the ranks, from the first one: equal ones that follow each other are told as one.
    runs: Vec<(usize, String)>,
}

async fn show(as_json: bool) -> Result<(), Error> {
    let job = posthaste::join().await?;
    let told = told(&job).to_bytes();
    // All say as much as the one with most to say: a few bytes a run, of which there are as many as ranks at most.
    let len = job.world().all_reduce_one(told.len() as u64, &Reduce::max()).await? as usize;
    let mut padded = told;
    padded.resize(len, 0);
    let all = job.world().gather(0, &padded).await?;
    if let Some(all) = all {
        let mut table = head();
        for (rank, told) in all.chunks(len).enumerate() {
            let said = Said::from_bytes(told);
            if as_json {
                let devices = said.runs.iter().flat_map(|(ranks, name)| std::iter::repeat_n(name, *ranks));
                let devices: Vec<&String> = devices.collect();
                say(json!({ "rank": rank, "host": said.host, "node": said.node, "devices": devices }));
            } else {
                let routes = routes(&said.runs);
                table.add_row([rank.to_string(), said.host, said.node.to_string(), routes]);
            }
        }
        if !as_json {
            say(table);
        }
    }
    job.barrier().await?;
    job.leave().await
}

fn told(job: &Job) -> Said {
    let node = job.messager().sysdep().personality().nodes.get(job.rank().index()).copied().unwrap_or(0);
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    Said { host, node, runs: runs(job.ranks().map(|rank| job.caps_of(rank).name)) }
}

/// How often each name comes before another one does.
fn runs<'n>(names: impl Iterator<Item = &'n str>) -> Vec<(usize, String)> {
    let mut runs: Vec<(usize, String)> = Vec::new();
    for name in names {
        match runs.last_mut() {
            Some((ranks, last)) if last == name => *ranks += 1,
            _ => runs.push((1, name.to_owned())),
        }
    }
    runs
}

impl Said {
    /// Node and number of runs; host and names of devices, each after its length; of each run the ranks and which name.
    fn to_bytes(&self) -> Vec<u8> {
        let mut names: Vec<&str> = self.runs.iter().map(|(_, name)| name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        let mut bytes = [self.node, self.runs.len() as u32].map(u32::to_le_bytes).concat();
        bytes.push(names.len() as u8);
        for name in std::iter::once(self.host.as_str()).chain(names.iter().copied()) {
            let name = &name.as_bytes()[..name.len().min(u8::MAX.into())];
            bytes.push(name.len() as u8);
            bytes.extend(name);
        }
        for (ranks, name) in &self.runs {
            bytes.extend((*ranks as u16).to_le_bytes());
            bytes.push(names.partition_point(|before| *before < name.as_str()) as u8);
        }
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Said {
        let mut rest = bytes;
        let mut next = |len: usize| rest.split_off(..len.min(rest.len())).unwrap_or_default();
        let word = |bytes: &[u8]| bytes.first_chunk().map_or(0, |word| u32::from_le_bytes(*word));
        let (node, count) = (word(next(4)), word(next(4)));
        let byte = |bytes: &[u8]| usize::from(bytes.first().copied().unwrap_or(0));
        let mut names: Vec<String> = Vec::new();
        for _ in 0..=byte(next(1)) {
            let len = byte(next(1));
            names.push(String::from_utf8_lossy(next(len)).into_owned());
        }
        let run = |_| {
            let ranks = next(2).first_chunk().map_or(0, |ranks| u16::from_le_bytes(*ranks));
            (usize::from(ranks), names.get(1 + byte(next(1))).cloned().unwrap_or_default())
        };
        let runs = (0..count.min(bytes.len() as u32 / 3)).map(run).collect();
        Said { host: names.swap_remove(0), node, runs }
    }
}

fn head() -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY).set_header(["rank", "host", "node", "reaches"]);
    table
}

/// `0-3 shm, 4-7 tcp`
fn routes(runs: &[(usize, String)]) -> String {
    let mut first = 0;
    let mut told = |(ranks, name): &(usize, String)| {
        let last = first + ranks - 1;
        let run = if first == last { first.to_string() } else { format!("{first}-{last}") };
        first += ranks;
        format!("{run} {name}")
    };
    let mut runs_told: Vec<String> = runs.iter().take(RUNS).map(&mut told).collect();
    if runs.len() > RUNS {
        runs_told.push(format!("and {} more (--json tells all)", runs.len() - RUNS));
    }
    runs_told.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs_of(names: &[&str]) -> Vec<(usize, String)> {
        runs(names.iter().copied())
    }

    #[test]
    fn ranks_with_one_device_are_told_together() {
        assert_eq!(routes(&runs_of(&["shm"; 4])), "0-3 shm");
        assert_eq!(routes(&runs_of(&["tcp", "shm", "shm", "tcp"])), "0 tcp, 1-2 shm, 3 tcp");
        assert_eq!(routes(&[]), "");
        let told = routes(&runs_of(&["shm", "tcp"].repeat(2048)));
        assert!(told.ends_with("62 shm, 63 tcp, and 4032 more (--json tells all)"), "{told}");
    }

    #[test]
    fn what_a_rank_tells_is_heard_and_short() {
        for names in [vec!["tcp", "shm", "shm", "tcp"], ["shm", "tcp"].repeat(2048), vec!["shm"; 4096]] {
            let said = Said { host: "träger".to_owned(), node: 70_000, runs: runs_of(&names) };
            let mut bytes = said.to_bytes();
            assert!(bytes.len() < 32 + 3 * said.runs.len(), "{}", bytes.len());
            bytes.resize(bytes.len() + 100, 0);
            assert_eq!(Said::from_bytes(&bytes), said);
        }
        // Whatever else comes is no reason to panic.
        let said = Said::from_bytes(&[1, 0, 0, 0, 2, 0, 0, 0, 1, 200, 65]);
        assert_eq!((said.host.as_str(), said.node, said.runs.len()), ("A", 1, 2));
    }
}
