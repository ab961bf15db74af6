//! Typed messages: how they are encoded, and the hash by which two ranks notice that they mean different types.

mod bounded;
mod shape;
mod whole;

use bounded::{Bounded, Parts};
use posthaste_core::CallError;
use serde::Serialize;
use serde::de::DeserializeOwned;
use shape::{Hash, add_shape};
use whole::{LeftOut, Whole};

/// A hash of a message type whose bytes are sent as they lie in memory: of its name, as
/// [`type_name`](std::any::type_name) gives it, its size and its alignment. It is never 0, which stands for bytes. Ranks of
/// one build agree on it.
///
/// Ranks of different builds refuse each other's messages if the type has another name, of which its crate, modules and
/// type parameters are parts, another size or another alignment. Nothing else is noticed: fields that were reordered, renamed
/// or given other types, where name and size stayed the same. Such messages are read as the receiver's type, whatever their
/// bytes meant. Whoever changes a type so should send it under another name. The compiler promises neither that two types have
/// different names nor that its next version names them alike: ranks of builds by different compilers may refuse each other
/// without need.
///
/// # Examples
/// ```
/// use posthaste_protocols::codec::plain_schema;
///
/// // Ranks that mean another type by a name notice it by this number.
/// assert_eq!(plain_schema::<[u32; 2]>(), plain_schema::<[u32; 2]>());
/// assert_ne!(plain_schema::<[u32; 2]>(), plain_schema::<u64>());
/// ```
#[must_use]
pub fn plain_schema<T>() -> u64 {
    let mut hash = Hash::new();
    add_name::<T>(&mut hash, "plain");
    hash.add(&(align_of::<T>() as u64).to_le_bytes());
    hash.value() | 1
}

/// A hash of a message type that is encoded: of its name and size, as for [`plain_schema`], and of its shape as serde tells it:
/// the names and order of fields and variants, and their types down to the primitives. Never 0, either.
///
/// For that a few values are deserialized from nothing, all numbers 1 and all strings `a`, and forgotten: their `Drop` does not
/// run, but that of parts of a value which does not come to be does.
///
/// Not noticed are changes behind the first thing at which a `Deserialize` written by hand fails or panics that is offered so
/// little, and one element of each sequence; behind 4,096 things, or 32 levels deep, or 12 of options and sequences; of an
/// enum's variants behind the 64th; and of what a type makes of the primitives. Such messages are decoded to other values, or
/// come out as [`CallError::Codec`].
///
/// # Examples
/// ```
/// use posthaste_protocols::codec::encoded_schema;
///
/// mod old {
///     #[derive(serde::Deserialize)]
///     pub struct Query {
///         pub from: u32,
///         pub to: u32,
///     }
/// }
/// mod new {
///     #[derive(serde::Deserialize)]
///     pub struct Query {
///         pub to: u32,
///         pub from: u32,
///     }
/// }
/// // Fields that were reordered are noticed, and so are requests of other types.
/// assert_ne!(encoded_schema::<old::Query>(), encoded_schema::<new::Query>());
/// assert_ne!(encoded_schema::<Vec<u32>>(), encoded_schema::<Vec<u64>>());
/// ```
#[must_use]
pub fn encoded_schema<T: DeserializeOwned>() -> u64 {
    let mut hash = Hash::new();
    add_name::<T>(&mut hash, "postcard");
    add_shape::<T>(&mut hash);
    hash.value() | 1
}

fn add_name<T>(hash: &mut Hash, encoding: &str) {
    hash.add(encoding.as_bytes());
    hash.add(std::any::type_name::<T>().as_bytes());
    hash.add(&(size_of::<T>() as u64).to_le_bytes());
}

/// Encodes with postcard: without names of fields, whose values are read in the order in which they are written.
///
/// # Errors
/// If the value cannot be encoded, as one of a length that is not known before (a field with `#[serde(flatten)]`); if it leaves
/// out a field, as `#[serde(skip_serializing_if = "..")]` does: whoever decodes it would take the next one for it.
///
/// # Examples
/// ```
/// use posthaste_protocols::codec::{decode, encode};
///
/// let bytes = encode(&("three", 3_u32))?;
/// assert_eq!(decode::<(String, u32)>(&bytes)?, ("three".to_owned(), 3));
/// assert!(decode::<u32>(&bytes).is_err(), "there are bytes left");
/// # Ok::<(), posthaste::CallError>(())
/// ```
pub fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, CallError> {
    let left_out = LeftOut::default();
    postcard::to_stdvec(&Whole::new(value, &left_out)).map_err(|error| {
        let reason = match left_out.get() {
            Some(field) => format!("the field {field} is left out, which its encoding cannot tell"),
            None => error.to_string(),
        };
        CallError::Codec { what: "encode", reason }
    })
}

/// Decodes with postcard.
///
/// # Errors
/// If the bytes are not those of a value, or more, or if its type has to be told by them what they are (`#[serde(untagged)]`,
/// `#[serde(tag = "..")]`), which they do not tell; if options, sequences, structures and variants are more than 256 deep within
/// each other, as a list may be whose elements own the next one; or if there are far more elements than bytes.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CallError> {
    let fail = |reason: String| CallError::Codec { what: "decode", reason };
    let parts = Parts::of(bytes.len());
    let mut deserializer = postcard::Deserializer::from_bytes(bytes);
    let value = T::deserialize(Bounded::new(&mut deserializer, &parts))
        .map_err(|error| fail(parts.why().map_or_else(|| error.to_string(), str::to_owned)))?;
    match deserializer.finalize() {
        Ok([]) => Ok(value),
        Ok(rest) => Err(fail(format!("{} bytes too many", rest.len()))),
        Err(error) => Err(fail(error.to_string())),
    }
}
