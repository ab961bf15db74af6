//! Decoding that ends, whatever the bytes say: no value is deeper than the stack has room for, and none has more parts than its
//! bytes can pay for.

use serde::de::{
    DeserializeSeed, Deserializer, EnumAccess, Error, MapAccess, SeqAccess, VariantAccess, Visitor,
};
use std::cell::Cell;
use std::fmt;

/// How deep options, sequences, structures and variants may be within each other. A level takes some frames of the stack, also
/// when the value is dropped.
pub(super) const DEEPEST: u32 = 256;
/// Elements of sequences and maps: so many for each byte, and besides. Those without bytes of their own are paid for by others.
const FOR_A_BYTE: u64 = 8;
const BESIDES: u64 = 1 << 20;

/// What a value may still have, and why it was refused if it had more: postcard's errors have no room for that.
#[derive(Debug)]
pub(super) struct Parts {
    left: Cell<u64>,
    why: Cell<Option<&'static str>>,
}

impl Parts {
    pub fn of(bytes: usize) -> Parts {
        let left = BESIDES.saturating_add(FOR_A_BYTE.saturating_mul(bytes as u64));
        Parts { left: Cell::new(left), why: Cell::new(None) }
    }

    pub fn why(&self) -> Option<&'static str> {
        self.why.get()
    }

    fn refuse<E: Error>(&self, why: &'static str) -> E {
        self.why.set(Some(why));
        E::custom(why)
    }

    fn take<E: Error>(&self) -> Result<(), E> {
        let left = self.left.get().checked_sub(1);
        self.left.set(left.ok_or_else(|| self.refuse("it has more elements than its bytes can have"))?);
        Ok(())
    }
}

/// Something of serde's, with what is left of the limits below it.
pub(super) struct Bounded<'p, T> {
    inner: T,
    levels: u32,
    parts: &'p Parts,
}

impl<'p, T> Bounded<'p, T> {
    pub fn new(inner: T, parts: &'p Parts) -> Self {
        Self { inner, levels: DEEPEST, parts }
    }

    fn around<U>(&self, inner: U) -> Bounded<'p, U> {
        Bounded { inner, levels: self.levels, parts: self.parts }
    }

    /// One level deeper.
    fn below<U, E: Error>(&self, inner: U) -> Result<Bounded<'p, U>, E> {
        let deeper = || self.parts.refuse("it is more than 256 levels deep");
        let levels = self.levels.checked_sub(1).ok_or_else(deeper)?;
        Ok(Bounded { inner, levels, parts: self.parts })
    }
}

macro_rules! flat {
    ($($method:ident)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
            self.inner.$method(visitor)
        }
    )*};
}

macro_rules! nested {
    ($($method:ident($($argument:ident: $type:ty),*);)*) => {$(
        fn $method<V: Visitor<'de>>(self $(, $argument: $type)*, visitor: V) -> Result<V::Value, D::Error> {
            let visitor = self.below(visitor)?;
            self.inner.$method($($argument,)* visitor)
        }
    )*};
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Bounded<'_, D> {
    type Error = D::Error;

    flat! {
        deserialize_bool deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64 deserialize_i128
        deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64 deserialize_u128
        deserialize_f32 deserialize_f64 deserialize_char deserialize_str deserialize_string
        deserialize_bytes deserialize_byte_buf deserialize_unit deserialize_identifier
    }

    nested! {
        deserialize_any();
        deserialize_ignored_any();
        deserialize_option();
        deserialize_seq();
        deserialize_map();
        deserialize_tuple(len: usize);
        deserialize_newtype_struct(name: &'static str);
        deserialize_tuple_struct(name: &'static str, len: usize);
        deserialize_struct(name: &'static str, fields: &'static [&'static str]);
        deserialize_enum(name: &'static str, variants: &'static [&'static str]);
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.inner.deserialize_unit_struct(name, visitor)
    }

    fn is_human_readable(&self) -> bool {
        self.inner.is_human_readable()
    }
}

macro_rules! visit {
    ($($method:ident: $type:ty;)*) => {$(
        fn $method<E: Error>(self, value: $type) -> Result<V::Value, E> {
            self.inner.$method(value)
        }
    )*};
}

macro_rules! visit_with {
    ($($method:ident: $access:ident;)*) => {$(
        fn $method<A: $access<'de>>(self, access: A) -> Result<V::Value, A::Error> {
            let access = self.around(access);
            self.inner.$method(access)
        }
    )*};
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Bounded<'_, V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(f)
    }

    visit! {
        visit_bool: bool;
        visit_i8: i8;
        visit_i16: i16;
        visit_i32: i32;
        visit_i64: i64;
        visit_i128: i128;
        visit_u8: u8;
        visit_u16: u16;
        visit_u32: u32;
        visit_u64: u64;
        visit_u128: u128;
        visit_f32: f32;
        visit_f64: f64;
        visit_char: char;
        visit_str: &str;
        visit_borrowed_str: &'de str;
        visit_string: String;
        visit_bytes: &[u8];
        visit_borrowed_bytes: &'de [u8];
        visit_byte_buf: Vec<u8>;
    }

    fn visit_none<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_none()
    }

    fn visit_unit<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_unit()
    }

    visit_with! {
        visit_some: Deserializer;
        visit_newtype_struct: Deserializer;
        visit_seq: SeqAccess;
        visit_map: MapAccess;
        visit_enum: EnumAccess;
    }
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Bounded<'_, S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<S::Value, D::Error> {
        let deserializer = self.around(deserializer);
        self.inner.deserialize(deserializer)
    }
}

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for Bounded<'_, A> {
    type Error = A::Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        self.parts.take()?;
        let seed = self.around(seed);
        self.inner.next_element_seed(seed)
    }

    fn size_hint(&self) -> Option<usize> {
        self.inner.size_hint()
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Bounded<'_, A> {
    type Error = A::Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        self.parts.take()?;
        let seed = self.around(seed);
        self.inner.next_key_seed(seed)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        let seed = self.around(seed);
        self.inner.next_value_seed(seed)
    }

    fn size_hint(&self) -> Option<usize> {
        self.inner.size_hint()
    }
}

impl<'de, 'p, A: EnumAccess<'de>> EnumAccess<'de> for Bounded<'p, A> {
    type Error = A::Error;
    type Variant = Bounded<'p, A::Variant>;

    fn variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<(S::Value, Self::Variant), A::Error> {
        let Bounded { inner, levels, parts } = self;
        let (value, variant) = inner.variant_seed(seed)?;
        Ok((value, Bounded { inner: variant, levels, parts }))
    }
}

impl<'de, A: VariantAccess<'de>> VariantAccess<'de> for Bounded<'_, A> {
    type Error = A::Error;

    fn unit_variant(self) -> Result<(), A::Error> {
        self.inner.unit_variant()
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, A::Error> {
        let seed = self.around(seed);
        self.inner.newtype_variant_seed(seed)
    }

    fn tuple_variant<V: Visitor<'de>>(self, len: usize, visitor: V) -> Result<V::Value, A::Error> {
        let visitor = self.around(visitor);
        self.inner.tuple_variant(len, visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, A::Error> {
        let visitor = self.around(visitor);
        self.inner.struct_variant(fields, visitor)
    }
}

#[cfg(test)]
mod tests {
    use crate::codec::{decode, encode};
    use proptest::prelude::*;
    use serde::{Deserialize, Serialize};
    use std::collections::BTreeMap;

    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
    enum Tree {
        Fork(Box<Tree>, Box<Tree>),
        Named { name: String, under: Option<Box<Tree>> },
        Many(Vec<Tree>),
        Leaf(u64),
        Nothing,
    }

    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
    struct Chain(Option<Box<Chain>>);

    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
    struct All {
        signed: (bool, i8, i16, i32, i64, i128),
        numbers: (u8, u16, u32, u64, u128, f32, f64, char),
        text: String,
        bytes: Vec<u8>,
        unit: (),
        map: BTreeMap<u32, Option<Vec<String>>>,
        array: [u16; 5],
        tree: Tree,
    }

    fn tree() -> impl Strategy<Value = Tree> {
        let leaf = prop_oneof![any::<u64>().prop_map(Tree::Leaf), Just(Tree::Nothing)];
        leaf.prop_recursive(6, 64, 4, |inner| {
            let boxed = inner.clone().prop_map(Box::new);
            prop_oneof![
                (boxed.clone(), boxed.clone()).prop_map(|(left, right)| Tree::Fork(left, right)),
                (".{0,9}", proptest::option::of(boxed)).prop_map(|(name, under)| Tree::Named { name, under }),
                proptest::collection::vec(inner, 0..4).prop_map(Tree::Many),
            ]
        })
    }

    #[test]
    fn a_value_deeper_than_the_stack_is_refused_and_takes_none() {
        // A fork, whose left is a fork, whose left is one, …
        let refused = decode::<Tree>(&vec![0; 1 << 20]).unwrap_err();
        assert!(refused.to_string().contains("levels deep"), "{refused}");
        let refused = decode::<Chain>(&vec![1; 1 << 20]).unwrap_err();
        assert!(refused.to_string().contains("levels deep"), "{refused}");
        let chain = |len| (0..len).fold(Chain(None), |chain, _| Chain(Some(Box::new(chain))));
        let deep = chain(super::DEEPEST as usize / 2 - 2);
        assert_eq!(decode::<Chain>(&encode(&deep).unwrap()).unwrap(), deep);
    }

    #[test]
    fn elements_without_bytes_come_to_an_end() {
        let refused = decode::<Vec<()>>(&encode(&u64::MAX).unwrap()).unwrap_err();
        assert!(refused.to_string().contains("more elements"), "{refused}");
        assert_eq!(decode::<Vec<()>>(&encode(&vec![(); 70_000]).unwrap()).unwrap().len(), 70_000);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn whatever_is_encoded_is_decoded(
            tree in tree(),
            text in ".{0,20}",
            bytes in proptest::collection::vec(any::<u8>(), 0..300),
            map in proptest::collection::btree_map(
                any::<u32>(), proptest::option::of(proptest::collection::vec(".{0,4}", 0..4)), 0..5),
            number in any::<i128>(),
        ) {
            let small = number as i64;
            let signed = (small < 0, small as i8, small as i16, small as i32, small, number);
            let numbers = (
                small as u8, small as u16, small as u32, small as u64, number as u128, small as f32, small as f64, 'é',
            );
            let all = All { signed, numbers, text, bytes, unit: (), map, array: [small as u16; 5], tree };
            let encoded = encode(&all).expect("it can be encoded");
            prop_assert_eq!(decode::<All>(&encoded).expect("it is whole"), all);
            for len in 0..encoded.len() {
                prop_assert!(decode::<All>(&encoded[..len]).is_err());
            }
        }

        #[test]
        fn any_bytes_are_decoded_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let _ = decode::<All>(&bytes);
            let _ = decode::<Tree>(&bytes);
        }
    }
}
