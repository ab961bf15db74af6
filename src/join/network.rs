//! Where this rank listens, and its devices over TCP.

use crate::error::JoinError;
use posthaste_core::{ClientId, Device, JobShape, Rank};
use posthaste_launch::{JobId, JobKey, Settings, TcpMode, address_facing, address_of};
use posthaste_tcp::{AddressBook, Memory, Mode, PeerAddress, TcpConfig, TcpDevice, Times};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
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
        return address_of(wanted).map_err(|error| JoinError::Interface {
            problem: format!(
                "{}; POSTHASTE_TCP_INTERFACE takes the name of one, or an address",
                error.problem
            ),
            wanted: error.wanted,
        });
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
    address_facing(place).map_err(|error| JoinError::Interface {
        problem: format!("{}, or an address, in POSTHASTE_TCP_INTERFACE", error.problem),
        wanted: error.wanted,
    })
}

/// What to look at where a rank cannot listen.
fn advice(settings: &Settings) -> &'static str {
    match (&settings.tcp_ports, &settings.tcp_interface) {
        (Some(_), _) => {
            "POSTHASTE_TCP_PORTS needs a free port for each client of each rank of this host, for each launcher, and \
             for each rank that stands by to serve the news"
        }
        (None, Some(_)) => "POSTHASTE_TCP_INTERFACE has to name an interface, or an address, of this host",
        (None, None) => "POSTHASTE_TCP_INTERFACE and POSTHASTE_TCP_PORTS say where else to listen",
    }
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
            let device = TcpDevice::new(config, book.clone());
            let device = device.map_err(|source| JoinError::Listen { source, advice: advice(settings) })?;
            devices.push(Arc::new(device));
            books.push(book);
        }
        Ok(Network { devices, books })
    }

    /// Where this rank listens, by client.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.devices.iter().map(|device| device.address()).collect()
    }

    /// Learns where a rank listens, and which incarnation of it does.
    pub fn learn(&self, rank: Rank, addresses: &[SocketAddr], incarnation: u64) {
        for ((book, device), address) in self.books.iter().zip(&self.devices).zip(addresses) {
            let address = PeerAddress { address: *address, incarnation };
            match incarnation {
                0 => book.set(rank, address),
                _ => device.restarted(rank, address),
            }
        }
    }

    /// The device of each client.
    pub fn into_devices(self) -> Vec<Arc<TcpDevice>> {
        self.devices
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_looks_at_this_host_listens_on_it() {
        let place = SocketAddr::from(([127, 0, 0, 1], 80));
        let mut settings = Settings::default();
        assert_eq!(own_address(&settings, &Whereabouts::Beyond(place)).unwrap(), place.ip());
        assert_eq!(own_address(&settings, &Whereabouts::OneHost).unwrap(), place.ip());
        settings.tcp_interface = Some("lo".into());
        assert_eq!(own_address(&settings, &Whereabouts::Anywhere).unwrap(), place.ip());
        settings.tcp_interface = Some("no-such-0".into());
        let error = own_address(&settings, &Whereabouts::Anywhere).unwrap_err().to_string();
        assert!(error.contains("no-such-0") && error.contains("POSTHASTE_TCP_INTERFACE"), "{error}");
    }
}
