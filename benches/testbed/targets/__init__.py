"""What is measured: a target sets up a volume, mounts it, and says which processes serve it."""
import importlib
import pkgutil
import shutil
import subprocess
import tempfile
from pathlib import Path

from ..process import drop_caches, is_mounted, stop, tree_of


class Target:
    """One filesystem. Subclasses say what differs; each runs in a directory of its own."""

    name = "?"
    install = ""
    kind = "filesystem"

    def __init__(self, server, options):
        self.server, self.options = server, options
        self.dir = Path(tempfile.mkdtemp(prefix="rfs-bench-%s-" % self.name))
        self.mount_point = self.dir / "mnt"
        self.mount_point.mkdir()
        self.processes = []

    @classmethod
    def missing(cls):
        """Why it cannot run here, or None."""
        return None

    def setup(self):
        """Makes an empty volume."""

    def mount(self):
        raise NotImplementedError

    def unmount(self):
        """Unmounts; returns when everything is stored."""
        raise NotImplementedError

    def remount_cold(self):
        """Mounts again with no cached data anywhere on this machine."""
        self.unmount()
        self.forget_caches()
        drop_caches()
        self.mount()

    def forget_caches(self):
        """Deletes local caches while unmounted."""

    def pids(self):
        """Processes whose CPU and memory are the filesystem's."""
        return [p for process in self.processes for p in tree_of(process.pid)]

    def teardown(self):
        if is_mounted(self.mount_point):
            subprocess.run(["umount", "-l", str(self.mount_point)])
        for process in self.processes:
            stop(process)
        shutil.rmtree(self.dir, ignore_errors=True)


def on_path(program, hint):
    """A `missing` for programs that are found on PATH."""
    return None if shutil.which(program) else "no %s on PATH (%s)" % (program, hint)


def all_targets():
    """Every target of this folder by name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(__name__ + "." + module.name)

    def below(cls):
        for sub in cls.__subclasses__():
            yield sub
            yield from below(sub)

    return {cls.name: cls for cls in below(Target) if cls.name != "?"}
