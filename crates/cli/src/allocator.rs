//! Settings of the C library's allocator for a process that moves large buffers between a few threads.
#![expect(unsafe_code, reason = "mallopt(3) is only there as a function of the C library")]

/// Arenas. Memory that is free in one of them is of no use to the others, and by default there are eight a processor.
const ARENAS_MAX: i32 = 2;
/// Larger allocations are mapped, and their pages faulted in, one by one.
const MAPPED_BYTES_MIN: i32 = 16 << 20;
/// Free memory at the end of an arena that is not given back to the system.
const SPARE_BYTES_MAX: i32 = 32 << 20;

/// Makes the settings. To be called before any thread is started.
pub(crate) fn tune() {
    for (parameter, value) in [
        (libc::M_ARENA_MAX, ARENAS_MAX),
        (libc::M_MMAP_THRESHOLD, MAPPED_BYTES_MIN),
        (libc::M_TRIM_THRESHOLD, SPARE_BYTES_MAX),
    ] {
        // SAFETY: takes two numbers and touches nothing but the allocator's own settings; refused ones change nothing.
        unsafe { libc::mallopt(parameter, value) };
    }
}
