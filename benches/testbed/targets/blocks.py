"""Tools that keep blocks in the store: s3backer below ext4, S3QL, ObjectiveFS, ZeroFS."""

import os
from pathlib import Path

from ..process import Failed, is_mounted, program, sh, wait_for
from ..server import REGION
from . import Target, needs

SIZE = "64g"


class S3backer(Target):
    """A block device of 128 KiB objects, and ext4 on a loop device on it; ext4's own work counts as the kernel's."""

    name = "s3backer"
    version_command = ("s3backer", "--version")

    @classmethod
    def missing(cls) -> str | None:
        return needs("s3backer", "mkfs.ext4", "losetup", hint="apt install s3backer e2fsprogs")

    @property
    def _device_dir(self) -> Path:
        return self.dir / "device"

    def setup(self) -> None:
        self._device_dir.mkdir()
        self._attach()
        sh("mkfs.ext4", "-q", "-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1", self._device_dir / "file")
        self._detach()

    def mount(self) -> None:
        self._attach()
        sh("mount", "-o", "loop", self._device_dir / "file", self.mount_point)

    def unmount(self) -> None:
        self.umount()
        self._detach()

    def _attach(self) -> None:
        # It names the bucket in the host name, which below `localhost` is this machine.
        endpoint = self.server.endpoint.replace("127.0.0.1", "localhost")
        process = self.group.start(
            "s3backer", "-f", f"--baseURL={endpoint}/", f"--accessId={self.server.access}",
            f"--accessKey={self.server.secret}", f"--region={REGION}", "--blockSize=128k", f"--size={SIZE}", "--listBlocks",
            "--quiet", "--force", self.bucket, self._device_dir, log=self.log)
        wait_for(lambda: is_mounted(self._device_dir) or process.poll() is not None, 60, "mount by s3backer")
        if process.returncode is not None:
            raise Failed(f"s3backer ended: {self.log_end()}")

    def _detach(self) -> None:
        self.umount(self._device_dir)
        self.group.wait_empty(600, "end of s3backer")


class S3ql(Target):
    """S3QL without encryption, which it would do beside compressing."""

    name = "s3ql"

    @classmethod
    def missing(cls) -> str | None:
        return needs("mkfs.s3ql", "mount.s3ql", "umount.s3ql", hint="no registry offers it; build it from its repository")

    @property
    def _url(self) -> str:
        return f"s3c4://{self.server.endpoint.removeprefix('http://')}/{self.bucket}"

    @property
    def _options(self) -> list[object]:
        auth = self.dir / "authinfo2"
        auth.write_text(f"[store]\nstorage-url: {self._url}\nbackend-login: {self.server.access}\n"
                        f"backend-password: {self.server.secret}\n")
        os.chmod(auth, 0o600)
        return ["--authfile", auth, "--cachedir", self.dir / "s3ql", "--backend-options", f"no-ssl,sig-region={REGION}"]

    def setup(self) -> None:
        sh("mkfs.s3ql", *self._options, "--plain", self._url)

    def mount(self) -> None:
        self.start_mount("mount.s3ql", *self._options, "--fg", self._url, self.mount_point)

    def unmount(self) -> None:
        sh("umount.s3ql", self.mount_point, group=self.group)
        self.group.wait_empty(600, "end of S3QL")

    def forget_caches(self) -> None:
        # Its metadata stays, as redb's and Redis's do.
        for blocks in (self.dir / "s3ql").glob("*-cache"):
            for block in blocks.iterdir():
                block.unlink()


class ObjectiveFs(Target):
    """ObjectiveFS; its makers sell the program and the licence (OBJECTIVEFS_LICENSE)."""

    name = "objectivefs"

    @classmethod
    def missing(cls) -> str | None:
        return needs("mount.objectivefs", hint="from its makers") or (
            None if os.environ.get("OBJECTIVEFS_LICENSE") else "OBJECTIVEFS_LICENSE is not set")

    @property
    def _url(self) -> str:
        return f"{self.server.endpoint}/{self.bucket}"

    def setup(self) -> None:
        os.environ["OBJECTIVEFS_PASSPHRASE"] = "bench"
        sh("mount.objectivefs", "create", self._url, env=self.server.env)

    def mount(self) -> None:
        self.start_mount("mount.objectivefs", "mount", self._url, self.mount_point)

    def unmount(self) -> None:
        self.umount()
        self.group.wait_empty(600, "end of ObjectiveFS")


class ZeroFs(Target):
    """ZeroFS, which serves 9P: the kernel must be able to mount that."""

    name = "zerofs"
    version_command = ("zerofs", "--version")

    @classmethod
    def missing(cls) -> str | None:
        if "\t9p\n" not in Path("/proc/filesystems").read_text():
            return "this kernel cannot mount 9P, which it serves"
        return needs(cls.name, hint="cargo install zerofs")

    @property
    def _config(self) -> Path:
        return self.dir / "zerofs.toml"

    @property
    def _socket(self) -> Path:
        return self.dir / "9p.sock"

    def setup(self) -> None:
        self._config.write_text(f"""
[cache]
dir = "{self.dir}/cache"
disk_size_gb = 10.0
[storage]
url = "s3://{self.bucket}/volume"
encryption_password = "bench-password"
[servers.ninep]
unix_socket = "{self._socket}"
[aws]
access_key_id = "{self.server.access}"
secret_access_key = "{self.server.secret}"
endpoint = "{self.server.endpoint}"
default_region = "{REGION}"
allow_http = "true"
""")

    def mount(self) -> None:
        (self.dir / "cache").mkdir(exist_ok=True)
        self.group.start(program("zerofs"), "run", "-c", self._config, log=self.log, env=self.server.env)
        wait_for(self._socket.exists, 60, f"socket of ZeroFS {self.log_end()}")
        sh("mount", "-t", "9p", "-o", "trans=unix,version=9p2000.L,msize=1048576,access=user", self._socket, self.mount_point)

    def unmount(self) -> None:
        sh("sync", "--file-system", self.mount_point)
        self.umount()
        self.group.terminate(600, "end of ZeroFS")
        self._socket.unlink(missing_ok=True)
