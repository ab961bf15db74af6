//! Typed messages: what is sent under a name, and the hash by which two ranks check that they mean the same type.

use posthaste_core::CallError;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A hash of a message type: its name and its size in memory. Ranks of one program agree on it; ranks of different
/// builds that changed the type do not, which is the point.
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
