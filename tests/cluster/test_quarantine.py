"""A run whose reward function has no score for two prompts: they leave it by name, and the run ends well without."""

import json
from contextlib import closing

import pytest

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.observability.metrics import read_metrics
from rlhf_ray.replay.audit import audit
from rlhf_ray.replay.ledger import open_for_reading
from tests.cluster.conftest import SMALL

pytestmark = pytest.mark.cluster
FUNCTION = """
def score(prompts, responses):
    if {raises!r} in prompts:
        raise ValueError("it has no answer")
    return [float("nan") if prompt == {nan!r} else len(response) / 100 for prompt, response in zip(prompts, responses)]
"""


def test_prompts_without_a_score_leave_and_the_audit_accounts_for_them(files, configure, tmp_path):
    from rlhf_ray.stages import ppo

    texts = [json.loads(line)["prompt"] for line in files.prompts.read_text().splitlines()]
    order = [row for _, row in PromptCursor(20, 5, shuffle=True).next(20)]
    bad = {order[1]: "it has no answer", order[12]: "gave nan"}
    (tmp_path / "f.py").write_text(FUNCTION.format(raises=texts[order[1]], nan=texts[order[12]]))
    sections = {**SMALL, "run": {"steps": 2},
                "rewards": {"main": {"type": "function", "function": f"{tmp_path}/f.py:score"}},
                "reward": {"on_failure": "quarantine", "quarantine_limit": 0.1}}
    file = configure(tmp_path / "run", **sections)
    summary = ppo.run(load(PPOConfig, file, []))
    assert summary["ledger"]["quarantined"] == 4 and summary["ledger"]["committed"] == 32
    lines = [json.loads(line) for line in (tmp_path / "run/quarantine.jsonl").read_text().splitlines()]
    assert {line["key"][1] for line in lines} == set(bad)
    assert all(bad[line["key"][1]] in line["reason"] and line["prompt"] == texts[line["key"][1]] for line in lines)
    with closing(open_for_reading(tmp_path / "run/ledger.sqlite")) as db:
        assert audit(db, ended=True) == []
        trained = {row for (row,) in db.execute("SELECT DISTINCT row FROM samples WHERE state = 'committed'")}
    assert trained == set(order[:18]) - set(bad)
    rows = [row for row in read_metrics(tmp_path / "run") if "reward/mean" in row]
    assert rows[-1]["reward/quarantined"] == 4
    assert "4 samples were left out" in (tmp_path / "run/report.html").read_text()
