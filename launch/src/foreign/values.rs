//! Reads one launcher's variables.

use super::error::ForeignError;
use crate::env::MAX_RANKS;

/// An environment: the value of a variable, if it is set.
pub(super) type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The variables of one launcher.
#[derive(Clone, Copy)]
pub(super) struct Reader<'a> {
    pub(super) env: Env<'a>,
    pub(super) launcher: &'static str,
    /// What to do if some of them are missing.
    pub(super) remedy: &'static str,
}

/// What a launcher's variables say about this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) rank: u32,
    pub(super) size: u32,
}

const RANK_EXPECTED: &str = "a rank, from 0 to one less than the size";
const SIZE_EXPECTED: &str = "a number of ranks from 1 to 4096";

impl Reader<'_> {
    /// An empty value is none: many ways to start a process can only empty a variable, not unset it.
    pub(super) fn get(&self, name: &str) -> Option<String> {
        (self.env)(name).filter(|value| !value.is_empty())
    }

    pub(super) fn is_set(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// The first of these that is set, as it would be written in a shell.
    pub(super) fn first_set(&self, names: &[&str]) -> Option<String> {
        names.iter().find_map(|name| Some(format!("{name}={}", shortened(&self.get(name)?))))
    }

    pub(super) fn number(
        &self,
        name: &'static str,
        min: u64,
        max: u64,
        expected: &'static str,
    ) -> Result<Option<u64>, ForeignError> {
        let Some(text) = self.get(name) else { return Ok(None) };
        match decimal(&text) {
            Some(number) if (min..=max).contains(&number) => Ok(Some(number)),
            _ => Err(self.invalid(name, &text, expected)),
        }
    }

    pub(super) fn rank(&self, name: &'static str) -> Result<Option<u32>, ForeignError> {
        Ok(self.number(name, 0, u64::from(u32::MAX), RANK_EXPECTED)?.map(|rank| rank as u32))
    }

    pub(super) fn size(&self, name: &'static str) -> Result<Option<u32>, ForeignError> {
        Ok(self.number(name, 1, u64::from(MAX_RANKS), SIZE_EXPECTED)?.map(|size| size as u32))
    }

    /// A rank and a size, both of which must be there.
    pub(super) fn claim(
        &self,
        rank_name: &'static str,
        size_name: &'static str,
        present: &str,
    ) -> Result<Claim, ForeignError> {
        let rank = self.rank(rank_name)?.ok_or_else(|| self.partial(present, rank_name))?;
        let size = self.size(size_name)?.ok_or_else(|| self.partial(present, size_name))?;
        self.in_range(rank, rank_name, size, size_name)
    }

    pub(super) fn in_range(
        &self,
        rank: u32,
        rank_name: &'static str,
        size: u32,
        size_name: &'static str,
    ) -> Result<Claim, ForeignError> {
        if rank < size {
            return Ok(Claim { rank, size });
        }
        Err(ForeignError::RankOutOfRange { launcher: self.launcher, rank, rank_name, size, size_name })
    }

    pub(super) fn partial(&self, present: &str, missing: &'static str) -> ForeignError {
        ForeignError::Partial {
            launcher: self.launcher,
            present: present.to_owned(),
            missing,
            remedy: self.remedy,
        }
    }

    pub(super) fn invalid(&self, name: &'static str, seen: &str, expected: &'static str) -> ForeignError {
        ForeignError::Invalid { launcher: self.launcher, name, seen: shortened(seen), expected }
    }
}

/// A number of decimal digits only.
pub(super) fn decimal(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten()
}

/// What somebody else wrote, fit to be shown.
pub(super) fn shortened(text: &str) -> String {
    let mut shown: String = text.chars().take(80).flat_map(char::escape_debug).collect();
    if text.chars().nth(80).is_some() {
        shown.push('…');
    }
    shown
}

/// Whether this could be the name or address of a host. The resolver has the last word. An address of one link (`fe80::1%eth0`)
/// is none: it means nothing on other hosts.
pub(super) fn is_host(text: &str) -> bool {
    let name = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:".contains(&byte);
    (1..=255).contains(&text.len()) && text.bytes().all(name)
}

/// `host:port`, with an IPv6 address in brackets.
pub(super) fn host_port(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// The host, without brackets, and the port of `host:port`.
pub(super) fn split_host_port(text: &str) -> Option<(&str, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let port = decimal(port).and_then(|port| u16::try_from(port).ok()).filter(|port| *port != 0)?;
    let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let host = match bracketed {
        Some(host) => host.contains(':').then_some(host)?,
        None => (!host.contains(':')).then_some(host)?,
    };
    is_host(host).then_some((host, port))
}
