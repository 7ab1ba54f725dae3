#!/usr/bin/env bash
# Builds rfs, mounts the embedded volume (a redb file and a directory below ~/.local/share/rfs) at ~/rfs or the given
# directory, and shows it working. Run it again at any time.
set -euo pipefail
cd "$(dirname "$0")/.."
mount_point=${1:-$HOME/rfs}

scripts/install-deps.sh
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/rfs/target}
cargo build --release --package rfs
rfs=$CARGO_TARGET_DIR/release/rfs

mkdir -p "$mount_point"
if ! mountpoint -q "$mount_point"; then
  "$rfs" mount --daemon "$mount_point"
fi
echo "hello from rfs, $(date)" >> "$mount_point/hello.txt"
cp -r docs "$mount_point/" 
tail -n 1 "$mount_point/hello.txt"
df -h "$mount_point"
"$rfs" status "$mount_point"
cat <<MSG

Mounted at $mount_point. Your files stay when you unmount:
  $rfs umount $mount_point
MSG
