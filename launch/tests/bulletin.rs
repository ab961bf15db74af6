//! What ranks hear of each other after a meeting.

mod common;

use std::time::{Duration, Instant};

use common::meeting::{key, meet, news, ranks, serve, within};
use common::watchdog;
use posthaste_launch::{Meeting, MeetingError, Notice};

#[test]
fn after_the_meeting_ranks_hear_who_is_gone() {
    let _dog = watchdog();
    let place = serve(4);
    let mut seats = ranks(&place, &[0, 1, 2, 3], 4, |_, mut seat| {
        seat.all_gather(b"", within(20_000)).unwrap();
        seat
    });
    let mut zero = seats.remove(0).bulletin().unwrap();
    let one = seats.remove(0).bulletin().unwrap();
    let two = seats.remove(0).bulletin().unwrap();
    assert!(zero.read().unwrap().is_empty());
    drop(one);
    assert_eq!(news(&mut zero), [Notice::Ended(1)]);
    two.leave().unwrap();
    assert_eq!(news(&mut zero), [Notice::Left(2)]);
    // Whoever asks later hears of those who went before.
    let mut three = seats.remove(0);
    let mut late = three.bulletin().unwrap();
    assert!(three.bulletin().is_none() && three.all_gather(b"", within(5000)).is_err());
    let mut heard = news(&mut late);
    while heard.len() < 2 {
        heard.extend(news(&mut late));
    }
    assert_eq!(heard, [Notice::Ended(1), Notice::Left(2)]);
    drop(place);
    assert_eq!((news(&mut zero), news(&mut late)), (vec![Notice::Closed], vec![Notice::Closed]));
    common::eventually("the connection ends", || zero.read().is_err());
}

#[test]
fn after_the_meeting_a_rank_that_died_comes_again_and_the_others_hear_of_it() {
    let _dog = watchdog();
    let place = serve(3);
    let address = place.address().to_string();
    let mut seats = ranks(&place, &[0, 1, 2], 3, |rank, mut seat| {
        assert_eq!(seat.incarnation(), 0);
        seat.all_gather(format!("part {rank}").as_bytes(), within(20_000)).unwrap();
        seat
    });
    let mut zero = seats.remove(0).bulletin().unwrap();
    assert!(zero.read().unwrap().is_empty());
    let one = seats.remove(0).bulletin().unwrap();
    // Whoever lives keeps its number.
    let twice = meet(&address, 1, 3, &key(7), 20_000).unwrap_err();
    assert!(matches!(twice, MeetingError::ClaimedTwice { rank: 1, .. }), "{twice}");
    drop(one);
    assert_eq!(news(&mut zero), [Notice::Ended(1)]);
    for incarnation in 1..4 {
        let mut again = meet(&address, 1, 3, &key(7), 20_000).unwrap();
        assert_eq!(again.incarnation(), incarnation);
        let twice = meet(&address, 1, 3, &key(7), 20_000).unwrap_err();
        assert!(matches!(twice, MeetingError::ClaimedTwice { rank: 1, .. }), "{twice}");
        // The roster: what all gave last, and as whom, with its own predecessor's part.
        let before =
            if incarnation == 1 { "part 1".into() } else { format!("part 1, again {}", incarnation - 1) };
        let roster = again.roster(within(20_000)).unwrap();
        let expected = [(0, "part 0".into()), (incarnation - 1, before), (0, "part 2".into())];
        assert_eq!(
            roster,
            expected.map(|(incarnation, part): (u32, String)| (incarnation, part.into_bytes()))
        );
        let part = format!("part 1, again {incarnation}").into_bytes();
        again.come_again(&part, within(20_000)).unwrap();
        let mut listening = again.bulletin().unwrap();
        assert_eq!(news(&mut zero), [Notice::Arrived { rank: 1, incarnation, part }]);
        assert!(listening.read().unwrap().is_empty());
        drop(listening);
        assert_eq!(news(&mut zero), [Notice::Ended(1)]);
    }
    // One that dies before it has said where it is has never been there.
    drop(meet(&address, 1, 3, &key(7), 20_000).unwrap());
    let last = {
        common::eventually("its seat is free", || match meet(&address, 1, 3, &key(7), 20_000) {
            Ok(mut again) => {
                again.roster(within(20_000)).unwrap();
                again.come_again(b"the last", within(20_000)).unwrap();
                std::mem::forget(again.bulletin().unwrap());
                true
            }
            Err(MeetingError::ClaimedTwice { .. }) => false,
            Err(other) => panic!("{other}"),
        });
        let mut heard = Vec::new();
        while !heard.iter().any(|notice| matches!(notice, Notice::Arrived { .. })) {
            heard.extend(news(&mut zero));
        }
        heard.pop()
    };
    let expected = Notice::Arrived { rank: 1, incarnation: 5, part: b"the last".to_vec() };
    assert_eq!(last.as_ref(), Some(&expected));
    // Whoever asks later hears the same.
    let mut late = seats.remove(0).bulletin().unwrap();
    assert_eq!(news(&mut late), [expected]);
    // Who has left in order does not come again.
    late.leave().unwrap();
    assert_eq!(news(&mut zero), [Notice::Left(2)]);
    // Nor does it wait for that in vain: whoever serves is none of the ranks, and serves no other job.
    let began = Instant::now();
    let told = meet(&address, 2, 3, &key(7), 20_000).unwrap_err();
    assert!(matches!(told, MeetingError::Refused { .. }), "{told}");
    assert!(told.to_string().contains("has left the job in order"), "{told}");
    assert!(began.elapsed() < Duration::from_secs(10), "{told}");
}
