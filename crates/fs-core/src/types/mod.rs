//! Words that every part of the filesystem shares: ids, names, attributes, slices, errors, the clock.
//!
//! Owns no state and does no I/O. Nothing here knows how a thing is stored.

mod attr;
mod clock;
mod error;
mod ids;
mod name;
mod slice;

pub use attr::{Attr, Caller, Kind, SetAttr, SetTime, Timestamp};
pub use clock::{Clock, ManualClock, SystemClock};
pub use error::{Error, ErrorKind, Result};
pub use ids::{CHUNK_BYTES, ChunkIndex, Ino, PackId, SessionId};
pub use name::{NAME_BYTES_MAX, Name};
pub use slice::{Block, PackedRun, Slice, SliceGroup, SliceStamp, Stored};
