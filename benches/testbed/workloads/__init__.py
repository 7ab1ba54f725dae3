"""What is measured. A workload is a function of a run; `run.phase` measures one phase of it.

Write phases end when the target is unmounted, that is when everything is in the store; read phases begin with no cached
data on this machine. Shapes are those that were published, times --scale.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from ..measure import Run

Workload = Callable[[Run], None]
WORKLOADS: dict[str, Workload] = {}
# Those that need no target: they return rates by operation for each of the things that they compare.
Standalone = Callable[[Any], dict[str, dict[str, float]]]
STANDALONE: dict[str, Standalone] = {}


def workload(function: Workload) -> Workload:
    """Makes a function a workload of its name."""
    WORKLOADS[function.__name__] = function
    return function


def standalone(function: Standalone) -> Standalone:
    """Makes a function a workload without targets."""
    STANDALONE[function.__name__] = function
    return function


for module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{module.name}")
