//! `rfs config`: shows and changes a volume's limits.

use rfs_core::meta::{Meta, VolumeLimits};
use rfs_kv::Kv;
use serde::{Deserialize, Serialize};

use crate::control::{self, Found, Request};
use crate::engine::{self, Missing};
use crate::exit::{Exit, Result, ResultExt, meta_failure};
use crate::output;
use crate::settings::{Limit, Size};
use crate::url::{MetaUrl, Target};
use crate::volume;

/// Show or change a volume's limits
///
/// Without options, prints them. A mount takes over new limits at once.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Mount point or metadata URL
    target: Target,
    /// Most bytes that files may take: 10GiB, or none
    #[arg(long, value_name = "SIZE")]
    capacity: Option<Limit<Size>>,
    /// Most inodes: a number, or none
    #[arg(long, value_name = "COUNT")]
    inodes: Option<Limit<u64>>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A volume's limits; absent: none.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) capacity_bytes: Option<u64>,
    pub(crate) inodes_max: Option<u64>,
}

impl From<VolumeLimits> for Report {
    fn from(limits: VolumeLimits) -> Report {
        Report { capacity_bytes: limits.capacity, inodes_max: limits.inodes }
    }
}

/// A change of the limits, as it travels: `None` leaves one as it is, 0 removes it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Change {
    pub(crate) capacity: Option<u64>,
    pub(crate) inodes: Option<u64>,
}

impl Change {
    /// Whether nothing changes.
    pub(crate) fn is_empty(self) -> bool {
        self.capacity.is_none() && self.inodes.is_none()
    }

    /// `limits` with the change.
    pub(crate) fn apply(self, limits: VolumeLimits) -> VolumeLimits {
        let changed = |change: Option<u64>, now: Option<u64>| match change {
            None => now,
            Some(0) => None,
            Some(limit) => Some(limit),
        };
        VolumeLimits {
            capacity: changed(self.capacity, limits.capacity),
            inodes: changed(self.inodes, limits.inodes),
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<Exit> {
    let change = Change {
        capacity: args.capacity.map(|limit| limit.0.map_or(0, |size| size.0)),
        inodes: args.inodes.map(|limit| limit.0.unwrap_or(0)),
    };
    let report = match control::find(&args.target)? {
        Found::Mounted(mut client) => {
            client.call(Request::Config { capacity: change.capacity, inodes: change.inodes }, &mut |_| {})?
        }
        Found::NotMounted(url) => crate::runtime::block_on(unmounted(&url, change))?,
    };
    if args.json {
        output::json(&report)?;
    } else {
        let capacity =
            report.capacity_bytes.map_or_else(|| "none".to_owned(), |bytes| Size(bytes).to_string());
        let inodes = report.inodes_max.map_or_else(|| "none".to_owned(), |count| count.to_string());
        output::line(format_args!("capacity    {capacity}\ninodes      {inodes}"))?;
    }
    Ok(Exit::Ok)
}

async fn unmounted(url: &MetaUrl, change: Change) -> Result<Report> {
    let kv = engine::open_kv(url, Missing::Fail).await?;
    let result = change_limits(&*kv, url, change).await;
    kv.close().await.exit(Exit::MetadataDown, "closing the metadata store")?;
    result
}

async fn change_limits(kv: &dyn Kv, url: &MetaUrl, change: Change) -> Result<Report> {
    let record = volume::read_record(kv).await?.ok_or_else(|| volume::not_formatted(url))?;
    if change.is_empty() {
        return Ok(record.limits.into());
    }
    let changed = Meta::update_volume(kv, change.apply(record.limits)).await;
    changed.map(|volume| volume.limits.into()).map_err(|e| meta_failure(e, "changing the limits"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_removes_a_limit_and_none_leaves_it() {
        let limits = VolumeLimits { capacity: Some(5), inodes: Some(7) };
        let change = Change { capacity: Some(0), inodes: None };
        assert_eq!(change.apply(limits), VolumeLimits { capacity: None, inodes: Some(7) });
        let change = Change { capacity: Some(9), inodes: Some(1) };
        assert_eq!(change.apply(limits), VolumeLimits { capacity: Some(9), inodes: Some(1) });
    }
}
