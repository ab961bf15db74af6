//! An arena and doorbells made by one of the ranks, for ranks that no launcher of ours has started.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;

use crate::broker::Broker;
use crate::broker_client::fetch_from_broker;
use crate::env::JobEnv;
use crate::error::BrokerError;
use crate::fds::HostFds;
use crate::inherited::InheritedFds;
use crate::key::{JobId, JobKey};
use crate::settings::Settings;

/// Hands an arena and doorbells out to the ranks of this host, over an abstract socket with a random name.
///
/// It is served by a thread, which ends with this value.
#[derive(Debug)]
pub struct HostBroker {
    broker: Broker,
}

impl HostBroker {
    /// Makes an arena of `arena_bytes` and a doorbell for each of `local` ranks of this host, takes what belongs to the
    /// first of them, and offers the rest.
    ///
    /// # Errors
    /// As [`HostFds::new`], or the socket or its thread cannot be had.
    pub fn start(
        job: JobId,
        key: &JobKey,
        local: u32,
        arena_bytes: u64,
    ) -> Result<(HostBroker, InheritedFds), BrokerError> {
        let system = |what: &'static str| move |source: io::Error| BrokerError::System { what, source };
        let mut fds = HostFds::new(local, arena_bytes)?;
        let own = fds.local(0).map_err(system("share the arena"))?;
        let offers: std::collections::BTreeMap<u32, OwnedFd> =
            (1..local).filter_map(|rank| Some((rank, fds.take_bell(rank)?))).collect();
        let env = env_of(job, key, 0, local, None);
        let broker = Broker::start(&env, fds.shared().clone(), offers).map_err(system("start the broker"))?;
        Ok((HostBroker { broker }, own))
    }

    /// What [`fetch`](Self::fetch) needs to know.
    #[must_use]
    pub fn name(&self) -> &str {
        self.broker.name()
    }

    /// Fetches what belongs to the rank with that number among the `local` ones of this host. Blocks for up to ten
    /// seconds.
    ///
    /// # Errors
    /// As [`fetch_from_broker`].
    pub fn fetch(
        name: &str,
        job: JobId,
        key: &JobKey,
        rank: u32,
        local: u32,
    ) -> Result<InheritedFds, BrokerError> {
        fetch_from_broker(&env_of(job, key, rank, local, Some(name.to_owned())))
    }
}

/// To the broker the ranks of one host are a job of their own.
fn env_of(job: JobId, key: &JobKey, rank: u32, size: u32, broker: Option<String>) -> JobEnv {
    JobEnv {
        job,
        rank,
        size,
        contexts: 1,
        clients: 1,
        key: key.clone(),
        fds: None,
        broker,
        nodes: vec![0; size as usize],
        rendezvous: None,
        restart: false,
        lifeline: None,
        settings: Settings::default(),
    }
}

/// What is the same for two processes only if they can share memory and watch each other: kernel, and the namespaces in
/// which processes, sockets, files and users are named. None where the system does not tell; such a process shares with
/// nobody.
#[must_use]
pub fn host_identity() -> Option<String> {
    let mut identity = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?.trim().to_owned();
    for namespace in ["pid", "net", "mnt", "user"] {
        let link = fs::read_link(format!("/proc/self/ns/{namespace}")).ok()?;
        identity.push(' ');
        identity.push_str(&link.to_string_lossy());
    }
    Some(identity)
}
