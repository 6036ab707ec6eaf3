"""The report: what it draws, from runs in any state, and the page itself in Chromium."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import Counter
from dataclasses import is_dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver import ActionChains
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select

from actors.config import RunConfig
from actors.settings import plain
from actors.timeline import Span
from losses import GSPO, Corrected
from recipes import figures, report, view
from recipes.figures import CHARTS, EVALUATIONS, Chart, by, curves, samples, spans_of, timeline
from recipes.folder import RunFiles, finite, visible
from tests.recipes.sample_run import CONTROL, EVIL, lines, make_run

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Chromium without a screen; `apt-get install chromium chromium-driver` where it is missing."""
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert program and driver, "the page is tested in Chromium: install chromium and chromedriver"
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chromium = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield chromium
    chromium.quit()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "finished")


def write(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["report", *map(str, arguments)])
    report.main()


def opened(browser, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False):
    """The page at a size, drawn without a word on the console and without loading anything."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    browser.get(path.as_uri())
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    return browser


def curves_of(browser, title: str) -> list[str]:
    """Path data of a chart's curves."""
    script = """
        const cards = [...document.querySelectorAll(".charts section")];
        const card = cards.find((card) => card.querySelector("h3").textContent === arguments[0]);
        return [...card.querySelectorAll("path.curve")].map((path) => path.getAttribute("d"));
    """
    return browser.execute_script(script, title)


def shown_range(browser) -> tuple[float, float]:
    plot = browser.find_element(By.CSS_SELECTOR, "#timeline svg")
    return float(plot.get_attribute("data-begin")), float(plot.get_attribute("data-end"))


@pytest.mark.slow
def test_the_page_of_a_finished_run(browser, run, monkeypatch, tmp_path):
    page = tmp_path / "page.html"
    write(monkeypatch, run, "--out", page)
    opened(browser, page)
    assert "done, 40 of 40 steps" in browser.find_element(By.TAG_NAME, "main").text

    # 40 steps are 40 points; of the engine gap every seventh is missing (3, 10, .. 38), so 6 pieces with 34 points.
    assert [Counter(re.sub("[^ML]", "", path)) for path in curves_of(browser, "Reward")] == [{"M": 1, "L": 39}] * 2
    assert [Counter(re.sub("[^ML]", "", path)) for path in curves_of(browser, "Engine gap")] == [{"M": 7, "L": 27}] * 2
    assert [len(re.findall("[ML]", path)) for path in curves_of(browser, "Evaluation")] == [5, 5]
    titles = {card.text for card in browser.find_elements(By.CSS_SELECTOR, ".charts h3")}
    assert titles == {chart.title for chart in CHARTS} | {"Evaluation"}  # which has no parts

    # A curve goes up where the metric does: the screen's y falls.
    heights = [float(y) for y in re.findall(r"[\d.]+,([\d.]+)", curves_of(browser, "Evaluation")[0])]
    assert heights == sorted(heights, reverse=True) and heights[0] - heights[-1] > 100

    # What a rollout or a name contains is text.
    assert browser.execute_script("return typeof window.pwned") == "undefined"
    assert browser.find_elements(By.CSS_SELECTOR, "main img, main script") == []
    assert page.read_text().lower().count("</script") == 2
    Select(browser.find_element(By.CSS_SELECTOR, "select[aria-label=Step]")).select_by_value("0")
    assert EVIL in browser.find_element(By.CSS_SELECTOR, "#rollout").text
    browser.find_element(By.CSS_SELECTOR, "[aria-label='Next rollout']").click()
    assert r"\x1b[2J\x07\u202e" in browser.find_element(By.CSS_SELECTOR, "#rollout").text
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_the_timeline_answers_to_pointer_and_wheel(browser, run, monkeypatch, tmp_path):
    write(monkeypatch, run, "--out", tmp_path / "page.html")
    opened(browser, tmp_path / "page.html")
    plot = browser.find_element(By.CSS_SELECTOR, "#timeline svg")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    names = Counter(
        r.get_attribute("data-name") for r in browser.find_elements(By.CSS_SELECTOR, "#timeline rect.span")
    )
    assert set(names) == {
        *("wait", "train", "stage", "decode", "swap", "score", "push", "pull", "checkpoint", "evaluate")
    }
    assert names["push"] == 40 and names["swap"] == 80 and names["checkpoint"] == 4

    first = next(r for r in browser.find_elements(By.CSS_SELECTOR, "rect.span[data-name=evaluate]"))
    ActionChains(browser).move_to_element(first).perform()
    tip = browser.find_element(By.ID, "tip")
    assert tip.is_displayed() and "evaluate version 10: 0.85 s" in tip.text and "evaluator at" in tip.text

    whole = shown_range(browser)
    at = ScrollOrigin.from_element(plot, 0, 0)
    ActionChains(browser).scroll_from_origin(at, 0, -100).perform()
    near = shown_range(browser)
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) * 0.8, rel=1e-6)
    assert near[0] > whole[0] and near[1] < whole[1]
    # Ten percent of the width dragged to the left shows what comes later.
    width = plot.size["width"]
    ActionChains(browser, duration=0).click_and_hold(plot).move_by_offset(-width // 20, 0).release().perform()
    moved = shown_range(browser)
    assert moved[1] - moved[0] == pytest.approx(near[1] - near[0])
    assert moved[0] - near[0] == pytest.approx((near[1] - near[0]) / 20, rel=0.05)
    ActionChains(browser, duration=0).move_by_offset(-50, 0).perform()
    assert shown_range(browser) == moved  # let go
    browser.find_element(By.CSS_SELECTOR, "#timeline [aria-label='The whole run']").click()
    assert shown_range(browser) == whole


@pytest.mark.slow
def test_tokens_tell_their_logprob_and_version(browser, run, monkeypatch, tmp_path):
    write(monkeypatch, run, "--out", tmp_path / "page.html")
    opened(browser, tmp_path / "page.html", width=390, height=844, dark=True)
    width = "return [document.documentElement.scrollWidth, getComputedStyle(document.body).backgroundColor]"
    assert browser.execute_script(width) == [390, "rgb(20, 23, 26)"]  # no sideways scrolling; the dark paper
    last = json.loads((run / "rollouts.jsonl").read_text().splitlines()[-1])
    token = browser.find_element(By.CSS_SELECTOR, "#rollout [data-t='7']")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", token)
    ActionChains(browser).move_to_element(token).perform()
    tip = browser.find_element(By.ID, "tip").text
    assert f"token {last['tokens'][7]} at 7" in tip
    assert f"logprob {round(last['logprobs'][7], 3)}" in tip and f"version {last['versions'][7]}" in tip
    legend = browser.find_elements(By.CSS_SELECTOR, "#rollout .legend > span")
    assert [entry.text for entry in legend] == ["version 38", "version 39", "probability below 0.1"]
    marked = browser.find_elements(By.CSS_SELECTOR, "#rollout .unlikely[data-t]")
    unlikely = {int(token.get_attribute("data-t")) for token in marked}
    assert unlikely == {t for t, value in enumerate(last["logprobs"]) if value < -2.302585}
    drawn = {t: browser.find_element(By.CSS_SELECTOR, f"#rollout [data-t='{t}']") for t in (6, 15, 16, 25)}
    shades = {t: token.value_of_css_property("background-color") for t, token in drawn.items()}
    assert shades[6] == shades[15] != shades[16] == shades[25]  # the version changes after token 15


@pytest.mark.slow
@pytest.mark.parametrize("state", ["began", "goes on", "failed"])
def test_the_page_of_a_run_that_is_not_whole(browser, run, monkeypatch, tmp_path, state):
    folder = tmp_path / "run & <title>"
    shutil.copytree(run, folder)
    (folder / "evals.jsonl").unlink()
    if state == "began":
        for name in ("timeline.jsonl", "rollouts.jsonl", "summary.json"):
            (folder / name).unlink()
        (folder / "metrics.jsonl").write_text("")
        expected = ["no summary, 0 of 40 steps", "There is no timeline.jsonl", "There is no rollouts.jsonl"]
    elif state == "goes on":
        (folder / "summary.json").unlink()
        for name in ("metrics.jsonl", "timeline.jsonl", "rollouts.jsonl"):
            whole = (folder / name).read_text().splitlines(keepends=True)
            (folder / name).write_text("".join([*whole[:9], "garbage\n", whole[9][:50]]))
        expected = ["no summary, 9 of 40 steps", "timeline.jsonl: left out line 10 (no JSON object)"]
    else:
        (folder / "summary.json").write_text(json.dumps({"status": "failed", "reason": EVIL, "steps": None}))
        expected = ["failed, 40 of 40 steps", EVIL]
    write(monkeypatch, folder)
    opened(browser, folder / "report.html")
    assert browser.title == browser.find_element(By.TAG_NAME, "h1").text == "run & <title>"
    text = browser.find_element(By.TAG_NAME, "main").text
    assert all(part in text for part in expected), text
    assert browser.execute_script("return typeof window.pwned") == "undefined"
    if state == "goes on":
        assert len(re.findall("[ML]", curves_of(browser, "Loss")[0])) == 9


def test_not_an_output_folder_is_one_line(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(SystemExit) as ended:
            write(monkeypatch, folder)
        assert ended.value.code == f"report: {folder} is not an output folder: give one that a run wrote"


def test_a_page_that_cannot_be_written_is_one_line(run, monkeypatch, tmp_path):
    out = tmp_path / "missing" / "page.html"
    with pytest.raises(SystemExit) as ended:
        write(monkeypatch, run, "--out", out)
    assert ended.value.code == f"report: cannot write {out}: No such file or directory"


def test_the_trace_holds_every_span(run, monkeypatch, tmp_path):
    write(monkeypatch, run, "--out", tmp_path / "page.html", "--trace", tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len((run / "timeline.jsonl").read_text().splitlines())


def test_curves_take_what_is_there():
    charts = [
        Chart("A", "s", ("time/a", "time/*"), ""),
        Chart("B", "", ("time/b", "none"), ""),
        Chart("C", "", ("x",), ""),
    ]
    rows = [{"step": 3, "time/a": 1.0, "time/b": 5}, {"step": 7, "time/a": float("nan"), "time/c": 0.123456789}]
    first, second = curves(rows, charts, "step")
    assert (first["title"], first["unit"], first["x"]) == ("A", "s", [3, 7])
    assert first["series"] == [
        {"name": "time/a", "values": [1.0, None]},
        {"name": "time/c", "values": [None, 0.123457]},
    ]
    assert second["series"] == [{"name": "time/b", "values": [5.0, None]}]


def test_parts_of_the_reward_do_not_flatten_it():
    rows = [{"step": 0, "version": 0, "reward/mean": 0.5, "reward/trained": 0.4, "reward/zero_variance": 0.1}]
    rows[0] |= {
        "reward/characters": 900.0,
        "eval/reward": 0.6,
        "eval/reward_error": 0.1,
        "eval/reward_characters": 800,
    }
    rows[0] |= {"eval/pass@1": 0.7, "eval/pass@2": 0.9}

    def drawn(charts, axis):
        return {chart["title"]: [series["name"] for series in chart["series"]] for chart in curves(rows, charts, axis)}

    assert drawn(CHARTS, "step") == {
        "Reward": ["reward/mean", "reward/trained"],
        "Parts of the reward": ["reward/characters"],
        "Shares": ["reward/zero_variance"],
    }
    assert drawn(EVALUATIONS, "version") == {
        "Evaluation": ["eval/reward", "eval/pass@1", "eval/pass@2"],
        "Evaluated parts of the reward": ["eval/reward_characters"],
    }


def test_a_step_that_was_done_again_counts_once():
    rows = [{"step": 0, "a": 1}, {"step": 1, "a": 2}, {"step": 1, "a": 3}, {"step": None}, {"a": 4}]
    assert by("step", rows) == [{"step": 0, "a": 1}, {"step": 1, "a": 3}]


def test_throughput_is_tokens_over_the_steps_seconds():
    row = figures.with_throughput({"perf/generated_tokens": 300.0, "perf/trained_tokens": None, "time/step": 0.5})
    assert row["generated"] == 600.0 and "trained" not in row
    assert "generated" not in figures.with_throughput({"perf/generated_tokens": 300.0, "time/step": 0.0})


def span(begin: float, end: float, name: str = "train", role: str = "trainer") -> Span:
    return Span(role=role, name=name, begin=begin, end=end, version=None)


def test_a_long_run_keeps_whole_stretches_and_what_reaches_into_them():
    """Of 1000 spans and a limit of 240: 80 first, 8 stretches of 10, 80 last, and a span that is in
    none of them but reaches into some."""
    spans = [span(85.5, 400.0, "evaluate", "evaluator"), *(span(float(i), i + 0.9) for i in range(1000))]
    data = timeline(sorted(spans, key=lambda s: (s.begin, s.end)), limit=240)
    evaluate = data["names"].index("evaluate")
    begins = sorted(begin for _, name, begin, _, _ in data["spans"] if name != evaluate)
    assert sum(name == evaluate for _, name, *_ in data["spans"]) == 1
    assert data["total"] == 1001 and len(begins) == 240
    assert begins[:80] == [float(i) for i in range(80)] and begins[-80:] == [float(i) for i in range(920, 1000)]
    assert len(data["holes"]) == 9 and {hole["text"] for hole in data["holes"]} == {"not embedded"}
    for t in range(1000):
        hidden = any(hole["begin"] <= t < hole["end"] for hole in data["holes"])
        assert hidden != (float(t) in begins)
    assert [hole["begin"] for hole in data["holes"]] == sorted(hole["begin"] for hole in data["holes"])


def test_a_long_pause_is_cut_out_of_the_axis():
    data = timeline([span(100.0, 160.0), span(120.0, 130.0), span(160.0 + 7200, 7361.0), span(7400.0, 7401.0)])
    assert [(begin, end) for _, _, begin, end, _ in data["spans"]] == [(0, 60), (20, 30), (61, 62), (101, 102)]
    assert data["holes"] == [{"begin": 60.0, "end": 61.0, "text": "2.0 h without spans left out"}]
    assert data["end"] == 102.0


def test_lanes_are_in_the_order_of_the_loop():
    roles = ["worker0", "generator10", "other", "sync", "generator2", "evaluator", "trainer"]
    data = timeline([span(float(i), i + 1.0, role=role) for i, role in enumerate(roles)])
    assert data["roles"] == ["trainer", "sync", "generator2", "generator10", "worker0", "evaluator", "other"]
    assert [data["roles"][role] for role, *_ in data["spans"]] == roles


def test_spans_without_times_are_left_out(tmp_path):
    folder = make_run(tmp_path / "run", steps=1)
    good = {"role": "trainer", "name": "train", "begin": 2.0, "end": 3.0, "version": 1}
    bad = [good | {"end": 1.0}, good | {"begin": None}, {"role": "trainer"}, good | {"version": None, "begin": 1.0}]
    lines(folder / "timeline.jsonl", [good, *bad])
    assert [(s.begin, s.version) for s in spans_of(RunFiles(folder))] == [(1.0, None), (2.0, 1)]


def test_samples_are_spread_over_the_run_and_cut(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "run", steps=50)
    monkeypatch.setattr(figures, "TOKENS", 25)
    files = RunFiles(folder)
    rows = samples(files)
    steps = sorted({row["step"] for row in rows})
    assert len(steps) == 24 and (steps[0], steps[-1]) == (0, 49) and len(rows) == 48
    assert {b - a for a, b in pairwise(steps)} <= {2, 3}
    assert files.notes == ["Rollouts of 24 of 50 steps are embedded; recipes.view shows all."]
    assert {len(row["pieces"]) for row in rows} == {25} and {row["length"] for row in rows} == {34}
    assert [turn["end"] for turn in rows[0]["turns"]] == [6, 20, 24, 25]


def test_settings_that_differ(run):
    changed = report.settings(json.loads((run / "config.json").read_text()))
    assert changed == [
        ["model", "model-folder", "null"],
        ["steps", "40", "60"],
        ["loss", "DIS", ""],
        ["buffer.max_staleness", "5", "2"],
        ["generator.engine.slots", "64", "512"],
    ]
    generator = {"type": "GeneratorConfig", "engine": {"type": "SimulatedEngine", "base": 0.02}}
    other = {"type": "Mine", "task": {"type": "Sums", "rows": 5}, "generator": generator}
    assert report.settings(other) == [
        ["task", "Sums", ""],
        ["task.rows", "5", ""],
        ["generator.engine", "SimulatedEngine", "NativeEngine"],
    ]


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"type": "Addition", "rows": 10_000, "seed": 3}, [["task.seed", "3", "0"]]),
        (
            {"type": "Dataset", "path": "x.jsonl", "split": "train", "reward": ["exact"]},
            [["task.path", "x.jsonl", ""]],
        ),
        ({"type": "ReasoningGym", "name": "chain_sum", "options": {}}, []),
        (
            {"type": "Verifiers", "name": "e", "options": {"a": 1}},
            [["task.name", "e", ""], ["task.options", '{"a": 1}', "{}"]],
        ),
        (plain(Corrected(base=GSPO())), [["task.base", "GSPO", "PPOClip"]]),
    ],
)
def test_settings_of_tasks_and_losses_that_differ(entry, expected):
    assert report.settings({"type": "Config", "task": entry}) == [["task", entry["type"], ""], *expected]


def test_rollouts_that_contradict_themselves_are_left_out(tmp_path):
    folder = make_run(tmp_path / "run", steps=2)
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    rows[0]["logprobs"].pop()
    rows[1]["turns"][0]["end"] = 999
    rows[2]["pieces"][0] = 7
    del rows[3]["mask"]
    rows.append(rows[3] | {"mask": [True] * 34, "extra": 1, "logprobs": [None] * 34})
    lines(folder / "rollouts.jsonl", rows)
    files = RunFiles(folder)
    for _ in range(2):  # the second time notes nothing new
        assert [rollout.drawn for rollout in files.rollouts()] == [34]
    assert files.notes == [
        "rollouts.jsonl: left out line 1 (the columns of tokens differ in length), "
        "line 2 (turns must be objects with kind, start and end), line 3 (pieces must be texts), "
        "line 4 (columns are missing)."
    ]


TURN = {"kind": "prompt", "start": 0, "end": 2, "finish": None, "reward": 0.0}


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("step", value) for value in (None, "1", 0.5, True, 10**400)),
        *(("ticket", "x"), ("row", [1]), ("rank", 5), ("rank", None)),
        *(("reward", value) for value in ("x", 10**400, [1.0], True)),
        *(("parts", value) for value in ([], {"a": "s"}, {"a": [1]}, {"a": 10**400})),
        *(("turns", value) for value in (None, {}, [1], [{"start": 0, "end": 1}], [TURN | {"kind": 1}])),
        *(("turns", [TURN | change]) for change in ({"start": 0.5}, {"end": 1.0}, {"start": -1}, {"reward": "x"})),
        *(("pieces", value) for value in (None, "a" * 34, [7] * 34, ["a"])),
        *(("tokens", ["1"] * 34), ("mask", [1] * 34), ("mask", 3), ("logprobs", ["x"] * 34)),
        *(("logprobs", [10**400] * 34), ("versions", [[1]] * 34), ("versions", [0.5] * 34), ("versions", {})),
    ],
)
def test_one_bad_rollout_costs_only_itself(tmp_path, monkeypatch, capsys, column, value):
    folder = make_run(tmp_path / "run", steps=1)
    good, other = (json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines())
    lines(folder / "rollouts.jsonl", [good, good | {column: value}, other])
    write(monkeypatch, folder)
    text = (folder / "report.html").read_text()
    assert "rollouts.jsonl: left out line 2 (" in text and text.count('"title":"best') == 1
    monkeypatch.setattr(sys, "argv", ["view", str(folder)])
    view.main()
    out, err = capsys.readouterr()
    assert out.count("step 0  ticket 3") == 2 and err.startswith("view: rollouts.jsonl: left out line 2 (")


def test_a_note_names_the_first_broken_lines(tmp_path):
    folder = make_run(tmp_path / "run", steps=1)
    (folder / "timeline.jsonl").write_text("{}\nx\n" + "[" * 100_000 + "\n" + "1\n" * 5)
    files = RunFiles(folder)
    assert list(files.lines("timeline.jsonl", "timeline")) == [{}]
    named = ", ".join(f"line {number} (no JSON object)" for number in range(2, 7))
    assert files.notes == [f"timeline.jsonl: left out {named}, 2 more."]


@pytest.mark.parametrize("value", ["1", None, 10**400, -(10**400), float("nan"), float("inf")])
def test_what_is_no_number_is_not_drawn(value):
    assert finite(value) is None
    assert curves([{"step": 0, "a": value}, {"step": 1, "a": 2}], [Chart("A", "", ("a",), "")], "step")[0][
        "series"
    ] == [{"name": "a", "values": [None, 2.0]}]
    assert by("step", [{"step": value}]) == []


def test_visible_text_keeps_letters_and_shows_the_rest():
    assert visible("é日本<b>\n") == r"é日本<b>\n"
    assert visible("a\nb\tc", keep="\n") == "a\nb\\tc"
    assert visible(CONTROL + "\x9b\ud800\u2028\U000e0001") == r"\x1b[2J\x07\u202e\x9b\ud800\u2028\U000e0001"


def test_the_defaults_of_every_setting_of_a_run_are_known():
    parts = {type(value) for value in vars(RunConfig()).values() if is_dataclass(value)}
    assert len(parts) > 8 and parts <= set(report.SETTINGS)
