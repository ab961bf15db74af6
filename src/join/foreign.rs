//! Ranks that another launcher started.

use super::meet::{Party, blocking, join_found};
use super::network::Whereabouts;
use super::part;
use crate::error::JoinError;
use crate::place::Place;
use posthaste_launch::{
    Appointment, Detected, Foreign, JobId, JobKey, LooseEnv, Meeting, MeetingError, Rendezvous,
};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::time::Instant;

/// This process's place in the job of that launcher.
pub(crate) async fn place_of(launcher: Detected) -> Result<Place, JoinError> {
    let LooseEnv { key, clients, contexts, settings, .. } = LooseEnv::from_process()?;
    let (clients, contexts) = (part("clients", clients)?, part("contexts", contexts)?);
    let until = Instant::now() + settings.join_timeout;
    match blocking(move || Ok(launcher.connect(until)?)).await? {
        Foreign::KeyValue(meeting) => {
            let party = Party::new(meeting, &settings);
            join_found(party, clients, contexts, settings, None).await
        }
        Foreign::Rendezvous(appointment) => {
            let key = key.ok_or(JoinError::NoKey { launcher: appointment.launcher })?;
            let here = is_loopback(&appointment.place).then_some(Whereabouts::OneHost);
            let meeting = blocking(move || keep(&appointment, &key, until)).await?;
            let party = Party::new(meeting, &settings);
            join_found(party, clients, contexts, settings, here).await
        }
    }
}

/// Whether the place is named by an address that no other host can mean.
fn is_loopback(place: &str) -> bool {
    place.parse::<SocketAddr>().is_ok_and(|address| address.ip().is_loopback())
}

/// Goes to an appointment, and serves it if that is this rank's part.
fn keep(appointment: &Appointment, key: &JobKey, until: Instant) -> Result<Box<dyn Meeting>, JoinError> {
    let (rank, size) = (appointment.rank, appointment.size);
    if !appointment.serve {
        return Ok(Box::new(Rendezvous::meet(
            std::slice::from_ref(&appointment.place),
            rank,
            size,
            key,
            until,
        )?));
    }
    let server = serve(appointment, key)?;
    // By its address: the name may mean something else to this rank's resolver.
    let own = facing_itself(server.address()).to_string();
    let seat = Box::new(Rendezvous::meet(&[own], rank, size, key, until)?);
    Ok(Box::new(Host { seat, _server: server }))
}

/// Serves the place of an appointment: on all interfaces, unless it is named by a loopback address.
fn serve(appointment: &Appointment, key: &JobKey) -> Result<Rendezvous, JoinError> {
    let place = &appointment.place;
    let refused = |problem: String| MeetingError::Refused { place: place.clone(), problem };
    let resolved = place.to_socket_addrs().ok().and_then(|mut found| found.next());
    let port = place.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
    let port = port.ok_or_else(|| refused("it names no port".into()))?;
    let everywhere: IpAddr = match resolved {
        Some(address) if address.is_ipv6() => Ipv6Addr::UNSPECIFIED.into(),
        _ => Ipv4Addr::UNSPECIFIED.into(),
    };
    let address = match place.parse::<SocketAddr>() {
        Ok(address) if address.ip().is_loopback() => address,
        _ => SocketAddr::new(everywhere, port),
    };
    let listener = TcpListener::bind(address).map_err(|error| {
        refused(format!("rank 0 cannot serve it on {address}: {error}; another job may use that port"))
    })?;
    let served = Rendezvous::serve(listener, appointment.size, key.clone(), None);
    Ok(served.map_err(|source| MeetingError::System { what: "serve the ranks' meeting", source })?)
}

/// How whoever listens there reaches itself.
fn facing_itself(listening: SocketAddr) -> SocketAddr {
    let ip: IpAddr = match listening.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, listening.port())
}

/// Rank 0's seat at the meeting that it serves.
struct Host {
    // Before the server, whose end waits until every rank has what it is due.
    seat: Box<dyn Meeting>,
    _server: Rendezvous,
}

impl Meeting for Host {
    fn rank(&self) -> u32 {
        self.seat.rank()
    }

    fn size(&self) -> u32 {
        self.seat.size()
    }

    fn identity(&self) -> Option<(JobId, JobKey)> {
        self.seat.identity()
    }

    fn all_gather(&mut self, blob: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>, MeetingError> {
        self.seat.all_gather(blob, deadline)
    }
}
