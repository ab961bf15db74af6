//! Which hosts there are, and how they are reached.

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use crate::env::MAX_RANKS;
use crate::error::LaunchError;

/// How hosts are reached by default: without a terminal and without questions. It is told, besides, after how much silence a host
/// is lost ([`Settings::tcp_timeout`](crate::Settings::tcp_timeout), rounded up to a multiple of five seconds).
pub const REMOTE_SHELL: &str = "ssh -T -o BatchMode=yes";
/// How often it asks a silent host in vain; where it would ask once more, the host is lost.
const ASKS: u32 = 4;

/// Hosts, how many ranks each takes, and how an agent is started there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hosts {
    pub(crate) hosts: Vec<Host>,
    /// None: the default one.
    remote_shell: Option<Vec<OsString>>,
    pub(crate) agent: Vec<OsString>,
    pub(crate) interface: Option<String>,
}

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Host {
    pub(crate) name: String,
    pub(crate) slots: u32,
}

impl Hosts {
    /// Reads a file of lines `host [slots=N]`; a host without slots has one. `#` begins a comment. A host that is listed
    /// twice is two nodes, whose ranks do not share memory.
    ///
    /// # Errors
    /// It cannot be read, or a line is something else.
    pub fn read(path: &Path) -> Result<Self, LaunchError> {
        let shown = path.display();
        let text = std::fs::read_to_string(path).map_err(|error| {
            LaunchError::Invalid(format!("the list of hosts {shown} cannot be read: {error}"))
        })?;
        Self::parse(&text).map_err(|problem| LaunchError::Invalid(format!("{shown}, {problem}")))
    }

    /// Reads such lines; the error names the line.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut hosts = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.split('#').next().unwrap_or_default();
            let mut words = line.split_ascii_whitespace();
            let Some(name) = words.next() else { continue };
            let told = |problem: &str| format!("line {number}: {problem}; a line is `host [slots=N]`");
            // It becomes an argument of the remote shell's program, which must not take it for an option.
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:@%[]".contains(&byte);
            if name.starts_with('-') || name.len() > 255 || !name.bytes().all(plain) {
                return Err(told(&format!("`{}` is no host's name", name.escape_debug())));
            }
            let mut slots = 1;
            for word in words {
                let count = word.strip_prefix("slots=").and_then(|count| count.parse().ok());
                match count.filter(|count| (1..=MAX_RANKS).contains(count)) {
                    Some(count) => slots = count,
                    None => return Err(told(&format!("`{}` is not understood", word.escape_debug()))),
                }
            }
            hosts.push(Host { name: name.to_owned(), slots });
        }
        if hosts.is_empty() {
            return Err("there is no host in it".into());
        }
        Ok(Self {
            hosts,
            remote_shell: None,
            agent: ["posthaste", "agent"].map(OsString::from).to_vec(),
            interface: None,
        })
    }

    /// How to reach a host: a program and its arguments, to which the host's name and the agent's command are added.
    /// [`REMOTE_SHELL`] by default. It is by its end that the loss of a host is noticed where no rank notices it.
    #[must_use]
    pub fn remote_shell(mut self, command: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.remote_shell = Some(command.into_iter().map(Into::into).collect());
        self
    }

    /// How to reach a host that is lost after so much silence; zero: never.
    pub(crate) fn remote_shell_with(&self, silence: Duration) -> Vec<OsString> {
        self.remote_shell.clone().unwrap_or_else(|| {
            let interval = silence.as_millis().div_ceil(1000 * u128::from(ASKS + 1));
            let asks = format!("-o ServerAliveInterval={interval} -o ServerAliveCountMax={ASKS}");
            REMOTE_SHELL.split(' ').chain(asks.split(' ')).map(OsString::from).collect()
        })
    }

    /// The command of the agent, which calls [`run_agent`](crate::run_agent); `posthaste agent` by default.
    #[must_use]
    pub fn agent(mut self, command: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.agent = command.into_iter().map(Into::into).collect();
        self
    }

    /// The interface of this host, by name or address, at which the others reach it. By default the one from which packets
    /// go to the first host that is not this one.
    #[must_use]
    pub fn interface(mut self, interface: impl Into<String>) -> Self {
        self.interface = Some(interface.into());
        self
    }

    /// How many ranks all hosts take together.
    pub fn slots(&self) -> u32 {
        self.hosts.iter().fold(0, |sum, host| sum.saturating_add(host.slots))
    }

    /// The node of each rank, in the order of the list, a host filled before the next.
    pub(crate) fn place(&self, ranks: u32) -> Result<Vec<u32>, String> {
        if ranks > self.slots() {
            return Err(format!(
                "{ranks} ranks do not fit on {} hosts with {} slots together: add hosts, or `slots=N` to their lines",
                self.hosts.len(),
                self.slots()
            ));
        }
        let nodes = (0..).zip(&self.hosts).flat_map(|(node, host)| (0..host.slots).map(move |_| node));
        Ok(nodes.take(ranks as usize).collect())
    }
}

impl Host {
    /// As the remote shell is told it: in a list an IPv6 address may have brackets, which `ssh` takes for a part of the name.
    pub(crate) fn destination(&self) -> String {
        let (user, host) = match self.name.rsplit_once('@') {
            Some((user, host)) => (Some(user), host),
            None => (None, &*self.name),
        };
        let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        user.map_or_else(|| address.to_owned(), |user| format!("{user}@{address}"))
    }

    /// Whether it can only be this one.
    pub(crate) fn is_local(&self) -> bool {
        let host = self.name.rsplit('@').next().unwrap_or_default();
        let address = host.trim_start_matches('[').trim_end_matches(']').parse::<std::net::IpAddr>();
        host == "localhost" || address.is_ok_and(|address| address.is_loopback())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_remote_shell_is_told_how_long_silence_may_last() {
        let hosts = Hosts::parse("alpha").unwrap();
        let told = |milliseconds| {
            let command = hosts.remote_shell_with(Duration::from_millis(milliseconds));
            command.into_iter().map(|word| word.into_string().unwrap()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(told(5000), format!("{REMOTE_SHELL} -o ServerAliveInterval=1 -o ServerAliveCountMax=4"));
        for (milliseconds, interval) in [(0, 0), (1, 1), (5000, 1), (5001, 2), (60_000, 12)] {
            assert!(told(milliseconds).contains(&format!("ServerAliveInterval={interval} ")));
        }
        let others = hosts.clone().remote_shell(["rsh", "-n"]);
        assert_eq!(others.remote_shell_with(Duration::from_secs(5)), ["rsh", "-n"]);
    }

    #[test]
    fn the_remote_shell_is_told_an_address_without_brackets() {
        let hosts = Hosts::parse("alpha\nme@beta\n[::1]\nme@[fe80::1%eth0]\n::1\nme@::1").unwrap();
        let told: Vec<String> = hosts.hosts.iter().map(Host::destination).collect();
        assert_eq!(told, ["alpha", "me@beta", "::1", "me@fe80::1%eth0", "::1", "me@::1"]);
    }

    #[test]
    fn lines_are_hosts_and_slots() {
        let text = "# all\n\nalpha slots=2 # two\n  me@beta.example\n[::1]   slots=3\r\n";
        let hosts = Hosts::parse(text).unwrap();
        let listed: Vec<_> = hosts.hosts.iter().map(|host| (&*host.name, host.slots)).collect();
        assert_eq!(listed, [("alpha", 2), ("me@beta.example", 1), ("[::1]", 3)]);
        assert_eq!(hosts.slots(), 6);
        assert_eq!(hosts.place(4).unwrap(), [0, 0, 1, 2]);
        assert!(hosts.place(7).unwrap_err().contains("7 ranks do not fit on 3 hosts with 6 slots"));
        let local: Vec<bool> = hosts.hosts.iter().map(Host::is_local).collect();
        assert_eq!(local, [false, false, true]);
        for (text, told) in [
            ("", "no host"),
            ("a\n-oProxyCommand=x", "line 2: `-oProxyCommand=x` is no host's name"),
            ("a;b", "`a;b` is no host's name"),
            ("a slots=0", "line 1: `slots=0` is not understood"),
            ("a slot=2", "`slot=2`"),
            ("a b", "`b`"),
            ("a slots=4097", "slots=4097"),
        ] {
            let error = Hosts::parse(text).unwrap_err();
            assert!(error.contains(told), "{error}");
        }
    }
}
