//! The FoundationDB bindings ask the linker for `-lfdb_c`. An empty archive of that name satisfies it, so that the
//! symbols come from this crate and the program neither links against nor needs the library.

use std::path::PathBuf;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    std::fs::write(out.join("libfdb_c.a"), b"!<arch>\n").expect("cannot write to OUT_DIR");
    println!("cargo:rustc-link-search=native={}", out.display());
}
