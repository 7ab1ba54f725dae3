#!/usr/bin/env bash
# Everything that must pass: format, lints, unit tests, tests on real mounts. Installs what it needs.
# RFS_E2E_LONG=1 runs the long versions, and the mounted tests once more for each combination of `--staging off` and
# `--writeback-cache on` (about seven minutes each); FDB_HOME=DIR adds the tests on a real FoundationDB (bin/fdbserver, bin/fdbcli,
# lib/libfdb_c.so below it, or installed from its packages).
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/install-deps.sh test
export PATH="$PATH:$HOME/.cargo/bin:$HOME/go/bin"
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/rfs/target}
export RFS_REQUIRE_SERVERS=1

step() { printf '\n== %s (%s)\n' "$1" "$(date +%T)"; }

step "format"
cargo fmt --check
step "lints"
cargo clippy --workspace --all-targets --quiet -- -D warnings
step "licences and advisories of dependencies"
if command -v cargo-deny >/dev/null; then
  cargo deny --all-features check
else
  echo "skipped: cargo-deny is not installed (cargo install cargo-deny)"
fi
step "unit tests"
# Builds the rfs that the mounted tests use, too: a build of its own would have other features, and build the S3 client again.
cargo test --workspace --exclude rfs-e2e --quiet
step "the testbed's figures"
(cd benches && python3 -B -m unittest discover --quiet --start-directory tests --top-level-directory .)
step "tests on real mounts"
export RFS_BIN=$CARGO_TARGET_DIR/debug/rfs
# Two tests at a time: each has its own servers and mounts.
mounted() { timeout --kill-after=60 3000 cargo test --package rfs-e2e -- --test-threads=2; }
mounted
if [[ ${RFS_E2E_LONG:-0} != 0 ]]; then
  for args in "--staging off" "--writeback-cache on" "--staging off --writeback-cache on"; do
    step "tests on real mounts with $args"
    RFS_E2E_LONG=0 RFS_E2E_MOUNT_ARGS=$args mounted
  done
fi
step "done"
