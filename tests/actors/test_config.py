"""Settings that make no sense are refused where they are made."""

from __future__ import annotations

import math

import pytest

from actors.config import (
    BufferConfig,
    GeneratorConfig,
    NativeEngine,
    RolloutConfig,
    Sampling,
    SimulatedEngine,
    SyncConfig,
    TrainerConfig,
    VllmEngine,
)
from actors.types import require

REFUSED = {
    Sampling: (
        "sampling",
        {"temperature": (-1, math.nan, math.inf), "top_p": (0, 1.1), "top_k": (-1,), "max_tokens": (-1,)},
    ),
    BufferConfig: (
        "buffer",
        {
            "groups_per_step": (0,),
            "max_staleness": (-2,),
            "window": (0,),
            "depth": (-2,),
            "in_flight": (0,),
            "reuse": (0,),
            "refill_cap": (0,),
            "attempts": (0,),
        },
    ),
    NativeEngine: ("generator.engine", {"slots": (0,), "max_length": (1,)}),
    VllmEngine: ("generator.engine", {"slots": (0,), "max_length": (1,), "kv_gib": (0, math.nan, math.inf)}),
    SimulatedEngine: (
        "generator.engine",
        {"slots": (0,), "base": (-1, math.nan), "per_request": (-1,), "median_length": (0,), "sigma": (-1,)},
    ),
    GeneratorConfig: ("generator", {"replicas": (0,), "tp": (0,), "threads": (0,)}),
    RolloutConfig: ("rollout", {"workers": (0,), "timeout": (0, math.nan)}),
    TrainerConfig: (
        "trainer",
        {
            "ranks": (0,),
            "threads": (0,),
            "lr": (-1e-3, math.nan, math.inf),
            "warmup_steps": (-1,),
            "final_lr": (-0.1, 1.5),
            "beta1": (1, -0.1),
            "beta2": (1, math.nan),
            "weight_decay": (-1,),
            "clip_norm": (0, -1, math.nan),
            "updates_per_step": (0,),
            "microbatch_tokens": (0,),
        },
    ),
    SyncConfig: ("sync", {"timeout": (0, -1, math.nan)}),
}


@pytest.mark.parametrize(
    ("config", "section", "name", "value"),
    [(c, s, n, v) for c, (s, fields) in REFUSED.items() for n, values in fields.items() for v in values],
)
def test_a_value_out_of_range_is_named(config, section, name, value):
    with pytest.raises(ValueError, match=rf"^{section}\.{name} must be .*, not {value}$"):
        config(**{name: value})


def test_the_ends_of_a_range_are_allowed():
    TrainerConfig(lr=0, warmup_steps=0, final_lr=1, clip_norm=math.inf)
    BufferConfig(max_staleness=-1, depth=-1, in_flight=1)
    Sampling(temperature=0, top_p=1, top_k=0, max_tokens=1)
    RolloutConfig(timeout=math.inf)
    with pytest.raises(ValueError, match=r"^a\.y must be in 1\.\.2, not 3$"):
        require("a", 1, 2, x=2, y=3)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty string"):
        Sampling(stop=("x", ""))
