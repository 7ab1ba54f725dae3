"""rfs over redb and the S3 server, and variants of it."""

import os
import shutil
from pathlib import Path
from typing import Any

from ..process import Failed, Group, sh, wait_for
from ..server import REGION, answers, free_port
from . import Target


class Rfs(Target):
    """rfs with its defaults, over redb."""

    name = "rfs"
    mount_args: tuple[str, ...] = ()

    @classmethod
    def version(cls, options: Any) -> str:
        commit = sh("git", "-C", Path(__file__).parent, "describe", "--always", "--dirty")
        return f"{sh(options.rfs, '--version').strip()}, tree at {commit.strip()}" if cls is Rfs else ""

    @property
    def meta(self) -> str:
        """The metadata URL."""
        return f"redb://{self.dir}/meta.redb"

    @property
    def store(self) -> str:
        """The store URL."""
        return f"s3://{self.bucket}?endpoint={self.server.endpoint}&region={REGION}&path_style=true"

    @property
    def environment(self) -> dict[str, str]:
        """Of every rfs command."""
        return self.server.env

    def setup(self) -> None:
        sh(self.options.rfs, "format", self.meta, self.store, env=self.environment)

    def mount(self) -> None:
        self.start_mount(self.options.rfs, "mount", *self.mount_args, *self.options.rfs_mount_args, self.meta, self.mount_point,
                         env=self.environment)

    def forget_caches(self) -> None:
        super().forget_caches()
        shutil.rmtree(self.dir / "meta.redb.cache", ignore_errors=True)

    def unmount(self) -> None:
        sh(self.options.rfs, "umount", self.mount_point, group=self.group)
        self.group.wait_empty(600, "end of rfs")
        if code := self.group.started[-1].returncode:
            raise Failed(f"rfs ended with {code}: {self.log_end()}")
        # Staged is not stored: a write phase must not end with bytes that only this machine has.
        staged = [path for path in self.dir.glob("meta.redb.staging/*/*") if path.name != "lock"]
        if staged:
            raise Failed(f"{len(staged)} journals are left after the unmount")


class RfsWriteback(Rfs):
    """With the kernel's write-back cache."""

    name = "rfs-wb-on"
    mount_args = ("--writeback-cache", "on")


class RfsLocal(Rfs):
    """Objects in a local directory, made durable file by file."""

    name = "rfs-local"

    @property
    def store(self) -> str:
        return f"file://{self.dir}/store"


class RfsFdb(Rfs):
    """Metadata in FoundationDB: one server process, the ssd engine."""

    name = "rfs-fdb"

    @classmethod
    def missing(cls) -> str | None:
        home = fdb_home()
        if not home:
            return "FDB_HOME does not name a directory"
        absent = [path for path in ("bin/fdbserver", "bin/fdbcli", "lib/libfdb_c.so") if not (home / path).exists()]
        return f"no {', '.join(absent)} below FDB_HOME" if absent else None

    @property
    def meta(self) -> str:
        return f"fdb://{self.dir}/fdb.cluster?prefix=bench"

    @property
    def environment(self) -> dict[str, str]:
        return {**self.server.env, "RFS_FDB_LIBRARY": f"{fdb_home()}/lib/libfdb_c.so"}

    def setup(self) -> None:
        self.meta_group = Group("fdb")
        start_fdb(self.meta_group, self.dir)
        super().setup()


def fdb_home() -> Path | None:
    """Where FoundationDB's programs are."""
    return Path(os.environ["FDB_HOME"]) if os.environ.get("FDB_HOME") else None


def start_fdb(group: Group, directory: Path) -> None:
    """Starts an empty FoundationDB of one process; its cluster file is `fdb.cluster`."""
    home, port, cluster = fdb_home(), free_port(), directory / "fdb.cluster"
    cluster.write_text(f"bench:bench@127.0.0.1:{port}\n")
    group.start(f"{home}/bin/fdbserver", "-p", f"127.0.0.1:{port}", "-C", cluster, "-d", directory / "fdb", "-L", directory,
                "--memory", "4GiB", log=directory / "fdb.log")
    wait_for(lambda: answers(port), 30, "answer from fdbserver")

    def configured() -> bool:
        try:
            sh(f"{home}/bin/fdbcli", "-C", cluster, "--timeout", "10", "--exec", "configure new single ssd")
        except Failed:
            return False
        return True
    wait_for(configured, 60, "new FoundationDB database")
