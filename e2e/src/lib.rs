//! Mounted tests.
