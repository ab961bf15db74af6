//! The launcher of a job on several hosts.

use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::error::LaunchError;
use crate::hosts::file::{Host, Hosts};
use crate::hosts::link::{Event, Link, Printing};
use crate::hosts::order::{Order, decode_end, decode_failure, decode_pid};
use crate::hosts::wire::{Frame, Kind};
use crate::interface::{address_facing, address_of};
use crate::job::lock;
use crate::key::{JobId, JobKey};
use crate::outcome::{Cause, Failure, JobOutcome, RankEnd};
use crate::output::Output;
use crate::placement::{Part, Placement};
use crate::rendezvous::{Obituary, Rendezvous, listen};
use crate::settings::Settings;
use crate::signals::{self, Forwarded, Target};
use crate::spawn::{Checked, Launch, system};
use crate::vars::{KEY_FILE, TCP_INTERFACE, TCP_PORTS};

/// How much longer than their grace ranks may take to end before their agents are given up.
const SLACK: Duration = Duration::from_secs(5);

impl Launch {
    /// Runs the job on other hosts, and waits for it: each is filled with ranks before the next, and is a node of its own.
    /// The ranks run the program in the directory of this process, and find the same settings set. Rank 0 reads nothing.
    ///
    /// The first failure ends the job on all hosts, as does the loss of one; a rank that may be started again
    /// ([`restart`](Self::restart)) is so on its own host. If this process ends, so do all ranks; if its host vanishes, as soon
    /// as the remote shells' servers notice.
    ///
    /// # Errors
    /// The description is wrong, there is no address at which the hosts reach this one, or no remote shell can be
    /// started. What happens on the hosts is told by the outcome.
    pub fn run_on(mut self, hosts: &Hosts) -> Result<JobOutcome, LaunchError> {
        if self.nodes > 1 || !self.delays.is_empty() {
            let text = "on listed hosts each host is a node, and all ranks start at once";
            return Err(LaunchError::Invalid(text.into()));
        }
        if [self.stdout, self.stderr].contains(&Output::Capture) {
            return Err(LaunchError::Invalid("what ranks print on other hosts cannot be captured".into()));
        }
        let placement = hosts.place(self.ranks).map(Placement::of_nodes);
        let Checked { arena_bytes, placement, settings, .. } = self.check(placement)?;
        signals::remember_children().map_err(system("see how remote shells end"))?;
        let job = JobId::random().map_err(system("draw the job's identity"))?;
        let key = JobKey::random().map_err(system("draw the job's key"))?;
        let used: Vec<u32> = placement.counts().into_iter().map(|(node, _)| node).collect();
        let listed = used.iter().map(|node| &hosts.hosts[*node as usize]);
        let address =
            own_address(listed, hosts.interface.as_deref(), &settings).map_err(LaunchError::Invalid)?;
        // Of each agent the pipes to and from its remote shell.
        Rendezvous::check_room_beside(self.ranks, 3 * used.len() as u64)
            .map_err(|error| LaunchError::Invalid(error.to_string()))?;
        let listener = listen(address, settings.tcp_ports.clone())
            .map_err(|error| LaunchError::Invalid(cannot_listen(address, &settings, &error)))?;
        let place = Rendezvous::serve(listener, self.ranks, key.clone(), Some(job), settings.tcp_timeout)
            .map_err(system("serve a place where the ranks meet"))?;
        let part = |node| Part {
            job,
            key: key.clone(),
            nodes: placement.nodes().to_vec(),
            node,
            rendezvous: place.address().to_string(),
        };
        let (sender, events) = channel();
        let target: Arc<dyn Target> = Arc::new(Taker(Mutex::new(sender.clone())));
        if self.forward_signals {
            signals::forward_to(Arc::downgrade(&target)).map_err(system("take over the signals"))?;
        }
        let printing = Printing { label: self.label, out: self.stdout, err: self.stderr };
        let mut links = Vec::new();
        for node in &used {
            let order = self.order(part(*node), arena_bytes)?.encode();
            let link = Link::start(hosts, settings.tcp_timeout, *node, order, printing, sender.clone());
            links.push((*node, link.map_err(system("start the remote shell"))?));
        }
        drop(sender);
        let now = Instant::now();
        let mut head = Head {
            ends: vec![RankEnd::NotStarted; self.ranks as usize],
            nodes: placement.nodes().to_vec(),
            links,
            obituary: place.obituary(),
            first_failure: None,
            ended_early: false,
            told: None,
            keep_going: self.keep_going,
            grace: self.grace,
            began: now,
            start_by: now + settings.join_timeout,
            deadline: None,
        };
        head.run(&events);
        drop(target);
        for (_, link) in &mut head.links {
            link.finish();
        }
        let Head { ends: ranks, first_failure, ended_early, told, .. } = head;
        Ok(JobOutcome { ranks, first_failure, ended_early, told })
    }

    /// What one agent is told.
    fn order(&self, part: Part, arena_bytes: u64) -> Result<Order, LaunchError> {
        let directory = std::env::current_dir().map_err(system("tell the current directory"))?;
        // A file of this host is of no use elsewhere, and the key is in the order.
        let settings = self.inherited_settings().filter(|(name, _)| name != KEY_FILE);
        let settings = settings.map(|(name, value)| (name.into(), value.into()));
        Ok(Order {
            part,
            contexts: self.contexts,
            clients: self.clients,
            arena_bytes,
            bind: self.bind,
            keep_going: self.keep_going,
            restarts: self.restarts.unwrap_or(0),
            grace: self.grace,
            directory,
            program: self.program.clone(),
            args: self.args.clone(),
            envs: settings.chain(self.envs.iter().cloned()).collect(),
        })
    }
}

/// Takes the signals that come to this process.
struct Taker(Mutex<Sender<Event>>);

impl Target for Taker {
    fn forward(&self, signal: Forwarded) -> bool {
        lock(&self.0).send(Event::Signal(signal)).is_ok()
    }
}

/// The address of this host at which the others reach it.
fn own_address<'a>(
    hosts: impl Iterator<Item = &'a Host>,
    interface: Option<&str>,
    settings: &Settings,
) -> Result<IpAddr, String> {
    if let Some(wanted) = interface.or(settings.tcp_interface.as_deref()) {
        let by = if interface.is_some() { "the interface given for the hosts" } else { TCP_INTERFACE };
        return address_of(wanted).map_err(|error| format!("{by}: {error}"));
    }
    let advice = format!("name the interface at which the hosts reach this one, as by {TCP_INTERFACE}");
    for far in hosts.into_iter().filter(|host| !host.is_local()) {
        let name = far.name.rsplit('@').next().unwrap_or_default();
        let name = name.trim_start_matches('[').trim_end_matches(']');
        let found =
            (name, 22).to_socket_addrs().map_err(|error| format!("host {name}: {error}; {advice}"))?;
        let facing = found.into_iter().find_map(|place| address_facing(place).ok());
        let facing = facing.ok_or_else(|| format!("no interface leads to host {name}; {advice}"))?;
        // This host by its own name, which others do not take for themselves.
        if !facing.is_loopback() {
            return Ok(facing);
        }
    }
    Ok(Ipv4Addr::LOCALHOST.into())
}

/// Why the ranks cannot meet at that address, and what to set otherwise.
fn cannot_listen(address: IpAddr, settings: &Settings, error: &std::io::Error) -> String {
    match &settings.tcp_ports {
        Some(ports) => {
            let (first, last) = (ports.start(), ports.end());
            format!(
                "no port of {TCP_PORTS} ({first}-{last}) can be had at {address}, where the ranks would meet: {error}"
            )
        }
        None => format!("the ranks cannot meet at {address}: {error}; {TCP_INTERFACE} names another address"),
    }
}

/// A job on several hosts while it runs.
struct Head {
    ends: Vec<RankEnd>,
    nodes: Vec<u32>,
    links: Vec<(u32, Link)>,
    /// Hears of the ends of the ranks.
    obituary: Obituary,
    first_failure: Option<Failure>,
    ended_early: bool,
    /// This launcher was told to end before a rank had failed.
    told: Option<i32>,
    keep_going: bool,
    grace: Duration,
    began: Instant,
    /// When agents that have started nothing are given up.
    start_by: Instant,
    /// When agents that were told to end are given up.
    deadline: Option<Instant>,
}

impl Head {
    fn run(&mut self, events: &Receiver<Event>) {
        while self.links.iter().any(|(_, link)| !link.over) {
            let starting = self.links.iter().any(|(_, link)| !link.started && !link.over);
            let next = starting.then_some(self.start_by).into_iter().chain(self.deadline).min();
            let event = match next {
                None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(next) => events.recv_timeout(next.saturating_duration_since(Instant::now())),
            };
            match event {
                Ok(Event::Said(node, frame)) => self.hear(node, &frame),
                Ok(Event::Over(node, why)) => self.lost(node, &why),
                Ok(Event::Signal(signal)) => self.pass_on(signal.signal),
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => self.give_up(Instant::now()),
            }
        }
    }

    fn hear(&mut self, node: u32, frame: &Frame) {
        let here = |rank: u32| self.nodes.get(rank as usize) == Some(&node);
        match frame.kind {
            Kind::Started => self.with(node, Link::starts),
            Kind::Failed if here(frame.number) => match decode_failure(&frame.body) {
                Some((cause, pid)) => self.fail(frame.number, pid, cause),
                None => self.lost(node, "its agent said something that is not understood"),
            },
            Kind::Reaped if here(frame.number) => match decode_pid(&frame.body) {
                Some(pid) => self.obituary.ended(frame.number, pid),
                None => self.lost(node, "its agent said something that is not understood"),
            },
            Kind::Ended if here(frame.number) => match decode_end(&frame.body) {
                Some(end) => self.ends[frame.number as usize] = end,
                None => self.lost(node, "its agent said something that is not understood"),
            },
            Kind::Done => {
                // Whether ranks of it still ran when the job was ended.
                self.ended_early |= frame.body == [1];
                self.with(node, |link| link.over = true);
            }
            Kind::Refused => {
                let problem = String::from_utf8_lossy(&frame.body).escape_debug().to_string();
                let problem = format!("host {}: {problem}", self.host(node));
                self.with(node, |link| link.over = true);
                self.fail(self.first_of(node), None, Cause::NotStarted(problem));
            }
            _ => self.lost(node, "its agent said something that is not understood"),
        }
    }

    /// An agent is gone.
    fn lost(&mut self, node: u32, why: &str) {
        let host = self.host(node);
        let Some((_, link)) = self.links.iter_mut().find(|(other, link)| *other == node && !link.over) else {
            return;
        };
        link.over = true;
        let started = link.started;
        let ended = link.finish().map(|status| format!(" ({status})")).unwrap_or_default();
        let why = format!("host {host}: {why}{ended}");
        if started {
            for (end, _) in self.ends.iter_mut().zip(&self.nodes).filter(|(_, other)| **other == node) {
                *end = RankEnd::Lost;
            }
        }
        let cause = if started { Cause::HostLost(why) } else { Cause::NotStarted(why) };
        self.fail(self.first_of(node), None, cause);
    }

    /// Notes a failure, and ends the job if it is the first.
    fn fail(&mut self, rank: u32, pid: Option<u32>, cause: Cause) {
        if self.first_failure.is_some() {
            return;
        }
        self.first_failure =
            Some(Failure { rank, pid, cause, after: self.began.elapsed(), quit_before: None });
        if self.keep_going {
            return;
        }
        self.end(Signal::TERM);
    }

    /// Passes a signal to all ranks; some of them end the job.
    fn pass_on(&mut self, signal: Signal) {
        if [Signal::INT, Signal::TERM, Signal::HUP].contains(&signal) {
            if self.first_failure.is_none() {
                self.told.get_or_insert(signal.as_raw());
            }
            self.end(signal);
        } else {
            self.links.iter_mut().for_each(|(_, link)| link.pass_on(signal));
        }
    }

    /// Ends all ranks, and their agents if that takes too long.
    fn end(&mut self, signal: Signal) {
        for (node, link) in self.links.iter_mut().filter(|(_, link)| !link.over) {
            if link.started {
                link.signal(signal);
                continue;
            }
            link.over = true;
            link.kill();
            self.ended_early = true;
            // Ranks that were never there cannot tell that they were ended.
            let rank = self.nodes.iter().position(|other| other == node).unwrap_or_default() as u32;
            let after = self.began.elapsed();
            let cause = Cause::Signal(signal.as_raw());
            self.first_failure.get_or_insert(Failure { rank, pid: None, cause, after, quit_before: None });
        }
        self.deadline.get_or_insert_with(|| Instant::now() + self.grace + SLACK);
    }

    /// Gives up agents that do not do what they should in time.
    fn give_up(&mut self, now: Instant) {
        let ending = self.deadline.is_some_and(|deadline| deadline <= now);
        let starting = self.start_by <= now;
        let waited = self.start_by.duration_since(self.began).as_secs();
        let late =
            self.links.iter_mut().filter(|(_, link)| !link.over && (ending || starting && !link.started));
        let late: Vec<u32> = late.map(|(node, _)| *node).collect();
        for node in late {
            self.with(node, Link::kill);
            let why = match ending {
                true => "its agent did not end its ranks".to_owned(),
                false => format!("no agent has started ranks within {waited} s; see POSTHASTE_JOIN_TIMEOUT"),
            };
            self.lost(node, &why);
        }
    }

    fn with(&mut self, node: u32, act: impl FnOnce(&mut Link)) {
        if let Some((_, link)) = self.links.iter_mut().find(|(other, _)| *other == node) {
            act(link);
        }
    }

    fn host(&self, node: u32) -> String {
        let link = self.links.iter().find(|(other, _)| *other == node);
        link.map(|(_, link)| link.host.clone()).unwrap_or_default()
    }

    fn first_of(&self, node: u32) -> u32 {
        self.nodes.iter().position(|other| *other == node).unwrap_or_default() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::SocketAddr;

    #[test]
    fn the_others_reach_this_host_though_it_is_listed_first_by_its_own_name() {
        let own = Hosts::parse("127.0.1.1\nlocalhost\n").expect("two hosts").hosts;
        let mut named = own.clone();
        // A name that this host takes for itself.
        named[0].name = "LOCALHOST".into();
        assert!(!named[0].is_local(), "it is not seen by the name alone");
        let address = |hosts: &[Host]| own_address(hosts.iter(), None, &Settings::default());
        assert_eq!(address(&own), Ok(Ipv4Addr::LOCALHOST.into()));
        assert_eq!(address(&named), Ok(Ipv4Addr::LOCALHOST.into()));
        named.extend(Hosts::parse("192.0.2.1").expect("a host").hosts);
        match address_facing(SocketAddr::from(([192, 0, 2, 1], 22))) {
            Ok(facing) => assert_eq!(address(&named), Ok(facing)),
            // No network leads anywhere.
            Err(_) => assert!(address(&named).unwrap_err().contains("192.0.2.1")),
        }
    }
}
