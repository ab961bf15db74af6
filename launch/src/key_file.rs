//! The job's secret in a file.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::process::geteuid;
use zeroize::Zeroizing;

use crate::error::EnvError;
use crate::key::JobKey;

/// What the file should hold, a line's end, and one byte that tells a longer file.
const MOST: usize = 64 + 2 + 1;

impl JobKey {
    /// Reads a key from a file of 64 hexadecimal digits, as [`Settings::key_file`](crate::Settings::key_file) names one.
    ///
    /// # Errors
    /// The file cannot be read, is no regular file of this user, its mode lets others read or write it, or it holds
    /// something else.
    pub fn from_file(path: &Path) -> Result<Self, EnvError> {
        let refused = |problem: String| EnvError::KeyFile { path: path.to_owned(), problem };
        // What is open is what is checked; NONBLOCK so that a pipe of that name does not wait for a writer.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file =
            rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| refused(errno.to_string()))?;
        let stat = rustix::fs::fstat(&file).map_err(|errno| refused(errno.to_string()))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(refused("it is no regular file".into()));
        }
        if stat.st_uid != geteuid().as_raw() {
            let own = geteuid().as_raw();
            return Err(refused(format!("it belongs to user {}, not to {own}: `chown` it", stat.st_uid)));
        }
        if stat.st_mode & 0o077 != 0 {
            let mode = stat.st_mode & 0o777;
            return Err(refused(format!(
                "its mode is {mode:03o}, so that others have access: `chmod 600` it"
            )));
        }
        let mut text = Zeroizing::new([0; MOST]);
        let mut length = 0;
        let mut file = File::from(file);
        while length < MOST {
            match file.read(&mut text[length..]) {
                Ok(0) => break,
                Ok(count) => length += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(refused(error.to_string())),
            }
        }
        let digits = text[..length].strip_suffix(b"\n").unwrap_or(&text[..length]);
        let digits = digits.strip_suffix(b"\r").unwrap_or(digits);
        let key = std::str::from_utf8(digits).ok().and_then(Self::from_hex);
        key.ok_or_else(|| refused("it does not hold 64 hexadecimal digits and nothing else".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_key_file_is_read_if_it_is_ours_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let write = |content: &str, mode: u32| {
            let _ = std::fs::remove_file(&path);
            std::fs::write(&path, content).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        let good = "5e".repeat(32);
        for (content, mode) in
            [(good.clone(), 0o600), (format!("{good}\n"), 0o400), (format!("{good}\r\n"), 0o600)]
        {
            write(&content, mode);
            assert_eq!(JobKey::from_file(&path).unwrap().as_bytes(), &[0x5e; 32]);
        }
        let refused = |told: &str| {
            let text = JobKey::from_file(&path).unwrap_err().to_string();
            assert!(text.contains(told) && text.contains("POSTHASTE_KEY_FILE"), "{text}");
            assert!(!text.contains("5e5e"), "{text}");
        };
        for mode in [0o640, 0o604, 0o620, 0o601, 0o777] {
            write(&good, mode);
            refused("chmod 600");
        }
        for content in
            [String::new(), "5e".repeat(31), format!("{good}5e"), format!("{good}\n\n"), "g".repeat(64)]
        {
            write(&content, 0o600);
            refused("64 hexadecimal digits");
        }
        std::fs::remove_file(&path).unwrap();
        refused("No such file");
        std::fs::create_dir(&path).unwrap();
        refused("no regular file");
    }

    #[test]
    fn a_file_of_another_user_is_refused() {
        if !geteuid().is_root() {
            eprintln!("skipped: only root can give a file away");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        std::fs::write(&path, "5e".repeat(32)).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
        let text = JobKey::from_file(&path).unwrap_err().to_string();
        assert!(text.contains("belongs to user 65534"), "{text}");
    }
}
