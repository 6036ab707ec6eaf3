"""Performance claims as ratios: each value beside a floor or a peer measured in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Result:
    """One claim: `value` is at most `bar` times `floor`. Without a bar it is only reported."""

    name: str
    value: float
    unit: str
    floor: float
    ratio: float
    bar: float | None = None
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether the claim holds."""
        return self.bar is None or self.ratio <= self.bar


def paired(
    name: str, values: Sequence[float], floors: Sequence[float], bar: float | None, *, unit: str = "s", note: str = ""
) -> Result:
    """A claim over repeats. The ratio is the median of the pairs' ratios: other work on the machine slows both sides
    of a pair that was measured together."""
    ratio = statistics.median(value / floor for value, floor in zip(values, floors, strict=True))
    return Result(
        name=name,
        value=statistics.median(values),
        unit=unit,
        floor=statistics.median(floors),
        ratio=ratio,
        bar=bar,
        note=note,
    )
