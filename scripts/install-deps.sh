#!/usr/bin/env bash
# Installs what building and running rfs needs on Debian; with the word `test`, also what the tests use. Does nothing that
# is done already. Needs root for Debian's packages.
set -euo pipefail

need=()
want() { # command-or-file, package
  [[ $1 == /* && -e $1 ]] || command -v "$1" >/dev/null 2>&1 || need+=("$2")
}

want cc gcc
want clang clang                       # FoundationDB's bindings are generated with libclang
want fusermount3 fuse3
if [[ ${1:-} == test ]]; then
  want git git
  want python3 python3
  want rsync rsync
  want sqlite3 sqlite3
  want getfattr attr
  want mkfs.ext4 e2fsprogs
  want go golang-go
fi
# libclang comes in versioned directories.
compgen -G '/usr/lib/llvm-*/lib/libclang*.so*' >/dev/null || need+=(libclang-dev)

if ((${#need[@]})); then
  if [[ $(id -u) != 0 ]]; then
    echo "as root, run: apt-get install ${need[*]}" >&2
    exit 1
  fi
  apt-get -o DPkg::Lock::Timeout=600 -q update
  DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 -qy install "${need[@]}"
fi

command -v cargo >/dev/null || { echo "install the Rust toolchain first (rustup)" >&2; exit 1; }

if [[ ${1:-} == test ]]; then
  export PATH="$PATH:$HOME/.cargo/bin:$HOME/go/bin"
  # An S3 server, and two suites that hold a filesystem to POSIX.
  command -v versitygw >/dev/null || go install github.com/versity/versitygw/cmd/versitygw@v1.8.0
  command -v pjdfstest >/dev/null || cargo install --quiet pjdfstest --version 0.2.2
  command -v fsx >/dev/null || cargo install --quiet fsx --version 0.3.2
fi
