"""GRPO with truncated sampling on vLLM's asynchronous engine: learners follow what was sampled from; no critic is
started, measured or saved; and a resumed run is the same run, running statistics included."""

import json

import pytest
from safetensors.torch import load_file

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from tests.cluster.conftest import SMALL
from tests.cluster.resumed import CLOCKS, TRAFFIC, resumed_run, steps, whole_run, without
from tests.cluster.tiny import RESPONSE_TOKENS

pytestmark = pytest.mark.cluster
ALGORITHM = {
    "estimator": "grpo", "epochs": 2, "mini_batches": 2, "importance": {"tokens": "truncate"}, "overlong_buffer": 4,
    "reward_normalisation": "standardise", "kl": {"coef": 0.1},
}


SAMPLING = {"max_tokens": RESPONSE_TOKENS, "temperature": 0.9, "top_k": 16, "min_p": 0.005, "min_tokens": 2,
            "stop": ["w9 w"]}
SECTIONS = {**SMALL, "run": {"steps": 3}, "algorithm": ALGORITHM, "critic": None,
            "generator": {"workers": 1, "engine": "async", "sampling": SAMPLING}}


@pytest.fixture(scope="module")
def run(configure, tmp_path_factory):
    return whole_run(configure, SECTIONS, tmp_path_factory)


def test_nothing_speaks_of_a_critic(run):
    rows = steps(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert not [name for row in rows for name in row if "critic" in name or name == "time/values"]
    saved = {path.name for path in (run / "checkpoints/step_2").iterdir()}
    assert "policy_learner" in saved and "critic_learner" not in saved


def test_the_asynchronous_engine_and_the_learner_agree_on_every_token(run):
    assert max(row["rollout/logprob_gap"] for row in steps(run)) < 1e-4


def test_the_policy_learns_with_the_penalty_in_its_loss(run):
    rows = steps(run)
    assert all(row["policy/grad_norm"] > 0 and 0 < row["policy/is_weight_mean"] <= 2 for row in rows)
    assert rows[0]["policy/kl_penalty"] >= 0 and rows[2]["policy/kl_penalty"] > 1e-3
    assert rows[2]["kl/sequence"] > 0.1


@pytest.mark.slow
def test_the_resumed_run_is_the_same_run(run, configure, tmp_path_factory):
    runs = run, resumed_run(run, configure, SECTIONS, tmp_path_factory)
    whole, again = (without(steps(directory), *CLOCKS, TRAFFIC) for directory in runs)
    assert again == whole
    one, two = (load_file(d / "model/model.safetensors") for d in runs)
    assert all(one[name].equal(two[name]) for name in one)
    states = [json.loads((d / "checkpoints/step_3/coordinator.json").read_text()) for d in runs]
    assert states[0]["run"]["scores"] == states[1]["run"]["scores"] and states[0]["run"]["scores"]["count"] == 48


@pytest.mark.slow
def test_a_run_without_the_pass_for_old_logprobs_is_the_run_with_it(configure, tmp_path_factory, monkeypatch):
    from rlhf_ray.config import derived
    from rlhf_ray.stages import ppo

    algorithm = {"estimator": "grpo", "epochs": 1, "mini_batches": 1, "kl": {"coef": 0.1, "kind": "fixed"}}
    sections = {**SMALL, "critic": None, "run": {"steps": 1}, "algorithm": algorithm}
    found = {}
    for old, overrides in (("update", []), ("generator", ["--algorithm.old_logprobs=generator"]), ("policy", [])):
        directory = tmp_path_factory.mktemp(old) / "run"
        config = load(PPOConfig, configure(directory, **sections), overrides)
        with monkeypatch.context() as patched:
            if old == "policy":
                patched.setattr(derived, "update_gives_old_logprobs", lambda _: False)
            assert derived.derive(config).old_logprobs == old
            ppo.run(config)
        found[old] = without(steps(directory), *CLOCKS, TRAFFIC)
    for old in ("update", "generator"):
        for ours, theirs in zip(found[old], found["policy"], strict=True):
            assert set(ours) == set(theirs) and 0 < ours["rollout/logprob_gap"] < 1e-4
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
            assert ours["policy/clip_fraction"] == 0 and ours["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)
