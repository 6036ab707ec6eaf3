"""Placement on imaginary machines."""

from __future__ import annotations

import itertools

import pytest

from actors.config import GeneratorConfig, RolloutConfig, TrainerConfig
from actors.placement import plan


def place(ranks, replicas, tp, hosts, gpus):
    return plan(
        GeneratorConfig(replicas=replicas, tp=tp, threads=3),
        TrainerConfig(ranks=ranks),
        RolloutConfig(),
        hosts=hosts,
        gpus=gpus,
    )


def test_on_cpu_everything_is_on_the_one_host():
    p = place(2, 3, 1, hosts=1, gpus=0)
    assert p.trainer.ranks_per_host == 2 and p.trainer.device == "cpu"
    assert [g.name for g in p.generators] == ["generator0", "generator1", "generator2"]
    assert {g.threads for g in p.generators} == {3}


def test_two_hosts_of_eight():
    p = place(8, 4, 2, hosts=2, gpus=8)
    assert p.trainer.hosts == (0,) and p.trainer.gpus == tuple(range(8))
    assert [(g.hosts, g.gpus) for g in p.generators] == [
        ((1,), (0, 1)),
        ((1,), (2, 3)),
        ((1,), (4, 5)),
        ((1,), (6, 7)),
    ]
    small = place(4, 2, 4, hosts=2, gpus=8)
    assert (small.generators[0].hosts, small.generators[0].gpus) == ((0,), (4, 5, 6, 7))
    assert (small.generators[1].hosts, small.generators[1].gpus) == ((1,), (0, 1, 2, 3))
    assert place(16, 1, 1, hosts=3, gpus=8).trainer.hosts == (0, 1)


def test_no_device_is_given_twice_and_refusals_have_numbers():
    fits = 0
    for ranks, replicas, tp in itertools.product((1, 2, 4, 8, 12, 16), (1, 2, 5, 9), (1, 2, 3, 8)):
        try:
            p = place(ranks, replicas, tp, hosts=2, gpus=8)
        except ValueError as error:
            assert "free are host 0: " in str(error)
            continue
        fits += 1
        used = [(h, g) for spot in (p.trainer, *p.generators) for h in spot.hosts for g in spot.gpus]
        assert len(used) == len(set(used)) == ranks + replicas * tp
    assert fits > 10


def test_counts_below_one_are_refused():
    with pytest.raises(ValueError, match=r"generator\.replicas must be at least 1, not 0"):
        place(1, 0, 1, hosts=1, gpus=0)
