"""Samples: their order and their summary. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """Samples in one unit: count, median, quartiles, extremes."""

    count: int
    median: float
    lower_quartile: float
    upper_quartile: float
    least: float
    most: float


def summarise(samples: Sequence[float]) -> Summary:
    """The summary of at least one sample; quartiles are interpolated and lie within the samples' range."""
    # Before Python 3.13 there were no quartiles of a single one.
    several = samples if len(samples) > 1 else [*samples, *samples]
    lower, median, upper = statistics.quantiles(several, n=4, method="inclusive")
    return Summary(len(samples), median, lower, upper, min(samples), max(samples))


def rotated(count: int, turn: int) -> list[int]:
    """The order of `count` variants in a round: a new one is first each time, and every second round runs backwards.

    Over `count` rounds each variant has been at each place, and none always follows the same other one.
    """
    order = [(turn + index) % count for index in range(count)]
    return order[:1] + order[:0:-1] if turn % 2 else order
