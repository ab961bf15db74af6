//! Whom to tell of what all are to hear, when each who hears of it tells others in turn.
//!
//! A rank tells those at distances of powers of two, either way round, so that all have heard after as many steps as their
//! number has digits where nobody is gone; in place of one that is, the next that is not. So the next living one is always among them, and
//! the ring of the living is closed again as soon as each knows who is gone: whoever hears of a death tells the one that
//! takes the place, if the news did not go there before. Telling all instead, as each of them would, is a storm of as many
//! messages as there are pairs.

/// The places to tell, in order and without `me`, of `size` places of which some are gone.
pub(crate) fn nearest_living(me: usize, size: usize, is_gone: impl Fn(usize) -> bool) -> Vec<usize> {
    let mut places = Vec::new();
    let mut distance = 1;
    while distance < size {
        // The own place ends the search.
        let ahead = (distance..size).map(|distance| (me + distance) % size);
        let behind = (distance..size).map(|distance| (me + size - distance) % size);
        places.extend(ahead.into_iter().find(|place| !is_gone(*place)));
        places.extend(behind.into_iter().find(|place| !is_gone(*place)));
        distance *= 2;
    }
    places.sort_unstable();
    places.dedup();
    places
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::{ProptestConfig, any, prop_assert, prop_assert_eq, proptest};

    #[test]
    fn powers_of_two_either_way_and_in_place_of_the_gone_the_next() {
        let gone = |gone: &'static [usize]| move |place: usize| gone.contains(&place);
        assert_eq!(nearest_living(0, 8, gone(&[])), [1, 2, 4, 6, 7]);
        assert_eq!(nearest_living(0, 8, gone(&[1, 2])), [3, 4, 6, 7]);
        assert_eq!(nearest_living(0, 8, gone(&[1, 2, 3, 4, 6, 7])), [5]);
        assert_eq!(nearest_living(3, 4, gone(&[0, 1, 2])), [0; 0]);
        assert_eq!(nearest_living(0, 1, gone(&[])), [0; 0]);
    }

    proptest! {
        // What fails is printed; no file of it is kept in the tree.
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn all_the_living_hear_of_it(is_gone in vec(any::<bool>(), 1..100), first in any::<usize>()) {
            let living: Vec<usize> = (0..is_gone.len()).filter(|place| !is_gone[*place]).collect();
            if !living.is_empty() {
                let mut heard = vec![living[first % living.len()]];
                let mut next = 0;
                while next < heard.len() {
                    for place in nearest_living(heard[next], is_gone.len(), |place| is_gone[place]) {
                        prop_assert!(!is_gone[place] && place != heard[next]);
                        if !heard.contains(&place) {
                            heard.push(place);
                        }
                    }
                    next += 1;
                }
                heard.sort_unstable();
                prop_assert_eq!(heard, living);
            }
        }
    }
}
