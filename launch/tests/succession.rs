//! The news of the others change hands: whoever serves them leaves, or is not heard any more.

mod common;

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::cut::Cut;
use common::meeting::{key, meet, news, nowhere, serve, within};
use common::{eventually, watchdog};
use posthaste_launch::{
    Bulletin, Duty, Meeting, MeetingError, Notice, Rendezvous, RendezvousClient, Succession, Whereabout,
    Whereabouts,
};

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// A rank that hears the news, and stands by if it is asked to.
struct Ear {
    bulletin: Option<Bulletin>,
    server: Option<Rendezvous>,
    heard: Vec<Notice>,
}

impl Ear {
    fn new(mut seat: RendezvousClient) -> Self {
        Self { bulletin: seat.bulletin(), server: None, heard: Vec::new() }
    }

    fn bulletin(&mut self) -> &mut Bulletin {
        self.bulletin.as_mut().unwrap()
    }

    /// Waits until it is asked to stand by.
    fn duty(&mut self) -> Duty {
        loop {
            let mut news = news(self.bulletin());
            match news.pop() {
                Some(Notice::StandBy(duty)) => return duty,
                other => self.heard.extend(news.into_iter().chain(other)),
            }
        }
    }

    /// Stands by when it is asked to; `listening` is where the others are, for those that it looks for.
    fn stand_by(&mut self, listening: &Whereabouts) -> SocketAddr {
        let duty = self.duty();
        let bulletin = self.bulletin.take().unwrap();
        let (server, bulletin) = bulletin.stand_by(duty, HERE, None, Arc::clone(listening)).unwrap();
        let place = server.address();
        (self.server, self.bulletin) = (Some(server), Some(bulletin));
        place
    }

    /// Listens until it has heard that, and moves if it is told to.
    fn hears(&mut self, wanted: &Notice) {
        eventually(&format!("it hears {wanted:?}, and not only {:?}", self.heard), || {
            for notice in self.bulletin().read().unwrap() {
                if let Notice::Move { place, .. } = notice {
                    self.bulletin = Some(self.bulletin.take().unwrap().follow(place).unwrap());
                }
                self.heard.push(notice);
            }
            self.heard.contains(wanted)
        });
    }

    /// Listens until the connection has ended without a word, and finds a successor.
    fn is_bereft(&mut self) {
        eventually("the connection ends", || match self.bulletin().read() {
            Ok(news) => {
                self.heard.extend(news);
                false
            }
            Err(_) => true,
        });
        let mut found = None;
        eventually("somebody serves", || match self.bulletin().find_successor() {
            Succession::Found(bulletin) => {
                found = Some(*bulletin);
                true
            }
            Succession::Later => false,
            Succession::Nobody => panic!("nobody is left"),
        });
        self.bulletin = found;
    }

    /// Waits until it knows so many ranks that stand by.
    fn knows_standbys(&mut self, count: usize) {
        eventually("all stand by", || {
            let news = self.bulletin().read().unwrap();
            self.heard.extend(news);
            let shown = format!("{:?}", self.bulletin);
            let list = shown.split_once("standbys: [").unwrap().1.split_once(']').unwrap().0;
            list.matches("127.0.0.1").count() == count
        });
    }

    /// Ends without a word.
    fn dies(mut self) {
        // The server first: it would say that its rank has only ended to itself.
        self.server = None;
    }
}

/// A job of so many ranks, the first of which serves; they come by these ways.
fn job(size: u32, way: impl Fn(u32, SocketAddr) -> SocketAddr) -> (Rendezvous, Vec<RendezvousClient>) {
    let place = serve(size);
    place.pass_on(0);
    let seats: Vec<_> = (0..size)
        .map(|rank| meet(&way(rank, place.address()).to_string(), rank, size, &key(7), 20_000).unwrap())
        .collect();
    let gathered = std::thread::scope(|scope| {
        let all: Vec<_> = (0..)
            .zip(seats)
            .map(|(rank, mut seat): (u32, _)| {
                scope.spawn(move || {
                    let parts = seat.all_gather(format!("part {rank}").as_bytes(), within(20_000)).unwrap();
                    assert_eq!(parts.len(), size as usize);
                    seat
                })
            })
            .collect();
        all.into_iter().map(|seat| seat.join().unwrap()).collect::<Vec<_>>()
    });
    (place, gathered)
}

/// Everybody lives.
fn alive() -> Whereabouts {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    Arc::new(move |_| Whereabout::Listens(listener.local_addr().into_iter().collect()))
}

/// All listen; ranks 1, 2 and 3 stand by, in this order, and the last knows it.
fn listen(seats: Vec<RendezvousClient>, listening: &Whereabouts) -> (Vec<Ear>, [SocketAddr; 3]) {
    let (mut ears, mut places) = (Vec::new(), Vec::new());
    for (rank, seat) in seats.into_iter().enumerate() {
        let mut ear = Ear::new(seat);
        if (1..4).contains(&rank) {
            places.push(ear.stand_by(listening));
        }
        ears.push(ear);
    }
    let last = ears.last_mut().unwrap();
    last.knows_standbys(3);
    assert!(last.heard.is_empty());
    (ears, places.try_into().unwrap())
}

#[test]
fn whoever_serves_passes_the_news_on_and_none_is_lost() {
    let _dog = watchdog();
    let (place, seats) = job(6, |_, place| place);
    let (mut ears, [one, ..]) = listen(seats, &alive());
    let [mut five, mut four, three, mut two, mut one_ear, zero] =
        std::array::from_fn(|_| ears.pop().expect("one of each"));
    zero.bulletin.unwrap().leave().unwrap();
    one_ear.hears(&Notice::Left(0));
    let first = std::thread::spawn(move || drop(place));
    let to_one = Notice::Move { rank: 1, place: one };
    five.hears(&to_one);
    // Who stands by has moved without being asked; one that only listens has not.
    std::thread::sleep(Duration::from_millis(300));
    assert!(!first.is_finished(), "one has not moved");
    assert!(!one_ear.heard.iter().any(|notice| matches!(notice, Notice::Ended(_))), "{:?}", one_ear.heard);
    // It dies before it has moved; the successor hears of it from the first server.
    drop(four.bulletin.take());
    first.join().unwrap();
    one_ear.hears(&Notice::Ended(4));
    five.hears(&Notice::Ended(4));
    three.dies();
    two.hears(&Notice::Ended(3));
    five.hears(&Notice::Ended(3));
    // The next one is passed on, too.
    one_ear.bulletin.take().unwrap().leave().unwrap();
    let second = std::thread::spawn(move || drop(one_ear));
    five.hears(&Notice::Move { rank: 2, place: two.server.as_ref().unwrap().address() });
    second.join().unwrap();
    two.hears(&Notice::Left(1));
    assert!(!two.heard.contains(&Notice::Ended(1)) && !two.heard.contains(&Notice::Ended(0)));
    // Alone, a rank needs no news.
    two.bulletin.take().unwrap().leave().unwrap();
    five.hears(&Notice::Left(2));
    drop(two);
    five.hears(&Notice::Closed);
}

#[test]
fn whoever_serves_may_leave_before_anybody_else_listens() {
    let _dog = watchdog();
    let (place, mut seats) = job(4, |_, place| place);
    let [mut three, mut two, mut one, mut zero] = std::array::from_fn(|_| seats.pop().unwrap());
    zero.bulletin().unwrap().leave().unwrap();
    let first = std::thread::spawn(move || drop(place));
    std::thread::sleep(Duration::from_millis(100));
    // It is leaving. Two come only now, and one so late that the server has ended.
    let mut one = Ear { bulletin: one.bulletin(), server: None, heard: Vec::new() };
    std::thread::sleep(Duration::from_millis(400));
    let mut two = Ear { bulletin: two.bulletin(), server: None, heard: Vec::new() };
    let place = one.stand_by(&alive());
    two.hears(&Notice::Move { rank: 1, place });
    first.join().unwrap();
    let mut late = three.bulletin().unwrap();
    let heard = late.read().unwrap();
    assert!(heard.contains(&Notice::Closed) && late.has_successors(), "{heard:?}");
    let Succession::Found(found) = late.find_successor() else { panic!("it serves") };
    let mut three = Ear { bulletin: Some(*found), server: None, heard: Vec::new() };
    two.dies();
    three.hears(&Notice::Ended(2));
    one.hears(&Notice::Ended(2));
    three.hears(&Notice::Left(0));
}

#[test]
fn whoever_does_not_answer_is_not_waited_for_and_another_is_asked() {
    let _dog = watchdog();
    let (_place, seats) = job(6, |_, place| place);
    let mut ears: Vec<_> = seats.into_iter().map(Ear::new).collect();
    // Ranks 1, 2 and 3 are asked, and compute.
    ears[4].stand_by(&alive());
    ears[0].knows_standbys(1);
    // Late is better than never.
    ears[2].stand_by(&alive());
    ears[0].knows_standbys(2);
}

#[test]
fn who_cannot_serve_says_so_and_another_is_asked() {
    let _dog = watchdog();
    // Who is asked has two seconds; where this process gets no core for so long, another one is asked rightly.
    let (place, mut seats, zero, mut one, duty, mut two, at_two, _three, mut four) = (0..5)
        .find_map(|_| {
            let (place, seats) = job(6, |_, place| place);
            let mut seats = seats.into_iter().map(Ear::new).collect::<Vec<_>>().into_iter();
            let [zero, mut one] = std::array::from_fn(|_| seats.next().expect("one of each"));
            let asked = Instant::now();
            let duty = one.duty();
            let mut two = seats.next().unwrap();
            let at_two = two.stand_by(&alive());
            let mut three = seats.next().unwrap();
            three.stand_by(&alive());
            // There are enough, unless one of them cannot.
            let mut four = seats.next().unwrap();
            four.knows_standbys(2);
            std::thread::sleep(Duration::from_millis(200));
            let heard = four.bulletin().read().unwrap();
            if asked.elapsed() > Duration::from_millis(1500) {
                return None;
            }
            assert_eq!(heard, []);
            Some((place, seats, zero, one, duty, two, at_two, three, four))
        })
        .expect("a moment in which this process is let run");
    // No interface of this machine.
    let bulletin = one.bulletin.take().unwrap();
    let (_, bulletin) = bulletin.stand_by(duty, [192, 0, 2, 1].into(), None, alive()).unwrap_err();
    one.bulletin = Some(*bulletin.expect("it goes on listening"));
    four.stand_by(&alive());
    let mut five = seats.next().unwrap();
    five.knows_standbys(3);
    assert_eq!(one.bulletin().read().unwrap(), [], "it is not asked again");
    zero.bulletin.unwrap().leave().unwrap();
    let first = std::thread::spawn(move || drop(place));
    one.hears(&Notice::Move { rank: 2, place: at_two });
    five.hears(&Notice::Move { rank: 2, place: at_two });
    first.join().unwrap();
    one.bulletin.take().unwrap().leave().unwrap();
    two.hears(&Notice::Left(1));
    five.hears(&Notice::Left(1));
    assert!(two.heard.contains(&Notice::Left(0)), "{:?}", two.heard);
}

#[test]
fn a_server_that_is_cut_off_is_succeeded_and_deaths_meanwhile_are_told() {
    let _dog = watchdog();
    let cut = std::sync::OnceLock::new();
    let (_place, seats) = job(6, |rank, place| match rank {
        0 => place,
        _ => cut.get_or_init(|| Cut::new(place, usize::MAX, usize::MAX)).address,
    });
    // Rank 4 will have ended, and 5 will be busy.
    let busy = TcpListener::bind("127.0.0.1:0").unwrap();
    let (_kept, ended) = nowhere();
    let listening: Whereabouts = Arc::new(move |rank| match rank {
        4 => Whereabout::Listens(vec![ended]),
        _ => Whereabout::Listens(busy.local_addr().into_iter().collect()),
    });
    let (mut ears, [one, ..]) = listen(seats, &listening);
    drop(ears[4].bulletin.take());
    // For all at once: nothing more that the server says comes anywhere.
    let cut = cut.get().unwrap();
    let held = cut.seen.way_back.lock().unwrap();
    cut.now();
    // The first of those that stand by serves, and tells of the server and of who ended when nobody could hear of it.
    ears[2].hears(&Notice::Ended(0));
    ears[3].hears(&Notice::Ended(4));
    ears[1].hears(&Notice::Ended(4));
    // Rank 5, which does not listen for so long, lives.
    std::thread::sleep(Duration::from_millis(1500));
    let five = Notice::Ended(5);
    assert!(ears[1].bulletin().read().unwrap().iter().all(|notice| *notice != five));
    drop(held);
    ears[5].is_bereft();
    ears[5].hears(&Notice::Ended(4));
    // A rank that ended comes again where the news are served now, with what all gave last.
    let mut again = meet(&one.to_string(), 4, 6, &key(7), 20_000).unwrap();
    assert_eq!(again.incarnation(), 1);
    let roster = again.roster(within(20_000)).unwrap();
    let of = |rank: u32| (0, format!("part {rank}").into_bytes());
    assert_eq!(roster, (0..6).map(of).collect::<Vec<_>>());
    again.come_again(b"again", within(20_000)).unwrap();
    let arrived = Notice::Arrived { rank: 4, incarnation: 1, part: b"again".to_vec() };
    for rank in [1, 2, 3, 5] {
        ears[rank].hears(&arrived);
    }
    // The second server goes, too, and its successor knows all that: the rank that came again is one of the others.
    let mut four = Ear::new(again);
    let one_ear = std::mem::replace(&mut ears[1], Ear { bulletin: None, server: None, heard: Vec::new() });
    four.knows_standbys(2);
    one_ear.bulletin.unwrap().leave().unwrap();
    let second = std::thread::spawn(move || drop(one_ear.server));
    four.hears(&Notice::Left(1));
    let moved = |notice: &Notice| matches!(notice, Notice::Move { rank: 2, .. });
    eventually("it is told to move", || {
        four.hears(&Notice::Left(1));
        ears[5].hears(&Notice::Left(1));
        four.heard.iter().any(moved) && ears[5].heard.iter().any(moved)
    });
    second.join().unwrap();
    let two = ears[2].server.as_ref().unwrap().address();
    let twice = meet(&two.to_string(), 4, 6, &key(7), 20_000).unwrap_err();
    assert!(matches!(twice, MeetingError::ClaimedTwice { rank: 4, .. }), "{twice}");
    drop(four);
    eventually("it hears of the second death", || {
        let news = ears[5].bulletin().read().unwrap();
        news.contains(&Notice::Ended(4))
    });
    let third = meet(&two.to_string(), 4, 6, &key(7), 20_000).unwrap();
    assert_eq!(third.incarnation(), 2);
}

#[test]
fn a_rank_that_is_cut_off_alone_serves_nobody() {
    let _dog = watchdog();
    let cut = std::sync::OnceLock::new();
    let (_place, seats) = job(5, |rank, place| match rank {
        1 => cut.get_or_init(|| Cut::new(place, usize::MAX, usize::MAX)).address,
        _ => place,
    });
    let (mut ears, [one, two, _]) = listen(seats, &alive());
    cut.get().unwrap().now();
    // To the others it has ended; they hear the server, and so the first that stands by does not take over.
    ears[4].hears(&Notice::Ended(1));
    ears[2].hears(&Notice::Ended(1));
    std::thread::sleep(Duration::from_millis(1500));
    for place in [one, two] {
        let refused = meet(&place.to_string(), 1, 5, &key(7), 300).unwrap_err();
        assert!(matches!(refused, MeetingError::Refused { .. }), "{refused}");
    }
    assert!(ears[1].bulletin().read().unwrap().is_empty(), "it has nothing to tell");
    let three = ears.remove(3);
    three.dies();
    ears[3].hears(&Notice::Ended(3));
}
