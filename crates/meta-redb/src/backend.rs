//! Where redb's bytes are: a file that this process has locked, or what a test brings.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use redb::StorageBackend;

/// A locked file. Clones share it, so that the lock outlives a database that has to be opened again.
#[derive(Debug, Clone)]
pub(crate) struct FileBackend(pub(crate) Arc<File>);

impl StorageBackend for FileBackend {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(out, offset)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_all_at(data, offset)
    }
}

/// Any backend, noting whether a sync failed: after that the kernel may have dropped pages that it reports as
/// written, so that nothing read back through it can be trusted.
#[derive(Debug)]
pub(crate) struct NotedBackend {
    pub(crate) inner: Box<dyn StorageBackend>,
    pub(crate) sync_failed: Arc<AtomicBool>,
}

impl StorageBackend for NotedBackend {
    fn len(&self) -> io::Result<u64> {
        self.inner.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.inner.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.inner.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        let result = self.inner.sync_data();
        if result.is_err() {
            self.sync_failed.store(true, Ordering::Release);
        }
        result
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.inner.write(offset, data)
    }

    fn close(&self) -> io::Result<()> {
        self.inner.close()
    }
}
