//! The shape of an encoded type, seen by deserializing one from nothing: which primitive follows which, under which names of
//! fields and variants. The way is that of serde-reflection, <https://github.com/zefchain/serde-reflection>.

use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, IntoDeserializer, MapAccess, SeqAccess,
    VariantAccess, Visitor,
};
use std::fmt::{self, Display};

/// Most things that are looked at, in all passes: of a type that contains itself, and of long arrays, no more is seen.
const MOST: u32 = 1 << 12;
/// Most passes. Each time an enum is met it shows its next variant, until all have been seen.
const MOST_PASSES: usize = 64;
/// How deep options and sequences have something in them, and how deep anything goes.
const DEEP: u32 = 12;
const DEEPEST: u32 = 32;

/// As an enum is seen.
const ENUM: &str = "enum";

/// FNV-1a.
#[derive(Clone, Copy)]
pub(super) struct Hash(u64);

impl Hash {
    pub fn new() -> Hash {
        Hash(0xcbf2_9ce4_8422_2325)
    }

    pub fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    fn add_names(&mut self, names: &[&str]) {
        self.add(&(names.len() as u64).to_le_bytes());
        for name in names {
            self.add(&(name.len() as u64).to_le_bytes());
            self.add(name.as_bytes());
        }
    }

    pub fn value(self) -> u64 {
        self.0
    }
}

/// Adds what can be seen of the shape of `T`. That is the same wherever `T` is: a type whose own `Deserialize` does not take
/// what it is offered here is seen up to there.
pub(super) fn add_shape<T: DeserializeOwned>(hash: &mut Hash) {
    let mut tracer = Tracer { hash: *hash, known: Vec::new(), seen: 0, depth: 0 };
    for _ in 0..MOST_PASSES {
        tracer.depth = 0;
        // It came out of nothing: what its end would do to what it names is not done.
        let pass = || T::deserialize(&mut tracer).map(std::mem::forget).is_ok();
        let whole = std::panic::catch_unwind(std::panic::AssertUnwindSafe(pass));
        tracer.hash.add(&[u8::from(whole.unwrap_or(false))]);
        if tracer.seen > MOST || tracer.known.iter().all(|known| known.shown >= known.parts.len()) {
            break;
        }
    }
    *hash = tracer.hash;
}

/// There is no more to be seen.
#[derive(Debug)]
struct End;

impl Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the shape ends here")
    }
}

impl std::error::Error for End {}

impl serde::de::Error for End {
    fn custom<T: Display>(_message: T) -> Self {
        End
    }
}

/// A struct or an enum that was met.
struct Known {
    what: &'static str,
    name: &'static str,
    parts: &'static [&'static str],
    /// Variants that were shown so far, of an enum.
    shown: usize,
}

struct Tracer {
    hash: Hash,
    known: Vec<Known>,
    seen: u32,
    depth: u32,
}

impl Tracer {
    /// One more thing is seen.
    fn see(&mut self, what: &str) -> Result<(), End> {
        self.seen += 1;
        if self.seen > MOST {
            return Err(End);
        }
        self.hash.add_names(&[what]);
        Ok(())
    }

    /// The same of what has a name and named parts, which count when it is met first.
    fn see_named(
        &mut self,
        what: &'static str,
        name: &'static str,
        parts: &'static [&'static str],
    ) -> Result<&mut Known, End> {
        self.see(what)?;
        let is_it = |known: &Known| (known.what, known.name, known.parts) == (what, name, parts);
        let at = self.known.iter().position(is_it).unwrap_or(self.known.len());
        self.hash.add(&(at as u64).to_le_bytes());
        if at == self.known.len() {
            self.hash.add_names(&[name]);
            self.hash.add_names(parts);
            // What is no enum has nothing to show.
            let shown = if what == ENUM { 0 } else { parts.len() };
            self.known.push(Known { what, name, parts, shown });
        }
        Ok(&mut self.known[at])
    }

    /// How many elements there are in what may have any number.
    fn some(&self) -> usize {
        usize::from(self.depth < DEEP)
    }

    /// Looks at what is within.
    fn within<R>(&mut self, look: impl FnOnce(&mut Self) -> Result<R, End>) -> Result<R, End> {
        if self.depth == DEEPEST {
            return Err(End);
        }
        self.depth += 1;
        let value = look(self);
        self.depth -= 1;
        value
    }

    fn row<'de, V: Visitor<'de>>(&mut self, left: usize, visitor: V) -> Result<V::Value, End> {
        self.within(|tracer| visitor.visit_seq(Row { tracer, left }))
    }
}

/// Elements one behind the other, or keys and their values.
struct Row<'t> {
    tracer: &'t mut Tracer,
    left: usize,
}

impl<'de> SeqAccess<'de> for Row<'_> {
    type Error = End;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, End> {
        if self.left == 0 {
            return Ok(None);
        }
        self.left -= 1;
        seed.deserialize(&mut *self.tracer).map(Some)
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.left)
    }
}

impl<'de> MapAccess<'de> for Row<'_> {
    type Error = End;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, End> {
        self.next_element_seed(seed)
    }

    fn next_value_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<T::Value, End> {
        seed.deserialize(&mut *self.tracer)
    }
}

/// The variant of an enum that is shown in this pass.
struct Shown<'t> {
    tracer: &'t mut Tracer,
    variant: u32,
}

impl<'de> EnumAccess<'de> for Shown<'_> {
    type Error = End;
    type Variant = Self;

    fn variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<(T::Value, Self), End> {
        let variant = IntoDeserializer::<End>::into_deserializer(self.variant);
        Ok((seed.deserialize(variant)?, self))
    }
}

impl<'de> VariantAccess<'de> for Shown<'_> {
    type Error = End;

    fn unit_variant(self) -> Result<(), End> {
        self.tracer.see("unit variant")
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, End> {
        self.tracer.see("newtype variant")?;
        self.tracer.within(|tracer| seed.deserialize(tracer))
    }

    fn tuple_variant<V: Visitor<'de>>(self, len: usize, visitor: V) -> Result<V::Value, End> {
        self.tracer.see("tuple variant")?;
        self.tracer.row(len, visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, End> {
        self.tracer.see_named("struct variant", "", fields)?;
        self.tracer.row(fields.len(), visitor)
    }
}

/// A primitive, and one of its values: not 0, which some types do not take.
macro_rules! primitive {
    ($($deserialize:ident $visit:ident $value:expr;)*) => {
        $(fn $deserialize<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, End> {
            self.see(stringify!($deserialize))?;
            visitor.$visit($value)
        })*
    };
}

/// What an encoding that does not describe itself cannot tell.
macro_rules! untold {
    ($($deserialize:ident)*) => {
        $(fn $deserialize<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, End> {
            self.see(stringify!($deserialize))?;
            Err(End)
        })*
    };
}

impl<'de> Deserializer<'de> for &mut Tracer {
    type Error = End;

    primitive! {
        deserialize_bool visit_bool true;
        deserialize_i8 visit_i8 1;
        deserialize_i16 visit_i16 1;
        deserialize_i32 visit_i32 1;
        deserialize_i64 visit_i64 1;
        deserialize_i128 visit_i128 1;
        deserialize_u8 visit_u8 1;
        deserialize_u16 visit_u16 1;
        deserialize_u32 visit_u32 1;
        deserialize_u64 visit_u64 1;
        deserialize_u128 visit_u128 1;
        deserialize_f32 visit_f32 1.0;
        deserialize_f64 visit_f64 1.0;
        deserialize_char visit_char 'a';
        deserialize_str visit_borrowed_str "a";
        deserialize_string visit_borrowed_str "a";
        deserialize_bytes visit_borrowed_bytes b"a";
        deserialize_byte_buf visit_borrowed_bytes b"a";
    }

    untold! { deserialize_any deserialize_identifier deserialize_ignored_any }

    fn deserialize_unit<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, End> {
        self.see("unit")?;
        visitor.visit_unit()
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, End> {
        self.see_named("unit struct", name, &[])?;
        visitor.visit_unit()
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, End> {
        self.see_named("newtype struct", name, &[])?;
        self.within(|tracer| visitor.visit_newtype_struct(tracer))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, End> {
        self.see("option")?;
        if self.some() == 0 {
            return visitor.visit_none();
        }
        self.within(|tracer| visitor.visit_some(tracer))
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, End> {
        self.see("seq")?;
        self.row(self.some(), visitor)
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, len: usize, visitor: V) -> Result<V::Value, End> {
        self.see("tuple")?;
        self.hash.add(&(len as u64).to_le_bytes());
        self.row(len, visitor)
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        len: usize,
        visitor: V,
    ) -> Result<V::Value, End> {
        self.see_named("tuple struct", name, &[])?;
        self.hash.add(&(len as u64).to_le_bytes());
        self.row(len, visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, End> {
        self.see("map")?;
        let left = self.some();
        self.within(|tracer| visitor.visit_map(Row { tracer, left }))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, End> {
        self.see_named("struct", name, fields)?;
        self.row(fields.len(), visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, End> {
        let known = self.see_named(ENUM, name, variants)?;
        let variant = known.shown.checked_rem(variants.len()).ok_or(End)? as u32;
        known.shown += 1;
        visitor.visit_enum(Shown { tracer: self, variant })
    }

    fn is_human_readable(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;
    use std::collections::BTreeMap;

    fn shape<T: DeserializeOwned>() -> u64 {
        let mut hash = Hash::new();
        add_shape::<T>(&mut hash);
        hash.value()
    }

    /// A type of that body, under the same name in every module.
    macro_rules! types {
        ($($module:ident { $($body:tt)* })*) => {
            $(mod $module {
                #[derive(super::Deserialize)]
                #[allow(dead_code)]
                $($body)*
            })*
        };
    }

    types! {
        pair { pub struct T { a: u32, b: i32 } }
        same { pub struct T { a: u32, b: i32 } }
        swapped { pub struct T { b: u32, a: i32 } }
        retyped { pub struct T { a: u32, b: u32 } }
        renamed { pub struct T { a: u32, c: i32 } }
        shorter { pub struct T { a: u32 } }
        nested { pub struct T { a: u32, b: Option<Vec<(u8, String)>> } }
        nested_otherwise { pub struct T { a: u32, b: Option<Vec<(u16, String)>> } }
        mapped { pub struct T(super::BTreeMap<u8, u32>); }
        mapped_otherwise { pub struct T(super::BTreeMap<u8, u64>); }
        choice { pub enum T { A, B(u32), C { x: u8 } } }
        choice_more { pub enum T { A, B(u32), C { x: u8 }, D } }
        choice_retyped { pub enum T { A, B(u32), C { x: i8 } } }
        choice_swapped { pub enum T { B(u32), A, C { x: u8 } } }
        choice_first_retyped { pub enum T { A(u8), B(u32), C { x: u8 } } }
        choice_second_retyped { pub enum T { A, B(u64), C { x: u8 } } }
        row { pub struct T([u8; 4]); }
        longer_row { pub struct T([u8; 5]); }
        skipping { pub struct T { a: u32, #[serde(skip)] b: i32 } }
    }

    #[test]
    fn types_of_one_name_differ_by_what_they_are_made_of() {
        let all = [
            shape::<pair::T>(),
            shape::<swapped::T>(),
            shape::<retyped::T>(),
            shape::<renamed::T>(),
            shape::<shorter::T>(),
            shape::<nested::T>(),
            shape::<nested_otherwise::T>(),
            shape::<mapped::T>(),
            shape::<mapped_otherwise::T>(),
            shape::<choice::T>(),
            shape::<choice_more::T>(),
            shape::<choice_retyped::T>(),
            shape::<choice_swapped::T>(),
            shape::<row::T>(),
            shape::<longer_row::T>(),
            shape::<u32>(),
            shape::<String>(),
            shape::<()>(),
        ];
        let mut different = all.to_vec();
        different.sort_unstable();
        different.dedup();
        assert_eq!(different.len(), all.len(), "{all:x?}");
        assert_eq!(shape::<pair::T>(), shape::<same::T>());
        assert_eq!(shape::<shorter::T>(), shape::<skipping::T>(), "what is not encoded does not count");
    }

    /// An enum within another one, of which every variant counts.
    #[test]
    fn every_variant_of_a_nested_enum_is_seen() {
        type Reply<E> = Result<(), E>;
        let all = [
            shape::<Reply<choice::T>>(),
            shape::<Reply<choice_more::T>>(),
            shape::<Reply<choice_retyped::T>>(),
            shape::<Reply<choice_swapped::T>>(),
            shape::<Reply<choice_first_retyped::T>>(),
            shape::<Reply<choice_second_retyped::T>>(),
            shape::<Option<Result<u8, choice::T>>>(),
        ];
        let mut different = all.to_vec();
        different.sort_unstable();
        different.dedup();
        assert_eq!(different.len(), all.len(), "{all:x?}");
    }

    #[derive(Deserialize)]
    #[allow(dead_code)]
    enum Tree {
        Fork(Box<Tree>, Box<Tree>),
        Only(Box<Tree>),
        Many(Vec<Tree>),
        Perhaps(Option<Box<Tree>>),
        Leaf(u64),
    }

    /// Of which there is no value, and each level of which takes much of the stack.
    #[derive(Deserialize)]
    #[allow(dead_code)]
    struct Endless(Box<Endless>, [(u64, [u64; 32]); 32]);

    struct Strict;

    impl<'de> Deserialize<'de> for Strict {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            let text = String::deserialize(deserializer)?;
            assert_eq!(text, "what nobody offers");
            Ok(Strict)
        }
    }

    #[test]
    fn a_type_that_contains_itself_or_takes_nothing_comes_to_an_end() {
        assert_eq!(shape::<Tree>(), shape::<Tree>());
        assert_ne!(shape::<Tree>(), shape::<Vec<Tree>>());
        assert_eq!(shape::<Endless>(), shape::<Endless>());
        assert_eq!(shape::<(u8, Strict)>(), shape::<(u8, Strict)>());
        assert_ne!(shape::<(u8, Strict)>(), shape::<(u16, Strict)>(), "it is seen up to there");
        assert_eq!(shape::<std::time::Duration>(), shape::<std::time::Duration>());
        assert_ne!(shape::<std::num::NonZeroU32>(), shape::<std::num::NonZeroU64>());
    }
}
