//! Every operation that combines values, on values of every type, and groups that are made of others: compared with what one
//! rank computes alone.

use crate::support::{Random, case, options, run, soon};
use futures::future::LocalBoxFuture;
use posthaste::collective::{Datum, Located};
use posthaste::{Algorithm, BadMembers, CollectiveError, Group, Rank, Reduce};
use std::fmt::Debug;

/// A number that follows from a rank and a place.
fn number(rank: usize, at: usize) -> u64 {
    Random((rank as u64) << 32 | at as u64).next()
}

/// The operation by each call that combines, on values that `of` gives for a rank and a place.
fn agrees<'t, T: Datum + PartialEq + Debug>(
    group: &'t Group,
    what: &'t str,
    reduce: &'t Reduce<T>,
    of: impl Fn(usize, usize) -> T + 't,
    combine: impl Fn(T, T) -> T + 't,
) -> LocalBoxFuture<'t, ()> {
    // Once for each type and not for each operation: that would be most of what the compiler has to do for all tests.
    Box::pin(agrees_by(group, what, reduce, Box::new(of), Box::new(combine)))
}

async fn agrees_by<T: Datum + PartialEq + Debug>(
    group: &Group,
    what: &str,
    reduce: &Reduce<T>,
    of: Box<dyn Fn(usize, usize) -> T + '_>,
    combine: Box<dyn Fn(T, T) -> T + '_>,
) {
    let (me, size) = (group.rank(), group.size());
    for len in [1, 300] {
        let alone = |at: usize| (0..size).map(|rank| of(rank, at)).reduce(&combine).unwrap();
        let total: Vec<T> = (0..len).map(alone).collect();
        let mine: Vec<T> = (0..len).map(|at| of(me, at)).collect();
        let what = format!("{what} of {len} {}", std::any::type_name::<T>());
        let got = soon("an allreduce", group.all_reduce(&mine, reduce)).await.unwrap();
        assert!(got == total, "{what}: {got:?} and not {total:?}");
        let root = len % size;
        let got = soon("a reduce", group.reduce(root, &mine, reduce)).await.unwrap();
        assert!(got == (me == root).then_some(total), "{what} at {root}: {got:?}");
        let wide: Vec<T> = (0..len * size).map(|at| of(me, at)).collect();
        let got = soon("a reduce-scatter", group.reduce_scatter(&wide, reduce)).await.unwrap();
        let own: Vec<T> = (me * len..(me + 1) * len).map(alone).collect();
        assert!(got == own, "{what}, scattered: {got:?} and not {own:?}");
    }
}

macro_rules! integers {
    ($group:expr; $($type:ty)*) => {$({
        // All bits count.
        let of = |rank: usize, at: usize| {
            let [low, high] = [0, 1 << 20].map(|more| u128::from(number(rank, at + more)));
            (high << 64 | low) as $type
        };
        agrees($group, "sum", &Reduce::sum(), of, <$type>::wrapping_add).await;
        // Odd ones, whose product is never nothing.
        agrees($group, "product", &Reduce::product(), |rank, at| of(rank, at) | 1, <$type>::wrapping_mul).await;
        agrees($group, "min", &Reduce::min(), of, <$type>::min).await;
        agrees($group, "max", &Reduce::max(), of, <$type>::max).await;
        agrees($group, "and", &Reduce::and(), |rank, at| of(rank, at) | of(rank, at + 7), |a, b| a & b).await;
        agrees($group, "or", &Reduce::or(), |rank, at| of(rank, at) & of(rank, at + 7), |a, b| a | b).await;
        agrees($group, "xor", &Reduce::xor(), of, |a, b| a ^ b).await;
    })*};
}

macro_rules! floats {
    ($group:expr; $($type:ty)*) => {$({
        // Halves and powers of two, which are added and multiplied without rounding: in any order.
        let of = |rank: usize, at: usize| (number(rank, at) % 2001) as $type / 2.0 - 500.0;
        let power = |rank: usize, at: usize| (2.0 as $type).powi((number(rank, at) % 9) as i32 - 4);
        agrees($group, "sum", &Reduce::sum(), of, |a, b| a + b).await;
        agrees($group, "product", &Reduce::product(), power, |a, b| a * b).await;
        agrees($group, "min", &Reduce::min(), of, <$type>::min).await;
        agrees($group, "max", &Reduce::max(), of, <$type>::max).await;
        // Few values, so that several ranks have the best one: the lowest place is told.
        let located = |rank: usize, at: usize| Located {
            value: (number(rank, at) % 3) as $type - 1.0,
            place: number(rank, at + 99) % 50,
        };
        let by = |better: fn(&$type, &$type) -> bool| move |a: Located<$type>, b: Located<$type>| {
            let (ours, theirs) = (a.value, b.value);
            if better(&theirs, &ours) || (ours == theirs && { b.place } < { a.place }) { b } else { a }
        };
        agrees($group, "min with location", &Reduce::min_location(), located, by(|a, b| a < b)).await;
        agrees($group, "max with location", &Reduce::max_location(), located, by(|a, b| a > b)).await;
    })*};
}

case!(m_d23_every_operation_on_values_of_every_type_gives_what_one_rank_computes_alone);
fn m_d23_every_operation_on_values_of_every_type_gives_what_one_rank_computes_alone() {
    run(5, options(), async |job| {
        let world = job.world();
        integers!(&world; u8 u16 u32 u64 u128 usize i8 i16 i32 i64 i128 isize);
        floats!(&world; f32 f64);
        // Where an integer is, too.
        let of = |rank, at| Located { value: (number(rank, at) % 5) as i64 - 2, place: rank as u64 };
        let last = |a: Located<i64>, b: Located<i64>| if { b.value } > { a.value } { b } else { a };
        agrees(&world, "max with location", &Reduce::max_location(), of, last).await;
        job.barrier().await.unwrap();
    });
}

/// Two linear functions modulo a prime, one after the other: in the other order it is another one.
fn compose([a, b]: [u64; 2], [c, d]: [u64; 2]) -> [u64; 2] {
    const PRIME: u64 = 2_147_483_647;
    [a * c % PRIME, (b * c + d) % PRIME]
}

case!(m_d23_a_users_operation_keeps_the_order_of_the_ranks_where_a_schedule_promises_it);
fn m_d23_a_users_operation_keeps_the_order_of_the_ranks_where_a_schedule_promises_it() {
    run(6, options(), async |job| {
        let world = job.world();
        let function = |rank: usize, at: usize| [0, 1].map(|more| number(rank, 2 * at + more) >> 34);
        let composed = Reduce::by(compose);
        let mine: Vec<[u64; 2]> = (0..200).map(|at| function(world.rank(), at)).collect();
        let total: Vec<[u64; 2]> = (0..200)
            .map(|at| (0..world.size()).map(|rank| function(rank, at)).reduce(compose).unwrap())
            .collect();
        let turned: Vec<[u64; 2]> = (0..200)
            .map(|at| (0..world.size()).rev().map(|rank| function(rank, at)).reduce(compose).unwrap())
            .collect();
        assert_ne!(total, turned, "the order matters");
        for algorithm in [Algorithm::Binomial, Algorithm::RecursiveDoubling] {
            let group = world.schedule(algorithm);
            let got = soon("an allreduce", group.all_reduce(&mine, &composed)).await.unwrap();
            assert!(got == total, "{algorithm:?}");
        }
        let at_first = world.schedule(Algorithm::Binomial).reduce(0, &mine, &composed);
        let got = soon("a reduce", at_first).await.unwrap();
        assert!(got == (world.rank() == 0).then_some(total));
        // Whatever is chosen does what needs no order.
        let longer = |a: [u8; 3], b: [u8; 3]| if a.iter().sum::<u8>() >= b.iter().sum() { a } else { b };
        let of = |rank: usize, at: usize| [(rank * 7 % 6) as u8, (at % 50) as u8, 1];
        agrees(&world, "a closure's", &Reduce::by(longer), of, longer).await;
        job.barrier().await.unwrap();
    });
}

case!(m_d23_groups_are_united_and_their_ranks_are_translated);
fn m_d23_groups_are_united_and_their_ranks_are_translated() {
    run(5, options(), async |job| {
        let (me, world) = (job.rank(), job.world());
        // The even ones from the last to the first, and the odd ones.
        let even = me.0.is_multiple_of(2);
        let key = if even { 9 - me.0 } else { me.0 };
        let half = soon("a split", world.split(Some(me.0 % 2), key)).await.unwrap().unwrap();
        let ours = if even { [4, 2, 0].map(Rank).to_vec() } else { [1, 3].map(Rank).to_vec() };
        assert_eq!(half.members(), ours);
        // Who is a member already is not added again, and those who have no part of it name the whole list.
        let expected = [4, 2, 0, 3].map(Rank);
        let united = match me.0 {
            1 => None,
            3 => Some(soon("a union", job.collectives().subset(&expected)).await.unwrap()),
            _ => Some(soon("a union", half.union(&[Rank(0), Rank(3)])).await.unwrap()),
        };
        for group in united.iter().chain([&half, &world]) {
            // All of them work, in the order of their members.
            let gathered = soon("a gathering", group.all_gather(&[u64::from(me.0)])).await.unwrap();
            let members: Vec<u64> = group.members().iter().map(|rank| u64::from(rank.0)).collect();
            assert_eq!(gathered, members);
            let sum = soon("a sum", group.all_reduce_one(1u64 << me.0, &Reduce::sum())).await.unwrap();
            assert_eq!(sum, members.iter().map(|rank| 1 << rank).sum::<u64>());
            assert_eq!(group.to_job(group.rank()), Some(me));
            assert_eq!((group.to_job(group.size()), group.from_job(Rank(5))), (None, None));
            for other in united.iter().chain([&half, &world]) {
                for rank in 0..=group.size() {
                    let member = group.members().get(rank);
                    let place = member.and_then(|rank| other.members().iter().position(|one| one == rank));
                    assert_eq!(group.translate(rank, other), place, "{rank} of {group:?} in {other:?}");
                }
            }
        }
        if let Some(united) = &united {
            assert_eq!(united.members(), expected);
            assert_ne!(united.id(), half.id());
            let outside = soon("no union", united.union(&[Rank(7)])).await;
            assert!(
                matches!(
                    outside,
                    Err(CollectiveError::BadMembers(BadMembers::Unknown { rank: Rank(7), .. }))
                ),
                "{outside:?}"
            );
        }
        // Of both halves it is everybody, in another order.
        let all = [4, 2, 0, 1, 3].map(Rank);
        let whole = match even {
            true => soon("a union", half.union(&[Rank(1), Rank(3)])).await.unwrap(),
            false => soon("a union", job.collectives().subset(&all)).await.unwrap(),
        };
        assert_eq!(whole.members(), all);
        let news = soon("a broadcast", whole.broadcast(3, &[me.0; 2000])).await.unwrap();
        assert_eq!(news, [1; 2000]);
        job.barrier().await.unwrap();
    });
}
