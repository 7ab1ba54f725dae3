"""The local directory: what no network filesystem can beat for long."""
import os

from . import Target


class Local(Target):
    name = "local"
    kind = "reference"

    def mount(self):
        pass

    def unmount(self):
        os.sync()
