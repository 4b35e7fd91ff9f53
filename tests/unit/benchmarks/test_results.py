"""Results: what a run of some benchmarks leaves of the others' figures, what fails alone, and what the page says."""

import json
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks.figure import TITLES, Figure, ordered, shown_goal, shown_value
from benchmarks.page import page, write_page
from benchmarks.page_charts import charts_of, lead
from benchmarks.summary import RunFacts, Summary, read_summary
from benchmarks.terminal import time_left

MACHINE = {"cores": 2, "cpu": "a CPU", "memory_gb": 24.0, "load_average_1min": 0.1}
MONDAY = RunFacts("2026-01-05T09:00:00+00:00", "aaaa", "python -m benchmarks", MACHINE)
TUESDAY = RunFacts("2026-01-06T09:00:00+00:00", "bbbb", "python -m benchmarks --only b", MACHINE)


def figure(value: float, goal: float = 1.0, **changes: Any) -> Figure:
    told: dict[str, Any] = {"value": value, "repeats": [value - 0.1, value, value + 0.1], "better": "higher",
                            "goal": goal, "ours_is": "ours", "theirs_is": "theirs", "ours": 70.0, "theirs": 50.0,
                            "unit": "tokens/s"}
    return Figure(**(told | changes))


class TestSummary:
    """What summary.json holds."""

    def test_what_was_not_run_again_keeps_its_date_and_commit(self, tmp_path: Path) -> None:
        first = Summary()
        first.add("a", {"learner_vs_torch": figure(0.8)}, 60.0, MONDAY)
        first.add("b", {"async_speedup": figure(1.2), "gone": figure(3.0)}, 30.0, MONDAY)
        first.write(tmp_path, MONDAY)
        second = read_summary(tmp_path)
        second.add("b", {"async_speedup": figure(1.7)}, 31.0, TUESDAY)
        told = json.loads(second.write(tmp_path, TUESDAY).read_text())
        assert (told["learner_vs_torch"], told["async_speedup"]) == (0.8, 1.7)
        assert told["details"].keys() == {"learner_vs_torch", "async_speedup"}, "a figure no longer given is dropped"
        assert [told["details"][name]["commit"] for name in ("learner_vs_torch", "async_speedup")] == ["aaaa", "bbbb"]
        assert told["details"]["learner_vs_torch"]["measured"] == MONDAY.time
        assert told["runs"][MONDAY.time]["command"] == "python -m benchmarks"
        assert told["seconds"] == {"a": 60.0, "b": 31.0}
        assert read_summary(tmp_path) == second

    def test_a_failure_is_remembered_until_the_benchmark_comes_through(self, tmp_path: Path) -> None:
        summary = Summary(failed={"a": "SideFailed: no"})
        summary.write(tmp_path, MONDAY)
        again = read_summary(tmp_path)
        assert again.failed == {"a": "SideFailed: no"}
        again.add("a", {}, 1.0, TUESDAY)
        assert again.failed == {}

    def test_a_summary_of_another_form_is_left_out_and_said(self, tmp_path: Path, capsys: Any) -> None:
        (tmp_path / "summary.json").write_text('{"async_speedup": 1.0, "details": {}, "machine": {}}')
        assert read_summary(tmp_path) == Summary()
        assert "not of the present format (KeyError: 'runs')" in capsys.readouterr().err


class TestCommand:
    """`python -m benchmarks` with made-up benchmarks."""

    @pytest.fixture
    def run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        def give(directory: Path, repeats: int) -> dict[str, Figure]:
            return {"async_speedup": figure(float(repeats))}

        def fail(directory: Path, repeats: int) -> dict[str, Figure]:
            raise ZeroDivisionError("of all things")

        for name, measure in (("fails", fail), ("gives", give)):
            module = ModuleType(f"benchmarks.{name}")
            module.measure = measure  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, f"benchmarks.{name}", module)
        monkeypatch.setattr(command, "NAMES", ("fails", "gives"))
        monkeypatch.setattr(command, "prepare", lambda directory: None)
        monkeypatch.setattr(command, "one_thread_on_cpu", lambda: None)

        def call(*words: str) -> None:
            monkeypatch.setattr(sys, "argv", ["benchmarks", "--results", str(tmp_path), *words])
            command.main()

        return call

    def test_when_one_fails_the_others_run_and_the_command_names_it(self, run: Any, tmp_path: Path) -> None:
        with pytest.raises(SystemExit, match="failed: fails;"):
            run("--repeats", "3")
        told = json.loads((tmp_path / "summary.json").read_text())
        assert told["async_speedup"] == 3.0
        assert told["failed"] == {"fails": "ZeroDivisionError: of all things"}
        assert "fails failed in its last run" in (tmp_path / "index.html").read_text()

    def test_only_what_was_asked_for_runs(self, run: Any, tmp_path: Path, capsys: Any) -> None:
        run("--only", "gives", "--repeats", "2")
        captured = capsys.readouterr()
        assert "[1/1] gives" in captured.err and "fails" not in captured.err
        assert "async_speedup" in captured.out and "index.html" in captured.out

    def test_time_left_is_told_by_earlier_runs(self) -> None:
        assert time_left(["a", "b", "c"], {"a": 50, "b": 40, "z": 9}) == "about 1 min 30 s left + 1 not timed before"


class Cells(HTMLParser):
    """Texts of the first table's rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        if tag == "tr":
            self.rows.append([])

    def handle_data(self, data: str) -> None:
        if self.rows:
            self.rows[-1].append(data)


class TestPage:
    """What a reader sees."""

    @pytest.fixture
    def text(self) -> str:
        summary = Summary()
        summary.add("a", {"learner_vs_torch": figure(0.8, 0.9)}, 60.0, MONDAY)
        summary.add("b", {"async_speedup": figure(1.7, 1.6, ours_is="<η of 1>")}, 30.0, TUESDAY)
        return page(summary, TUESDAY)

    def test_missed_goals_are_marked_in_words(self, text: str) -> None:
        rows = {next(name for name in TITLES if name in row): row for row in Cells(text).rows[1:3]}
        assert "missed" in rows["learner_vs_torch"] and "reached" not in rows["learner_vs_torch"]
        assert "reached" in rows["async_speedup"]
        assert "1 of 2 measured figures reach their goal" in text
        assert "Missed: Learner, compared with plain torch." in text

    def test_each_figure_tells_its_spread_sides_date_and_commit(self, text: str) -> None:
        row = next(row for row in Cells(text).rows if "learner_vs_torch" in row)
        told = {"0.8 x", "≥ 0.9 x", "0.7 to 0.9", "3 repeats", "70 tokens/s", "2026-01-05 09:00 UTC", "aaaa"}
        assert told <= set(row)

    def test_texts_are_escaped_and_nothing_is_loaded(self, text: str) -> None:
        assert "&lt;η of 1&gt;" in text and "<η of 1>" not in text
        assert " src=" not in text.split("<script>")[0]

    def test_what_is_missing_is_said(self, text: str) -> None:
        missing = [title for name, title in TITLES.items() if name not in ("learner_vs_torch", "async_speedup")]
        text = unescape(text)
        assert f"Not measured yet: {', '.join(missing)}." in text
        assert "Kept from earlier runs, of the date and commit beside them: Learner, compared with plain torch." in text

    def test_what_other_commands_drew_is_shown_and_carried_inside(self, tmp_path: Path) -> None:
        (tmp_path / "growth.svg").write_text("<svg/>")
        text = write_page(Summary(), TUESDAY, tmp_path).read_text()
        assert 'src="data:image/svg+xml;base64,PHN2Zy8+"' in text and text.count("<img") == 1

    def test_right_of_one_the_goal_is_reached_whichever_way_is_good(self) -> None:
        assert lead(figure(2.0, 1.6), 2.0) == pytest.approx(1.25)
        assert lead(figure(2.0, 2.5, better="lower"), 2.0) == pytest.approx(1.25)
        assert lead(figure(2.0, 2.5, better="lower"), 0.0) > 1 > lead(figure(2.0), -1.0)

    def test_a_chart_a_figure_and_one_of_all(self) -> None:
        summary = Summary()
        summary.add("a", {"async_speedup": figure(1.0), "learner_vs_torch": figure(2.0)}, 1.0, MONDAY)
        charts = charts_of(summary.measured)
        assert len(charts) == 3
        assert charts[0].data[1]["x"] == pytest.approx([0.9, 1.0, 1.1]), "drawn from below, so the first comes last"
        assert charts[1].data[0]["y"] == pytest.approx([0.9, 1.0, 1.1])


def test_a_number_that_is_no_ratio_keeps_its_unit() -> None:
    time = figure(0.21, 0.3, better="lower", theirs_is="", unit="ms")
    assert (shown_value(time), shown_goal(time)) == ("0.21 ms", "≤ 0.3 ms")
    assert (shown_value(figure(0.93)), shown_goal(figure(0.93, 0.95))) == ("0.93 x", "≥ 0.95 x")


def test_promised_figures_come_first_in_their_order() -> None:
    found = ordered(["other", "first_token_seconds", "async_speedup"])
    assert found == ["async_speedup", "first_token_seconds", "other"]
