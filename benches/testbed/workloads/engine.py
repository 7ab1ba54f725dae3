"""The metadata operations themselves, without FUSE and without contents."""

import json
from typing import Any

from ..process import sh
from ..targets.rfs import RfsFdb
from . import standalone


@standalone
def engine(options: Any) -> dict[str, dict[str, float]]:
    """Metadata operations a second over each engine: redb, the reference engine in memory, FoundationDB."""
    engines = ["redb", "mem"] + ([] if RfsFdb.missing() else ["fdb"])
    count = max(200, int(20_000 * options.scale))
    return {name: json.loads(sh(options.engine, "--engine", name, "--count", count, "--dir", options.work))["per_second"]
            for name in engines}
