"""A reward function that has no score for two prompts, and scores so large that no loss is finite for those of the
first update: the prompts leave the run by name, the update changes nothing, and the run ends well without either."""

import json
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.observability.metrics import read_metrics
from rlhf_ray.replay.audit import audit
from rlhf_ray.replay.ledger import open_for_reading
from tests.cluster.conftest import SMALL

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
PROMPTS, A_STEP, SEED = 20, 8, 5
FUNCTION = """
SCORES = {"huge": 3e38, "nan": float("nan")}

def score(responses, labels, **_):
    kinds = [row.get("kind") for row in labels]
    if "raises" in kinds:
        raise ValueError("it has no answer")
    return [SCORES.get(kind, len(response) / 10) for response, kind in zip(responses, kinds)]
"""


@pytest.fixture(scope="module")
def run(configure, tmp_path_factory):
    """A run of two updates. Of the prompts in the order in which they are drawn, the second and the thirteenth have no
    score; those of the first update are the other seven of the first eight, and the ninth. So is one that is held
    out."""
    from rlhf_ray.stages import ppo

    root = tmp_path_factory.mktemp("bad_rewards")
    (root / "mine.py").write_text(FUNCTION)
    order = [row for _, row in PromptCursor(PROMPTS, SEED, shuffle=True).next(PROMPTS)]
    kinds = dict.fromkeys(order[:A_STEP + 1], "huge") | {order[1]: "raises", order[12]: "nan"}
    rows = [{"prompt": f"w{i + 2} w{i + 3}", "kind": kinds.get(i)} for i in range(PROMPTS)]
    held_out = [{"prompt": "w2 w3", "kind": "nan"}, {"prompt": "w4 w5", "kind": None}]
    for name, lines in (("prompts", rows), ("held_out", held_out)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    sections = {**SMALL, "run": {"steps": 2, "seed": SEED}, "checkpoint": {"every": 1},
                "evaluation": {"prompts": str(root / "held_out.jsonl"), "limit": None},
                "rewards": {"main": {"type": "function", "function": f"{root}/mine.py:score"}},
                "prompts": {"path": str(root / "prompts.jsonl")},
                "reward": {"on_failure": "quarantine", "quarantine_limit": 0.1}}
    summary = ppo.run(load(PPOConfig, configure(root / "run", **sections), []))
    return SimpleNamespace(directory=root / "run", summary=summary, order=order, rows=rows)


def steps(run):
    return [row for row in read_metrics(run.directory) if "reward/mean" in row]


def test_prompts_without_a_score_leave_by_name(run):
    bad = {run.order[1]: "it has no answer", run.order[12]: "gave nan"}
    lines = [json.loads(line) for line in (run.directory / "quarantine.jsonl").read_text().splitlines()]
    assert {line["key"][1] for line in lines} == set(bad)
    for line in lines:
        row = line["key"][1]
        assert bad[row] in line["reason"] and line["prompt"] == run.rows[row]["prompt"]
    assert steps(run)[-1]["reward/quarantined"] == 4
    assert "4 samples were left out" in (run.directory / "report.html").read_text()


def test_no_optimizer_step_of_the_first_update_is_applied_and_all_of_the_next(run):
    rows = steps(run)
    assert [(row["policy/skipped_steps"], row["critic/skipped_steps"]) for row in rows] == [(4, 4), (0, 0)]
    assert rows[0]["reward/mean"] is None or rows[0]["reward/mean"] > 1e38
    assert "policy/loss" not in rows[0] and rows[1]["policy/loss"] is not None


def test_the_audit_accounts_for_every_sample(run):
    with closing(open_for_reading(run.directory / "ledger.sqlite")) as db:
        assert audit(db, ended=True) == []
        told = db.execute("SELECT step, state, count(*) FROM samples GROUP BY 1, 2 ORDER BY 1, 2").fetchall()
        trained = {row for (row,) in db.execute("SELECT DISTINCT row FROM samples WHERE state = 'committed'")}
        assert db.execute("SELECT * FROM attempts").fetchall() == [], "no sample was generated twice"
    assert told == [(None, "quarantined", 4), (1, "not_applied", 16), (2, "committed", 16)]
    assert trained == set(run.order[9:18]) - {run.order[12]}
    assert (run.summary["ledger"]["quarantined"], run.summary["ledger"]["committed"]) == (4, 16)


def test_the_weights_change_by_the_next_update_only_and_are_numbers(run, files):
    start, end = (load_file(d / "model.safetensors") for d in (files.policy, run.directory / "model"))
    assert all(np.isfinite(end[name]).all() for name in end)
    assert any((start[name] != end[name]).any() for name in end)
    state = json.loads((run.directory / "checkpoints/step_1/coordinator.json").read_text())["run"]
    assert state["kl"]["value"] == 0.1 and state["scores"]["count"] == 0, "nor do controllers learn from it"


def test_a_held_out_prompt_without_a_score_is_left_out_and_counted(run):
    measured = [row for row in read_metrics(run.directory) if "eval/reward" in row]
    assert [(row["eval/unscored"], row["eval/responses"]) for row in measured] == [(1, 1), (1, 1)]
