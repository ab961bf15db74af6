//! Pods of an indexed Kubernetes job, as far as a rank sees of them: its index, its host's name, and a file of names.

use crate::{KEY, all_joined, be_a_rank, command, ended, port, started_by};
use std::process::{Command, Stdio};

/// Set within a network of the test's own.
const APART: &str = "POSTHASTE_TEST_APART";
const SIZE: u32 = 3;
/// Of the host there.
const ADDRESS: &str = "10.213.9.1";

fn pod(test: &str, rank: u32) -> Command {
    let mut pod = command(test);
    pod.env("POSTHASTE_KEY", KEY).env("JOB_COMPLETION_INDEX", rank.to_string());
    pod.env("KUBERNETES_SERVICE_HOST", "10.96.0.1");
    pod
}

/// Each has a mount namespace of its own, as containers do, and there a file that says where its service's names lead: to
/// this host. They meet where all pods do, for which a network of their own is made.
#[test]
fn pods_of_a_headless_service_are_a_job() {
    be_a_rank();
    let test = "kubernetes::pods_of_a_headless_service_are_a_job";
    if std::env::var_os(APART).is_some() {
        return pods_of_a_service(test);
    }
    let script = format!("ip link set lo up && ip address add {ADDRESS}/32 dev lo && exec \"$0\" \"$@\"");
    let apart = ["--net", "--mount", "sh", "-c", &script];
    let possible = Command::new("unshare").args(apart).arg("true").output();
    if !possible.is_ok_and(|output| output.status.success()) {
        super::slurm::skipped(test, "this machine lets nobody make namespaces");
        return;
    }
    let own = std::env::current_exe().unwrap();
    let mut run = Command::new("unshare");
    run.args(apart).arg(own).args([test, "--exact", "--nocapture"]).env(APART, "1").stdin(Stdio::null());
    let output = run.output().unwrap();
    assert!(output.status.success(), "{}", crate::text(&output));
}

fn pods_of_a_service(test: &str) {
    let folder = tempfile::TempDir::new().unwrap();
    let children = (0..SIZE).rev().map(|rank| {
        let name = |of: u32| format!("{ADDRESS}\tsort-{of}.ranks.prod.svc.cluster.local\tsort-{of}\n");
        // Its own name comes from Kubernetes; that of rank 0 would be asked of the cluster's name service.
        let hosts = folder.path().join(format!("hosts-{rank}"));
        std::fs::write(&hosts, format!("# Kubernetes-managed hosts file.\n{}{}", name(rank), name(0)))
            .unwrap();
        let mut rank_of = pod(test, rank);
        rank_of.env("JOB_COMPLETIONS", SIZE.to_string()).env("HOSTNAME", format!("sort-{rank}"));
        let bind = "mount --bind \"$0\" /etc/hosts && exec \"$@\"";
        let arguments = ["--mount".as_ref(), "sh".as_ref(), "-c".as_ref(), bind.as_ref(), hosts.as_os_str()];
        started_by("unshare", &arguments, &rank_of).spawn().unwrap()
    });
    let mut outputs = ended(children.collect());
    outputs.reverse();
    all_joined(&outputs, &["shm,tcp,tcp", "tcp,shm,tcp", "tcp,tcp,shm"]);
}

#[test]
fn pods_with_a_master_are_a_job() {
    be_a_rank();
    let test = "kubernetes::pods_with_a_master_are_a_job";
    let port = port();
    let children = (0..SIZE).rev().map(|rank| {
        let mut pod = pod(test, rank);
        // As the templates of torch's jobs have it.
        pod.env("WORLD_SIZE", SIZE.to_string());
        pod.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        pod.spawn().unwrap()
    });
    let mut outputs = ended(children.collect());
    outputs.reverse();
    all_joined(&outputs, &["shm,shm,shm"; SIZE as usize]);
}
