"""The memory benchmark, apart from its runs: which runs there are, and what a row of it says."""

import json

import pytest

from benchmarks import plan_memory
from benchmarks.plan_memory import CASES, Case, compare, llama, measure
from benchmarks.side_process import SideFailed


def test_cases_differ_in_size_budget_and_stage():
    assert len({json.dumps(case.shape) for case in CASES}) == 3
    assert len({case.learner["micro_batch_tokens"] for case in CASES}) == 3
    assert {case.learner.get("zero_stage", 1) for case in CASES} == {1, 2, 3}


@pytest.fixture
def case(tmp_path):
    shape = llama(64, 2, 4, 96, 320)
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text(json.dumps(shape))
    return Case("tiny", "sft", shape, {}, {"micro_batch_tokens": 256})


def held(monkeypatch, mib):
    def run(case, directory):
        config = plan_memory.whole_config(case, directory)
        config["data"] |= {"path": "rows.jsonl", "max_tokens": 64}
        return {"config": config, "held_mib": {"SFTLearner": mib, "DataReader": [1.0]}}

    monkeypatch.setattr(plan_memory, "run", run)


def test_the_largest_worker_of_a_role_is_compared(case, tmp_path, monkeypatch):
    held(monkeypatch, [1000.0, 10.0])
    [row] = compare(case, tmp_path)
    assert (row["role"], row["measured_mib"]) == ("learner", 1000)
    assert row["error"] == pytest.approx(row["planned_mib"] / 1000 - 1, abs=1e-3)
    assert sum(row["parts_mib"].values()) == pytest.approx(row["planned_mib"], abs=5)


def test_the_figure_is_the_largest_error(case, tmp_path, monkeypatch):
    held(monkeypatch, [5000.0])
    (tmp_path / "plan-memory-0").symlink_to(tmp_path)
    monkeypatch.setattr(plan_memory, "CASES", (case,))
    figure = measure(tmp_path, 9)["plan_memory_error"]
    assert figure.value == pytest.approx(abs(figure.more["workers"][0]["error"]))
    assert not figure.reached


def test_a_run_that_fails_is_told(case, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_memory.sys, "executable", "/bin/false")
    with pytest.raises(SideFailed, match="tiny failed"):
        plan_memory.run(case, tmp_path)
