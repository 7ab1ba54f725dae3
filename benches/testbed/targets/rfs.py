"""rfs over redb and the S3 server; over redb and a local directory; over FoundationDB when it is found."""
import os
import time

from . import Target
from ..process import Failed, is_mounted, sh, start, wait_for
from ..server import BUCKET


class Rfs(Target):
    name = "rfs"
    mount_args = ()

    def __init__(self, server, options):
        super().__init__(server, options)
        self.program = options.rfs
        self.meta = "redb://%s/meta.redb" % self.dir

    @property
    def store(self):
        return "s3://%s/%s?endpoint=%s&region=us-east-1&path_style=true" % (BUCKET, self.dir.name, self.server.endpoint)

    def setup(self):
        sh(self.program, "format", self.meta, self.store, env=self.server.env)

    def mount(self):
        args = [*self.mount_args, *self.options.rfs_mount_args]
        self.processes = [start(self.program, "mount", *args, self.meta, self.mount_point, log=self.dir / "log",
                                env=self.server.env)]
        wait_for(lambda: is_mounted(self.mount_point) or self.processes[0].poll() is not None, 30, "mount")
        if self.processes[0].poll() is not None:
            raise Failed((self.dir / "log").read_text()[-2000:])

    def unmount(self):
        sh(self.program, "umount", self.mount_point)
        self.processes[0].wait(600)
        self.processes = []


class RfsLocal(Rfs):
    name = "rfs-local"

    @property
    def store(self):
        return "file://%s/store" % self.dir
