//! The PMIx client library, loaded when a launcher is there that needs it: the one place where it is called.
//!
//! Layouts and constants are those of the PMIx standard, versions 2 to 5, which all come as `libpmix.so.2`. Arrays that
//! are passed have one element, for versions differ in how long the last field of one is.

use std::error::Error;
use std::ffi::{CStr, c_char, c_int};
use std::mem::offset_of;
use std::ptr;
use std::sync::OnceLock;

use libloading::Library;

const LIBRARY: &str = "libpmix.so.2";
const NAMESPACE_ROOM: usize = 256;
const KEY_ROOM: usize = 512;
/// A rank that stands for the job as a whole.
const WILDCARD: u32 = u32::MAX - 1;
/// Values for all ranks.
const GLOBAL: u8 = 3;
const SUCCESS: c_int = 0;
const BOOL: u16 = 1;
const UINT32: u16 = 14;
const BYTE_OBJECT: u16 = 27;
const JOB_SIZE: &str = "pmix.job.size";
const COLLECT: &str = "pmix.collect";

#[repr(C)]
struct Proc {
    namespace: [c_char; NAMESPACE_ROOM],
    rank: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ByteObject {
    bytes: *mut c_char,
    size: usize,
}

/// The longest member of any version has 24 bytes.
#[repr(C)]
union Data {
    flag: bool,
    number: u32,
    object: ByteObject,
    room: [u64; 3],
}

#[repr(C)]
struct Value {
    kind: u16,
    data: Data,
}

#[repr(C)]
struct Info {
    key: [c_char; KEY_ROOM],
    flags: u32,
    value: Value,
}

// As a C compiler lays them out for 64 bits.
#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<Proc>() == 260 && offset_of!(Proc, rank) == 256);
    assert!(size_of::<Value>() == 32 && offset_of!(Value, data) == 8);
    assert!(size_of::<Info>() == 552 && offset_of!(Info, flags) == 512 && offset_of!(Info, value) == 520);
};

type Init = unsafe extern "C" fn(*mut Proc, *mut Info, usize) -> c_int;
type Finalize = unsafe extern "C" fn(*const Info, usize) -> c_int;
type Put = unsafe extern "C" fn(u8, *const c_char, *mut Value) -> c_int;
type Commit = unsafe extern "C" fn() -> c_int;
type Fence = unsafe extern "C" fn(*const Proc, usize, *const Info, usize) -> c_int;
type Get = unsafe extern "C" fn(*const Proc, *const c_char, *const Info, usize, *mut *mut Value) -> c_int;
type ErrorString = unsafe extern "C" fn(c_int) -> *const c_char;

/// The library's functions.
struct Api {
    init: Init,
    finalize: Finalize,
    put: Put,
    commit: Commit,
    fence: Fence,
    get: Get,
    error_string: ErrorString,
}

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CallError {
    pub(super) call: &'static str,
    /// What the library says of it.
    pub(super) reason: String,
}

/// Why there is no client.
#[derive(Debug)]
pub(super) enum OpenError {
    Library(String),
    Call(CallError),
}

/// This process as the launcher's PMIx server knows it. Dropped, it says farewell, which may block.
pub(super) struct Client {
    api: &'static Api,
    namespace: [c_char; NAMESPACE_ROOM],
    rank: u32,
}

impl Client {
    /// Blocks while the server is silent.
    pub(super) fn open() -> Result<Self, OpenError> {
        let api = api().map_err(OpenError::Library)?;
        let mut own = Proc { namespace: [0; NAMESPACE_ROOM], rank: 0 };
        // SAFETY: `own` has the layout of `pmix_proc_t` and outlives the call, which fills it; no options are passed.
        let status = unsafe { (api.init)(&raw mut own, ptr::null_mut(), 0) };
        api.check("PMIx_Init", status).map_err(OpenError::Call)?;
        own.namespace[NAMESPACE_ROOM - 1] = 0;
        Ok(Self { api, namespace: own.namespace, rank: own.rank })
    }

    pub(super) fn rank(&self) -> u32 {
        self.rank
    }

    pub(super) fn namespace(&self) -> String {
        text(&self.namespace)
    }

    /// The number of ranks.
    pub(super) fn job_size(&self) -> Result<u32, CallError> {
        let value = self.fetch(WILDCARD, JOB_SIZE)?;
        if value.kind() != UINT32 {
            return Err(value.of_wrong_kind());
        }
        // SAFETY: `value` is alive, and its kind, which the library sets, says that this member is there.
        Ok(unsafe { (&raw const (*value.0).data.number).read() })
    }

    /// Keeps a value for all ranks, to be sent by [`commit`](Self::commit).
    pub(super) fn put(&self, key: &str, bytes: &mut [u8]) -> Result<(), CallError> {
        let key = room_for(key);
        let object = ByteObject { bytes: bytes.as_mut_ptr().cast(), size: bytes.len() };
        let mut value = Value { kind: BYTE_OBJECT, data: Data { room: [0; 3] } };
        value.data.object = object;
        // SAFETY: the key ends with a zero. `value` has the layout of `pmix_value_t` and names `bytes` exactly; the
        // library copies both before it returns.
        let status = unsafe { (self.api.put)(GLOBAL, key.as_ptr(), &raw mut value) };
        self.api.check("PMIx_Put", status)
    }

    /// Sends what was put to the server.
    pub(super) fn commit(&self) -> Result<(), CallError> {
        // SAFETY: takes nothing, and a client is open.
        self.api.check("PMIx_Commit", unsafe { (self.api.commit)() })
    }

    /// Blocks until all ranks are there, and what they committed is here.
    pub(super) fn fence(&self) -> Result<(), CallError> {
        let data = Data { room: [0; 3] };
        let mut collect = Info { key: room_for(COLLECT), flags: 0, value: Value { kind: BOOL, data } };
        collect.value.data.flag = true;
        // SAFETY: no processes mean all of the job. `collect` is one `pmix_info_t` and outlives the call.
        let status = unsafe { (self.api.fence)(ptr::null(), 0, &raw const collect, 1) };
        self.api.check("PMIx_Fence", status)
    }

    /// What a rank put under a key, of at most `limit` bytes.
    pub(super) fn get(&self, rank: u32, key: &str, limit: usize) -> Result<Vec<u8>, CallError> {
        let value = self.fetch(rank, key)?;
        if value.kind() != BYTE_OBJECT {
            return Err(value.of_wrong_kind());
        }
        // SAFETY: `value` is alive, and its kind, which the library sets, says that this member is there.
        let object = unsafe { (&raw const (*value.0).data.object).read() };
        if object.size > limit {
            let reason = format!("rank {rank} put {} bytes where {limit} are possible", object.size);
            return Err(CallError { call: "PMIx_Get", reason });
        }
        if object.bytes.is_null() || object.size == 0 {
            return Ok(Vec::new());
        }
        // SAFETY: the library allocated `size` bytes there and filled them; they live until `value` is dropped, and
        // nobody else knows them.
        Ok(unsafe { std::slice::from_raw_parts(object.bytes.cast_const().cast::<u8>(), object.size) }
            .to_vec())
    }

    fn fetch(&self, rank: u32, key: &str) -> Result<Fetched, CallError> {
        let of = Proc { namespace: self.namespace, rank };
        let key = room_for(key);
        let mut value = ptr::null_mut();
        // SAFETY: `of` and the key, which ends with a zero, outlive the call; the library makes `value` point to a
        // value of its own making, which is the caller's from then on, or leaves it null.
        let status = unsafe { (self.api.get)(&raw const of, key.as_ptr(), ptr::null(), 0, &raw mut value) };
        self.api.check("PMIx_Get", status)?;
        if value.is_null() {
            return Err(CallError { call: "PMIx_Get", reason: "it succeeded without a value".into() });
        }
        Ok(Fetched(value))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // SAFETY: pairs with the one successful `PMIx_Init` of this client; no options are passed.
        let status = unsafe { (self.api.finalize)(ptr::null(), 0) };
        if let Err(error) = self.api.check("PMIx_Finalize", status) {
            tracing::debug!(reason = error.reason, "the PMIx server did not hear our farewell");
        }
    }
}

impl Api {
    fn check(&self, call: &'static str, status: c_int) -> Result<(), CallError> {
        if status == SUCCESS {
            return Ok(());
        }
        // SAFETY: takes any number; answers with null or a static text that ends with a zero.
        let text = unsafe {
            let text = (self.error_string)(status);
            if text.is_null() { c"no text" } else { CStr::from_ptr(text) }
        };
        Err(CallError { call, reason: format!("{} ({status})", text.to_string_lossy()) })
    }
}

/// A value that the library handed out. It came from `malloc`, as the standard says.
struct Fetched(*mut Value);

impl Fetched {
    fn kind(&self) -> u16 {
        // SAFETY: not null, and alive until dropped; the kind is the first field of every version.
        unsafe { (&raw const (*self.0).kind).read() }
    }

    fn of_wrong_kind(&self) -> CallError {
        CallError { call: "PMIx_Get", reason: format!("the value is of kind {}", self.kind()) }
    }
}

impl Drop for Fetched {
    /// Frees what can be freed: parts of other kinds than those asked for are left to the end of the process.
    fn drop(&mut self) {
        let object = (self.kind() == BYTE_OBJECT).then(|| {
            // SAFETY: alive, and of the kind that has this member.
            unsafe { (&raw const (*self.0).data.object).read() }
        });
        // SAFETY: `malloc` gave both, this is their only owner, and free takes null.
        unsafe {
            if let Some(object) = object {
                libc::free(object.bytes.cast());
            }
            libc::free(self.0.cast());
        }
    }
}

/// The library's functions; it stays loaded, for it has threads and handlers of its own.
fn api() -> Result<&'static Api, String> {
    static API: OnceLock<Result<Api, String>> = OnceLock::new();
    API.get_or_init(|| load(LIBRARY)).as_ref().map_err(Clone::clone)
}

fn load(name: &str) -> Result<Api, String> {
    // SAFETY: the library's initialisers do what those of any linked library do; its name has one meaning on a system
    // with a PMIx launcher, and whoever may put another library in the way may replace this program too.
    let library = unsafe { Library::new(name) }.map_err(explained)?;
    let library: &'static Library = Box::leak(Box::new(library));
    // SAFETY: the types are those of the PMIx standard for these names, unchanged in all versions of this library.
    let api = unsafe {
        let find = || -> Result<Api, libloading::Error> {
            Ok(Api {
                init: *library.get::<Init>(c"PMIx_Init")?,
                finalize: *library.get::<Finalize>(c"PMIx_Finalize")?,
                put: *library.get::<Put>(c"PMIx_Put")?,
                commit: *library.get::<Commit>(c"PMIx_Commit")?,
                fence: *library.get::<Fence>(c"PMIx_Fence")?,
                get: *library.get::<Get>(c"PMIx_Get")?,
                error_string: *library.get::<ErrorString>(c"PMIx_Error_string")?,
            })
        };
        find()
    };
    api.map_err(explained)
}

/// What the dynamic linker says is in the source only.
fn explained(error: libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// A key with zeros up to the full length, as a `pmix_key_t`.
fn room_for(key: &str) -> [c_char; KEY_ROOM] {
    let mut room = [0; KEY_ROOM];
    for (to, from) in room[..KEY_ROOM - 1].iter_mut().zip(key.bytes()) {
        *to = from as c_char;
    }
    room
}

fn text(chars: &[c_char]) -> String {
    let bytes: Vec<u8> = chars.iter().take_while(|char| **char != 0).map(|char| *char as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_missing_or_another_is_named() {
        let reason = |name| load(name).err().unwrap();
        assert!(reason("libposthaste-has-none.so.2").contains("libposthaste-has-none.so.2"));
        let other = reason("libc.so.6");
        assert!(other.contains("PMIx_Init"), "{other}");
    }

    #[test]
    fn keys_end_with_a_zero() {
        assert_eq!(text(&room_for("pmix.job.size")), "pmix.job.size");
        let long = "k".repeat(2 * KEY_ROOM);
        assert_eq!(text(&room_for(&long)).len(), KEY_ROOM - 1);
    }
}
