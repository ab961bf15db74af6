//! How values are combined.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// A plain value that collective operations carry: any type without padding, pointers or forbidden bit patterns.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::Reduce;
/// use zerocopy::{FromBytes, Immutable, IntoBytes};
///
/// #[derive(Clone, Copy, Debug, PartialEq, FromBytes, IntoBytes, Immutable)]
/// #[repr(C)]
/// struct Complex {
///     re: f64,
///     im: f64,
/// }
///
/// let sum = Reduce::by(|a: Complex, b: Complex| Complex { re: a.re + b.re, im: a.im + b.im });
/// let total = job.world().all_reduce_one(Complex { re: 1.0, im: -2.0 }, &sum).await?;
/// assert_eq!(total, Complex { re: 1.0, im: -2.0 });
/// # job.leave().await
/// # }
/// ```
///
/// Types without bytes are accepted here, and no operation on them compiles:
/// ```compile_fail
/// let nothing = posthaste::Reduce::by(|(), ()| ());
/// ```
pub trait Datum: Copy + FromBytes + IntoBytes + Immutable + Send + 'static {}

impl<T: Copy + FromBytes + IntoBytes + Immutable + Send + 'static> Datum for T {}

/// Values without bytes could not be told apart, nor counted. To be asked while it is compiled.
pub(super) const fn has_bytes<T>() {
    assert!(size_of::<T>() > 0, "collective operations are on values of at least one byte");
}

/// Numbers: sum, product, least and greatest.
pub trait Arithmetic: Datum {
    /// The sum; integers wrap around.
    #[must_use]
    fn add(self, other: Self) -> Self;
    /// The product; integers wrap around.
    #[must_use]
    fn multiply(self, other: Self) -> Self;
    /// The lesser; of floats, a number rather than a NaN.
    #[must_use]
    fn least(self, other: Self) -> Self;
    /// The greater; of floats, a number rather than a NaN.
    #[must_use]
    fn greatest(self, other: Self) -> Self;
}

/// Integers as rows of bits.
pub trait Bits: Datum {
    /// Bits that both have.
    #[must_use]
    fn and(self, other: Self) -> Self;
    /// Bits that either has.
    #[must_use]
    fn or(self, other: Self) -> Self;
    /// Bits that one has and the other has not.
    #[must_use]
    fn xor(self, other: Self) -> Self;
}

macro_rules! integers {
    ($($int:ty)*) => {$(
        impl Arithmetic for $int {
            #[inline(always)]
            fn add(self, other: Self) -> Self { self.wrapping_add(other) }
            #[inline(always)]
            fn multiply(self, other: Self) -> Self { self.wrapping_mul(other) }
            #[inline(always)]
            fn least(self, other: Self) -> Self { self.min(other) }
            #[inline(always)]
            fn greatest(self, other: Self) -> Self { self.max(other) }
        }
        impl Bits for $int {
            #[inline(always)]
            fn and(self, other: Self) -> Self { self & other }
            #[inline(always)]
            fn or(self, other: Self) -> Self { self | other }
            #[inline(always)]
            fn xor(self, other: Self) -> Self { self ^ other }
        }
    )*};
}

macro_rules! floats {
    ($($float:ty)*) => {$(
        impl Arithmetic for $float {
            #[inline(always)]
            fn add(self, other: Self) -> Self { self + other }
            #[inline(always)]
            fn multiply(self, other: Self) -> Self { self * other }
            #[inline(always)]
            fn least(self, other: Self) -> Self { self.min(other) }
            #[inline(always)]
            fn greatest(self, other: Self) -> Self { self.max(other) }
        }
    )*};
}

integers!(u8 u16 u32 u64 u128 usize i8 i16 i32 i64 i128 isize);
floats!(f32 f64);

/// A value and where it is, for [`Reduce::min_location`] and [`Reduce::max_location`].
///
/// It has no padding, which would be undefined bytes on their way: so its fields cannot be borrowed, only copied.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::Reduce;
/// use posthaste::collective::Located;
/// // Which rank has the largest residual?
/// let mine = Located { value: 0.25, place: job.rank().index() as u64 };
/// let worst = job.world().all_reduce_one(mine, &Reduce::max_location()).await?;
/// assert_eq!({ worst.place }, 0);
/// # job.leave().await
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C, packed)]
pub struct Located<T: Copy> {
    /// The value.
    pub value: T,
    /// Its place: a rank, an index.
    pub place: u64,
}

type Function<T> = Arc<dyn Fn(T, T) -> T + Send + Sync>;
/// Combines the second row of values into the first; `true`: the second is the left operand.
type RowFunction = fn(&mut [u8], &[u8], bool);
type UsersRowFunction = dyn Fn(&mut [u8], &[u8], bool) + Send + Sync;

enum Operation<T> {
    /// The name of the operation, its loop over rows of values, and what tells it from others.
    BuiltIn(&'static str, RowFunction, u32),
    Users(Function<T>),
}

/// An operation that combines values of a type. It must be associative, up to rounding; the operands are combined in an
/// order that the schedule fixes, so that the same values give the same result however messages race. Operations that
/// are not commutative keep the order of the ranks in trees from rank 0, in recursive doubling and in chains.
///
/// # Examples
/// ```
/// use posthaste_protocols::collective::Reduce;
///
/// let total = Reduce::<f64>::sum();
/// let shorter = Reduce::by(|a: u32, b: u32| if a.count_ones() <= b.count_ones() { a } else { b });
/// ```
pub struct Reduce<T>(Operation<T>);

impl<T> Clone for Reduce<T> {
    fn clone(&self) -> Self {
        Self(match &self.0 {
            Operation::BuiltIn(name, rows, mark) => Operation::BuiltIn(name, *rows, *mark),
            Operation::Users(function) => Operation::Users(function.clone()),
        })
    }
}

impl<T> fmt::Debug for Reduce<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.0 {
            Operation::BuiltIn(name, ..) => name,
            Operation::Users(_) => "a closure",
        })
    }
}

/// A binary operation that is known at compile time, so that its loop over a row of values is one.
trait Binary<T> {
    const NAME: &'static str;
    fn apply(left: T, right: T) -> T;
}

#[inline(always)]
fn rows<T: Datum>(target: &mut [u8], other: &[u8], prepend: bool, apply: impl Fn(T, T) -> T) {
    const { has_bytes::<T>() };
    let pairs = target.chunks_exact_mut(size_of::<T>()).zip(other.chunks_exact(size_of::<T>()));
    for (ours, theirs) in pairs {
        if let (Ok(a), Ok(b)) = (T::read_from_bytes(ours), T::read_from_bytes(theirs)) {
            let result = if prepend { apply(b, a) } else { apply(a, b) };
            ours.copy_from_slice(result.as_bytes());
        }
    }
}

fn row_function<T: Datum, B: Binary<T>>(target: &mut [u8], other: &[u8], prepend: bool) {
    // Two loops and not one with a question in it.
    match prepend {
        true => rows::<T>(target, other, false, |a, b| B::apply(b, a)),
        false => rows::<T>(target, other, false, |a, b| B::apply(a, b)),
    }
}

macro_rules! operations {
    ($($name:ident $bound:ident $method:ident $text:literal;)*) => {$(
        struct $name<T>(PhantomData<T>);
        impl<T: $bound> Binary<T> for $name<T> {
            const NAME: &'static str = $text;
            #[inline(always)]
            fn apply(left: T, right: T) -> T { left.$method(right) }
        }
    )*};
}

operations! {
    Sum Arithmetic add "sum";
    Product Arithmetic multiply "product";
    Least Arithmetic least "min";
    Greatest Arithmetic greatest "max";
    And Bits and "and";
    Or Bits or "or";
    Xor Bits xor "xor";
}

struct LeastPlace<T>(PhantomData<T>);
struct GreatestPlace<T>(PhantomData<T>);

/// A number rather than a NaN; of two that are alike the one with the lower place. By that all values are in one order,
/// and so neither that of the operands matters nor how they are grouped.
#[inline(always)]
fn choose<T: PartialOrd + Copy>(
    left: Located<T>,
    right: Located<T>,
    better: impl Fn(&T, &T) -> bool,
) -> Located<T> {
    let ((ours, our_place), (theirs, their_place)) = ((left.value, left.place), (right.value, right.place));
    let is_nan = |value: &T| value.partial_cmp(value).is_none();
    let theirs_is_better = match (is_nan(&ours), is_nan(&theirs)) {
        (true, false) => true,
        (false, true) => false,
        _ if better(&theirs, &ours) => true,
        _ => !better(&ours, &theirs) && their_place < our_place,
    };
    if theirs_is_better { right } else { left }
}

impl<T: PartialOrd + Copy> Binary<Located<T>> for LeastPlace<T> {
    const NAME: &'static str = "min with location";
    fn apply(left: Located<T>, right: Located<T>) -> Located<T> {
        choose(left, right, |a, b| a < b)
    }
}

impl<T: PartialOrd + Copy> Binary<Located<T>> for GreatestPlace<T> {
    const NAME: &'static str = "max with location";
    fn apply(left: Located<T>, right: Located<T>) -> Located<T> {
        choose(left, right, |a, b| a > b)
    }
}

impl<T: Datum> Reduce<T> {
    fn built_in<B: Binary<T>>() -> Self {
        let mark = super::plan::hash(B::NAME.bytes().chain(std::any::type_name::<T>().bytes()));
        Self(Operation::BuiltIn(B::NAME, row_function::<T, B>, mark))
    }

    /// Any other operation. It runs inside `advance`: keep it short. If it panics, the collective operation ends with an
    /// error on all ranks.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::Reduce;
    /// let world = job.world();
    /// let gcd = Reduce::by(|mut a: u64, mut b: u64| {
    ///     while b > 0 {
    ///         (a, b) = (b, a % b);
    ///     }
    ///     a
    /// });
    /// assert_eq!(world.all_reduce(&[12, 18], &gcd).await?, [12, 18]);
    /// # job.leave().await
    /// # }
    /// ```
    pub fn by(operation: impl Fn(T, T) -> T + Send + Sync + 'static) -> Self {
        const { has_bytes::<T>() };
        Self(Operation::Users(Arc::new(operation)))
    }

    pub(crate) fn combiner(&self) -> Combiner {
        match &self.0 {
            Operation::BuiltIn(_, rows, mark) => {
                Combiner { element: size_of::<T>(), mark: *mark, function: RowOf::BuiltIn(*rows) }
            }
            Operation::Users(function) => {
                let function = function.clone();
                let run = move |target: &mut [u8], other: &[u8], prepend: bool| {
                    rows::<T>(target, other, prepend, &*function);
                };
                Combiner {
                    element: size_of::<T>(),
                    mark: super::plan::hash(std::any::type_name::<T>().bytes()),
                    function: RowOf::Users(Arc::new(run)),
                }
            }
        }
    }
}

impl<T: Arithmetic> Reduce<T> {
    /// The sum; integers wrap around.
    #[must_use]
    pub fn sum() -> Self {
        Self::built_in::<Sum<T>>()
    }

    /// The product; integers wrap around.
    #[must_use]
    pub fn product() -> Self {
        Self::built_in::<Product<T>>()
    }

    /// The least; a number rather than a NaN.
    #[must_use]
    pub fn min() -> Self {
        Self::built_in::<Least<T>>()
    }

    /// The greatest; a number rather than a NaN.
    #[must_use]
    pub fn max() -> Self {
        Self::built_in::<Greatest<T>>()
    }
}

impl<T: Bits> Reduce<T> {
    /// The bits that all have.
    #[must_use]
    pub fn and() -> Self {
        Self::built_in::<And<T>>()
    }

    /// The bits that any has.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::Reduce;
    /// // Which features has anybody, and which have all?
    /// let mine = 0b0110_u8;
    /// let any = job.world().all_reduce_one(mine, &Reduce::or());
    /// let all = job.world().all_reduce_one(mine, &Reduce::and());
    /// assert_eq!((any.await?, all.await?), (0b0110, 0b0110));
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn or() -> Self {
        Self::built_in::<Or<T>>()
    }

    /// The bits that an odd number have.
    #[must_use]
    pub fn xor() -> Self {
        Self::built_in::<Xor<T>>()
    }
}

impl<T: PartialOrd + Copy> Reduce<Located<T>>
where
    Located<T>: Datum,
{
    /// The least value and its place; of equal ones, the lowest place. A number rather than a NaN: that is the result only
    /// if there is no number, with the lowest place.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::Reduce;
    /// use posthaste::collective::Located;
    /// // Who has the least to do?
    /// let load = Located { value: 17_u64, place: job.rank().index() as u64 };
    /// let idle = job.world().all_reduce_one(load, &Reduce::min_location()).await?;
    /// assert_eq!((idle.value, idle.place), (17, 0));
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn min_location() -> Self {
        Self::built_in::<LeastPlace<T>>()
    }

    /// The greatest value and its place; of equal ones, the lowest place. NaNs are as for
    /// [`min_location`](Self::min_location).
    #[must_use]
    pub fn max_location() -> Self {
        Self::built_in::<GreatestPlace<T>>()
    }
}

#[derive(Clone)]
enum RowOf {
    BuiltIn(RowFunction),
    Users(Arc<UsersRowFunction>),
}

/// An operation over rows of bytes.
#[derive(Clone)]
pub(crate) struct Combiner {
    element: usize,
    mark: u32,
    function: RowOf,
}

impl fmt::Debug for Combiner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Combiner").field("element", &self.element).finish_non_exhaustive()
    }
}

impl Combiner {
    /// Bytes of a value; at least 1.
    pub fn element(&self) -> usize {
        self.element.max(1)
    }

    /// Tells operations apart.
    pub fn mark(&self) -> u32 {
        self.mark
    }

    /// Whether it is code of the user's, under which no lock may be held.
    pub fn is_users(&self) -> bool {
        matches!(self.function, RowOf::Users(_))
    }

    /// Combines `other` into `target`; `prepend`: as the left operand.
    #[inline]
    pub fn run(&self, target: &mut [u8], other: &[u8], prepend: bool) {
        match &self.function {
            RowOf::BuiltIn(rows) => rows(target, other, prepend),
            RowOf::Users(rows) => rows(target, other, prepend),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All orders of some values.
    fn permutations(values: &[Located<f64>]) -> Vec<Vec<Located<f64>>> {
        let Some((first, rest)) = values.split_first() else { return vec![Vec::new()] };
        let with_first = |at: usize, mut others: Vec<_>| {
            others.insert(at, *first);
            others
        };
        let rest = permutations(rest);
        (0..values.len())
            .flat_map(|at| rest.iter().cloned().map(move |others| with_first(at, others)))
            .collect()
    }

    /// The results of all ways to put parentheses.
    fn groupings(
        values: &[Located<f64>],
        combine: fn(Located<f64>, Located<f64>) -> Located<f64>,
    ) -> Vec<Located<f64>> {
        if let [only] = values {
            return vec![*only];
        }
        let mut results = Vec::new();
        for (left, right) in (1..values.len()).map(|at| values.split_at(at)) {
            for one in groupings(left, combine) {
                results.extend(groupings(right, combine).into_iter().map(|two| combine(one, two)));
            }
        }
        results
    }

    #[test]
    fn places_of_the_least_and_the_greatest_depend_on_no_order() {
        const NAN: f64 = f64::NAN;
        // Places of the least and of the greatest.
        let cases: [(&[f64], u64, u64); 8] = [
            (&[1.0, 2.0, NAN, 0.0], 3, 1),
            (&[NAN, 1.0, NAN, 1.0], 1, 1),
            (&[NAN, NAN, NAN, NAN], 0, 0),
            (&[NAN, NAN, -NAN, f64::INFINITY], 3, 3),
            (&[f64::NEG_INFINITY, NAN, f64::INFINITY, 7.0], 0, 2),
            (&[2.0, 1.0, 2.0, 1.0, 2.0], 1, 0),
            (&[0.0, -0.0, NAN, 0.0], 0, 0),
            (&[NAN, 3.0], 1, 1),
        ];
        for (values, least, greatest) in cases {
            let located = |(place, value): (usize, &f64)| Located { value: *value, place: place as u64 };
            let located: Vec<_> = values.iter().enumerate().map(located).collect();
            for order in permutations(&located) {
                for (combine, place) in [
                    (LeastPlace::apply as fn(_, _) -> _, least),
                    (GreatestPlace::apply as fn(_, _) -> _, greatest),
                ] {
                    for result in groupings(&order, combine) {
                        assert_eq!({ result.place }, place, "{order:?}");
                        assert_eq!({ result.value }.to_bits(), values[place as usize].to_bits(), "{order:?}");
                    }
                }
            }
        }
    }
}
