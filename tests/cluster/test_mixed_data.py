"""A PPO run on two data sets mixed by weight, evaluated on what it holds out of them."""

import json

import pyarrow.parquet as pq
import pytest

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.observability.metrics import read_metrics
from tests.cluster.conftest import SMALL

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def run(configure, tmp_path_factory):
    """(directory, prompts of both files)."""
    from rlhf_ray.stages import ppo

    root = tmp_path_factory.mktemp("mixed")
    texts = [[f"{first} w{n} w{m}" for n in range(10, 15) for m in range(20, 24)] for first in ("w2", "w3")]
    for name, prompts in zip("ab", texts, strict=True):
        (root / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    prompts = {"path": None, "mix": [{"path": str(root / "a.jsonl"), "weight": 3}, {"path": str(root / "b.jsonl")}],
               "held_out": 0.25}
    sections = {**SMALL, "prompts": prompts, "evaluation": {"prompts": None, "limit": None}, "run": {"steps": 2},
                "checkpoint": {"every": 0}, "logging": {"samples_per_step": 64},
                "generator": {"workers": 1, "chunk": 16}}
    ppo.run(load(PPOConfig, configure(root / "run", **sections), []))
    return root / "run", texts


def test_training_sees_the_data_sets_by_their_weights_and_no_prompt_that_is_held_out(run):
    directory, texts = run
    seen = [row["prompt"] for step in (1, 2) for row in
            pq.read_table(directory / f"samples/step_{step:06d}.parquet").to_pylist()]
    assert len(seen) == 32, "two steps of eight prompts with two samples each"
    assert [sum(prompt in source for prompt in seen) for source in texts] == [24, 8]
    evaluated = json.loads((directory / "evaluation.json").read_text())
    shown = {text["prompt"] for text in evaluated["texts"]}
    assert shown and not shown & set(seen)


def test_all_that_is_held_out_is_evaluated(run):
    rows = [row for row in read_metrics(run[0]) if "eval/responses" in row]
    assert [row["eval/responses"] for row in rows] == [10, 10], "a quarter of forty"
