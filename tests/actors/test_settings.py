"""Settings written as JSON come back as they were."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tyro.conf import subcommand

from actors.config import (
    BufferConfig,
    GeneratorConfig,
    LogConfig,
    NativeEngine,
    RolloutConfig,
    RunConfig,
    Sampling,
    SimulatedEngine,
    Tracker,
    VllmEngine,
)
from actors.settings import plain, restore


@dataclass(frozen=True, kw_only=True)
class Left:
    size: int = 1


@dataclass(frozen=True, kw_only=True)
class Right:
    size: float = 1.0
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Leaf:
    side: Annotated[Left, subcommand("left")] | Annotated[Right, subcommand("right")] = field(default_factory=Left)
    either: Left | None = None
    folder: Path | None = None
    text: str | Path = "x"
    number: int | float | None = None
    pair: tuple[int, float] = (1, 2.0)
    many: list[Right] = field(default_factory=list)
    table: dict[str, bool] = field(default_factory=dict)
    mode: Literal["a", "b", 3] = "a"


number = st.floats(allow_nan=False)
text = st.text(max_size=5)
lefts = st.builds(Left, size=st.integers())
rights = st.builds(Right, size=number, names=st.lists(text, max_size=3).map(tuple))
leaves = st.builds(
    Leaf,
    side=lefts | rights,
    either=st.none() | lefts,
    folder=st.none() | text.map(Path),
    text=text,
    number=st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    pair=st.tuples(st.integers(), number),
    many=st.lists(rights, max_size=2),
    table=st.dictionaries(text, st.booleans(), max_size=2),
    mode=st.sampled_from(["a", "b", 3]),
)
runs = st.builds(
    RunConfig,
    model=st.none() | text,
    output_dir=st.none() | text.map(Path),
    sampling=st.builds(Sampling, stop=st.lists(st.text(min_size=1, max_size=3), max_size=2).map(tuple)),
    rollout=st.builds(RolloutConfig, timeout=st.floats(min_value=1)),
    buffer=st.builds(BufferConfig, depth=st.none() | st.integers(-1, 9), order=st.sampled_from(["oldest", "window"])),
    generator=st.builds(
        GeneratorConfig,
        engine=st.builds(NativeEngine) | st.builds(VllmEngine) | st.builds(SimulatedEngine, base=st.floats(0, 9)),
    ),
    log=st.builds(LogConfig, to=st.lists(st.sampled_from(get_args(Tracker)), unique=True).map(tuple)),
)


@given(leaves | runs)
def test_settings_survive_strict_json(settings):
    text = json.dumps(plain(settings), allow_nan=False)
    back = restore(type(settings), json.loads(text))
    assert back == settings
    assert json.dumps(plain(back)) == text  # equal also where 1 == 1.0 == True


def test_nan_survives():
    assert math.isnan(restore(Right, plain(Right(size=math.nan))).size)


def changed(path: str, value: object) -> dict:
    """The JSON of a run's settings with one entry set."""
    whole = plain(RunConfig())
    *outer, name = path.split(".")
    inner = whole
    for part in outer:
        inner = inner[part]
    inner[name] = value
    return whole


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("buffer.colour", 3, "unknown field buffer.colour"),
        ("colour", 3, "unknown field colour"),
        ("buffer.window", "16", "buffer.window cannot be '16': expected int"),
        ("buffer.window", True, "buffer.window cannot be True: expected int"),
        ("buffer.order", "newest", "buffer.order cannot be 'newest'"),
        ("sampling.stop", "x", "sampling.stop cannot be 'x'"),
        ("sampling.stop", [1], "sampling.stop[0] cannot be 1: expected str"),
        (
            "generator.engine.type",
            "Other",
            "generator.engine cannot be 'Other': expected NativeEngine or Vllm",
        ),
        ("buffer.type", "Other", "buffer must be of type BufferConfig, not 'Other'"),
        ("buffer", None, "buffer must be of type BufferConfig, not None"),
        ("type", "Other", "the whole must be of type RunConfig, not 'Other'"),
        ("buffer.groups_per_step", 0, "buffer.groups_per_step must be at least 1"),
    ],
)
def test_what_does_not_fit_is_named(path, value, message):
    with pytest.raises(ValueError) as refused:
        restore(RunConfig, changed(path, value))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_field_is_named_even_if_it_has_a_default():
    whole = plain(RunConfig())
    del whole["trainer"]["lr"]
    with pytest.raises(ValueError, match=r"missing field trainer\.lr"):
        restore(RunConfig, whole)


def test_settings_of_a_subclass_are_another_type():
    whole = plain(replace(RunConfig(), steps=3))
    with pytest.raises(ValueError, match="must be of type Leaf, not 'RunConfig'"):
        restore(Leaf, whole)
