//! Pods of an indexed Kubernetes job, one rank each.
//!
//! | variable | value |
//! |---|---|
//! | `JOB_COMPLETION_INDEX` | the rank; set by Kubernetes |
//! | `JOB_COMPLETIONS`, else `WORLD_SIZE` | the number of ranks; Kubernetes does not tell it to the pods: set it in the template to the job's `completions`, to which `parallelism` must be equal |
//! | `MASTER_ADDR`, `MASTER_PORT` | optional: the host of rank 0, such as `sort-0.ranks`, and the port before the one where the ranks meet, else they meet at 17717 |
//! | `HOSTNAME` | else: the pod's host name, `sort-3`; its full name in `/etc/hosts` gives that of rank 0 |
//!
//! For a pod to have a full name, the template's `subdomain` must name a headless service that selects the pods, with
//! `publishNotReadyAddresses` so that ranks that still start are found. `POSTHASTE_RENDEZVOUS` names another place.

use super::Appointment;
use super::error::ForeignError;
use super::torchrun::{self, master, overridden};
use super::values::{Claim, Env, Reader, host_port, is_host, shortened};

pub(super) const LAUNCHER: &str = "Kubernetes";
const RANK: &str = "JOB_COMPLETION_INDEX";
const SIZE: &str = "JOB_COMPLETIONS";
const HOSTNAME: &str = "HOSTNAME";
/// A pod has its network to itself, so that any port will do that is not given out by the kernel.
const PORT: u16 = 17_717;

/// What is known of a rank's pod before looking at its files.
#[derive(Debug)]
pub(super) enum Found {
    Place(Appointment),
    /// The place is to be found from the pod's own name.
    Pod {
        claim: Claim,
        hostname: String,
    },
}

pub(super) fn detect(env: Env<'_>) -> Result<Option<Found>, ForeignError> {
    let remedy = "set JOB_COMPLETIONS in the pod template to the job's `completions`, or empty \
                  JOB_COMPLETION_INDEX for a program that runs without a job";
    let reader = Reader { env, launcher: LAUNCHER, remedy };
    let Some(present) = reader.first_set(&[RANK]) else { return Ok(None) };
    let size_name = if reader.is_set(SIZE) || !reader.is_set(torchrun::SIZE) { SIZE } else { torchrun::SIZE };
    let claim = reader.claim(RANK, size_name, &present)?;
    let place = match overridden(&reader)? {
        Some(place) => Some(place),
        None => master(&reader, Some(PORT))?,
    };
    if let Some(place) = place {
        return Ok(Some(Found::Place(Appointment::new(LAUNCHER, claim, place))));
    }
    if claim.size == 1 {
        return Ok(Some(Found::Place(Appointment::new(LAUNCHER, claim, host_port("127.0.0.1", PORT)))));
    }
    let hostname = reader.get(HOSTNAME).ok_or_else(|| reader.partial(&present, HOSTNAME))?;
    if index_of(&hostname, claim.rank).is_none() {
        return Err(no_place(format!(
            "HOSTNAME is `{}`, which does not end in `-{}` as the name of an indexed job's pod does; {REMEDY}",
            shortened(&hostname),
            claim.rank
        )));
    }
    Ok(Some(Found::Pod { claim, hostname }))
}

/// Finds rank 0's full name from this pod's, which Kubernetes writes into `/etc/hosts`.
pub(super) fn appointment(claim: Claim, hostname: &str, hosts: &str) -> Result<Appointment, ForeignError> {
    let own = hosts.lines().filter_map(|line| {
        let line = line.split('#').next().unwrap_or_default();
        line.split_ascii_whitespace().skip(1).find(|name| {
            name.strip_prefix(hostname).is_some_and(|domain| domain.starts_with('.') && is_host(domain))
        })
    });
    let own = own.map(|name| &name[hostname.len()..]).next();
    let (Some(domain), Some(job)) = (own, index_of(hostname, claim.rank)) else {
        return Err(no_place(format!(
            "the pod {} has no full name in /etc/hosts; {REMEDY}",
            shortened(hostname)
        )));
    };
    Ok(Appointment::new(LAUNCHER, claim, host_port(&format!("{job}-0{domain}"), PORT)))
}

const REMEDY: &str =
    "let the template's `subdomain` name a headless service, or set MASTER_ADDR to rank 0's name";

/// The job's name in a pod's host name, which is that and the index.
fn index_of(hostname: &str, rank: u32) -> Option<&str> {
    let (job, index) = hostname.rsplit_once('-')?;
    (index == rank.to_string() && !job.is_empty() && is_host(job)).then_some(job)
}

fn no_place(problem: String) -> ForeignError {
    ForeignError::NoPlace { launcher: LAUNCHER, problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLAIM: Claim = Claim { rank: 3, size: 4 };

    #[test]
    fn the_full_name_of_rank_0_follows_from_ones_own() {
        let hosts = "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1 ip6-localhost\n\
                     10.1.0.7\tsort-3.ranks.prod.svc.cluster.local\tsort-3\n";
        let appointment = appointment(CLAIM, "sort-3", hosts).unwrap();
        assert_eq!(appointment.place, "sort-0.ranks.prod.svc.cluster.local:17717");
        assert!(!appointment.serve);
    }

    #[test]
    fn a_pod_without_a_service_is_told_what_to_do() {
        for hosts in
            ["", "10.1.0.7 sort-3", "# 10.1.0.7 sort-3.ranks", "10.1.0.7 sort-3.ra`nks", "sort-3.ranks"]
        {
            let error = appointment(CLAIM, "sort-3", hosts).unwrap_err().to_string();
            assert!(error.contains("headless service") && error.contains("sort-3"), "{error}");
        }
    }
}
