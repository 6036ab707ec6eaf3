"""What the README says a user can type."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import pytest
import tyro

from actors.config import TrainerConfig
from losses import DIS
from recipes.grpo_async import Estimator, Losses

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()


def recipe() -> str:
    """The README's recipe of one's own."""
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    return next(block for block in blocks if block.startswith('"""A recipe'))


@pytest.mark.slow
def test_the_recipe_in_the_readme_runs_as_it_is_printed(tmp_path):
    assert recipe() == (ROOT / "recipes" / "custom.py").read_text()
    (tmp_path / "mine.py").write_text(recipe())
    flags = ["--model", str(ROOT / "recipes/assets/tiny/addition"), "--steps", "4", "--group-size", "8"]
    flags += ["--buffer.groups-per-step", "4", "--task.price", "0.02", "--loss.cap", "0.9", "--output-dir", "out"]
    done = subprocess.run([sys.executable, "mine.py", *flags], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    for row in rows:  # the text has no special tokens: one character for each token but the last
        paid = row["reward/right"] - 0.02 * (row["rollout/length"] - 1)
        assert row["reward/trained"] == pytest.approx(paid, abs=0.03)
        assert row["policy/capped"] > 0.5  # a cap below 1 hits the on-policy ratio


def test_it_imports_what_the_packages_export_and_no_more():
    for package, names in re.findall(r"^from (actors|losses)\S* import (.*)$", recipe(), re.MULTILINE):
        exported = __import__(package).__all__
        assert set(names.split(", ")) <= set(exported)
    assert not re.search(r"^from (actors|losses)\.", recipe(), re.MULTILINE)


def test_every_flag_that_the_readme_names_is_one():
    shown = subprocess.run(
        [sys.executable, "-m", "recipes.grpo_async", "task:dataset", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"COLUMNS": "200", "PATH": "/usr/bin"},
    ).stdout
    known = set(re.findall(r"--[a-z]+(?:[.-][a-z]+)*", shown))
    elsewhere = {"--trace", "--no-deps", "--task.price", "--help", "--task.name", "--json", "--through-actors"}
    table = re.findall(r"`([^`]*--[^`]*)`", TEXT)
    named = {flag for code in table for flag in re.findall(r"--[a-z]+(?:[.-][a-z]+)*", code)}
    named |= set(re.findall(r"(?<=\s)--[a-z]+(?:[.-][a-z]+)*", "".join(re.findall(r"```\n(.*?)```", TEXT, re.DOTALL))))
    missing = {flag for flag in named - known - elsewhere if not flag.startswith(("--generator.engine", "--loss."))}
    assert not missing, sorted(missing)


@pytest.mark.parametrize("module", sorted(set(re.findall(r"python -m (recipes\.\w+)", TEXT))))
def test_every_command_that_the_readme_names_has_help(module):
    done = subprocess.run([sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "usage" in done.stdout.lower()


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The settings of the recipe that the table of objectives is about."""

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    loss: Losses = field(default_factory=DIS)
    advantage: Estimator = "group_norm"


def test_every_objective_of_the_table_is_what_its_flags_give():
    section = TEXT.split("## Objectives")[1].split("\n## ")[0]
    typed = [code.split() for code in re.findall(r"`([^`]+)`", section) if re.search(r"(^| )loss:", code)]
    given = [tyro.cli(Trained, args=flags, config=(tyro.conf.CascadeSubcommandArgs,)) for flags in typed]
    assert all(settings != Trained() for settings in given)
    assert {type(settings.loss) for settings in given} == set(get_args(Losses)), "an objective is not in the table"
