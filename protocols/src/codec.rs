//! Typed messages: how they are encoded, and the hash by which two ranks notice that they mean types of different names
//! or sizes.

use posthaste_core::CallError;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A hash of a message type: of the encoding, of the type's name as [`type_name`](std::any::type_name) gives it, and of
/// its size in memory. It is never 0, which stands for bytes. Ranks of one build agree on it.
///
/// Ranks of different builds refuse each other's messages if the type has another name, of which its crate, modules and
/// type parameters are parts, another size, or another encoding. Nothing else is noticed:
///
/// * Fields or variants that were added, taken away, reordered, renamed or given other types, where name and size
///   stayed the same. So it is with the types within it: of a `Vec<T>` the name of `T` counts, not its size.
/// * What serde's attributes change in the encoding.
///
/// Such messages are taken: plain ones are read as the receiver's type, whatever their bytes meant, and encoded ones
/// come out as other values or as [`CallError::Codec`]. Whoever changes a type so should send it under another name.
/// The compiler promises neither that two types have different names nor that its next version names them alike: ranks
/// of builds by different compilers may refuse each other without need.
#[must_use]
pub fn schema_of<T>(encoding: &str) -> u64 {
    let name = std::any::type_name::<T>();
    let size = size_of::<T>() as u64;
    // FNV-1a; never 0, which means "bytes".
    let bytes = encoding.bytes().chain(name.bytes()).chain(size.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    }) | 1
}

/// Encodes with postcard.
///
/// # Errors
/// If the value cannot be encoded.
pub fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, CallError> {
    postcard::to_stdvec(value).map_err(|error| CallError::Codec { what: "encode", reason: error.to_string() })
}

/// Decodes with postcard.
///
/// # Errors
/// If the bytes are not those of a value, or more.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CallError> {
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => {
            Err(CallError::Codec { what: "decode", reason: format!("{} bytes too many", rest.len()) })
        }
        Err(error) => Err(CallError::Codec { what: "decode", reason: error.to_string() }),
    }
}
