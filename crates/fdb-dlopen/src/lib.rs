//! FoundationDB's client library, found when the program runs instead of when it is linked.
//!
//! Defines every symbol of the C API (version 730) as a jump through a table. [`load`] opens the real library and fills
//! the table; before that every entry ends the process with a message, so call `load` first. A program that never
//! opens an `fdb://` volume runs on a machine without the library.
//!
//! Owns the table. Knows nothing of what the functions do; their signatures are those of the bindings that call them.
#![expect(unsafe_code, reason = "symbols of a C library are defined and resolved here, and nowhere else")]

use std::arch::naked_asm;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Why the library cannot be used.
#[derive(Debug, Clone, thiserror::Error)]
pub enum LoadError {
    /// No candidate could be opened.
    #[error(
        "FoundationDB's client library is not installed: install the foundationdb-clients package of your cluster's \
         version, or set RFS_FDB_LIBRARY to the path of libfdb_c.so ({0})"
    )]
    NotFound(String),
    /// It was opened, but is not (a new enough) `libfdb_c`.
    #[error("{path} is no FoundationDB client library of version 7.3 or newer: it has no {symbol}")]
    Unusable {
        /// What was opened.
        path: PathBuf,
        /// What it lacks.
        symbol: &'static str,
    },
}

/// Opens the library: `path` if given, otherwise `$RFS_FDB_LIBRARY`, otherwise the system's `libfdb_c`.
/// The first success or failure is remembered for the life of the process.
///
/// # Errors
/// [`LoadError`]; the text says what to do.
pub fn load(path: Option<&Path>) -> Result<(), LoadError> {
    static LOADED: OnceLock<Result<(), LoadError>> = OnceLock::new();
    LOADED.get_or_init(|| load_once(path)).clone()
}

#[cfg(target_os = "macos")]
const DEFAULT_NAME: &str = "libfdb_c.dylib";
#[cfg(not(target_os = "macos"))]
const DEFAULT_NAME: &str = "libfdb_c.so";

fn load_once(path: Option<&Path>) -> Result<(), LoadError> {
    let from_env = std::env::var_os("RFS_FDB_LIBRARY");
    let candidate =
        path.map(Path::as_os_str).or(from_env.as_deref()).unwrap_or_else(|| OsStr::new(DEFAULT_NAME));
    // SAFETY: opening a shared library runs its initialisers; libfdb_c's have no preconditions.
    let library = unsafe { libloading::Library::new(candidate) }
        .map_err(|e| LoadError::NotFound(format!("{}: {e}", candidate.display())))?;
    // The library stays loaded for ever: its network thread cannot be unloaded safely.
    let library: &'static libloading::Library = Box::leak(Box::new(library));
    for (index, (name, trampoline)) in SYMBOLS.iter().enumerate() {
        // Referring to the trampolines here keeps them beside `load` when the linker drops unused objects.
        std::hint::black_box(trampoline);
        // SAFETY: only the address is taken; the callers' bindings give it its type.
        let found = unsafe { library.get::<unsafe extern "C" fn()>(name.as_bytes()) };
        match found {
            Ok(symbol) => TABLE[index].store(*symbol as *mut (), Ordering::Release),
            Err(_) if REQUIRED.contains(name) => {
                return Err(LoadError::Unusable { path: candidate.into(), symbol: name });
            }
            // A function that this version of the library lacks keeps its entry that explains itself.
            Err(_) => {}
        }
    }
    Ok(())
}

/// Functions whose absence shows that the library is something else or too old.
const REQUIRED: &[&str] = &[
    "fdb_select_api_version_impl",
    "fdb_setup_network",
    "fdb_run_network",
    "fdb_create_database",
    "fdb_transaction_get",
    "fdb_transaction_commit",
    "fdb_transaction_get_mapped_range",
];

extern "C" fn not_loaded() {
    eprintln!(
        "rfs: a FoundationDB function was called that is not loaded or that this libfdb_c does not have"
    );
    std::process::abort();
}

macro_rules! trampolines {
    ($count:literal; $($index:literal $name:ident),* $(,)?) => {
        static TABLE: [AtomicPtr<()>; $count] =
            [const { AtomicPtr::new(not_loaded as extern "C" fn() as *mut ()) }; $count];

        static SYMBOLS: [(&str, unsafe extern "C" fn()); $count] =
            [$((stringify!($name), symbols::$name)),*];

        mod symbols {
            use super::{TABLE, naked_asm};

            $(
                /// Jumps to the library's function with registers and stack as they are.
                #[unsafe(no_mangle)]
                #[unsafe(naked)]
                pub(super) unsafe extern "C" fn $name() {
                    #[cfg(target_arch = "x86_64")]
                    naked_asm!("jmp qword ptr [rip + {table} + 8*{index}]", table = sym TABLE, index = const $index);
                    #[cfg(all(target_arch = "aarch64", not(target_os = "macos")))]
                    naked_asm!(
                        "adrp x16, {table}",
                        "add x16, x16, :lo12:{table}",
                        "ldr x16, [x16, #8*{index}]",
                        "br x16",
                        table = sym TABLE, index = const $index
                    );
                    #[cfg(all(target_arch = "aarch64", target_os = "macos"))]
                    naked_asm!(
                        "adrp x16, {table}@PAGE",
                        "add x16, x16, {table}@PAGEOFF",
                        "ldr x16, [x16, #8*{index}]",
                        "br x16",
                        table = sym TABLE, index = const $index
                    );
                }
            )*
        }
    };
}

trampolines! {
    97;
    0 fdb_add_network_thread_completion_hook,
    1 fdb_create_database,
    2 fdb_create_database_from_connection_string,
    3 fdb_database_blobbify_range,
    4 fdb_database_blobbify_range_blocking,
    5 fdb_database_create_snapshot,
    6 fdb_database_create_transaction,
    7 fdb_database_destroy,
    8 fdb_database_flush_blob_range,
    9 fdb_database_force_recovery_with_data_loss,
    10 fdb_database_get_client_status,
    11 fdb_database_get_main_thread_busyness,
    12 fdb_database_get_server_protocol,
    13 fdb_database_list_blobbified_ranges,
    14 fdb_database_open_tenant,
    15 fdb_database_purge_blob_granules,
    16 fdb_database_reboot_worker,
    17 fdb_database_set_option,
    18 fdb_database_unblobbify_range,
    19 fdb_database_verify_blob_range,
    20 fdb_database_wait_purge_granules_complete,
    21 fdb_error_predicate,
    22 fdb_future_block_until_ready,
    23 fdb_future_cancel,
    24 fdb_future_destroy,
    25 fdb_future_get_bool,
    26 fdb_future_get_double,
    27 fdb_future_get_error,
    28 fdb_future_get_granule_summary_array,
    29 fdb_future_get_int64,
    30 fdb_future_get_key,
    31 fdb_future_get_key_array,
    32 fdb_future_get_keyrange_array,
    33 fdb_future_get_keyvalue_array,
    34 fdb_future_get_mappedkeyvalue_array,
    35 fdb_future_get_string_array,
    36 fdb_future_get_uint64,
    37 fdb_future_get_value,
    38 fdb_future_is_ready,
    39 fdb_future_readbg_get_descriptions,
    40 fdb_future_release_memory,
    41 fdb_future_set_callback,
    42 fdb_get_client_version,
    43 fdb_get_error,
    44 fdb_get_max_api_version,
    45 fdb_network_set_option,
    46 fdb_readbg_parse_delta_file,
    47 fdb_readbg_parse_snapshot_file,
    48 fdb_result_destroy,
    49 fdb_result_get_bg_mutations_array,
    50 fdb_result_get_keyvalue_array,
    51 fdb_run_network,
    52 fdb_select_api_version_capped,
    53 fdb_select_api_version_impl,
    54 fdb_setup_network,
    55 fdb_stop_network,
    56 fdb_tenant_blobbify_range,
    57 fdb_tenant_blobbify_range_blocking,
    58 fdb_tenant_create_transaction,
    59 fdb_tenant_destroy,
    60 fdb_tenant_flush_blob_range,
    61 fdb_tenant_get_id,
    62 fdb_tenant_list_blobbified_ranges,
    63 fdb_tenant_purge_blob_granules,
    64 fdb_tenant_unblobbify_range,
    65 fdb_tenant_verify_blob_range,
    66 fdb_tenant_wait_purge_granules_complete,
    67 fdb_transaction_add_conflict_range,
    68 fdb_transaction_atomic_op,
    69 fdb_transaction_cancel,
    70 fdb_transaction_clear,
    71 fdb_transaction_clear_range,
    72 fdb_transaction_commit,
    73 fdb_transaction_destroy,
    74 fdb_transaction_get,
    75 fdb_transaction_get_addresses_for_key,
    76 fdb_transaction_get_approximate_size,
    77 fdb_transaction_get_blob_granule_ranges,
    78 fdb_transaction_get_committed_version,
    79 fdb_transaction_get_estimated_range_size_bytes,
    80 fdb_transaction_get_key,
    81 fdb_transaction_get_mapped_range,
    82 fdb_transaction_get_range,
    83 fdb_transaction_get_range_split_points,
    84 fdb_transaction_get_read_version,
    85 fdb_transaction_get_tag_throttled_duration,
    86 fdb_transaction_get_total_cost,
    87 fdb_transaction_get_versionstamp,
    88 fdb_transaction_on_error,
    89 fdb_transaction_read_blob_granules,
    90 fdb_transaction_read_blob_granules_description,
    91 fdb_transaction_reset,
    92 fdb_transaction_set,
    93 fdb_transaction_set_option,
    94 fdb_transaction_set_read_version,
    95 fdb_transaction_summarize_blob_granules,
    96 fdb_transaction_watch,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_are_positions() {
        // The table is indexed by the literals above; a gap would send a call to another function.
        let source = include_str!("lib.rs");
        for (index, (name, _)) in SYMBOLS.iter().enumerate() {
            assert!(source.contains(&format!("    {index} {name},")), "{index} {name}");
        }
    }

    #[test]
    fn a_missing_library_is_a_clear_error() {
        let error =
            load_once(Some(Path::new("/nonexistent/libfdb_c.so"))).expect_err("there is no such file");
        assert!(error.to_string().contains("RFS_FDB_LIBRARY"), "{error}");
    }
}
