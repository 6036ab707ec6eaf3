"""Each tracker's own store is read back; nothing here uses the network."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from actors import trackers
from actors.config import LogConfig, RunConfig
from actors.metrics import RunLog

ROOT = Path(__file__).parents[2]
TEXT = "**2+2=**\n</script> \U0001f600"


def record(step: int, rank: str) -> dict:
    return {"step": step, "ticket": 7, "rank": rank, "reward": 0.5, "pieces": [TEXT[:3], TEXT[3:]]}


def legs(folder: Path, to: str) -> tuple[list[str], list[str]]:
    """A run of steps 0..3, resumed at step 2 for steps 2..4; the links that each shows."""
    links = []
    for resume_step, steps in ((None, range(4)), (2, range(2, 5))):
        log = RunLog(folder, RunConfig(steps=5), 5, LogConfig(to=(to,), project="sums"), resume_step=resume_step)
        with log:
            links.append(log._trackers.links)
            for step in steps:
                log.step({"step": step, "reward/mean": step / 8, "policy/loss": float("nan")})
            log.rollouts([record(step, "best"), record(step, "worst")])
            log.rollouts([])
            log.evaluation(steps[0] + 1, {"eval/reward": 0.75})
            log.finish(1.0, {"trained": 3})
        assert log._trackers.errors == 0
    return links[0], links[1]


def wandb_records(file: Path) -> list:
    """A .wandb file is a LevelDB log after 7 bytes of its own: blocks of 32 KiB with records of crc (4 bytes), length
    (2), kind (1: whole, 2: first part, 3: middle, 4: last) and data; no header is split, zeros fill up."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts, records = file.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            records.append(Record.FromString(parts))
            parts = b""
    assert len(records) > 5
    return records


def value(items: list, key: str) -> object:
    return next((json.loads(i.value_json) for i in items if key in (i.key, *i.nested_key)), None)


def test_wandb_offline_holds_the_run_and_its_resumption(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    links, _ = legs(tmp_path / "run", "wandb")
    wandb.teardown()  # as at the end of a process: waits until the files are written
    first, second = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    records, resumed = wandb_records(first), wandb_records(second)
    assert links == [f"wandb sync {first.parent}"]
    ids = {r.run.run_id for r in (*records, *resumed) if r.WhichOneof("record_type") == "run"}
    assert ids == {json.loads((tmp_path / "run" / "trackers.json").read_text())["id"]}
    (run, *_) = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name) == ("sums", "run")
    assert value(run.config.update, "buffer")["groups_per_step"] == 16
    for part, steps in ((records, range(4)), (resumed, range(2, 5))):
        history = [r.history.item for r in part if r.WhichOneof("record_type") == "history"]
        rewards = [(value(items, "step"), value(items, "reward/mean")) for items in history]
        assert [pair for pair in rewards if pair[1] is not None] == [(step, step / 8) for step in steps]
        judged = [(value(items, "step"), value(items, "eval/reward")) for items in history]
        assert [pair for pair in judged if pair[1] is not None] == [(steps[0] + 1, 0.75)]
        (axis,) = {r.metric.step_metric for r in part if r.metric.glob_name == "*"}
        assert axis == "step"
        summary = [item for r in part for item in r.summary.update]
        assert value(summary, "summary/trained") == 3
    (table,) = first.parent.glob("files/media/table/*.json")
    assert json.loads(table.read_text())["data"] == [[3, 7, rank, 0.5, TEXT] for rank in ("best", "worst")]


def test_tensorboard_forgets_the_steps_that_a_resumed_run_repeats(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "run"
    links, again = legs(folder, "tensorboard")
    assert links == again == [f"tensorboard --logdir {folder / 'tensorboard'}"]
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(step, step / 8) for step in range(5)]
    assert [(e.step, e.value) for e in events.Scalars("eval/reward")] == [(1, 0.75), (3, 0.75)]
    assert "step" not in events.Tags()["scalars"]
    (best,) = [e for e in events.Tensors("rollouts/best") if e.step == 4]
    expected = "ticket 7, reward 0.500\n\n    **2+2=**\n    </script> \U0001f600"
    assert best.tensor_proto.string_val[0].decode() == expected
    assert '"groups_per_step": 16' in events.Tensors("config")[0].tensor_proto.string_val[0].decode()


def test_tensorboard_brings_no_torch():
    code = (
        "import sys, tempfile\nfrom pathlib import Path\nfrom actors.trackers import TensorBoard\n"
        "TensorBoard(Path(tempfile.mkdtemp()), 'p', 'i', {}, None).finish({})\n"
        "print({'torch', 'tensorflow'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


TRACKIO = """
import sys
from pathlib import Path
from tests.actors.test_trackers import legs
legs(Path(sys.argv[1]), "trackio")
from trackio.sqlite_storage import SQLiteStorage
import json
run, = SQLiteStorage.get_runs("sums")
logs = SQLiteStorage.get_logs("sums", run)
config = SQLiteStorage.get_run_config("sums", run)
print(json.dumps([run, logs, config], default=str))
"""


def test_trackio_holds_the_run_and_its_resumption(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))  # read when trackio is imported, hence the process
    done = subprocess.run(
        [sys.executable, "-c", TRACKIO, str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True, check=True
    )
    run, logs, config = json.loads(done.stdout.splitlines()[-1])
    assert run == json.loads((tmp_path / "run" / "trackers.json").read_text())["id"]
    assert config["buffer"]["groups_per_step"] == 16
    rewards = sorted((entry["step"], entry["reward/mean"]) for entry in logs if "reward/mean" in entry)
    assert rewards == [(step, step / 8) for step in (0, 1, 2, 2, 3, 3, 4)]
    assert sorted((e["step"], e["eval/reward"]) for e in logs if "eval/reward" in e) == [(1, 0.75), (3, 0.75)]
    (table,) = [entry["rollouts"] for entry in logs if "rollouts" in entry and entry["step"] == 4]
    assert [row["text"] for row in table["_value"]] == [TEXT, TEXT]
    assert "Run finished" in done.stdout
    assert "dashboard" not in done.stdout


class Failing:
    """A tracker without network."""

    link = "nowhere"

    def __init__(self, *_: object) -> None:
        self.held = threading.Event()
        self.finished = threading.Event()

    def step(self, row: dict) -> None:
        self.held.wait()
        raise ConnectionError(f"no network at step {row['step']}")

    def finish(self, summary: dict) -> None:
        self.finished.set()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trackers.KINDS, "wandb", Failing)


def test_a_tracker_that_fails_or_hangs_does_not_touch_the_run(tmp_path, installed, monkeypatch, caplog):
    monkeypatch.setattr(trackers, "WAITING", 3)
    log = RunLog(tmp_path / "run", RunConfig(), 9, LogConfig(to=("wandb",)), quiet=True)
    with log:
        (courier,) = log._trackers._couriers
        tracker = courier.tracker
        for step in range(9):  # one is in the thread by then or none, three wait, the others are lost
            log.step({"step": step, "reward/mean": 1.0})
        assert courier.errors in (5, 6)
        assert not tracker.finished.is_set()
        tracker.held.set()
    assert tracker.finished.is_set()
    assert courier.errors == 9
    assert len(log.rows) == 9
    (record,) = caplog.records  # once imported, Monarch puts the actor's name before every message
    assert record.getMessage().endswith("wandb fails, the run goes on without: 3 records wait for it")


def test_a_tracker_that_does_not_start_is_one_line_and_ends_those_that_did(tmp_path, installed, monkeypatch):
    started = []

    class Refusing:
        def __init__(self, *_: object) -> None:
            raise PermissionError("not logged in:\nrun wandb login")

    class Started(Failing):
        def __init__(self, *_: object) -> None:
            super().__init__()
            started.append(self)

    monkeypatch.setitem(trackers.KINDS, "tensorboard", Started)
    monkeypatch.setitem(trackers.KINDS, "wandb", Refusing)
    log = RunLog(tmp_path / "run", RunConfig(), 9, LogConfig(to=("tensorboard", "wandb")), quiet=True)
    with pytest.raises(ValueError, match=r"^--log.to wandb does not start: not logged in: run wandb login$"), log:
        raise AssertionError("not reached")
    assert started[0].finished.is_set()


def test_a_tracker_that_never_ends_is_left_behind(tmp_path, installed, monkeypatch, caplog):
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.05)
    with RunLog(tmp_path / "run", RunConfig(), 9, LogConfig(to=("wandb",)), quiet=True) as log:
        (courier,) = log._trackers._couriers
        log.step({"step": 0, "reward/mean": 1.0})
    assert not courier.tracker.finished.is_set()
    assert ["did not finish" in r.message for r in caplog.records] == [True]
    courier.tracker.held.set()
    courier._thread.join()
    assert courier.tracker.finished.is_set()
