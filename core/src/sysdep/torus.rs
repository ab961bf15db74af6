//! Ranks as the points of a grid that closes on itself.

use crate::ids::Rank;

/// A grid of ranks of any number of dimensions, each of which closes on itself. Ranks count along the last dimension first
/// (row-major order), so that neighbours along that one are ranks of one node as a rule.
///
/// ```
/// use posthaste_core::Rank;
/// use posthaste_core::sysdep::Torus;
///
/// let torus = Torus::new(&[3, 4]).expect("so few ranks");
/// assert_eq!(torus.coordinates(Rank(6)), Some(vec![1, 2]));
/// assert_eq!(torus.neighbour(Rank(6), 0, -1), Some(Rank(2)));
/// assert_eq!(torus.neighbour(Rank(6), 1, 2), Some(Rank(4)));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Torus {
    extents: Box<[u32]>,
}

impl Torus {
    /// Of so many ranks along each dimension. `None`: there are none along one, or more than ranks have numbers.
    #[must_use]
    pub fn new(extents: &[u32]) -> Option<Torus> {
        let size = extents.iter().try_fold(1u32, |size, extent| size.checked_mul(*extent))?;
        (size > 0).then(|| Torus { extents: extents.into() })
    }

    /// Of so many ranks over so many dimensions, as nearly equal as `size` can be divided, the longest first. With no
    /// dimensions, or no ranks, it is one rank alone.
    #[must_use]
    pub fn balanced(size: u32, dimensions: usize) -> Torus {
        let mut extents = vec![1; dimensions];
        let mut factors = Vec::new();
        let mut rest = size.max(1);
        let mut factor = 2;
        while factor <= rest / factor {
            while rest.is_multiple_of(factor) {
                factors.push(factor);
                rest /= factor;
            }
            factor += 1;
        }
        factors.push(rest);
        // The longest factors first, each where there is least: what comes later evens out.
        for factor in factors.into_iter().rev() {
            if let Some(least) = extents.iter_mut().min() {
                *least *= factor;
            }
        }
        extents.sort_unstable_by(|a, b| b.cmp(a));
        Torus { extents: extents.into() }
    }

    /// Ranks along each dimension.
    #[must_use]
    pub fn extents(&self) -> &[u32] {
        &self.extents
    }

    /// How many ranks it has.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.extents.iter().product()
    }

    /// Where a rank is, one number for each dimension; `None` if it is not in the torus.
    #[must_use]
    pub fn coordinates(&self, rank: Rank) -> Option<Vec<u32>> {
        let mut rest = rank.0;
        let mut at: Vec<u32> = self
            .extents
            .iter()
            .rev()
            .map(|extent| {
                let along = rest % extent;
                rest /= extent;
                along
            })
            .collect();
        at.reverse();
        (rest == 0).then_some(at)
    }

    /// Who is there. Coordinates beyond an end go on at the other; `None` if there is not one for each dimension.
    #[must_use]
    pub fn rank_at(&self, coordinates: &[i64]) -> Option<Rank> {
        if coordinates.len() != self.extents.len() {
            return None;
        }
        let along = self.extents.iter().zip(coordinates);
        let rank =
            along.fold(0, |rank, (extent, at)| rank * extent + at.rem_euclid(i64::from(*extent)) as u32);
        Some(Rank(rank))
    }

    /// Who is so many steps from a rank along a dimension; `None` if there is no such rank or dimension.
    #[must_use]
    pub fn neighbour(&self, rank: Rank, dimension: usize, steps: i64) -> Option<Rank> {
        let mut at: Vec<i64> = self.coordinates(rank)?.into_iter().map(i64::from).collect();
        let along = at.get_mut(dimension)?;
        // Steps without number are too many for one sum.
        *along += steps.rem_euclid(i64::from(self.extents[dimension]));
        self.rank_at(&at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_has_a_place_of_its_own() {
        for extents in [&[1][..], &[7], &[3, 4], &[2, 3, 5], &[4, 1, 2, 3]] {
            let torus = Torus::new(extents).expect("so few");
            let size: u32 = extents.iter().product();
            assert_eq!((torus.size(), torus.extents()), (size, extents));
            for rank in (0..size).map(Rank) {
                let at = torus.coordinates(rank).expect("inside");
                assert!(at.iter().zip(extents).all(|(at, extent)| at < extent));
                let at: Vec<i64> = at.into_iter().map(i64::from).collect();
                assert_eq!(torus.rank_at(&at), Some(rank));
                let beyond = |times: i64| {
                    at.iter().zip(extents).map(move |(at, extent)| at + times * i64::from(*extent))
                };
                for times in [-3, -1, 1] {
                    assert_eq!(torus.rank_at(&beyond(times).collect::<Vec<_>>()), Some(rank), "it goes on");
                }
                for (dimension, extent) in extents.iter().enumerate() {
                    let there = torus.neighbour(rank, dimension, 1).expect("a neighbour");
                    assert_eq!(torus.neighbour(there, dimension, -1), Some(rank));
                    assert_eq!(torus.neighbour(rank, dimension, i64::from(*extent)), Some(rank));
                    for far in [i64::MAX, i64::MIN] {
                        let there = torus.neighbour(rank, dimension, far).expect("it closes on itself");
                        assert!(there.0 < size);
                    }
                }
            }
            assert_eq!(torus.coordinates(Rank(size)), None);
            assert_eq!(torus.neighbour(Rank(0), extents.len(), 1), None);
            assert_eq!(torus.rank_at(&vec![0; extents.len() + 1]), None);
        }
    }

    #[test]
    fn what_cannot_be_is_none() {
        assert_eq!(Torus::new(&[3, 0]), None);
        assert_eq!(Torus::new(&[1 << 16, 1 << 16]), None);
        assert_eq!(Torus::new(&[]).map(|torus| torus.size()), Some(1));
    }

    #[test]
    fn a_balanced_torus_has_all_ranks_and_no_long_side_without_need() {
        for size in 1..=400 {
            for dimensions in 1..=4 {
                let torus = Torus::balanced(size, dimensions);
                assert_eq!((torus.size(), torus.extents().len()), (size, dimensions));
                assert!(torus.extents().is_sorted_by(|a, b| a >= b));
            }
        }
        let of = |size, dimensions| Torus::balanced(size, dimensions).extents().to_vec();
        assert_eq!(of(12, 2), [4, 3]);
        assert_eq!(of(64, 3), [4, 4, 4]);
        assert_eq!(of(30, 3), [5, 3, 2]);
        assert_eq!(of(7, 2), [7, 1]);
        assert_eq!(of(4096, 2), [64, 64]);
        assert_eq!(of(0, 2), [1, 1]);
        assert_eq!(Torus::balanced(9, 0).size(), 1);
    }
}
