//! Values of options, parsed once: sizes (`64MiB`), durations (`30s`), switches (`on`, `off`).

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;

/// A number of bytes, written with a unit: `64MiB`, `10G` (= GiB, as in mkfs), `1.5TiB`, `100MB` (decimal), `4096`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Size(pub(crate) u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Size, String> {
        let (number, unit) = split_unit(text);
        let wrong = || format!("'{text}' is not a size: write one like 4096, 64MiB or 10GiB");
        if number.is_empty() {
            return Err(wrong());
        }
        let factor: u64 = match unit.to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kib" => 1 << 10,
            "m" | "mib" => 1 << 20,
            "g" | "gib" => 1 << 30,
            "t" | "tib" => 1 << 40,
            "p" | "pib" => 1 << 50,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            "pb" => 1_000_000_000_000_000,
            _ => return Err(format!("unknown unit '{unit}': write a size like 4096, 64MiB or 10GiB")),
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let whole: u64 = whole.parse().map_err(|_| wrong())?;
        let too_large = || format!("'{text}' is too large");
        let mut bytes = whole.checked_mul(factor).ok_or_else(too_large)?;
        if !fraction.is_empty() {
            let digits =
                u32::try_from(fraction.len()).ok().filter(|digits| *digits <= 9).ok_or_else(wrong)?;
            let parts: u64 = fraction.parse().map_err(|_| wrong())?;
            let part = u128::from(parts) * u128::from(factor) / u128::from(10_u64.pow(digits));
            bytes =
                u64::try_from(part).ok().and_then(|part| bytes.checked_add(part)).ok_or_else(too_large)?;
        }
        Ok(Size(bytes))
    }
}

impl fmt::Display for Size {
    /// The largest binary unit that leaves at least 1, with one digit after the point where it is not exact.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
        let index = (0..UNITS.len()).rev().find(|index| self.0 >> (10 * index) > 0).unwrap_or(0);
        let unit = 1_u64 << (10 * index);
        let (whole, tenth) = (self.0 / unit, u128::from(self.0 % unit) * 10 / u128::from(unit));
        let text = match tenth {
            0 => format!("{whole} {}", UNITS[index]),
            _ => format!("{whole}.{tenth} {}", UNITS[index]),
        };
        f.pad(&text)
    }
}

/// A span of time, written with a unit: `30s`, `500ms`, `5m`, `1h`; a bare number is seconds; `0` is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span(pub(crate) Duration);

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Span, String> {
        let (number, unit) = split_unit(text);
        let number: u64 =
            number.parse().map_err(|_| format!("'{text}' is not a time: write one like 30s, 500ms, 5m"))?;
        let secs = |factor: u64| number.checked_mul(factor).map(Duration::from_secs);
        let span = match unit {
            "ms" => Some(Duration::from_millis(number)),
            "" | "s" => secs(1),
            "m" | "min" => secs(60),
            "h" => secs(3_600),
            "d" => secs(86_400),
            _ => return Err(format!("unknown unit '{unit}': write a time like 30s, 500ms, 5m")),
        };
        span.map(Span).ok_or_else(|| format!("'{text}' is too long"))
    }
}

/// Cuts a number from the unit behind it.
fn split_unit(text: &str) -> (&str, &str) {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    (&text[..end], text[end..].trim())
}

/// An option that is on or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
}

impl FromStr for Switch {
    type Err = String;

    fn from_str(text: &str) -> Result<Switch, String> {
        match text {
            "on" | "yes" | "true" | "1" => Ok(Switch::On),
            "off" | "no" | "false" | "0" => Ok(Switch::Off),
            _ => Err(format!("'{text}' is neither on nor off")),
        }
    }
}

/// Where a mount keeps something on the local disk: a directory, or `off`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LocalDir {
    Off,
    Dir(PathBuf),
}

impl FromStr for LocalDir {
    type Err = String;

    fn from_str(text: &str) -> Result<LocalDir, String> {
        match text {
            "" => Err("a directory is needed, or off".to_owned()),
            "off" => Ok(LocalDir::Off),
            dir => crate::url::absolute(Path::new(dir)).map(LocalDir::Dir),
        }
    }
}

/// A limit that can be removed again: a number, or `none`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limit<T>(pub(crate) Option<T>);

impl<T: FromStr> FromStr for Limit<T>
where
    T::Err: fmt::Display,
{
    type Err = String;

    fn from_str(text: &str) -> Result<Limit<T>, String> {
        match text {
            "none" | "unlimited" => Ok(Limit(None)),
            "0" => {
                Err("a limit of 0 would leave no room for anything: write none to remove the limit"
                    .to_owned())
            }
            _ => text.parse().map(|value| Limit(Some(value))).map_err(|e: T::Err| e.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_people_write_them() {
        for (text, bytes) in [
            ("4096", 4096),
            ("64MiB", 64 << 20),
            ("64m", 64 << 20),
            ("10GiB", 10 << 30),
            ("10 GiB", 10 << 30),
            ("1.5K", 1536),
            ("100MB", 100_000_000),
            ("0", 0),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "GiB", "1.2.3M", "-1", "12parsecs", "99999999999TiB", "1.x"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
        assert!("plenty".parse::<Size>().unwrap_err().contains("is not a size"));
    }

    #[test]
    fn sizes_print_short() {
        assert_eq!(Size(0).to_string(), "0 B");
        assert_eq!(Size(1023).to_string(), "1023 B");
        assert_eq!(Size(64 << 20).to_string(), "64 MiB");
        assert_eq!(Size(1536).to_string(), "1.5 KiB");
        assert_eq!(Size(u64::MAX).to_string(), "16383.9 PiB");
    }

    #[test]
    fn spans_read_as_people_write_them() {
        for (text, millis) in [("30s", 30_000), ("500ms", 500), ("5m", 300_000), ("7", 7_000), ("0", 0)] {
            assert_eq!(text.parse(), Ok(Span(Duration::from_millis(millis))), "{text}");
        }
        assert!("soon".parse::<Span>().is_err());
        assert!("5y".parse::<Span>().is_err());
    }

    #[test]
    fn directories_can_be_off() {
        assert_eq!("off".parse(), Ok(LocalDir::Off));
        assert_eq!("/var/cache/x".parse(), Ok(LocalDir::Dir("/var/cache/x".into())));
        assert!("".parse::<LocalDir>().is_err());
    }

    #[test]
    fn limits_can_be_removed() {
        assert_eq!("none".parse(), Ok(Limit::<Size>(None)));
        assert_eq!("1k".parse(), Ok(Limit(Some(Size(1024)))));
        assert!("many".parse::<Limit<u64>>().is_err());
    }
}
