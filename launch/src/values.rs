//! How values of variables are read.

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

use crate::error::EnvError;
use crate::vars::Vars;

/// The longest host name, a port, and what separates them.
const LONGEST_ADDRESS: usize = 255 + 6;

/// Takes and reads one variable; none if it is not set.
pub(crate) fn read<T>(
    vars: &mut Vars,
    name: &'static str,
    expected: &'static str,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<Option<T>, EnvError> {
    let Some(text) = vars.take(name) else { return Ok(None) };
    match parse(&text) {
        Some(value) => Ok(Some(value)),
        None => Err(EnvError::Invalid { name, seen: excerpt(&text), expected }),
    }
}

/// Decimal digits only: no sign, no blanks.
pub(crate) fn number(text: &str, least: u64, most: u64) -> Option<u64> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    text.parse().ok().filter(|value| (least..=most).contains(value))
}

/// A number of bytes, optionally in units of powers of 1024.
pub(crate) fn bytes(text: &str) -> Option<u64> {
    let (digits, shift) = match text.as_bytes().last()? {
        b'K' | b'k' => (&text[..text.len() - 1], 10),
        b'M' | b'm' => (&text[..text.len() - 1], 20),
        b'G' | b'g' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    number(digits, 1, u64::MAX)?.checked_mul(1 << shift)
}

/// Seconds with up to three decimals, a day at most.
pub(crate) fn seconds(text: &str) -> Option<Duration> {
    let (whole, decimals) = text.split_once('.').unwrap_or((text, "0"));
    if decimals.len() > 3 {
        return None;
    }
    let thousandths = number(decimals, 0, 999)? * 10_u64.pow(3 - decimals.len() as u32);
    Some(Duration::from_millis(number(whole, 0, 86_400)? * 1000 + thousandths))
}

/// Two ports, the lower one first.
pub(crate) fn ports(text: &str) -> Option<RangeInclusive<u16>> {
    let port = |text| number(text, 1, 65_535).map(|port| port as u16);
    let (first, last) = text.split_once('-')?;
    let (first, last) = (port(first)?, port(last)?);
    (first <= last).then_some(first..=last)
}

/// The name of a network interface, or an address; whether there is one is found out where it is used. An address that means
/// something on one link alone (`fe80::1%eth0`) is none: other hosts cannot be told of it.
pub(crate) fn interface(text: &str) -> Option<String> {
    let named = (1..=15).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_graphic() && !b"/%".contains(&byte));
    let address = || text.parse::<IpAddr>().is_ok();
    (named || text.len() <= 64 && address()).then(|| text.to_owned())
}

/// A host, by name or address, and a port; an IPv6 address is in brackets.
pub(crate) fn host_and_port(text: &str) -> Option<String> {
    let (host, port) = text.rsplit_once(':')?;
    number(port, 1, 65_535)?;
    let host_fits = match host.strip_prefix('[') {
        Some(rest) => rest.strip_suffix(']')?.parse::<std::net::Ipv6Addr>().is_ok(),
        None => {
            !host.is_empty()
                && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_".contains(&byte))
        }
    };
    (host_fits && text.len() <= LONGEST_ADDRESS).then(|| text.to_owned())
}

/// The node of each rank: numbers, or a number and how often it follows itself (`0x2:1x2` is `0:0:1:1`).
///
/// No more than `most` ranks are listed, and the numbers are below `most`.
pub(crate) fn nodes(text: &str, most: u32) -> Option<Vec<u32>> {
    let mut nodes = Vec::new();
    for run in text.split(':') {
        let (node, count) = run.split_once('x').unwrap_or((run, "1"));
        let node = number(node, 0, u64::from(most - 1))? as u32;
        let count = number(count, 1, u64::from(most))? as usize;
        if nodes.len() + count > most as usize {
            return None;
        }
        nodes.extend(std::iter::repeat_n(node, count));
    }
    Some(nodes)
}

/// The text that [`nodes`] reads.
pub(crate) fn nodes_text(nodes: &[u32]) -> String {
    let runs = nodes.chunk_by(|a, b| a == b).map(|run| match run.len() {
        1 => run[0].to_string(),
        count => format!("{}x{count}", run[0]),
    });
    runs.collect::<Vec<_>>().join(":")
}

/// A value as an error shows it: at most 80 characters, control characters escaped.
pub(crate) fn excerpt(text: &str) -> String {
    let mut shown: String = text.chars().take(80).flat_map(char::escape_debug).collect();
    if text.chars().nth(80).is_some() {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_go_round() {
        for (list, text) in [
            (&[0][..], "0"),
            (&[0, 0, 1, 1], "0x2:1x2"),
            (&[0, 1, 0, 1], "0:1:0:1"),
            (&[4095, 4095, 0], "4095x2:0"),
        ] {
            assert_eq!(nodes_text(list), text);
            assert_eq!(nodes(text, 4096).unwrap(), list);
        }
        assert_eq!(nodes("0:0:1:1", 4096), nodes("0x2:1x2", 4096));
        for wrong in ["", ":", "0:", "x2", "0x", "0x0", "4096", "0x4097", "0x4096:0", "-1", "0 x2", "0x2x2"] {
            assert_eq!(nodes(wrong, 4096), None, "{wrong}");
        }
    }

    #[test]
    fn seconds_have_thousandths() {
        for (text, milliseconds) in
            [("0", 0), ("5", 5000), ("0.5", 500), ("1.25", 1250), ("2.005", 2005), ("86400", 86_400_000)]
        {
            assert_eq!(seconds(text), Some(Duration::from_millis(milliseconds)));
        }
        for wrong in ["", ".", "1.", ".5", "-1", "1e3", "86401", "0.0001", "inf", "5s"] {
            assert_eq!(seconds(wrong), None, "{wrong}");
        }
    }
}
