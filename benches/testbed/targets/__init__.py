"""What is measured. A target is one small file: it makes a volume, mounts it, and unmounts it when all is stored."""

import importlib
import json
import os
import pkgutil
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..process import Failed, Group, drop_caches, is_mounted, program, sh, wait_for
from ..server import Server


@dataclass(frozen=True)
class Files:
    """`dirs` directories of `files` files of `size` bytes, as rfs-load writes and reads them."""

    dirs: int
    files: int
    size: int
    content: str = "random"

    @property
    def count(self) -> int:
        """All files."""
        return self.dirs * self.files

    @property
    def bytes(self) -> int:
        """All bytes."""
        return self.count * self.size

    def args(self) -> list[object]:
        """For rfs-load."""
        return ["--dirs", self.dirs, "--files", self.files, "--size", self.size, "--content", self.content]


class Target:
    """One filesystem in a directory and a bucket of its own. Subclasses say what differs."""

    name = "?"
    # `filesystem`; `store` writes and reads files without mounting; `reference` costs nothing that could be counted.
    kind = "filesystem"
    # What prints the version; in the first line that has a digit.
    version_command: tuple[str, ...] = ()
    _number = 0

    def __init__(self, server: Server, options: Any) -> None:
        self.server, self.options = server, options
        self.dir = Path(tempfile.mkdtemp(prefix=f"rfs-bench-{self.name}-", dir=options.work))
        Target._number += 1
        self.bucket = f"bench-{os.getpid()}-{Target._number}"
        self.mount_point = self.dir / "mnt"
        self.mount_point.mkdir()
        self.log = self.dir / "log"
        self.group = Group(self.name)
        self.meta_group: Group | None = None

    @classmethod
    def missing(cls) -> str | None:
        """Why it cannot run here, or None."""
        return None

    @classmethod
    def version(cls, options: Any) -> str:
        """What is measured, as it names itself; empty if it does not."""
        if not cls.version_command:
            return ""
        done = subprocess.run(cls.version_command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=30)
        return next((line.strip() for line in (done.stdout + done.stderr).splitlines() if any(map(str.isdigit, line))), "")

    def open(self) -> None:
        """Makes an empty volume and mounts it."""
        self.server.make_bucket(self.bucket)
        self.setup()
        self.mount()

    def setup(self) -> None:
        """Makes an empty volume."""

    def mount(self) -> None:
        """Mounts the volume; returns when it answers."""
        raise NotImplementedError

    def unmount(self) -> None:
        """Unmounts; returns when everything that was written is in the store."""
        raise NotImplementedError

    def forget_caches(self) -> None:
        """Deletes local caches of contents while unmounted."""
        shutil.rmtree(self.dir / "cache", ignore_errors=True)

    def go_cold(self) -> None:
        """Drops the kernel's caches; those of the server's objects are filled again."""
        drop_caches()
        self.server.warm(self.bucket)

    def write(self, files: Files, threads: int) -> Callable[[], float | None]:
        """Prepares to write files, unmeasured; the result writes them, and tells the seconds if it times itself."""
        return lambda: self._load("write", files, threads)

    def read(self, files: Files, threads: int) -> Callable[[], float | None]:
        """Prepares to read and check the files of `write`; the result does it, and tells the same."""
        return lambda: self._load("read", files, threads)

    def _load(self, command: str, files: Files, threads: int) -> float:
        report = sh(self.options.load, command, self.mount_point / "files", *files.args(), "--threads", threads)
        load = json.loads(report)
        # Until the program is gone, a target that is written to stores on.
        return load["secs"] + (time.time() - load["ended"] if command == "write" else 0)

    def groups(self) -> list[Group]:
        """All processes whose CPU and memory are the target's."""
        return [self.group] + ([self.meta_group] if self.meta_group else [])

    def cpu_seconds(self) -> tuple[float, float]:
        """Of the filesystem's own processes, and of its metadata server's."""
        return self.group.cpu_seconds(), self.meta_group.cpu_seconds() if self.meta_group else 0.0

    def start_mount(self, *argv: object, env: dict[str, str] | None = None, seconds: float = 60) -> None:
        """Starts a program that serves the mount point; with the server's credentials, unless `env` says otherwise."""
        process = self.group.start(*argv, log=self.log, env=env or self.server.env)
        wait_for(lambda: is_mounted(self.mount_point) or process.poll() is not None, seconds, "mount")
        if not is_mounted(self.mount_point):
            raise Failed(f"{argv[0]} ended with {process.returncode}: {self.log_end()}")

    def log_end(self) -> str:
        """What its programs printed last."""
        return self.log.read_text(errors="replace")[-1500:] if self.log.exists() else ""

    def umount(self, path: Path | None = None) -> None:
        """umount(8), asked again while something is still being written.

        It counts as the target's: the kernel frees the cache of the file's contents in it, or in the program itself.
        """
        failure = ""

        def unmounted() -> bool:
            nonlocal failure
            try:
                sh("umount", path or self.mount_point, group=self.group)
            except Failed as e:
                failure = str(e)
                return False
            return True
        try:
            wait_for(unmounted, 600, "unmount")
        except Failed as e:
            raise Failed(f"{e}: {failure}") from e

    def close(self) -> None:
        """Ends and removes everything, whatever state it is in."""
        for line in Path("/proc/self/mountinfo").read_text().splitlines()[::-1]:
            if line.split()[4].startswith(f"{self.dir}/"):
                subprocess.run(["umount", "-l", line.split()[4]], check=False)
        for group in self.groups():
            group.close()
        try:
            self.server.drop_bucket(self.bucket)
        finally:
            shutil.rmtree(self.dir, ignore_errors=True)
            os.sync()


def needs(*names: str, hint: str) -> str | None:
    """A `missing` for programs."""
    absent = [name for name in names if not program(name)]
    return f"no {', '.join(absent)} on PATH ({hint})" if absent else None


def all_targets() -> dict[str, type[Target]]:
    """Every target of this folder by name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")

    def below(cls: type[Target]) -> Iterator[type[Target]]:
        for sub in cls.__subclasses__():
            yield sub
            yield from below(sub)

    return {cls.name: cls for cls in below(Target) if cls.name != "?"}
