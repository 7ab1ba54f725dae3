"""Medians, spreads and paired ratios of rounds."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """The middle and the ends of some rounds."""

    median: float
    low: float
    high: float
    rounds: int


def spread(values: list[float]) -> Spread | None:
    """Of no values: None."""
    if not values:
        return None
    return Spread(statistics.median(values), min(values), max(values), len(values))


def paired_ratio(base: Mapping[int, float], other: Mapping[int, float]) -> Spread | None:
    """How many times `other` is `base`: the ratio of each round that both have, by round number.

    Rounds of one machine drift together, so the ratio inside a round says more than the ratio of two medians.
    """
    return spread([base[number] / other[number] for number in sorted(base.keys() & other.keys()) if other[number]])
