"""The stability grid: the lag is what it says, cells repeat to the bit, what is finished is not run again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.types import Taken
from losses import ReadsOld, reads
from recipes.stability import CORRECTIONS, GROUPS, MEMBERS, Cell, Curves, collapse, figures, means
from recipes.stability.__main__ import Config, collect
from recipes.stability.cell import Lab

CELL = Cell(correction="decoupled", lag=2, lr=1e-3, seed=5, steps=3)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Lab(str(tmp_path_factory.mktemp("lab")))
    torch.set_num_threads(threads)


def without_times(curves: Curves) -> list[Any]:
    rows = [{name: value for name, value in row.items() if not name.startswith("time/")} for row in curves.steps]
    return [curves.rewards, repr(rows)]  # engine gaps are nan, which equals nothing


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_every_token_of_step_s_is_exactly_min_of_s_and_lag_versions_old(
    lab: Lab, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, set[int], set[int], int]] = []
    from actors import training

    step = training.Training.step

    def spied(self: training.Training, taken: Taken) -> Any:
        read = [training.payload.read(group.handle).rollouts for group in taken.groups]
        versions = {int(v) for rollouts in read for r in rollouts for v in r.versions[r.mask]}
        tickets = {group.ticket for group in taken.groups}
        seen.append((taken.step, versions, tickets, sum(len(rollouts) for rollouts in read)))
        return step(self, taken)

    monkeypatch.setattr(training.Training, "step", spied)
    curves = lab.run(replace(CELL, lag=lag, steps=5))
    assert [s for s, *_ in seen] == [0, 1, 2, 3, 4]
    for s, versions, tickets, rollouts in seen:
        assert versions == {s - min(s, lag)}
        assert tickets == set(range(s * GROUPS, (s + 1) * GROUPS))
        assert rollouts == GROUPS * MEMBERS
        row = curves.steps[s]
        assert row["staleness/mean"] == row["staleness/max"] == min(s, lag)
    assert len(curves.rewards) == 6


def test_a_cell_repeats_to_the_bit_whatever_ran_before_it(lab: Lab) -> None:
    first = lab.run(CELL)
    weights = {name: tensor.clone() for name, tensor in lab.backend.weights().items()}
    other = lab.run(replace(CELL, correction="none", lag=0, seed=6))
    again = lab.run(CELL)
    assert without_times(again) == without_times(first) != without_times(other)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in lab.backend.weights().items())


def test_version_0_is_the_same_for_all_lags_and_later_ones_are_not(lab: Lab) -> None:
    fresh, stale = (lab.run(replace(CELL, lag=lag, lr=1e-2)) for lag in (0, 2))
    assert fresh.rewards[0] == stale.rewards[0]
    # The first batch is the same, so version 1 is too, but it draws tickets of other rows.
    assert fresh.steps[0]["policy/loss"] == stale.steps[0]["policy/loss"]
    assert fresh.steps[1]["policy/loss"] != stale.steps[1]["policy/loss"]


def test_which_corrections_make_the_pass_at_the_start_of_the_step() -> None:
    """The ratios in the table are what the objectives read."""
    for correction in CORRECTIONS.values():
        assert reads(correction.objective, ReadsOld) == ("old" in correction.ratio)


STEADY = [0.8] * 10


@pytest.mark.parametrize(
    ("rewards", "version"),
    [
        (STEADY, None),
        # Means over 5 from version 4 on: .8 until 9, then .64, .48, .32 at version 12: below .4.
        (STEADY + [0.0] * 5, 12),
        # Down to .32 and back up: .32 at 12, .16 at 13, 0.32, 0.48.
        ([*STEADY, *[0.0] * 4, *[0.8] * 5], None),
        # Back up and down again: the second fall counts. Means .8 until 18, then .64 .48 .32 at 21.
        ([*STEADY, *[0.0] * 4, *[0.8] * 5, *[0.0] * 3], 21),
        # Half of the best is not below half.
        ([0.8] * 5 + [0.4] * 5, None),
        # The best comes late: half of .2 is not undercut early on.
        ([0.2] * 5 + [0.1] * 5 + [0.8] * 5, None),
        ([0.0] * 8, None),
        ([0.5, 0.1], None),
    ],
)
def test_a_collapse_is_a_fall_below_half_of_the_best_that_lasts(rewards: list[float], version: int | None) -> None:
    assert collapse(rewards) == version


def test_figures_of_a_curve_by_hand() -> None:
    """12 steps, 13 versions. masked 0 .. 11: last ten 2 .. 11 mean 6.5, best five 7 .. 11 mean 9. Rewards 0 .. 12:
    3 .. 12 mean 7.5, 8 .. 12 mean 10. ESS 1 - masked / 100: lowest of the same five .91."""
    steps = [
        {"policy/masked": float(i), "policy/lag_kl": 11.0 - i, "policy/ess": 1 - i / 100, "staleness/mean": 2.0}
        for i in range(12)
    ]
    found = figures(Curves([float(i) for i in range(13)], steps))
    wanted = {
        "reward_last": 7.5,
        "reward_best": 10.0,
        "collapse": None,
        "masked_last": 6.5,
        "masked_peak": 9.0,
        "ess_last": 0.935,
        "ess_lowest": 0.91,
        "lag_kl_last": 4.5,
        "lag_kl_peak": 9.0,
        "staleness": 2.0,
    }
    assert found == pytest.approx(wanted)
    assert means([1.0, 3.0]) == [2.0]


def record(cell: Cell) -> dict[str, Any]:
    return cell.name | {"reward_last": 0.5, "rewards": [0.5]}


def test_an_interrupted_grid_goes_on(tmp_path: Path) -> None:
    output = tmp_path / "cells.jsonl"
    config = Config(corrections=("none", "tis"), lags=(0, 8), lrs=(1e-4,), seeds=(0,), steps=7)
    cells, asked = config.cells(), []

    def work(missing: Sequence[Cell]) -> Iterator[dict[str, Any]]:
        asked.append(list(missing))
        yield record(missing[1])
        yield record(missing[0])
        if len(asked) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(cells, output, work)
    kept = output.read_bytes()
    output.write_bytes(kept + b'{"correction": "no')
    assert collect(cells, output, work) == [record(cell) for cell in cells]
    assert asked == [cells, cells[2:]]
    assert output.read_bytes().startswith(kept) and len(output.read_bytes().splitlines()) == 4
    assert collect(cells, output, work) == [record(cell) for cell in cells]
    assert len(asked) == 2
    other = [replace(cell, steps=8) for cell in cells[:2]]
    assert collect(other, output, work) == [record(cell) for cell in other]
    assert asked[2:] == [other]


@pytest.mark.parametrize("text", ['{"mine": 1}', '{"mine": 1}\n', "5\n", "[1]\n", '{"correction": "none"}\n'])
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    output = tmp_path / "mine.json"
    output.write_text(text)
    with pytest.raises(ValueError, match="holds something else than cells"):
        collect(Config(steps=7).cells()[:1], output, lambda cells: [record(cell) for cell in cells])
    assert output.read_text() == text


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"stability\.lrs must be at least 0, not nan"):
        Config(lrs=(1e-4, float("nan")))
    with pytest.raises(ValueError, match="--corrections plain is none of none, ppo_old"):
        Config(corrections=("none", "plain"))
    with pytest.raises(ValueError, match=r"stability\.lags must be at least 0"):
        Config(lags=(8, -1))


@pytest.mark.slow
def test_json_parses_and_another_process_gives_the_same_bits(lab: Lab, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recipes.stability", "--json", "--corrections", "decoupled", "--lags", "2"]
    command += ["--lrs", "1e-3", "--seeds", "5", "--steps", "3", "--output", str(tmp_path / "cells.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    printed = json.loads(done.stdout)
    assert printed["settings"]["steps"] == 3 and printed["machine"]["torch"]
    (cell,) = printed["cells"]
    assert cell == json.loads((tmp_path / "cells.jsonl").read_text())
    curves = lab.run(CELL)
    assert cell["rewards"] == curves.rewards
    found = figures(curves)
    assert {name: cell[name] for name in found} == found
    assert cell["cpu_s"] > 0
