//! Where the ranks of a job met in the first place, and those look that are started again.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};

/// The address of a place that no other host can mean: named by a loopback address or as `localhost`. A host's own name is
/// not one, whatever it resolves to here.
pub fn loopback(place: &str) -> Option<SocketAddr> {
    if let Some(port) = place.strip_prefix("localhost:") {
        return Some(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port.parse().ok()?));
    }
    place.parse::<SocketAddr>().ok().filter(|address| address.ip().is_loopback())
}

/// That place, as a rank reached it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MetAt {
    /// As the ranks were told, which may mean something else when it is served again.
    name: String,
    pub(crate) address: SocketAddr,
    /// Other hosts may know it by another address than this one.
    everywhere: bool,
}

impl MetAt {
    pub(crate) fn new(place: &str, address: SocketAddr) -> Self {
        Self { name: place.to_owned(), address, everywhere: loopback(place).is_none() }
    }

    /// Takes it, which one process can at a time, and on its host only: on all interfaces if others may come by them.
    pub(crate) fn take(&self) -> io::Result<TcpListener> {
        // This tells whether it is this host's, and free.
        let own = TcpListener::bind(self.address)?;
        if !self.everywhere {
            return Ok(own);
        }
        drop(own);
        let port = self.address.port();
        let all = match self.address {
            SocketAddr::V4(_) => SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port),
            SocketAddr::V6(_) => SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port),
        };
        // Somebody else may have that port of another interface.
        TcpListener::bind(all).or_else(|_| TcpListener::bind(self.address))
    }

    /// Where whoever serves it now may be found: at what its name means now, and where it was. May block.
    pub(crate) fn addresses(&self) -> Vec<SocketAddr> {
        let mut addresses: Vec<SocketAddr> =
            self.name.to_socket_addrs().map(Iterator::collect).unwrap_or_default();
        if !addresses.contains(&self.address) {
            addresses.push(self.address);
        }
        addresses
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    #[test]
    fn a_place_is_taken_on_all_interfaces_unless_its_name_says_that_it_is_of_one_host() {
        for (name, everywhere) in
            [("localhost:7", false), ("127.0.0.3:7", false), ("[::1]:7", false), ("here:7", true)]
        {
            assert_eq!(MetAt::new(name, ([127, 0, 0, 3], 7).into()).everywhere, everywhere, "{name}");
        }
        // As the resolver of the host itself has it, and as that of others may.
        // Free on all interfaces.
        let port = TcpListener::bind("0.0.0.0:0").unwrap().local_addr().unwrap().port();
        let address = SocketAddr::from(([127, 0, 0, 3], port));
        for (name, everywhere) in [(address.to_string(), false), (format!("localhost.:{port}"), true)] {
            let met_at = MetAt::new(&name, address);
            let taken = met_at.take().unwrap();
            assert!(TcpStream::connect(address).is_ok());
            assert_eq!(TcpStream::connect(("127.0.0.4", port)).is_ok(), everywhere);
            assert!(met_at.take().is_err(), "one process has it at a time");
            assert!(met_at.addresses().contains(&address));
            drop(taken);
        }
        let elsewhere = SocketAddr::from(([192, 0, 2, 1], port));
        assert!(MetAt::new("far:7", elsewhere).take().is_err(), "it is not of this host");
    }
}
