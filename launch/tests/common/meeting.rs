//! Ranks that meet, as threads of a test.

use std::time::{Duration, Instant};

use posthaste_launch::{Bulletin, JobKey, MeetingError, Notice, Rendezvous, RendezvousClient};

use super::eventually;

/// After how much of it a host is lost: the default.
pub const SILENCE: Duration = Duration::from_secs(5);

/// A place at which nobody listens, nor comes to as long as the socket is there.
pub fn nowhere() -> (std::os::fd::OwnedFd, std::net::SocketAddr) {
    use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket};
    let kept = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&kept, &std::net::SocketAddrV4::new(std::net::Ipv4Addr::LOCALHOST, 0)).unwrap();
    let place = getsockname(&kept).unwrap().try_into().unwrap();
    (kept, place)
}

pub fn key(byte: u8) -> JobKey {
    JobKey::from_bytes([byte; 32])
}

pub fn within(milliseconds: u64) -> Instant {
    Instant::now() + Duration::from_millis(milliseconds)
}

pub fn serve(size: u32) -> Rendezvous {
    Rendezvous::bind("127.0.0.1:0".parse().unwrap(), size, key(7), None, SILENCE).unwrap()
}

pub fn meet(
    place: &str,
    rank: u32,
    size: u32,
    key: &JobKey,
    milliseconds: u64,
) -> Result<RendezvousClient, MeetingError> {
    Rendezvous::meet(&[place.to_owned()], rank, size, key, within(milliseconds), SILENCE)
}

pub fn ranks<T: Send>(
    place: &Rendezvous,
    ranks: &[u32],
    size: u32,
    act: impl Fn(u32, RendezvousClient) -> T + Sync,
) -> Vec<T> {
    let place = place.address().to_string();
    std::thread::scope(|scope| {
        let all: Vec<_> = ranks
            .iter()
            .map(|rank| {
                let (place, act) = (&place, &act);
                scope.spawn(move || act(*rank, meet(place, *rank, size, &key(7), 20_000).unwrap()))
            })
            .collect();
        all.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

pub fn news(bulletin: &mut Bulletin) -> Vec<Notice> {
    let mut heard = Vec::new();
    eventually("there are news", || {
        heard = bulletin.read().unwrap();
        !heard.is_empty()
    });
    heard
}
