"""A profile in the report, and the traces of who worked when."""

import json
import re

import pytest

from rlhf_ray.errors import DataError
from rlhf_ray.observability.report import write_report
from rlhf_ray.observability.report_profile import SHOWN, lanes_by_worker, profiles
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.observability.spans import chrome_trace

LANES = [["generator/0", 0.0, 1.0], ["generator/1", 0.0, 1.5], ["policy_learner/0", 1.5, 2.0]]


def write_profile(run, step, operators=1):
    directory = run / f"profile/step_{step}"
    directory.mkdir(parents=True)
    worker = {"trace": "generator_0.trace.json.gz", "seconds": 2.0,
              "operators": [{"name": f"aten::op{i}<x>", "calls": 1200, "own_ms": 20.0 - i} for i in range(operators)]}
    (directory / "profile.json").write_text(json.dumps(
        {"step": step, "seconds": 2.0, "spans": LANES, "workers": {"generator/0": worker}}))


def test_the_report_shows_the_newest_profile_and_links_its_traces(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 0, "time/step": 1.0}\n')
    write_profile(tmp_path, 9)
    write_profile(tmp_path, 10, operators=SHOWN + 3)
    page = write_report(tmp_path).read_text()
    assert page.index("<h3>Step 10:") < page.index("<h3>Step 9:")
    assert '<a href="profile/step_10/generator_0.trace.json.gz">' in page
    assert '<a href="profile/step_10/workers.trace.json">' in page
    assert "aten::op0&lt;x&gt;" in page and "<td class=\"num\">1,200</td>" in page
    assert f"aten::op{SHOWN}" not in page


def test_without_profiles_the_report_says_nothing_of_them(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 0, "time/step": 1.0}\n')
    assert "Profile" not in write_report(tmp_path).read_text()


def test_a_damaged_profile_is_named(tmp_path):
    write_profile(tmp_path, 3)
    (tmp_path / "profile/step_3/profile.json").write_text("{}")
    with pytest.raises(DataError, match="step_3/profile.json"):
        profiles(RunDirectory(tmp_path))


def test_the_trace_has_a_process_for_each_role_and_a_thread_for_each_worker():
    events = [event for event in chrome_trace(LANES)["traceEvents"] if event["ph"] == "X"]
    assert [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in events] == [
        ("generator/0", 0, 0, 0.0, 1e6), ("generator/1", 0, 1, 0.0, 1.5e6), ("policy_learner/0", 1, 0, 1.5e6, 0.5e6)]


def test_the_picture_has_a_row_for_each_worker_and_a_bar_for_each_call(tmp_path):
    RunDirectory(tmp_path).config.write_text("run: {}")
    write_profile(tmp_path, 3)
    drawn = " ".join(write_report(tmp_path).read_text().split())
    assert re.findall(r'<text x="142" y="(\d+)" text-anchor="end">([^<]+)</text>', drawn) == [
        ("15", "Generator 0"), ("37", "Generator 1"), ("59", "Policy learner 0")]
    bars = re.findall(r'<rect x="([^"]+)" y="(\d+)" width="([^"]+)" .*?var\(--(\w+)\).*?<title>([^<]+)</title>', drawn)
    assert bars == [("150.0", "3", "380.0", "generator", "0.000–1.000 s"),
                    ("150.0", "25", "570.0", "generator", "0.000–1.500 s"),
                    ("720.0", "47", "190.0", "policy", "1.500–2.000 s")], "760 pixels are 2 s"


def test_ranks_of_a_role_stand_together_in_the_order_in_which_roles_begin():
    lanes = lanes_by_worker([["a/10", 0.0, 1.0], ["b/0", 0.1, 1.0], ["a/2", 0.2, 1.0], ["a/2", 1.2, 1.4]])
    assert [(name, calls) for name, _, calls in lanes] == [
        ("A 2", [(0.2, 1.0), (1.2, 1.4)]), ("A 10", [(0.0, 1.0)]), ("B 0", [(0.1, 1.0)])]
