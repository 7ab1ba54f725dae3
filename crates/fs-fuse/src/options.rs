//! The words of `-o`, as mount(8), fstab(5) and FUSE use them, parsed once into [`MountOptions`].
//!
//! Unknown words are an error rather than ignored: an option that was meant to protect something must not be lost to a
//! spelling mistake. Words that only tools around the mount look at (`noauto`, `_netdev`, `x-systemd.*`, ..) are let pass.

use rfs_core::vfs::AtimeMode;
use thiserror::Error;

/// Who may use the mount at all; among those, permission bits decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Access {
    /// Everybody if root mounts, else the user who mounts.
    #[default]
    ByMounter,
    /// The user who mounts.
    Owner,
    /// Everybody. A user other than root needs `user_allow_other` in `/etc/fuse.conf` for it.
    Everyone,
}

/// Mount options. [`Default`] is what mounting without `-o` gives.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[expect(clippy::struct_excessive_bools, reason = "independent switches, named as mount(8) names them")]
pub struct MountOptions {
    /// `ro`: nothing may be changed.
    pub read_only: bool,
    /// `allow_other`, `noallow_other`.
    pub access: Access,
    /// `nodev`: device files are not opened.
    pub nodev: bool,
    /// `nosuid`: set-id bits and capabilities have no effect.
    pub nosuid: bool,
    /// `noexec`: nothing is executed.
    pub noexec: bool,
    /// `sync`: each write is stored before it returns.
    pub sync: bool,
    /// `dirsync`: each change of a name is durable before it returns.
    pub dirsync: bool,
    /// `relatime`, `noatime`: when reading moves access times.
    pub atime: AtimeMode,
    /// `nodiratime`: reading a directory does not move its access time.
    pub nodiratime: bool,
    /// `nonempty`: mount over a directory that holds files.
    pub nonempty: bool,
    /// `writeback`, `nowriteback`: whether the kernel collects writes before it sends them; `None` if not said. For whoever
    /// makes the `Vfs` (`VfsOptions::kernel_caches_writes`). Good for one client; not for several, nor with a limited
    /// capacity, since the kernel accepts writes before rfs can refuse them; not possible on macOS.
    pub writeback: Option<bool>,
    /// `remount`: change the options of an existing mount.
    pub remount: bool,
}

/// A word in `-o` that means nothing, or nothing here.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum OptionsError {
    /// Not known to mount(8), FUSE or rfs.
    #[error("unknown mount option `{0}`")]
    Unknown(String),
    /// Known, and not possible here.
    #[error("mount option `{option}` is not supported: {reason}")]
    Unsupported {
        /// The word.
        option: String,
        /// Why, and what to do.
        reason: &'static str,
    },
}

impl MountOptions {
    /// Parses a comma-separated list.
    ///
    /// # Errors
    /// The first word that is not understood.
    pub fn parse(list: &str) -> Result<MountOptions, OptionsError> {
        let mut options = MountOptions::default();
        options.apply(list, |_, _| false)?;
        Ok(options)
    }

    /// Applies a comma-separated list in order, later words over earlier ones. Words that are not mount options go to
    /// `other` as name and value; it returns whether it knows them.
    ///
    /// # Errors
    /// The first word that neither understands.
    pub fn apply(
        &mut self,
        list: &str,
        mut other: impl FnMut(&str, Option<&str>) -> bool,
    ) -> Result<(), OptionsError> {
        for word in list.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            let (name, value) = match word.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (word, None),
            };
            let known = match value {
                None => self.apply_word(name)?,
                Some(_) => is_for_others(name),
            };
            if !known && !other(name, value) {
                return Err(OptionsError::Unknown(word.to_owned()));
            }
        }
        Ok(())
    }

    fn apply_word(&mut self, word: &str) -> Result<bool, OptionsError> {
        match word {
            "ro" => self.read_only = true,
            "rw" => self.read_only = false,
            "allow_other" => self.access = Access::Everyone,
            "noallow_other" => self.access = Access::Owner,
            "dev" => self.nodev = false,
            "nodev" => self.nodev = true,
            "suid" => self.nosuid = false,
            "nosuid" => self.nosuid = true,
            "exec" => self.noexec = false,
            "noexec" => self.noexec = true,
            "sync" => self.sync = true,
            "async" => self.sync = false,
            "dirsync" => self.dirsync = true,
            "atime" | "relatime" | "nostrictatime" => self.atime = AtimeMode::Relatime,
            "noatime" => self.atime = AtimeMode::Noatime,
            "diratime" => self.nodiratime = false,
            "nodiratime" => self.nodiratime = true,
            "nonempty" => self.nonempty = true,
            "writeback" | "writeback_cache" => self.writeback = Some(true),
            "nowriteback" | "nowriteback_cache" => self.writeback = Some(false),
            "remount" => self.remount = true,
            "defaults" => {
                *self = MountOptions {
                    remount: self.remount,
                    nonempty: self.nonempty,
                    ..MountOptions::default()
                };
            }
            "allow_root" => {
                return Err(OptionsError::Unsupported {
                    option: word.to_owned(),
                    reason: "use allow_other; permission bits are always checked",
                });
            }
            "auto_unmount" => {
                return Err(OptionsError::Unsupported {
                    option: word.to_owned(),
                    reason: "`rfs umount` clears away a mount whose process died",
                });
            }
            "strictatime" | "norelatime" => {
                return Err(OptionsError::Unsupported {
                    option: word.to_owned(),
                    reason: "access times move as with relatime, or never with noatime",
                });
            }
            "mand" => {
                return Err(OptionsError::Unsupported {
                    option: word.to_owned(),
                    reason: "Linux has no mandatory locks any more",
                });
            }
            _ => return Ok(is_for_others(word)),
        }
        Ok(true)
    }

    /// The option list that this is, in the words of mount(8), for people.
    pub fn describe(&self) -> String {
        let mut words = vec![if self.read_only { "ro" } else { "rw" }];
        let mut add = |on: bool, word: &'static str| {
            if on {
                words.push(word);
            }
        };
        add(self.access == Access::Everyone, "allow_other");
        add(self.nosuid, "nosuid");
        add(self.nodev, "nodev");
        add(self.noexec, "noexec");
        add(self.sync, "sync");
        add(self.dirsync, "dirsync");
        add(self.atime == AtimeMode::Noatime, "noatime");
        add(self.nodiratime, "nodiratime");
        words.join(",")
    }
}

/// Whether a word is addressed to a tool around the mount (mount(8), systemd, fusermount3), or says what is always so.
fn is_for_others(name: &str) -> bool {
    const NAMES: [&str; 35] = [
        "auto",
        "noauto",
        // Who may mount; mount(8) has put `nosuid`, `nodev` and `noexec` beside them where due.
        "user",
        "users",
        "owner",
        "group",
        "nouser",
        "nousers",
        "noowner",
        "nogroup",
        "nofail",
        "_netdev",
        "_rnetdev",
        "comment",
        "uhelper",
        "helper",
        "lazytime",
        "nolazytime",
        "iversion",
        "noiversion",
        "nomand",
        "silent",
        "loud",
        "quiet",
        "default_permissions",
        "noauto_unmount",
        "fsname",
        "subtype",
        "fd",
        "rootmode",
        "user_id",
        "group_id",
        "max_read",
        "blksize",
        "seclabel",
    ];
    NAMES.contains(&name) || name.starts_with("x-") || name.starts_with("X-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_mount_and_fstab_are_understood() {
        let options =
            MountOptions::parse("ro,nosuid,nodev,noatime,_netdev,x-systemd.automount,nofail").unwrap();
        assert_eq!(
            options,
            MountOptions {
                read_only: true,
                nosuid: true,
                nodev: true,
                atime: AtimeMode::Noatime,
                ..MountOptions::default()
            }
        );
    }

    #[test]
    fn later_words_win() {
        let options = MountOptions::parse("ro,allow_other,rw,noexec,nosuid,nodev,exec,suid,user").unwrap();
        assert!(!options.read_only && !options.noexec && !options.nosuid && options.nodev);
        assert_eq!(options.access, Access::Everyone);
    }

    #[test]
    fn what_mount_passes_for_a_remount_is_understood() {
        let passed = "remount,ro,nosuid,nodev,relatime,user_id=0,group_id=0,default_permissions,allow_other";
        let options = MountOptions::parse(passed).unwrap();
        assert!(options.remount && options.read_only);
    }

    #[test]
    fn unknown_words_are_named() {
        assert_eq!(MountOptions::parse("ro,nosiud"), Err(OptionsError::Unknown("nosiud".to_owned())));
        let mut seen = None;
        let mut options = MountOptions::default();
        options
            .apply("io-timeout=5s,rw", |name, value| {
                seen = Some((name.to_owned(), value.map(str::to_owned)));
                true
            })
            .unwrap();
        assert_eq!(seen, Some(("io-timeout".to_owned(), Some("5s".to_owned()))));
        assert!(matches!(MountOptions::parse("allow_root"), Err(OptionsError::Unsupported { .. })));
    }
}
