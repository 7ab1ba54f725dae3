"""References: the local directory, which no network filesystem can beat for long, and FUSE without a filesystem behind it."""

from ..process import sh
from . import Target


class Local(Target):
    """The disk below the other targets; unmounting is syncfs(2)."""

    name = "local"
    kind = "reference"

    def mount(self) -> None:
        pass

    def unmount(self) -> None:
        sh("sync", "--file-system", self.mount_point)


class Null(Target):
    """Names in memory behind FUSE, with the settings of rfs: what the kernel's protocol allows."""

    name = "null"

    def mount(self) -> None:
        self.start_mount(self.options.load, "null", self.mount_point)

    def unmount(self) -> None:
        self.umount()
        self.group.wait_empty(60, "end of the null filesystem")
