"""What a run leaves in its folder, through endings, resumption, full disks and readers."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from actors.config import LogConfig, RunConfig
from actors.metrics import RunLog, print_summary
from actors.output import LEFT, is_run, read_lines
from actors.settings import restore
from actors.timeline import Span

CONFIG = RunConfig(steps=9)
STRANGER = "notes.txt"


def lines(path: Path) -> list[dict]:
    return [row for _, row in read_lines(path)]


def row(step: int, **more: float) -> dict[str, float]:
    return {"step": step, "reward/mean": step / 10, "time/step": 2.0, "time/wait_batch": 0.5, **more}


def record(step: int) -> dict:
    return {"step": step, "ticket": 7, "rank": "best", "reward": 1.0, "pieces": ["a"], "logprobs": [-math.inf]}


def span(begin: float) -> Span:
    return Span(role="trainer", name="train", begin=begin, end=begin + 1, version=None)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def earlier_run(folder: Path, steps: int = 4) -> None:
    """A run that was killed: no summary, and its last line is torn everywhere."""
    log = RunLog(folder, CONFIG, 9, quiet=True)
    for step in range(steps):
        log.step(row(step, **{"perf/trained_tokens": 100.0, "rollout/length": math.nan if step == 1 else 5.0}))
        log.rollouts([record(step)])
        log.spans([span(step)])
        log.evaluation(step + 1, {"eval/reward": 0.5})
    for name in ("metrics", "rollouts", "timeline", "evals"):
        with (folder / f"{name}.jsonl").open("a") as file:
            file.write('{"step": 4, "versi')


def test_a_run_leaves_strict_json_and_its_settings(tmp_path):
    log = RunLog(tmp_path / "a" / "b", CONFIG, 2, quiet=True)
    log.step(row(0, x=math.inf))
    log.rollouts([record(0), {**record(0), "rank": "worst"}])
    log.rollouts([])
    log.spans([span(3.5)])
    log.evaluation(1, {"eval/pass@1": 0.25})
    log.finish(2.0, {"issued": 1})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    for path in log.folder.iterdir():
        for text in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
            json.loads(text, parse_constant=refuse)
    (metrics,) = lines(log.folder / "metrics.jsonl")
    assert metrics["time/wall"] >= 0
    assert {k: v for k, v in metrics.items() if k != "time/wall"} == row(0, x=None)
    assert [r["rank"] for r in lines(log.folder / "rollouts.jsonl")] == ["best", "worst"]
    assert lines(log.folder / "rollouts.jsonl")[0]["logprobs"] == [None]
    expected = {"role": "trainer", "name": "train", "begin": 3.5, "end": 4.5, "version": None}
    assert lines(log.folder / "timeline.jsonl") == [expected]
    assert lines(log.folder / "evals.jsonl") == [{"version": 1, "eval/pass@1": 0.25}]
    settings = restore(RunConfig, json.loads((log.folder / "config.json").read_text()))
    assert settings == replace(CONFIG, output_dir=log.folder)


def test_the_console_has_a_line_a_step(tmp_path, capsys):
    with RunLog(tmp_path / "run", CONFIG, 9) as log:
        log.step(row(0, **{"rollout/truncated": 0.125, "policy/loss": math.nan}))
        log.evaluation(1, {"eval/reward": 0.5})
    assert capsys.readouterr().out.splitlines() == [
        f"writing to {tmp_path / 'run'}",
        "step    1/9  reward 0.000  cut 12%  step 2.000s  wait 0.500s",
        "evaluation of version 1  reward 0.500",
    ]


def test_the_summary_is_of_these_numbers(tmp_path):
    log = RunLog(tmp_path, CONFIG, 9, quiet=True)
    for step in range(12):
        tokens = {"perf/trained_tokens": 30.0, "perf/generated_tokens": 60.0, "idle/generator": 0.5 if step else 0.0}
        log.step(row(step, **tokens))
    summary = log.finish(24.0, {"issued": 5, "trained": 3}, extra=1.5)
    on_disk = json.loads((tmp_path / "summary.json").read_text())
    assert on_disk == {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in summary.items()}
    del summary["wall_seconds"]
    assert math.isnan(summary.pop("length_first5"))
    assert math.isnan(summary.pop("length_last10"))
    assert summary == pytest.approx(
        {
            "status": "done",
            "reason": "",
            "reward_first5": 0.2,  # (0 + .1 + .2 + .3 + .4) / 5
            "reward_last10": 0.65,  # (.2 + ... + 1.1) / 10
            "steps": 12,
            "loop_seconds": 24.0,
            "generated_tokens_per_second": 30.0,  # 720 / 24
            "trained_tokens_per_second": 15.0,
            "idle_trainer": 0.25,
            "idle_generator": 11 / 24,
            "tracker_errors": 0,
            "extra": 1.5,
            "issued": 5,
            "trained": 3,
        }
    )


def test_a_run_that_fails_at_once_leaves_a_summary(tmp_path):
    log = RunLog(tmp_path, CONFIG, 9, quiet=True)
    log.fail("ValueError: no")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["reason"], summary["steps"]) == ("failed", "ValueError: no", 0)
    assert summary["trained_tokens_per_second"] is None
    log.fail("Ctrl-C", status="stopped")
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "stopped"


def test_resuming_takes_back_later_steps_and_counts_earlier_ones(tmp_path):
    earlier_run(tmp_path)
    (tmp_path / STRANGER).write_text("mine")
    whole = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    log = RunLog(tmp_path, replace(CONFIG, steps=7), 7, resume_step=2, quiet=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(whole[:2])
    assert [r["step"] for r in lines(tmp_path / "rollouts.jsonl")] == [0, 1]
    assert [r["version"] for r in lines(tmp_path / "evals.jsonl")] == [1, 2]
    assert [r["begin"] for r in lines(tmp_path / "timeline.jsonl")] == [0, 1, 2, 3]
    for step in range(2, 7):
        log.step(row(step, **{"perf/trained_tokens": 200.0}))
    log.rollouts([record(2)])
    log.spans([span(9)])
    summary = log.finish(11.0, {})
    assert [r["step"] for r in lines(tmp_path / "metrics.jsonl")] == list(range(7))
    assert [r["step"] for r in lines(tmp_path / "rollouts.jsonl")] == [0, 1, 2]
    assert len(lines(tmp_path / "timeline.jsonl")) == 5
    assert summary["steps"] == 7
    assert summary["reward_first5"] == pytest.approx(0.2)
    assert summary["loop_seconds"] == 15.0  # two steps of 2 s before
    assert summary["trained_tokens_per_second"] == pytest.approx(80.0)  # (2 * 100 + 5 * 200) / 15
    assert math.isnan(log.rows[1]["rollout/length"])
    assert restore(RunConfig, json.loads((tmp_path / "config.json").read_text())).steps == 7
    assert (tmp_path / STRANGER).read_text() == "mine"


def test_wall_time_goes_on_where_the_last_kept_step_ended(tmp_path):
    earlier_run(tmp_path)
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()[:3]]
    kept[1]["time/wall"] = 1000.0
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in kept))
    log = RunLog(tmp_path, CONFIG, 9, resume_step=2, quiet=True)
    log.step(row(2))
    assert 1000.0 < log.rows[-1]["time/wall"] < 1060.0


def test_resuming_at_the_first_step_keeps_nothing(tmp_path):
    earlier_run(tmp_path)
    log = RunLog(tmp_path, CONFIG, 9, resume_step=0, quiet=True)
    assert log.rows == []
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    assert log.fail("x")["loop_seconds"] == 0.0


def test_a_damaged_line_inside_is_named(tmp_path):
    earlier_run(tmp_path)
    text = (tmp_path / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text("\n".join([text[0], "{oops", *text[2:]]))
    with pytest.raises(ValueError, match=r"metrics\.jsonl line 2 is not JSON"):
        RunLog(tmp_path, CONFIG, 9, resume_step=3, quiet=True)


def test_overwriting_removes_what_a_run_leaves_and_nothing_else(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "weights").write_text("kept")
    folder = tmp_path / "run"
    earlier_run(folder)
    for name in set(LEFT) - {p.name for p in folder.iterdir()}:
        (folder / name).mkdir() if "." not in name else (folder / name).touch()
    (folder / "checkpoints" / "step-000010").mkdir()
    (folder / "model").rmdir()
    (folder / "model").symlink_to(elsewhere)
    (folder / STRANGER).write_text("mine")
    (folder / "plots").mkdir()
    log = RunLog(folder, CONFIG, 9, overwrite=True, quiet=True)
    assert {p.name for p in folder.iterdir()} == {STRANGER, "plots", "config.json", "metrics.jsonl"}
    assert (elsewhere / "weights").read_text() == "kept"
    assert log.rows == []
    assert (folder / "metrics.jsonl").read_bytes() == b""


def test_a_folder_in_use_is_refused_and_left_alone(tmp_path):
    earlier_run(tmp_path)
    before = tree(tmp_path)
    with pytest.raises(FileExistsError, match=r"holds a run: go on with --resume, start anew with --overwrite"):
        RunLog(tmp_path, CONFIG, 9, quiet=True)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("config", [None, '{"model_type": "qwen2"}', '{"type": 3}', "[1]", "{", '{"type": "Config"}'])
def test_a_folder_of_another_kind_is_refused_even_to_overwrite(tmp_path, config):
    """Such as a model's, which has a config.json too."""
    (tmp_path / "model.safetensors").write_text("precious")
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    if config != '{"type": "Config"}':
        (tmp_path / "metrics.jsonl").touch()
    before = tree(tmp_path)
    assert not is_run(tmp_path)
    with pytest.raises(FileExistsError, match="not the folder of a run"):
        RunLog(tmp_path, CONFIG, 9, overwrite=True, quiet=True)
    with pytest.raises(ValueError, match="nothing to resume"):
        RunLog(tmp_path, CONFIG, 9, resume_step=1, quiet=True)
    assert tree(tmp_path) == before


def test_a_missing_folder_cannot_be_resumed(tmp_path):
    with pytest.raises(ValueError, match="nothing to resume"):
        RunLog(tmp_path / "new", CONFIG, 9, resume_step=1, quiet=True)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"cannot write .*file.*: .*; choose another --output-dir"):
        RunLog(tmp_path / "file" / "run", CONFIG, 9, quiet=True)


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [p for p in sys.path if "site-packages" not in p])
    with pytest.raises(ValueError, match=r"^--log.to wandb: wandb is not installed: pip install -e '\.\[log\]'$"):
        RunLog(tmp_path / "run", CONFIG, 9, LogConfig(to=("wandb",)))
    assert not (tmp_path / "run").exists()


FULL = f"""
import resource, signal, sys
from pathlib import Path
from actors.config import RunConfig
from actors.metrics import RunLog
log = RunLog(Path(sys.argv[1]), RunConfig(), 9, quiet=True)
log.finish(1.0, {{}})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, {resource.RLIM_INFINITY}))
for call in (lambda: log.rollouts([{{"pieces": ["x" * 200]}}]), lambda: log.fail("why")):
    try:
        call()
    except OSError as error:
        print(error)
"""


def test_a_full_disk_is_one_line_that_names_the_file(tmp_path):
    """A limit on the size of files stands for it: the write stops in the middle of a line."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    why = os.strerror(errno.EFBIG)
    assert done.stdout.splitlines() == [
        f"cannot write {tmp_path / 'rollouts.jsonl'}: {why}; the run ends here",
        f"cannot write {tmp_path / 'summary.json'}: {why}",
    ]
    assert (tmp_path / "rollouts.jsonl").stat().st_size == 100
    assert lines(tmp_path / "rollouts.jsonl") == []
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "metrics.jsonl", "rollouts.jsonl", "summary.json"}
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "done"  # the one before, whole


def test_the_printed_summary(capsys):
    summary = {
        "status": "failed",
        "reason": "RuntimeError: [bold]no[/bold]",
        "reward_first5": 0.25,
        "reward_last10": 0.5,
        "length_first5": math.nan,
        "length_last10": math.nan,
        "steps": 12,
        "loop_seconds": 61.25,
        "idle_trainer": 0.125,
        "trained": 3,
        "quarantined": 0,
        "tracker_errors": 2,
    }
    print_summary(summary, Console(width=50, highlight=False))
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "failed           RuntimeError: [bold]no[/bold]",
        "reward           0.250 -> 0.500",
        "steps            12",
        "seconds          61.2",
        "trainer idle     12%",
        "tickets trained  3",
        "tracker errors   2",
    ]
