//! Ranks that another launcher started.

use super::meet::{Party, blocking, join_found};
use super::network::Whereabouts;
use super::part;
use crate::error::JoinError;
use crate::place::Place;
use posthaste_launch::{
    Appointment, Bulletin, Detected, Foreign, JobId, JobKey, LooseEnv, Meeting, MeetingError, Rendezvous,
    loopback,
};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::time::{Duration, Instant};

/// A seat at the meeting, and who else comes to it.
type Found = (Box<dyn Meeting>, Whereabouts);

/// How long a rank that took the place over may take to find out that the one that comes again has ended before.
const RESUME: Duration = Duration::from_secs(10);
/// How long rank 0 talks to whoever has its place before it looks whether that is free.
const TURN: Duration = Duration::from_secs(2);
/// And pauses before it talks to it again.
const AGAIN: Duration = Duration::from_millis(50);

/// This process's place in the job of that launcher.
pub(crate) async fn place_of(launcher: Detected) -> Result<Place, JoinError> {
    let LooseEnv { key, clients, contexts, rendezvous, settings, .. } = LooseEnv::from_process()?;
    let (clients, contexts) = (part("clients", clients)?, part("contexts", contexts)?);
    let (until, silence) = (Instant::now() + settings.join_timeout, settings.tcp_timeout);
    match blocking(move || Ok(launcher.connect(until)?)).await? {
        Foreign::KeyValue(meeting) => {
            let party = Party::new(meeting, until);
            join_found(party, clients, contexts, settings, None).await
        }
        Foreign::Rendezvous(mut appointment) => {
            if let Some(place) = rendezvous {
                appointment.place = place;
            }
            let key = key.ok_or(JoinError::NoKey { launcher: appointment.launcher })?;
            let (mut elsewhere, mut again) = (None, false);
            loop {
                let (at, secret) = (appointment.clone(), key.clone());
                let joined =
                    match blocking(move || keep(&at, elsewhere, again, &secret, until, silence)).await {
                        Ok((meeting, here)) => {
                            again = meeting.incarnation() > 0;
                            let party = Party::new(meeting, until);
                            join_found(party, clients, contexts, settings.clone(), Some(here)).await
                        }
                        Err(error) => Err(error),
                    };
                match joined {
                    // This rank has died, and serves a meeting to which nobody comes: the others have met, and say where they are.
                    Err(JoinError::Meeting(MeetingError::Elsewhere { served_at, .. })) => {
                        tracing::debug!(%served_at, "the other ranks have met before");
                        elsewhere = Some(served_at);
                    }
                    // Whoever served there has ended as well: another one may tell where by now, or nobody is left.
                    Err(JoinError::Meeting(error)) if elsewhere.is_some() && Instant::now() < until => {
                        tracing::debug!(%error, "the other ranks are not where they were said to be");
                        elsewhere = None;
                        tokio::time::sleep(AGAIN).await;
                    }
                    // Nobody may know of this rank: whoever serves next does not if it does not come again.
                    Err(JoinError::Meeting(error @ MeetingError::ServerGone { .. }))
                        if again && Instant::now() < until =>
                    {
                        tracing::debug!(%error, "this rank came again while whoever served ended");
                        tokio::time::sleep(AGAIN).await;
                    }
                    joined => return joined,
                }
            }
        }
    }
}

/// Goes to an appointment, and serves it if that is this rank's part; or to where those are who have kept it before. `again`: it
/// has been taken for one that comes again already, and whoever serves may be yet to notice that it is not there any more.
fn keep(
    appointment: &Appointment,
    elsewhere: Option<SocketAddr>,
    again: bool,
    key: &JobKey,
    until: Instant,
    silence: Duration,
) -> Result<(Box<dyn Meeting>, Whereabouts), JoinError> {
    let (rank, size) = (appointment.rank, appointment.size);
    let meet = if again { Rendezvous::meet_again } else { Rendezvous::meet };
    if let Some(served_at) = elsewhere {
        let (place, until) = (served_at.to_string(), until.min(Instant::now() + RESUME));
        let mut seat = meet(std::slice::from_ref(&place), rank, size, key, until, silence)?;
        if let Some(met_at) = appointment.place.to_socket_addrs().ok().and_then(|mut found| found.next()) {
            seat.met_before_at(&appointment.place, met_at);
        }
        return Ok((Box::new(seat), whereabouts(&place, Some(served_at))));
    }
    if !appointment.serve {
        let place = std::slice::from_ref(&appointment.place);
        let seat = meet(place, rank, size, key, until, silence)?;
        let lost = |source| JoinError::System { what: "tell where the ranks meet", source };
        let here = whereabouts(&appointment.place, Some(seat.address().map_err(lost)?));
        return Ok((Box::new(seat), here));
    }
    Rendezvous::check_room(size)?;
    let mut patience = until.min(Instant::now() + RESUME);
    let server = loop {
        let refused = match serve(appointment, key, silence) {
            Ok(server) => break server,
            Err(refused) => refused,
        };
        match resume(appointment, key, until, silence) {
            Ok(Some(resumed)) => return Ok(resumed),
            // Ranks of the program that they were before this one are still at it.
            Err(MeetingError::LeftBefore { .. }) => patience = until,
            Err(error @ MeetingError::Elsewhere { .. }) => return Err(error.into()),
            // It may have ended meanwhile, or not know yet that the predecessor has.
            Err(error @ (MeetingError::Refused { .. } | MeetingError::ClaimedTwice { .. })) => {
                tracing::debug!(%error, "whoever has the place is not of this job");
            }
            Ok(None) | Err(_) => return Err(refused),
        }
        if Instant::now() >= patience {
            return Err(refused);
        }
        std::thread::sleep(AGAIN);
    };
    server.pass_on(rank);
    // By its address: the name may mean something else to this rank's resolver.
    let own = facing_itself(server.address()).to_string();
    let seat = Box::new(Rendezvous::meet(&[own], rank, size, key, until, silence)?);
    // The others come to this host by the place's address, unless its own resolver takes the name for itself.
    let resolved = appointment.place.to_socket_addrs().ok().and_then(|mut found| found.next());
    let here = whereabouts(&appointment.place, resolved);
    Ok((Box::new(Host { seat, _server: server }), here))
}

/// Who else comes to a place, which this rank finds at that address.
fn whereabouts(place: &str, found: Option<SocketAddr>) -> Whereabouts {
    match (loopback(place), found) {
        (Some(_), _) => Whereabouts::OneHost,
        // A host often takes its own name for itself, where others do not.
        (None, Some(address)) if !address.ip().is_loopback() => Whereabouts::Beyond(address),
        _ => Whereabouts::Anywhere,
    }
}

/// Goes to the place that this rank is to serve, and that somebody else has: if that is a rank of the same job, this one was
/// part of it before and died. None if it has not heard of this rank before.
fn resume(
    appointment: &Appointment,
    key: &JobKey,
    until: Instant,
    silence: Duration,
) -> Result<Option<Found>, MeetingError> {
    let place = std::slice::from_ref(&appointment.place);
    let until = until.min(Instant::now() + TURN);
    let seat = Rendezvous::meet(place, appointment.rank, appointment.size, key, until, silence)?;
    let refused =
        |problem: &str| MeetingError::Refused { place: place.join(""), problem: problem.to_owned() };
    if seat.incarnation() == 0 {
        return Ok(None);
    }
    let found = seat.address().map_err(|error| refused(&error.to_string()))?;
    Ok(Some((Box::new(seat), whereabouts(&appointment.place, Some(found)))))
}

/// Serves the place of an appointment: on all interfaces, unless it is named by a loopback address.
fn serve(appointment: &Appointment, key: &JobKey, silence: Duration) -> Result<Rendezvous, JoinError> {
    let place = &appointment.place;
    let refused = |problem: String| MeetingError::Refused { place: place.clone(), problem };
    let resolved = place.to_socket_addrs().ok().and_then(|mut found| found.next());
    let port = place.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
    let port = port.ok_or_else(|| refused("it names no port".into()))?;
    let everywhere: IpAddr = match resolved {
        Some(address) if address.is_ipv6() => Ipv6Addr::UNSPECIFIED.into(),
        _ => Ipv4Addr::UNSPECIFIED.into(),
    };
    let address = loopback(place).unwrap_or(SocketAddr::new(everywhere, port));
    let listener = TcpListener::bind(address).map_err(|error| {
        refused(format!("rank 0 cannot serve it on {address}: {error}; another job may use that port"))
    })?;
    let served = Rendezvous::serve(listener, appointment.size, key.clone(), None, silence);
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
    // Before the server, whose end waits until every rank has what it is due, or another rank serves those that go on.
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

    fn bulletin(&mut self) -> Option<Bulletin> {
        self.seat.bulletin()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_takes_its_own_name_for_itself_listens_where_others_reach_it() {
        let own = SocketAddr::from(([127, 0, 1, 1], 29_500));
        let far = SocketAddr::from(([192, 0, 2, 7], 29_500));
        for (place, found, listens) in [
            ("node1:29500", Some(own), "Anywhere"),
            ("node1:29500", Some(far), "Beyond"),
            ("node1:29500", None, "Anywhere"),
            ("localhost:29500", Some(own), "OneHost"),
            ("127.0.0.1:29500", Some(own), "OneHost"),
            ("192.0.2.7:29500", Some(far), "Beyond"),
        ] {
            let here = format!("{:?}", whereabouts(place, found));
            assert!(here.starts_with(listens), "{place}: {here}");
        }
    }
}
