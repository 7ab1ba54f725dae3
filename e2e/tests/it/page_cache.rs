//! What the kernel keeps of files, and that nobody sees bytes that are no longer there.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use rfs_e2e::{Backend, Mount, MountOptions, Volume, on_each_backend, run_ok, tool};
use rfs_testkit::noise;

const PAGE: usize = 4096;

on_each_backend! {
    fn what_is_written_past_the_page_cache_is_not_in_it;
    fn a_memory_map_shows_what_is_written_past_the_page_cache;
    fn readers_never_see_bytes_from_before_a_write_past_the_page_cache;
}

fn mount(volume: &Volume) -> Mount {
    volume.mount_with(&MountOptions::args(&["--cache-written", "off"]).with_default("--writeback-cache"))
}

/// Bytes of the file that the kernel has in memory.
fn cached_bytes(fincore: &Path, file: &Path) -> u64 {
    let mut command = Command::new(fincore);
    let told = run_ok(
        command.args(["--bytes", "--noheadings", "--output", "RES"]).arg(file),
        Duration::from_mins(1),
    );
    told.stdout.trim().parse().unwrap()
}

fn what_is_written_past_the_page_cache_is_not_in_it(backend: Backend) {
    let Some(fincore) = tool("fincore", "apt install util-linux") else { return };
    let Some(volume) = Volume::format(backend) else { return };
    let contents = noise(1, (3 << 20) + 5);
    let mount = mount(&volume);
    let path = mount.path().join("f");
    fs::write(&path, &contents).unwrap();
    assert_eq!(cached_bytes(&fincore, &path), 0);
    assert!(fs::read(&path).unwrap() == contents);
    mount.unmount();
    volume.assert_clean();
}

/// A page of a file, mapped for reading and writing by all.
struct SharedPage(*mut u8);

impl SharedPage {
    #[expect(unsafe_code, reason = "std has no memory maps")]
    fn map(file: &File) -> SharedPage {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(ptr::null_mut(), PAGE, access, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        assert_ne!(at, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        SharedPage(at.cast())
    }

    #[expect(unsafe_code, reason = "std has no memory maps")]
    fn get(&self, at: usize) -> u8 {
        assert!(at < PAGE);
        // SAFETY: within the mapping, which lives as long as `self`; others change it, so it is read as it is now.
        unsafe { self.0.add(at).read_volatile() }
    }

    #[expect(unsafe_code, reason = "std has no memory maps")]
    fn set(&self, at: usize, byte: u8) {
        assert!(at < PAGE);
        // SAFETY: as above.
        unsafe { self.0.add(at).write_volatile(byte) }
    }
}

impl Drop for SharedPage {
    #[expect(unsafe_code, reason = "std has no memory maps")]
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and nothing refers to it any more.
        unsafe { libc::munmap(self.0.cast(), PAGE) };
    }
}

fn a_memory_map_shows_what_is_written_past_the_page_cache(backend: Backend) {
    let Some(volume) = Volume::format(backend) else { return };
    let mount = mount(&volume);
    let path = mount.path().join("f");
    fs::write(&path, [b'a'; PAGE]).unwrap();
    let mapped = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let page = SharedPage::map(&mapped);
    assert_eq!((page.get(0), page.get(PAGE - 1)), (b'a', b'a'));
    // Changed through the map, and not written back: a write elsewhere in the page must not undo it.
    page.set(7, b'm');
    let writer = OpenOptions::new().write(true).open(&path).unwrap();
    writer.write_all_at(b"w", 100).unwrap();
    assert_eq!([6, 7, 99, 100].map(|at| page.get(at)), *b"amaw");
    let mut bytes = [0; 101];
    mapped.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!([bytes[6], bytes[7], bytes[99], bytes[100]], *b"amaw");
    let appender = OpenOptions::new().append(true).open(&path).unwrap();
    std::io::Write::write_all(&mut &appender, b"end").unwrap();
    drop((page, mapped, writer, appender));
    mount.unmount();
    let mount = volume.mount();
    let stored = fs::read(mount.path().join("f")).unwrap();
    assert_eq!((stored.len(), stored[7], stored[100], &stored[PAGE..]), (PAGE + 3, b'm', b'w', &b"end"[..]));
    mount.unmount();
    volume.assert_clean();
}

/// A reader fills the page cache all the while that a writer goes past it: a page that was asked for before a write and
/// arrives after it must not stay.
fn readers_never_see_bytes_from_before_a_write_past_the_page_cache(backend: Backend) {
    let Some(volume) = Volume::format(backend) else { return };
    let mount = mount(&volume);
    let path = mount.path().join("f");
    let record = |number: u64| number.to_le_bytes().repeat(2 * PAGE / 8);
    fs::write(&path, record(0)).unwrap();
    let (written, done) = (AtomicU64::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let file = File::open(&path).unwrap();
                while !done.load(Ordering::Acquire) {
                    let least = written.load(Ordering::Acquire);
                    for at in [0, PAGE as u64, 2 * PAGE as u64 - 8] {
                        let mut bytes = [0; 8];
                        file.read_exact_at(&mut bytes, at).unwrap();
                        let seen = u64::from_le_bytes(bytes);
                        assert!(seen >= least, "{seen} at {at}, after {least} was written");
                    }
                }
            });
        }
        let writer = OpenOptions::new().write(true).open(&path).unwrap();
        for number in 1..=2000 {
            writer.write_all_at(&record(number), 0).unwrap();
            written.store(number, Ordering::Release);
        }
        done.store(true, Ordering::Release);
    });
    assert_eq!(fs::read(&path).unwrap(), record(2000));
    mount.unmount();
    volume.assert_clean();
}
