//! What the environment says of a run, besides its flags.

use super::Device;
use crate::say::complain;
use posthaste_launch::{Settings, is_ignored};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

const DEVICE: &str = "POSTHASTE_DEVICE";

/// Settings that are not the default ones, and their values.
pub type Changed = BTreeMap<&'static str, String>;

/// What is measured: a device, with the settings that the ranks get from this process's environment.
#[derive(Debug)]
pub struct Setup {
    pub device: Device,
    /// All but that of the device.
    pub settings: Changed,
    /// Whether the device is that of the environment.
    by_environment: bool,
}

impl Setup {
    /// With the device that a flag names, or else the environment.
    ///
    /// # Errors
    /// If a setting is wrong, or both name a device and not the same one.
    pub fn of(flag: Option<Device>) -> Result<Setup, String> {
        let settings = Settings::from_process().map_err(|error| error.to_string())?;
        let defaults: BTreeMap<_, _> = Settings::default().in_force().collect();
        let changed = settings.in_force().filter(|(name, value)| defaults.get(name) != Some(value));
        let mut settings: Changed =
            changed.map(|(name, value)| (name, value.unwrap_or_else(|| "not set".to_owned()))).collect();
        let named = match settings.remove(DEVICE).as_deref() {
            Some("tcp") => Some(Device::Tcp),
            Some("shm") => Some(Device::Shm),
            _ => None,
        };
        if let Some((flag, named)) = flag.zip(named).filter(|(flag, named)| flag != named) {
            let (flag, named) = (flag.name(), named.name());
            return Err(format!("--device {flag}, but {DEVICE}={named}: leave one of the two out"));
        }
        let device = flag.or(named).unwrap_or(Device::Shm);
        Ok(Setup { device, settings, by_environment: named.is_some() })
    }

    /// The settings of ranks that nobody tells a device.
    pub fn inherited(mut self) -> Changed {
        if self.by_environment && self.device != Device::Shm {
            self.settings.insert(DEVICE, self.device.name().to_owned());
        }
        self.settings
    }
}

/// Says so where figures are not what a program gets that sets nothing.
pub fn warn_of(settings: &Changed) {
    if settings.is_empty() {
        return;
    }
    let set: Vec<String> = settings.iter().map(|(name, value)| format!("{name}={value}")).collect();
    complain(format_args!(
        "perf: figures are not those of the default configuration, for the environment has {}",
        set.join(" ")
    ));
}

/// What becomes true when somebody wants this program to end. A job that runs ends by these signals, too, and tells so;
/// nothing else is begun then.
///
/// # Errors
/// If the system refuses.
pub fn interruption() -> Result<Arc<AtomicBool>, String> {
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| !is_ignored(*signal)) {
        signal_hook::flag::register(signal, interrupted.clone()).map_err(|error| error.to_string())?;
    }
    Ok(interrupted)
}
