//! The addresses of this host.

use std::net::{IpAddr, SocketAddr, UdpSocket};

/// Why there is no such address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{wanted}`: {problem}")]
pub struct InterfaceError {
    /// The interface, or the place that was to be reached.
    pub wanted: String,
    /// What is wrong with it, and what to do.
    pub problem: String,
}

/// The address of an interface, given its name; an address stands for itself.
///
/// IPv4 comes first; of IPv6, addresses that mean the same on other hosts.
///
/// # Errors
/// There is no such interface, or it has no such address.
pub fn address_of(wanted: &str) -> Result<IpAddr, InterfaceError> {
    let problem = |problem| InterfaceError { wanted: wanted.to_owned(), problem };
    if let Ok(address) = wanted.parse::<IpAddr>() {
        // Others are told of it.
        if address.is_unspecified() || address.is_multicast() {
            return Err(problem(
                "no host is reached by that address; name an interface, or one of its addresses".into(),
            ));
        }
        return Ok(address);
    }
    let interfaces = if_addrs::get_if_addrs()
        .map_err(|error| problem(format!("the interfaces of this host cannot be listed: {error}")))?;
    let of_name = interfaces.iter().filter(|interface| interface.name == wanted).map(|found| found.ip());
    let usable = |address: &IpAddr| match address {
        IpAddr::V4(_) => true,
        IpAddr::V6(address) => !address.is_unicast_link_local(),
    };
    of_name.filter(usable).min_by_key(IpAddr::is_ipv6).ok_or_else(|| {
        let mut names: Vec<_> = interfaces.iter().map(|interface| interface.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        problem(format!("there is no such interface with an address; there are {}", names.join(", ")))
    })
}

/// This host's address from which packets go to that place. Nothing is sent.
///
/// # Errors
/// No interface leads there.
pub fn address_facing(place: SocketAddr) -> Result<IpAddr, InterfaceError> {
    let any = if place.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let found = UdpSocket::bind(any).and_then(|socket| {
        socket.connect(place)?;
        socket.local_addr()
    });
    found.map(|address| address.ip()).map_err(|error| InterfaceError {
        wanted: place.ip().to_string(),
        problem: format!("no interface leads there ({error}); name one"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_is_found_by_name_address_and_what_it_faces() {
        assert_eq!(address_of("lo").unwrap(), IpAddr::from([127, 0, 0, 1]));
        assert_eq!(address_of("192.0.2.7").unwrap(), IpAddr::from([192, 0, 2, 7]));
        let error = address_of("no-such-0").unwrap_err().to_string();
        assert!(error.contains("no-such-0") && error.contains("lo"), "{error}");
        for nobody in ["0.0.0.0", "::", "224.0.0.1"] {
            let error = address_of(nobody).unwrap_err().to_string();
            assert!(error.contains(nobody) && error.contains("name an interface"), "{error}");
        }
        let place = SocketAddr::from(([127, 0, 0, 1], 80));
        assert_eq!(address_facing(place).unwrap(), place.ip());
    }
}
