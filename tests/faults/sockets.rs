//! The sockets of this process, whoever has made them.

use posthaste::Job;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use std::net::{SocketAddr, TcpStream};

/// A socket of TCP, of which this is a second descriptor.
pub struct Socket {
    pub stream: TcpStream,
    pub local: SocketAddr,
    /// None: it listens.
    pub peer: Option<SocketAddr>,
}

/// All of them, as they are now.
pub fn sockets() -> Vec<Socket> {
    let own = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    let numbers = std::fs::read_dir("/proc/self/fd").unwrap().flatten().filter(|entry| {
        // One that is gone meanwhile is none.
        std::fs::read_link(entry.path()).is_ok_and(|to| to.to_string_lossy().starts_with("socket:"))
    });
    let numbers = numbers.map(|entry| entry.file_name().to_string_lossy().parse().unwrap());
    let again = numbers.filter_map(|number: i32| pidfd_getfd(&own, number, PidfdGetfdFlags::empty()).ok());
    let of_tcp = again.filter_map(|descriptor| {
        let stream = TcpStream::from(descriptor);
        // Others have no such address.
        let local = stream.local_addr().ok()?;
        let peer = stream.peer_addr().ok();
        Some(Socket { stream, local, peer })
    });
    of_tcp.collect()
}

/// What a rank has of sockets when it has joined and talked to nobody: that by which it hears of ends is among it.
pub struct Before {
    listens: Vec<SocketAddr>,
    others: Vec<SocketAddr>,
}

impl Before {
    pub fn of(_joined: &Job) -> Before {
        let (listening, connected): (Vec<_>, Vec<_>) =
            sockets().into_iter().partition(|socket| socket.peer.is_none());
        let listens: Vec<_> = listening.iter().map(|socket| socket.local).collect();
        // A peer that was quicker has connected already.
        let others = connected.iter().map(|socket| socket.local).filter(|local| !listens.contains(local));
        Before { others: others.collect(), listens }
    }

    /// The connections with other ranks that were made since, or were accepted before.
    pub fn connections(&self) -> Vec<TcpStream> {
        let with_ranks = sockets().into_iter().filter(|socket| {
            let accepted = self.listens.contains(&socket.local);
            socket.peer.is_some() && (accepted || !self.others.contains(&socket.local))
        });
        with_ranks.map(|socket| socket.stream).collect()
    }
}
