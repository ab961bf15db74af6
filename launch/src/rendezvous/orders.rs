//! Servers and those who are to succeed them leave, die and are stopped in orders that seeds decide: whoever lives hears of all
//! who have gone, and of nobody else.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use rustix::net;

use crate::key::JobKey;
use crate::meeting::Meeting;
use crate::rendezvous::wire::STANDBYS;
use crate::rendezvous::{
    Bulletin, Notice, Rendezvous, RendezvousClient, Succession, Whereabout, Whereabouts,
};

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// How many orders are tried, and how many at a time.
const ORDERS: u64 = 48;
const AT_A_TIME: u64 = 48;
/// How long news may take: whoever serves them may wait ten seconds for one that is stopped.
const NEWS: Duration = Duration::from_secs(40);

/// Numbers that follow from a seed.
struct Dice(u64);

impl Dice {
    /// One of so many.
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % sides
    }

    /// A pause: often hardly any, sometimes a long one.
    fn pause(&mut self) -> Duration {
        let longest = [1, 2_000, 30_000, 300_000][self.roll(4) as usize];
        Duration::from_micros(self.roll(longest))
    }
}

/// What happens to a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    Dies,
    Leaves,
    /// It does not listen for so many milliseconds, or its server is stopped, or both.
    Stopped {
        ear: bool,
        server: bool,
        milliseconds: u64,
    },
}

/// Where the ranks of a job listen, as long as they live.
type Ports = Arc<Mutex<Vec<(SocketAddr, Option<TcpListener>)>>>;

/// What a rank has heard.
type Heard = Arc<Mutex<Vec<Notice>>>;

/// Whether a rank stands by, or knows all who do.
type Known = Arc<AtomicBool>;

/// Where nobody listens: the port of one that has ended might be another's by the time that it is looked at.
fn closed() -> SocketAddr {
    static BOUND: OnceLock<(SocketAddr, OwnedFd)> = OnceLock::new();
    let bound = BOUND.get_or_init(|| {
        let socket = net::socket(net::AddressFamily::INET, net::SocketType::STREAM, None).unwrap();
        net::bind(&socket, &SocketAddr::from((HERE, 0))).unwrap();
        let place = net::getsockname(&socket).unwrap();
        (place.try_into().unwrap(), socket)
    });
    bound.0
}

/// A rank, which does with its bulletin what ranks do.
struct Ear {
    rank: u32,
    bulletin: Bulletin,
    server: Option<Rendezvous>,
    /// The rank that serves, unless it has said so.
    served_by: u32,
    /// Who is to serve from here on, and could not be reached yet.
    named: Option<(SocketAddr, Instant)>,
    ports: Ports,
    heard: Heard,
    known: Known,
}

/// How a rank listens on.
enum On {
    Here(Ear),
    Lost(Ear),
    Deaf(Option<Rendezvous>),
}

impl Ear {
    fn listen(self, events: &Receiver<Event>) {
        let mut ear = self;
        loop {
            match events.try_recv() {
                // Or the order is over.
                Ok(Event::Dies) | Err(TryRecvError::Disconnected) => return ear.dies(),
                Ok(Event::Leaves) => return ear.leaves(),
                Ok(Event::Stopped { ear: own, server, milliseconds }) => {
                    let time = Duration::from_millis(milliseconds);
                    if let Some(serving) = ear.server.as_ref().filter(|_| server) {
                        serving.is_stopped_for(time);
                    }
                    if own {
                        std::thread::sleep(time);
                    }
                }
                Err(TryRecvError::Empty) => {}
            }
            ear = match ear.step() {
                On::Here(ear) => ear,
                On::Lost(ear) => match ear.find(events) {
                    Some(ear) => ear,
                    None => return,
                },
                // The end of the job is that of its server.
                On::Deaf(server) => {
                    while !matches!(events.recv(), Ok(Event::Dies | Event::Leaves) | Err(_)) {}
                    return drop(server);
                }
            };
        }
    }

    fn leaves(self) {
        // Whoever hears it may have gone.
        let _ = self.bulletin.leave();
        self.ports.lock().unwrap()[self.rank as usize].1 = None;
        drop(self.server);
    }

    fn dies(self) {
        self.ports.lock().unwrap()[self.rank as usize].1 = None;
        if let Some(server) = self.server {
            server.vanish();
        }
    }

    /// Reads what has come.
    fn step(mut self) -> On {
        let Ok(news) = self.bulletin.read() else { return On::Lost(self) };
        let known = self.bulletin.standbys().len() >= STANDBYS;
        if known || (self.rank != 0 && self.server.is_some()) {
            self.known.store(true, Ordering::Relaxed);
        }
        let (mut duty, mut next) = (None, None);
        if news.is_empty() {
            std::thread::sleep(Duration::from_millis(1));
        }
        for notice in news {
            match notice {
                Notice::StandBy(asked) => duty = Some(asked),
                Notice::Move { place, .. } => next = Some(place),
                Notice::Closed => {
                    if let Some(server) = self.bulletin.server() {
                        self.heard.lock().unwrap().push(Notice::Left(server));
                    }
                    if next.is_none() {
                        return if self.bulletin.has_successors() {
                            On::Lost(self)
                        } else {
                            On::Deaf(self.server)
                        };
                    }
                }
                other => self.heard.lock().unwrap().push(other),
            }
        }
        if let Some(duty) = duty {
            let ports = Arc::clone(&self.ports);
            let listening: Whereabouts = Arc::new(move |rank| {
                let (place, listener) = &ports.lock().unwrap()[rank as usize];
                Whereabout::Listens(vec![if listener.is_some() { *place } else { closed() }])
            });
            return match self.bulletin.stand_by(duty, HERE, None, listening) {
                Ok((server, bulletin)) => {
                    On::Here(Self { bulletin, server: Some(server), named: None, ..self })
                }
                Err((_, Some(bulletin))) => On::Here(Self { bulletin: *bulletin, ..self }),
                Err(_) => On::Deaf(self.server),
            };
        }
        let again = self.named.filter(|(_, next)| Instant::now() >= *next).map(|(place, _)| place);
        On::Here(match next.or(again) {
            Some(place) => match self.bulletin.follow(place) {
                Ok(bulletin) => Self { bulletin, named: None, ..self },
                Err((_, bulletin)) => {
                    let named = Some((place, Instant::now() + Duration::from_millis(500)));
                    Self { bulletin: *bulletin, named, ..self }
                }
            },
            None => self,
        })
    }

    /// After the end of whoever served: finds the next.
    fn find(mut self, events: &Receiver<Event>) -> Option<Self> {
        let server = self.bulletin.server().unwrap_or(self.served_by);
        self.heard.lock().unwrap().push(Notice::Ended(server));
        let mut until = Instant::now() + Duration::from_secs(40);
        let unknown = Instant::now() + Duration::from_secs(4);
        let mut leaving = false;
        loop {
            match events.try_recv() {
                Ok(Event::Dies) | Err(TryRecvError::Disconnected) => {
                    self.dies();
                    return None;
                }
                Ok(Event::Leaves) => {
                    (leaving, until) = (true, Instant::now() + Duration::from_secs(4));
                }
                _ => {}
            }
            match self.bulletin.find_successor() {
                Succession::Found(bulletin) => {
                    (self.bulletin, self.named) = (*bulletin, None);
                    if leaving {
                        self.leaves();
                        return None;
                    }
                    return Some(self);
                }
                Succession::Later if Instant::now() < until => {}
                Succession::Nobody if !leaving && Instant::now() < unknown => {}
                Succession::Later | Succession::Nobody => {
                    // What it does not hear will be missed.
                    while !leaving {
                        leaving = matches!(events.recv(), Ok(Event::Dies | Event::Leaves) | Err(_));
                    }
                    self.leaves();
                    return None;
                }
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// A job whose ranks have met.
struct Job {
    events: Vec<Sender<Event>>,
    heard: Vec<Heard>,
    known: Vec<Known>,
    gone: Vec<u32>,
}

impl Job {
    fn new(size: u32, dice: &mut Dice) -> Self {
        // Of its own: ranks of the job before this one may still ask at the ports where that had been.
        let key = JobKey::random().unwrap();
        let until = Instant::now() + Duration::from_secs(40);
        let place =
            Rendezvous::bind(SocketAddr::from((HERE, 0)), size, key.clone(), None, Duration::from_secs(5))
                .unwrap();
        place.pass_on(0);
        let at = [place.address().to_string()];
        let seats = std::thread::scope(|scope| {
            let meets = |rank| {
                let (at, key) = (&at, &key);
                scope.spawn(move || {
                    let mut seat =
                        Rendezvous::meet(at, rank, size, key, until, Duration::from_secs(5)).unwrap();
                    seat.all_gather(&rank.to_le_bytes(), until).unwrap();
                    seat
                })
            };
            let all: Vec<_> = (0..size).map(meets).collect();
            all.into_iter().map(|seat| seat.join().unwrap()).collect::<Vec<RendezvousClient>>()
        });
        let port = |_| {
            let listener = TcpListener::bind((HERE, 0)).unwrap();
            (listener.local_addr().unwrap(), Some(listener))
        };
        let ports: Ports = Arc::new(Mutex::new((0..size).map(port).collect()));
        let (mut events, mut heard, mut known) = (Vec::new(), Vec::new(), Vec::new());
        let mut place = Some(place);
        for (rank, mut seat) in (0..).zip(seats) {
            let (sender, receiver) = channel();
            let (ports, hears, server, pause) =
                (Arc::clone(&ports), Heard::default(), place.take(), dice.pause());
            events.push(sender);
            heard.push(Arc::clone(&hears));
            let knows = Known::default();
            known.push(Arc::clone(&knows));
            std::thread::spawn(move || {
                std::thread::sleep(pause);
                let Some(bulletin) = seat.bulletin() else { return };
                let (served_by, named, heard, known) = (0, None, hears, knows);
                let ear = Ear { rank, bulletin, server, served_by, named, ports, heard, known };
                ear.listen(&receiver);
            });
        }
        Self { events, heard, known, gone: Vec::new() }
    }

    /// Waits until all stand by or know who does: from then on they outlive whoever serves, also where that ends without a word.
    fn all_know_who_stands_by(&self) {
        let until = Instant::now() + NEWS;
        while !self.known.iter().all(|known| known.load(Ordering::Relaxed)) {
            assert!(Instant::now() < until, "not all know who stands by: {:?}", self.known);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn happens(&mut self, rank: u32, event: Event) {
        // It may be deaf, which shows.
        let _ = self.events[rank as usize].send(event);
        if !matches!(event, Event::Stopped { .. }) {
            self.gone.push(rank);
        }
    }

    fn living(&self) -> impl DoubleEndedIterator<Item = u32> {
        (0..self.heard.len() as u32).filter(|rank| !self.gone.contains(rank))
    }

    /// Why it is not true that all who live have heard of all who have gone, and of nobody else.
    fn untold(&self) -> Option<String> {
        for rank in self.living() {
            let heard = self.heard[rank as usize].lock().unwrap().clone();
            let told = |notice: &Notice| match notice {
                Notice::Ended(rank) | Notice::Died(rank) | Notice::Left(rank) => Some(*rank),
                _ => None,
            };
            let told: Vec<u32> = heard.iter().filter_map(told).collect();
            if let Some(lives) = told.iter().find(|rank| !self.gone.contains(rank)) {
                return Some(format!("{rank} was told of the end of {lives}, which lives: {heard:?}"));
            }
            if let Some(missed) = self.gone.iter().find(|gone| !told.contains(gone)) {
                return Some(format!("{rank} has not heard of the end of {missed}: {heard:?}"));
            }
        }
        None
    }
}

/// One order of events; what went wrong.
fn order(seed: u64) -> Result<(), String> {
    let mut dice = Dice(seed);
    let mut said = Vec::new();
    let mut job = Job::new(5 + dice.roll(3) as u32, &mut dice);
    // Until ranks stand by, and the others know it, nobody promises to outlive rank 0; but it alone may leave.
    let early = dice.roll(2) == 0;
    if !early {
        job.all_know_who_stands_by();
    }
    let stopped = |dice: &mut Dice| Event::Stopped {
        ear: dice.roll(2) == 0,
        server: dice.roll(2) == 0,
        milliseconds: [50, 400, 2_500][dice.roll(3) as usize],
    };
    let goes = |dice: &mut Dice| if dice.roll(2) == 0 { Event::Dies } else { Event::Leaves };
    let mut events = Vec::new();
    if dice.roll(2) == 0 {
        events.push((1 + dice.roll(3) as u32, stopped(&mut dice)));
    }
    events.push((0, if early { Event::Leaves } else { goes(&mut dice) }));
    let next = 1 + dice.roll(3) as u32;
    match dice.roll(3) {
        0 if !early => events.push((next, goes(&mut dice))),
        2 => {}
        _ => events.push((next, stopped(&mut dice))),
    }
    for (rank, event) in events {
        std::thread::sleep(dice.pause());
        said.push(format!("{rank} {event:?}"));
        job.happens(rank, event);
    }
    std::thread::sleep(dice.pause());
    // The last hears of most, and is nobody's successor as a rule.
    let last = job.living().next_back().unwrap();
    said.push(format!("{last} Dies"));
    job.happens(last, Event::Dies);
    let until = Instant::now() + NEWS;
    loop {
        let untold = job.untold();
        match untold {
            None => return Ok(()),
            Some(untold) if Instant::now() >= until || untold.contains("lives") => {
                return Err(format!("seed {seed}, {} ranks, {}: {untold}", job.heard.len(), said.join(", ")));
            }
            Some(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

#[test]
fn whoever_lives_hears_of_all_who_go_in_whatever_order() {
    let number = |name: &str, default| std::env::var(name).map_or(default, |number| number.parse().unwrap());
    let (first, count) = (number("POSTHASTE_TEST_SEED", 0), number("POSTHASTE_TEST_ORDERS", ORDERS));
    let wrong: Mutex<Vec<String>> = Mutex::default();
    std::thread::scope(|scope| {
        for lane in 0..AT_A_TIME {
            let wrong = &wrong;
            scope.spawn(move || {
                for seed in (first..first + count).filter(|seed| seed % AT_A_TIME == lane) {
                    if let Err(why) = order(seed) {
                        wrong.lock().unwrap().push(why);
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{} of {count} orders:\n{}", wrong.len(), wrong.join("\n"));
}
