//! Encoding that refuses what its bytes could not tell: fields that a value leaves out. The receiver has no names to go by, and
//! would read the next field in the place of that one.

use serde::ser::{
    Error, Serialize, SerializeMap, SerializeSeq, SerializeStruct, SerializeStructVariant, SerializeTuple,
    SerializeTupleStruct, SerializeTupleVariant, Serializer,
};
use std::cell::Cell;
use std::fmt::Display;

/// The field that was left out, if any was: postcard's errors have no room for its name.
pub(super) type LeftOut = Cell<Option<&'static str>>;

/// A value, or something of serde's that takes one, and where to say what was left out.
pub(super) struct Whole<'w, T> {
    inner: T,
    left_out: &'w LeftOut,
}

impl<'w, T> Whole<'w, T> {
    pub fn new(inner: T, left_out: &'w LeftOut) -> Self {
        Self { inner, left_out }
    }

    fn around<U>(&self, inner: U) -> Whole<'w, U> {
        Whole { inner, left_out: self.left_out }
    }

    fn refuse<E: Error>(&self, field: &'static str) -> E {
        self.left_out.set(Some(field));
        E::custom(field)
    }
}

impl<T: Serialize + ?Sized> Serialize for Whole<'_, &T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.inner.serialize(self.around(serializer))
    }
}

macro_rules! scalars {
    ($($method:ident($type:ty))*) => {
        $(fn $method(self, value: $type) -> Result<S::Ok, S::Error> {
            self.inner.$method(value)
        })*
    };
}

/// What begins several parts.
macro_rules! rows_of {
    ($($method:ident($($name:ident: $type:ty),*) -> $parts:ident;)*) => {
        $(fn $method(self, $($name: $type),*) -> Result<Self::$parts, S::Error> {
            let left_out = self.left_out;
            self.inner.$method($($name),*).map(|inner| Whole { inner, left_out })
        })*
    };
}

impl<'w, S: Serializer> Serializer for Whole<'w, S> {
    type Ok = S::Ok;
    type Error = S::Error;
    type SerializeSeq = Whole<'w, S::SerializeSeq>;
    type SerializeTuple = Whole<'w, S::SerializeTuple>;
    type SerializeTupleStruct = Whole<'w, S::SerializeTupleStruct>;
    type SerializeTupleVariant = Whole<'w, S::SerializeTupleVariant>;
    type SerializeMap = Whole<'w, S::SerializeMap>;
    type SerializeStruct = Whole<'w, S::SerializeStruct>;
    type SerializeStructVariant = Whole<'w, S::SerializeStructVariant>;

    scalars! {
        serialize_bool(bool) serialize_char(char) serialize_str(&str) serialize_bytes(&[u8])
        serialize_i8(i8) serialize_i16(i16) serialize_i32(i32) serialize_i64(i64) serialize_i128(i128)
        serialize_u8(u8) serialize_u16(u16) serialize_u32(u32) serialize_u64(u64) serialize_u128(u128)
        serialize_f32(f32) serialize_f64(f64) serialize_unit_struct(&'static str)
    }

    fn serialize_none(self) -> Result<S::Ok, S::Error> {
        self.inner.serialize_none()
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<S::Ok, S::Error> {
        let value = self.around(value);
        self.inner.serialize_some(&value)
    }

    fn serialize_unit(self) -> Result<S::Ok, S::Error> {
        self.inner.serialize_unit()
    }

    fn serialize_unit_variant(
        self,
        name: &'static str,
        index: u32,
        variant: &'static str,
    ) -> Result<S::Ok, S::Error> {
        self.inner.serialize_unit_variant(name, index, variant)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        name: &'static str,
        value: &T,
    ) -> Result<S::Ok, S::Error> {
        let value = self.around(value);
        self.inner.serialize_newtype_struct(name, &value)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        name: &'static str,
        index: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<S::Ok, S::Error> {
        let value = self.around(value);
        self.inner.serialize_newtype_variant(name, index, variant, &value)
    }

    rows_of! {
        serialize_seq(len: Option<usize>) -> SerializeSeq;
        serialize_tuple(len: usize) -> SerializeTuple;
        serialize_tuple_struct(name: &'static str, len: usize) -> SerializeTupleStruct;
        serialize_tuple_variant(name: &'static str, index: u32, variant: &'static str, len: usize)
            -> SerializeTupleVariant;
        serialize_map(len: Option<usize>) -> SerializeMap;
        serialize_struct(name: &'static str, len: usize) -> SerializeStruct;
        serialize_struct_variant(name: &'static str, index: u32, variant: &'static str, len: usize)
            -> SerializeStructVariant;
    }

    fn collect_str<T: Display + ?Sized>(self, value: &T) -> Result<S::Ok, S::Error> {
        self.inner.collect_str(value)
    }

    fn is_human_readable(&self) -> bool {
        self.inner.is_human_readable()
    }
}

/// What takes parts one behind the other, without names.
macro_rules! rows {
    ($($trait:ident::$method:ident)*) => {
        $(impl<S: $trait> $trait for Whole<'_, S> {
            type Ok = S::Ok;
            type Error = S::Error;

            fn $method<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), S::Error> {
                let value = self.around(value);
                self.inner.$method(&value)
            }

            fn end(self) -> Result<S::Ok, S::Error> {
                self.inner.end()
            }
        })*
    };
}

rows! {
    SerializeSeq::serialize_element SerializeTuple::serialize_element
    SerializeTupleStruct::serialize_field SerializeTupleVariant::serialize_field
}

impl<S: SerializeMap> SerializeMap for Whole<'_, S> {
    type Ok = S::Ok;
    type Error = S::Error;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), S::Error> {
        let key = self.around(key);
        self.inner.serialize_key(&key)
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), S::Error> {
        let value = self.around(value);
        self.inner.serialize_value(&value)
    }

    fn end(self) -> Result<S::Ok, S::Error> {
        self.inner.end()
    }
}

/// What takes fields by name, and is told of those that are left out.
macro_rules! fields {
    ($($trait:ident)*) => {
        $(impl<S: $trait> $trait for Whole<'_, S> {
            type Ok = S::Ok;
            type Error = S::Error;

            fn serialize_field<T: Serialize + ?Sized>(
                &mut self,
                name: &'static str,
                value: &T,
            ) -> Result<(), S::Error> {
                let value = self.around(value);
                self.inner.serialize_field(name, &value)
            }

            fn skip_field(&mut self, name: &'static str) -> Result<(), S::Error> {
                Err(self.refuse(name))
            }

            fn end(self) -> Result<S::Ok, S::Error> {
                self.inner.end()
            }
        })*
    };
}

fields!(SerializeStruct SerializeStructVariant);

#[cfg(test)]
mod tests {
    use crate::codec::{decode, encode};
    use serde::{Deserialize, Serialize};

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Some {
        #[serde(skip_serializing_if = "Option::is_none", default)]
        first: Option<u8>,
        then: (u8, Vec<u8>),
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    enum Variant {
        Named {
            #[serde(skip_serializing_if = "Vec::is_empty", default)]
            list: Vec<Some>,
        },
        #[allow(dead_code, reason = "one that is never made, as in a message of a later version")]
        Other,
    }

    /// Of types that both sides leave out always, nothing is written and nothing is read.
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Without {
        #[serde(skip)]
        never: u32,
        always: u16,
    }

    #[test]
    fn a_value_that_leaves_out_a_field_is_not_sent() {
        let whole = Some { first: Option::Some(2), then: (1, vec![5, 0]) };
        let bytes = encode(&whole).expect("it has all fields");
        assert_eq!(bytes, postcard::to_stdvec(&whole).expect("the same"), "the encoding is postcard's");
        assert_eq!(decode::<Some>(&bytes).expect("what was encoded"), whole);

        let part = Some { first: None, then: (1, vec![5, 0]) };
        let silently: Some = decode(&postcard::to_stdvec(&part).expect("it has no names")).expect("a value");
        assert_ne!(silently, part, "what this is about");
        for told in [
            encode(&part).expect_err("a field is missing"),
            encode(&[Option::Some(part)]).expect_err("in an element"),
        ] {
            assert!(told.to_string().contains("the field first is left out"), "{told}");
        }
        let told = encode(&Variant::Named { list: vec![] }).expect_err("in a variant");
        assert!(told.to_string().contains("the field list is left out"), "{told}");

        let without = Without { never: 0, always: 7 };
        let bytes = encode(&without).expect("both sides know");
        assert_eq!(decode::<Without>(&bytes).expect("what was encoded"), without);
    }
}
