//! The settings that there are, and how each is written: the one list that the parser knows names from, and programs show
//! values from.

use std::time::Duration;

use crate::settings::{DeviceChoice, Driver, Settings, TcpMode};
use crate::vars;

/// A setting: its variable, and its value as the variable would have it; none where nothing is set and the library decides.
pub(crate) type Shown = (&'static str, fn(&Settings) -> Option<String>);

/// What a user may set.
pub(crate) const SETTINGS: [Shown; 20] = [
    (vars::LANE_BYTES, |settings| Some(settings.lane_bytes.to_string())),
    (vars::CREDITS, |settings| Some(settings.credits.to_string())),
    (vars::CREDIT_BYTES, |settings| Some(bytes(settings.credit_bytes))),
    (vars::ANSWER_BYTES, |settings| Some(bytes(settings.answer_bytes))),
    (vars::SPIN_US, |settings| Some(settings.spin?.as_micros().to_string())),
    (vars::MEMORY_LIMIT, |settings| settings.memory_limit.map(bytes)),
    (vars::SEGMENT, |settings| settings.segment.map(bytes)),
    (vars::DRIVER, |settings| {
        Some(match settings.driver {
            Driver::Task => "task".into(),
            Driver::Thread => "thread".into(),
        })
    }),
    (vars::CORES, |settings| Some(settings.cores?.to_string())),
    (vars::DEVICE, |settings| {
        Some(match settings.device {
            DeviceChoice::Auto => "auto".into(),
            DeviceChoice::Shm => "shm".into(),
            DeviceChoice::Tcp => "tcp".into(),
        })
    }),
    (vars::TCP_MODE, |settings| {
        Some(match settings.tcp_mode? {
            TcpMode::Encrypted => "encrypted".into(),
            TcpMode::HandshakeOnly => "handshake-only".into(),
            TcpMode::Insecure => "insecure".into(),
        })
    }),
    (vars::TCP_INTERFACE, |settings| settings.tcp_interface.clone()),
    (vars::TCP_PORTS, |settings| {
        let ports = settings.tcp_ports.as_ref()?;
        Some(format!("{}-{}", ports.start(), ports.end()))
    }),
    (vars::TCP_TIMEOUT, |settings| Some(seconds(settings.tcp_timeout))),
    (vars::JOIN_TIMEOUT, |settings| Some(seconds(settings.join_timeout))),
    (vars::OVERSEND, |settings| Some(if settings.oversend { "always" } else { "auto" }.into())),
    (vars::RENDEZVOUS_BYTES, |settings| match settings.rendezvous_bytes? {
        u64::MAX => Some("never".into()),
        least => Some(bytes(least)),
    }),
    (vars::STAGE_BYTES, |settings| match settings.stage_bytes {
        0 => Some("never".into()),
        most => Some(bytes(most)),
    }),
    (vars::PATTERN_SLOTS, |settings| Some(settings.pattern_slots.to_string())),
    (vars::KEY_FILE, |settings| Some(settings.key_file.as_ref()?.to_string_lossy().into_owned())),
];

impl Settings {
    /// The variable of each setting, and the value in force as the variable would have it; none where nothing is set and the
    /// library decides, or there is no limit.
    pub fn in_force(&self) -> impl Iterator<Item = (&'static str, Option<String>)> {
        SETTINGS.into_iter().map(|(name, value)| (name, value(self)))
    }
}

/// A number of bytes, with the largest suffix that says it exactly.
fn bytes(count: u64) -> String {
    let units = [(30, "G"), (20, "M"), (10, "K")];
    match units.into_iter().find(|(shift, _)| count > 0 && count.trailing_zeros() >= *shift) {
        Some((shift, unit)) => format!("{}{unit}", count >> shift),
        None => count.to_string(),
    }
}

fn seconds(time: Duration) -> String {
    time.as_secs_f64().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A value of each setting that is not its default.
    const OTHER: [(&str, &str); 20] = [
        ("POSTHASTE_LANE_BYTES", "32768"),
        ("POSTHASTE_CREDITS", "7"),
        ("POSTHASTE_CREDIT_BYTES", "1M"),
        ("POSTHASTE_ANSWER_BYTES", "64K"),
        ("POSTHASTE_SPIN_US", "50"),
        ("POSTHASTE_MEMORY_LIMIT", "3G"),
        ("POSTHASTE_SEGMENT", "1234567"),
        ("POSTHASTE_DRIVER", "thread"),
        ("POSTHASTE_CORES", "3"),
        ("POSTHASTE_DEVICE", "tcp"),
        ("POSTHASTE_TCP_MODE", "handshake-only"),
        ("POSTHASTE_TCP_INTERFACE", "lo"),
        ("POSTHASTE_TCP_PORTS", "5000-5999"),
        ("POSTHASTE_TCP_TIMEOUT", "2.005"),
        ("POSTHASTE_JOIN_TIMEOUT", "0.25"),
        ("POSTHASTE_OVERSEND", "always"),
        ("POSTHASTE_RENDEZVOUS_BYTES", "never"),
        ("POSTHASTE_STAGE_BYTES", "8M"),
        ("POSTHASTE_PATTERN_SLOTS", "1000"),
        ("POSTHASTE_KEY_FILE", "/a/key"),
    ];

    fn parse(set: impl IntoIterator<Item = (&'static str, String)>) -> Settings {
        Settings::parse(set.into_iter().map(|(name, value)| (name.to_owned(), value))).unwrap()
    }

    #[test]
    fn every_setting_is_shown_as_it_was_set() {
        let default = Settings::default();
        for (name, value) in OTHER {
            let set = parse([(name, value.to_owned())]);
            assert_ne!(set, default, "{name} is read");
            for (other, shown) in set.in_force() {
                let before = default.in_force().find(|(name, _)| *name == other).unwrap().1;
                let expected = if other == name { Some(value.to_owned()) } else { before };
                assert_eq!(shown, expected, "{other} when {name} is {value}");
            }
        }
        let names: Vec<_> = default.in_force().map(|(name, _)| name).collect();
        assert_eq!(names, OTHER.map(|(name, _)| name), "all of them are tried here");
    }

    #[test]
    fn what_is_shown_is_read_as_the_same() {
        let all = parse(OTHER.map(|(name, value)| (name, value.to_owned())));
        for settings in [Settings::default(), all] {
            let shown = settings.in_force().filter_map(|(name, value)| Some((name, value?)));
            assert_eq!(parse(shown), settings);
        }
        for count in [1, 1023, 1 << 10, 1 << 40, 3 << 19, u64::MAX] {
            assert_eq!(crate::values::bytes(&bytes(count)), Some(count));
        }
    }
}
