"""A run whose policy is its own critic and reads pretraining text: no critic is started."""

import json
import shutil

import numpy as np
import pytest
from safetensors.torch import load_file

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import ConfigError
from tests.cluster.conftest import SMALL, VOCAB
from tests.cluster.resumed import CLOCKS, TRAFFIC, resumed_run, steps, whole_run, without
from tests.cluster.tiny import SHARED_BACKBONE

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def sections(files, tmp_path_factory):
    """A short run with one worker of each role; every eighth text is longer than a row."""
    rng, path = np.random.default_rng(3), tmp_path_factory.mktemp("text") / "text.jsonl"
    lengths = [40 if i % 8 == 0 else 10 for i in range(24)]
    texts = [" ".join(f"w{i}" for i in rng.integers(2, VOCAB, length)) for length in lengths]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {**SMALL, "run": {"steps": 3}, "critic": SHARED_BACKBONE,
            "ptx": {"path": str(path), "max_tokens": 20, "batch_size": 4, "coef": 0.1}}


@pytest.fixture(scope="module")
def run(configure, sections, tmp_path_factory):
    return whole_run(configure, sections, tmp_path_factory)


def test_both_learn_and_are_spoken_of_under_their_own_names(run):
    rows = steps(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["policy/grad_norm"] > 0 and row["policy/ptx_loss"] > 1
        assert row["critic/loss"] > 0 and np.isfinite(row["critic/explained_variance"])
        assert row["rollout/logprob_gap"] < 1e-4
        assert not [name for name in row if "critic_learner" in name or name in ("time/values", "time/critic_update")]
    assert rows[2]["kl/sequence"] > 0.1


def test_no_critic_is_saved_and_the_head_lies_beside_the_model(run):
    saved = {path.name for path in (run / "checkpoints/step_2").iterdir()}
    assert "policy_learner" in saved and "critic_learner" not in saved
    assert (run / "checkpoints/step_2/policy_learner/ptx_0.json").is_file()
    assert set(load_file(run / "value_head.safetensors")) == {"value_head.weight"}
    assert "and text in text.jsonl" in (run / "model/README.md").read_text()


def test_the_resumed_run_is_the_same_run(run, configure, sections, tmp_path_factory):
    runs = run, resumed_run(run, configure, sections, tmp_path_factory)
    whole, again = (without(steps(directory), *CLOCKS, TRAFFIC) for directory in runs)
    assert again == whole
    for file in ("model/model.safetensors", "model_ema/model.safetensors", "value_head.safetensors"):
        assert (runs[0] / file).read_bytes() == (runs[1] / file).read_bytes()


def test_a_run_with_a_critic_of_its_own_does_not_go_on_from_there(run, configure, sections, tmp_path):
    from rlhf_ray.stages import ppo

    directory = shutil.copytree(run, tmp_path / "run")
    own = {**sections, "critic": SMALL["critic"]}
    with pytest.raises(ConfigError, match=r"critic.backbone was policy and is own"):
        ppo.run(load(PPOConfig, configure(directory, **own), []), resume=True)
