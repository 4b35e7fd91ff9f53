"""Pairs of samples: workers that are lost on the way are replaced, and the file is the same."""

import json
import os
import signal
from pathlib import Path

import pytest
import yaml

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PreferencesStageConfig
from rlhf_ray.stages import preferences
from rlhf_ray.workers.worker_group import WorkerGroup
from tests.cluster.conftest import PROMPT_TOKENS, RESPONSE_TOKENS
from tests.cluster.processes import descendants

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def sampled(files, root, name, strikes=()):
    """Pairs of a run whose workers get a signal with their first calls of a method: (role, method, signal)."""
    judge = root / "judge.py"
    judge.write_text("def judge(responses, **_):\n    return [sum(map(ord, r)) % 89 / 89 for r in responses]\n")
    settings = {
        "run": {"dir": str(root / name), "seed": 3},
        "cluster": {"dashboard": False, "object_store_mb": 128, "heartbeat_timeout_s": 5, "call_timeout_s": 120},
        "pools": {"default": {"cpus": 2}}, "model": {"path": str(files.policy)},
        "prompts": {"path": str(files.prompts), "max_tokens": PROMPT_TOKENS},
        "pairs": {"min_margin": 0.0, "judge": f"{judge}:judge"},
        "generator": {"workers": 2, "chunk": 4, "max_sequences": 8, "kv_cache_mb": 8,
                      "sampling": {"max_tokens": RESPONSE_TOKENS}},
    }
    (root / f"{name}.yaml").write_text(yaml.safe_dump(settings))
    call, left = WorkerGroup.call, list(strikes)

    def strike(group, rank, method, *args, **options):
        found = next((one for one in left if one[:2] == (group.role, method.__name__)), None)
        if found:
            left.remove(found)
            os.kill(group.processes(rank).pid, found[2])
        return call(group, rank, method, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerGroup, "call", strike)
        preferences.run(load(PreferencesStageConfig, root / f"{name}.yaml", []))
    assert not left and descendants() == []
    return (root / name / "preferences.jsonl").read_text()


def test_pairs_are_the_same_when_workers_are_lost(files, shared_ray, tmp_path):
    expected = sampled(files, tmp_path, "undisturbed")
    assert 12 <= len(expected.splitlines()) <= 20, "a pair of equal scores is left out"
    strikes = [("generator", "generate", signal.SIGSTOP), ("pair_ranker", "rank", signal.SIGKILL),
               ("prompt_reader", "rows", signal.SIGKILL)]
    assert sampled(files, tmp_path, "disturbed", strikes) == expected
    faults = [json.loads(line) for line in Path(tmp_path, "disturbed", "faults.jsonl").read_text().splitlines()]
    assert {fault["role"] for fault in faults} == {"generator", "pair_ranker", "prompt_reader"}
    left_out = Path(tmp_path, "disturbed", "left_out.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in left_out] == [21, 22, 23]
