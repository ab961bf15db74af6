//! `posthaste info --job`: in a job, by which device each of its ranks reaches each other.

use crate::run::fail;
use crate::say::{complain, say};
use comfy_table::{Table, presets};
use posthaste::{Error, Job, JoinError, Rank};
use serde_json::json;

/// Bytes in which a rank tells a name.
const NAME: usize = 64;

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
        Err(error) => fail(&error, 1),
    }
}

/// What a rank says of itself.
struct Said {
    host: String,
    node: u32,
    devices: Vec<String>,
}

async fn show(as_json: bool) -> Result<(), Error> {
    let job = posthaste::join().await?;
    let blobs = job.all_gather(&told(&job)).await?;
    if job.rank() == Rank(0) {
        let all: Vec<Said> = blobs.iter().map(|blob| heard(blob)).collect();
        if as_json {
            for (rank, said) in all.iter().enumerate() {
                let line = json!({
                    "rank": rank, "host": said.host, "node": said.node, "devices": said.devices,
                });
                say(line);
            }
        } else {
            say(table(&all));
        }
    }
    job.barrier().await?;
    job.leave().await
}

fn told(job: &Job) -> Vec<u8> {
    let node = job.messager().sysdep().personality().nodes.get(job.rank().index()).copied().unwrap_or(0);
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let names = job.ranks().map(|rank| job.caps_of(rank).name.to_owned());
    let mut blob = node.to_le_bytes().to_vec();
    for name in std::iter::once(host).chain(names) {
        let mut field = [0; NAME];
        for (to, from) in field.iter_mut().zip(name.bytes()) {
            *to = from;
        }
        blob.extend(field);
    }
    blob
}

fn heard(blob: &[u8]) -> Said {
    let (node, names) = blob.split_first_chunk::<4>().unwrap_or((&[0; 4], &[]));
    let mut names = names
        .chunks(NAME)
        .map(|field| String::from_utf8_lossy(field).trim_end_matches(['\0', '\u{fffd}']).to_owned());
    Said { node: u32::from_le_bytes(*node), host: names.next().unwrap_or_default(), devices: names.collect() }
}

fn table(all: &[Said]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY).set_header(["rank", "host", "node", "reaches"]);
    for (rank, said) in all.iter().enumerate() {
        table.add_row([rank.to_string(), said.host.clone(), said.node.to_string(), routes(&said.devices)]);
    }
    table
}

/// `0-3 shm, 4-7 tcp`
fn routes(devices: &[String]) -> String {
    let mut first = 0;
    let runs = devices.chunk_by(|one, next| one == next).map(|run| {
        let last = first + run.len() - 1;
        let ranks = if first == last { first.to_string() } else { format!("{first}-{last}") };
        first += run.len();
        format!("{ranks} {}", run[0])
    });
    runs.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_with_one_device_are_told_together() {
        let devices = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(routes(&devices(&["shm"; 4])), "0-3 shm");
        assert_eq!(routes(&devices(&["tcp", "shm", "shm", "tcp"])), "0 tcp, 1-2 shm, 3 tcp");
        assert_eq!(routes(&[]), "");
    }
}
