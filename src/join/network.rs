//! Where this rank listens, and its devices over TCP.

use crate::error::JoinError;
use posthaste_core::{ClientId, Device, JobShape, Rank};
use posthaste_launch::{JobId, JobKey, Settings, TcpMode};
use posthaste_tcp::{AddressBook, Memory, Mode, PeerAddress, TcpConfig, TcpDevice, Times};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;

/// Who else is in the job, as far as it says where to listen.
#[derive(Clone, Debug)]
pub(crate) enum Whereabouts {
    /// All ranks are on this host.
    OneHost,
    /// Others come from elsewhere; this address can be reached from here, and so can this rank from there.
    Beyond(SocketAddr),
    /// Others come from elsewhere.
    Anywhere,
}

/// The address that this rank listens on.
pub(crate) fn own_address(settings: &Settings, whereabouts: &Whereabouts) -> Result<IpAddr, JoinError> {
    if let Some(wanted) = &settings.tcp_interface {
        return address_of(wanted);
    }
    match whereabouts {
        Whereabouts::OneHost => Ok(Ipv4Addr::LOCALHOST.into()),
        Whereabouts::Beyond(place) => facing(*place),
        // An address reserved for documentation: nothing is sent, the kernel only says by which way it would go.
        Whereabouts::Anywhere => facing(SocketAddr::new(Ipv4Addr::new(192, 0, 2, 1).into(), 9)),
    }
}

/// The own address from which packets go to that place.
fn facing(place: SocketAddr) -> Result<IpAddr, JoinError> {
    let any = if place.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let found = UdpSocket::bind(any).and_then(|socket| {
        socket.connect(place)?;
        socket.local_addr()
    });
    let problem = |source| JoinError::Interface {
        wanted: place.ip().to_string(),
        problem: format!(
            "no interface leads there ({source}); name one, or an address, in POSTHASTE_TCP_INTERFACE"
        ),
    };
    found.map(|address| address.ip()).map_err(problem)
}

/// The address of an interface, or the address itself.
fn address_of(wanted: &str) -> Result<IpAddr, JoinError> {
    if let Ok(address) = wanted.parse::<IpAddr>() {
        return Ok(address);
    }
    let problem = |problem| JoinError::Interface { wanted: wanted.to_owned(), problem };
    let interfaces = if_addrs::get_if_addrs()
        .map_err(|error| problem(format!("the interfaces of this host cannot be listed: {error}")))?;
    let of_name = interfaces.iter().filter(|interface| interface.name == wanted).map(|found| found.ip());
    // IPv4 first; of IPv6, an address that means the same on other hosts.
    let usable = |address: &IpAddr| match address {
        IpAddr::V4(_) => true,
        IpAddr::V6(address) => !address.is_unicast_link_local(),
    };
    of_name.filter(usable).min_by_key(IpAddr::is_ipv6).ok_or_else(|| {
        let mut names: Vec<_> = interfaces.iter().map(|interface| interface.name.as_str()).collect();
        names.dedup();
        problem(format!("there is no such interface with an address; there are {}", names.join(", ")))
    })
}

/// A rank's devices over TCP, one per client, and where the others listen.
pub(crate) struct Network {
    devices: Vec<Arc<TcpDevice>>,
    books: Vec<Arc<AddressBook>>,
}

/// What a network is made for.
pub(crate) struct NetworkParts<'a> {
    pub rank: Rank,
    pub shape: JobShape,
    pub job: JobId,
    pub key: &'a JobKey,
    pub address: IpAddr,
    pub settings: &'a Settings,
    pub incarnation: u64,
    /// The devices over shared memory, one per client, whose memory peers reach through these, too.
    pub near: &'a [Arc<dyn Device>],
}

impl Network {
    /// Listens, once per client.
    pub fn listen(parts: &NetworkParts<'_>) -> Result<Network, JoinError> {
        let NetworkParts { rank, shape, settings, .. } = *parts;
        let key = posthaste_tcp::JobKey::new(*parts.key.as_bytes());
        let (mut devices, mut books) = (Vec::new(), Vec::new());
        for client in (0..shape.clients).map(ClientId) {
            let mut config = TcpConfig::new(rank, shape, *parts.job.as_bytes(), key.clone())
                .bind(SocketAddr::new(parts.address, 0));
            config.client = client;
            config.incarnation = parts.incarnation;
            config.ports = settings.tcp_ports.clone();
            match settings.tcp_mode {
                Some(TcpMode::Insecure) => config.mode = Mode::Insecure,
                Some(TcpMode::HandshakeOnly) => config.mode = Mode::HandshakeOnly,
                Some(_) => config.mode = Mode::Encrypted,
                None => {}
            }
            config.times =
                Times { connect: settings.join_timeout, silence: settings.tcp_timeout, ..Times::default() };
            if let Some(near) = parts.near.get(client.index()) {
                config.memory = Memory::Of(near.clone());
            }
            let book = Arc::new(AddressBook::new(shape.ranks));
            devices.push(Arc::new(TcpDevice::new(config, book.clone())?));
            books.push(book);
        }
        Ok(Network { devices, books })
    }

    /// Where this rank listens, by client.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.devices.iter().map(|device| device.address()).collect()
    }

    /// Learns where a rank listens.
    pub fn learn(&self, rank: Rank, addresses: &[SocketAddr], incarnation: u64) {
        for (book, address) in self.books.iter().zip(addresses) {
            book.set(rank, PeerAddress { address: *address, incarnation });
        }
    }

    /// The device of each client.
    pub fn into_devices(self) -> Vec<Arc<dyn Device>> {
        self.devices.into_iter().map(|device| device as Arc<dyn Device>).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_is_found_by_name_and_by_address() {
        assert_eq!(address_of("lo").unwrap(), IpAddr::from([127, 0, 0, 1]));
        assert_eq!(address_of("192.0.2.7").unwrap(), IpAddr::from([192, 0, 2, 7]));
        assert_eq!(address_of("::1").unwrap(), IpAddr::from(Ipv6Addr::LOCALHOST));
        let error = address_of("no-such-0").unwrap_err().to_string();
        assert!(error.contains("no-such-0") && error.contains("lo"), "{error}");
    }

    #[test]
    fn who_looks_at_this_host_listens_on_it() {
        let place = SocketAddr::from(([127, 0, 0, 1], 80));
        assert_eq!(facing(place).unwrap(), place.ip());
        let settings = Settings::default();
        assert_eq!(own_address(&settings, &Whereabouts::Beyond(place)).unwrap(), place.ip());
        assert_eq!(own_address(&settings, &Whereabouts::OneHost).unwrap(), place.ip());
    }

    use std::net::Ipv6Addr;
}
