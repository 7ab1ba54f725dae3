//! Looking for records that do not decode, once something has stumbled over one.
//!
//! Reads every record that names, inodes and contents are made of, and goes on past what makes no sense.

use bytes::Bytes;
use rfs_kv::RangePage;

use crate::meta::inode::NodeReader;
use crate::meta::key::KeyRange;
use crate::meta::ops::chunks::group;
use crate::meta::record::{self, DentryRecord, PackRecord};
use crate::meta::{Meta, key};
use crate::types::{Ino, Result};

use super::scan::page_of;
use super::{CheckProgress, Finding, PAGE};

/// Decodes one record.
type Decode = Box<dyn FnMut(&Bytes, &Bytes) -> Result<()> + Send>;

/// Where the records of each kind are, and what decodes them in order.
fn all_records() -> [(KeyRange, Decode); 7] {
    let mut inodes = NodeReader::default();
    [
        (key::all_inodes(None), Box::new(move |key, value| inodes.push(key, value).map(drop))),
        (
            key::all_dentries(None),
            Box::new(|key, value| {
                record::parsed(key::parse_dentry(key), "dentry key")?;
                DentryRecord::decode(value).map(drop)
            }),
        ),
        (
            key::all_xattrs(None),
            Box::new(|key, _| record::parsed(key::parse_xattr(key), "attribute key").map(drop)),
        ),
        (key::all_chunks(None), Box::new(|key, value| group(key, value).map(drop))),
        (
            key::all_orphans(None),
            Box::new(|key, _| record::parsed(key::parse_orphan(key), "orphan key").map(drop)),
        ),
        (
            key::packs(None),
            Box::new(|key, value| {
                record::parsed(key::parse_pack(key), "pack key")?;
                PackRecord::decode(value).map(drop)
            }),
        ),
        (
            key::packs_live(None),
            Box::new(|key, value| {
                record::parsed(key::parse_pack(key), "pack key")?;
                record::decode_counter(value).map(drop)
            }),
        ),
    ]
}

impl Meta {
    /// Everything that does not decode.
    pub(super) async fn undecodable(&self, progress: &CheckProgress) -> Result<Vec<Finding>> {
        let mut findings = Vec::new();
        for (mut range, mut decode) in all_records() {
            loop {
                let within = &range;
                let page: RangePage =
                    self.read(|txn| async move { page_of(&*txn, within, PAGE).await }).await?;
                progress.add(page.entries.len());
                for (key, value) in &page.entries {
                    if let Err(error) = decode(key, value) {
                        findings.push(Finding::Undecodable { ino: owner(key), error: error.to_string() });
                    }
                }
                match page.entries.last() {
                    Some((last, _)) if page.more => range = range.after(last),
                    _ => break,
                }
            }
        }
        Ok(findings)
    }
}

/// The inode that a key belongs to: it comes first after the kind, except in keys of packs.
fn owner(key: &[u8]) -> Option<Ino> {
    if key::parse_pack(key).is_some() {
        return None;
    }
    key.get(1..9)?.try_into().ok().map(|bytes| Ino(u64::from_be_bytes(bytes)))
}
