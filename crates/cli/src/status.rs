//! `rfs status`: what is mounted where, how full it is, what is waiting.

use std::fmt::Write as _;
use std::path::Path;

use rfs_core::meta::{self, Meta};
use rfs_core::types::Timestamp;
use serde::{Deserialize, Serialize};

use crate::control::{self, Client, Found, Request};
use crate::exit::{Exit, Result, meta_failure};
use crate::output;
use crate::settings::Size;
use crate::url::{MetaUrl, Target};
use crate::volume::{OpenSettings, Volume};

/// Tell what is mounted, how full it is and what is waiting to be stored
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Mount point or metadata URL; without it, all mounts on this machine
    target: Option<Target>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A volume, and its mount if it has one on this machine.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) volume: VolumeReport,
    pub(crate) mount: Option<MountReport>,
}

/// What a volume is and how full it is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct VolumeReport {
    pub(crate) uuid: String,
    pub(crate) meta_url: String,
    pub(crate) store_url: String,
    pub(crate) block_bytes: u32,
    pub(crate) codec: String,
    /// Seconds since 1970.
    pub(crate) created_secs: i64,
    pub(crate) used_bytes: u64,
    /// No limit: absent.
    pub(crate) capacity_bytes: Option<u64>,
    pub(crate) inodes_used: u64,
    /// No limit: absent.
    pub(crate) inodes_max: Option<u64>,
}

/// What a mount is doing.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct MountReport {
    pub(crate) mountpoint: String,
    pub(crate) options: String,
    pub(crate) pid: u32,
    pub(crate) version: String,
    /// Seconds since 1970.
    pub(crate) since_secs: i64,
    /// Why nothing is changed any more, after a mistake in rfs; absent: all is well.
    pub(crate) broken: Option<String>,
    /// Bytes that are only in memory.
    pub(crate) dirty_bytes: u64,
    /// Bytes on their way to the store.
    pub(crate) pending_bytes: u64,
    pub(crate) packs_unstored: u64,
    /// Bytes in the staging directory, and packs.
    pub(crate) staged_bytes: u64,
    pub(crate) packs_staged: u64,
    /// Age of the oldest of them, at most that of the mount; absent: there are none.
    pub(crate) staged_oldest_secs: Option<u64>,
    /// Nothing can be staged now, as when the disk is full: fsync waits for the store.
    #[serde(default)]
    pub(crate) staging_fails: bool,
    pub(crate) files_open: u64,
    pub(crate) inodes_active: u64,
    /// Attempts to store something that failed since it was mounted.
    pub(crate) store_failures: u64,
    pub(crate) stored_bytes: u64,
    pub(crate) fetched_bytes: u64,
    pub(crate) memory_cache_bytes: u64,
    pub(crate) disk_cache_bytes: u64,
    /// No disk cache: absent.
    pub(crate) disk_cache_dir: Option<String>,
    /// Blocks that were found in the caches since it was mounted, and in neither.
    pub(crate) memory_cache_hits: u64,
    pub(crate) disk_cache_hits: u64,
    pub(crate) cache_misses: u64,
    pub(crate) chunks_compacted: u64,
    pub(crate) packs_deleted: u64,
}

/// One line of the list of all mounts.
#[derive(Debug, Serialize)]
struct Listed {
    mountpoint: String,
    source: String,
    /// Absent when the process behind the mount does not answer.
    status: Option<Report>,
}

pub(crate) fn run(args: &Args) -> Result<Exit> {
    let Some(target) = &args.target else { return list(args.json) };
    let report = match control::find(target)? {
        Found::Mounted(mut client) => client.call(Request::Status, &mut |_| {})?,
        Found::NotMounted(url) => crate::runtime::block_on(unmounted(&url))?,
    };
    if args.json {
        output::json(&report)?;
    } else {
        output::line(format_args!("{}", describe(&report)))?;
    }
    Ok(Exit::Ok)
}

fn list(json: bool) -> Result<Exit> {
    let mut listed = Vec::new();
    for mounted in control::mounts()? {
        let client = Client::of_mount(&mounted)?;
        let status = client.and_then(|mut client| client.call(Request::Status, &mut |_| {}).ok());
        let mountpoint = mounted.mountpoint.display().to_string();
        listed.push(Listed { mountpoint, source: mounted.source, status });
    }
    if json {
        output::json(&listed)?;
        return Ok(Exit::Ok);
    }
    if listed.is_empty() {
        output::note(format_args!("no rfs is mounted"));
    }
    for (index, mount) in listed.iter().enumerate() {
        if index > 0 {
            output::line(format_args!(""))?;
        }
        match &mount.status {
            Some(report) => output::line(format_args!("{}", describe(report)))?,
            None => output::line(format_args!(
                "{}\n  volume      {}\n  state       does not answer; if its process died: rfs umount {}",
                mount.mountpoint, mount.source, mount.mountpoint
            ))?,
        }
    }
    Ok(Exit::Ok)
}

/// The report on a volume that nobody has mounted here; changes nothing.
async fn unmounted(url: &MetaUrl) -> Result<Report> {
    let settings = OpenSettings::look();
    let volume = Volume::open(url, &settings).await?;
    let report = volume_report(url, &volume.record, &volume.meta).await;
    volume.close().await?;
    Ok(Report { volume: report?, mount: None })
}

/// What a volume is and how full it is.
pub(crate) async fn volume_report(url: &MetaUrl, record: &meta::Volume, meta: &Meta) -> Result<VolumeReport> {
    let statfs = meta.statfs().await.map_err(|e| meta_failure(e, "asking how full the volume is"))?;
    Ok(VolumeReport {
        uuid: record.uuid.to_string(),
        meta_url: url.to_string(),
        store_url: record.store_url.clone(),
        block_bytes: record.block_bytes,
        codec: match record.codec {
            meta::Codec::None => "none",
            meta::Codec::Lz4 => "lz4",
        }
        .to_owned(),
        created_secs: record.created.secs,
        used_bytes: statfs.used_bytes,
        capacity_bytes: statfs.capacity,
        inodes_used: statfs.inodes_used,
        inodes_max: statfs.inodes_max,
    })
}

/// The report as text.
fn describe(report: &Report) -> String {
    let Report { volume, mount } = report;
    let mut out = String::new();
    let mut row = |name: &str, value: String| {
        // Writing to a String cannot fail.
        let _ = write!(out, "\n  {name:<11} {value}");
    };
    row("volume", volume.uuid.clone());
    row("metadata", volume.meta_url.clone());
    row("store", volume.store_url.clone());
    row("blocks", format!("{}, {}", Size(u64::from(volume.block_bytes)), volume.codec));
    row("created", timestamp(volume.created_secs));
    let capacity = volume.capacity_bytes.map_or_else(String::new, |max| format!(" of {}", Size(max)));
    row("used", format!("{}{capacity}", Size(volume.used_bytes)));
    let inodes = volume.inodes_max.map_or_else(String::new, |max| format!(" of {max}"));
    row("inodes", format!("{}{inodes}", volume.inodes_used));
    let Some(mount) = mount else {
        return format!("{} (not mounted on this machine){out}", volume.meta_url);
    };
    row("options", mount.options.clone());
    row("process", format!("{} (rfs {}) since {}", mount.pid, mount.version, timestamp(mount.since_secs)));
    if let Some(text) = &mount.broken {
        let what = "a mistake in rfs, nothing is changed any more: save what you need, then mount again";
        row("broken", format!("{what} ({text})"));
    }
    row(
        "waiting",
        format!("{} in memory, {} on the way", Size(mount.dirty_bytes), Size(mount.pending_bytes)),
    );
    if let Some(age) = mount.staged_oldest_secs {
        row("staged", format!("{} in {} packs, for {age} s", Size(mount.staged_bytes), mount.packs_staged));
    }
    if mount.staging_fails {
        row("staging", "does not work, so fsync waits for the store; the log says why".to_owned());
    }
    row("open", format!("{} files", mount.files_open));
    row("sent", format!("{} stored, {} fetched", Size(mount.stored_bytes), Size(mount.fetched_bytes)));
    let on_disk = mount
        .disk_cache_dir
        .as_ref()
        .map_or_else(String::new, |dir| format!(", {} in {dir}", Size(mount.disk_cache_bytes)));
    row("cache", format!("{} in memory{on_disk}", Size(mount.memory_cache_bytes)));
    let (memory, disk) = (mount.memory_cache_hits, mount.disk_cache_hits);
    row("found", format!("{memory} blocks in memory, {disk} on disk, {} in the store", mount.cache_misses));
    if mount.store_failures > 0 {
        row("failures", format!("{} requests to the store failed", mount.store_failures));
    }
    format!("{}{out}", mount.mountpoint)
}

/// `2026-11-21 04:31:05 UTC`.
pub(crate) fn timestamp(secs: i64) -> String {
    let days = secs.div_euclid(86_400);
    let second = secs.rem_euclid(86_400);
    // Days to a date of the Gregorian calendar, counting from 1 March of the year 0 (Howard Hinnant, "chrono-Compatible
    // Low-Level Date Algorithms").
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_index = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_index + 2) / 5 + 1;
    let month = if month_index < 10 { month_index + 3 } else { month_index - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02} UTC",
        second / 3_600,
        second / 60 % 60,
        second % 60
    )
}

/// A mount's own report.
pub(crate) struct MountFacts<'a> {
    pub(crate) mountpoint: &'a Path,
    pub(crate) options: &'a str,
    pub(crate) since: Timestamp,
    pub(crate) broken: Option<&'a str>,
    pub(crate) vfs: rfs_core::vfs::VfsStats,
    pub(crate) data: rfs_core::data::DataStats,
    pub(crate) disk_cache_dir: Option<&'a Path>,
}

impl From<MountFacts<'_>> for MountReport {
    fn from(facts: MountFacts<'_>) -> MountReport {
        let MountFacts { mountpoint, options, since, broken, vfs, data, disk_cache_dir } = facts;
        MountReport {
            mountpoint: mountpoint.display().to_string(),
            options: options.to_owned(),
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            since_secs: since.secs,
            broken: broken.map(str::to_owned),
            dirty_bytes: vfs.dirty_bytes,
            pending_bytes: vfs.pending_bytes,
            packs_unstored: data.packs_unstored,
            staged_bytes: data.staged_bytes,
            packs_staged: data.packs_staged,
            staged_oldest_secs: data.staged_age.map(|age| age.as_secs()),
            staging_fails: data.staging_fails,
            files_open: vfs.files_open,
            inodes_active: vfs.inodes_active,
            store_failures: data.upload_failures + data.fetch_failures,
            stored_bytes: data.appended_stored_bytes,
            fetched_bytes: data.fetched_bytes,
            memory_cache_bytes: data.memory_cache_bytes,
            disk_cache_bytes: data.disk_cache_bytes,
            disk_cache_dir: disk_cache_dir.map(|dir| dir.display().to_string()),
            memory_cache_hits: data.memory_hits,
            disk_cache_hits: data.disk_hits,
            cache_misses: data.misses,
            chunks_compacted: vfs.chunks_compacted,
            packs_deleted: vfs.packs_deleted,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_mount_says_so() {
        let facts = |broken| MountFacts {
            mountpoint: Path::new("/mnt"),
            options: "rw",
            since: Timestamp { secs: 0, nanos: 0 },
            broken,
            vfs: rfs_core::vfs::VfsStats::default(),
            data: rfs_core::data::DataStats::default(),
            disk_cache_dir: None,
        };
        let volume = VolumeReport {
            uuid: String::new(),
            meta_url: String::new(),
            store_url: String::new(),
            block_bytes: 4096,
            codec: "lz4".to_owned(),
            created_secs: 0,
            used_bytes: 0,
            capacity_bytes: None,
            inodes_used: 0,
            inodes_max: None,
        };
        let text = |broken| describe(&Report { volume: volume.clone(), mount: Some(facts(broken).into()) });
        assert!(text(Some("an index is gone")).contains("an index is gone"));
        assert!(!text(None).contains("broken"));
    }

    #[test]
    fn times_are_readable() {
        assert_eq!(timestamp(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(timestamp(951_782_400), "2000-02-29 00:00:00 UTC");
        assert_eq!(timestamp(1_795_235_465), "2026-11-21 04:31:05 UTC");
        assert_eq!(timestamp(-1), "1969-12-31 23:59:59 UTC");
    }
}
