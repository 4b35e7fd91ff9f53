"""A run as its own process: watched through Ray's metrics endpoint, stopped by a signal, gone on with."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.engine.training_state import TrainingState
from rlhf_ray.observability.metrics import read_metrics
from rlhf_ray.stages.export_checkpoint import export_checkpoint
from tests.cluster.outside import gauge

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
RESUMABLE = 75
"""EX_TEMPFAIL of sysexits.h."""


def test_the_run_s_numbers_are_on_ray_s_metrics_endpoint(interrupted):
    rewards = [row["reward/mean"] for row in interrupted.rows if "reward/mean" in row]
    assert min(abs(gauge(interrupted.gauges, "ray_rlhf_reward_mean") - r) for r in rewards) < 1e-6
    for name in ("kl_sequence", "policy_loss", "throughput_tokens_per_second", "buffer_samples", "staleness_max",
                 "weights_publish_seconds"):
        assert gauge(interrupted.gauges, f"ray_rlhf_{name}") is not None, name
    assert 0 < gauge(interrupted.gauges, "ray_rlhf_share", role="generator", cause="busy") < 1


def test_a_signal_ends_it_with_the_code_for_try_again_and_says_how(interrupted):
    assert interrupted.code == RESUMABLE, interrupted.errors
    assert "stopped by SIGTERM after step" in interrupted.errors and "--resume" in interrupted.errors
    assert "Traceback" not in interrupted.errors + interrupted.output


def test_the_checkpoint_is_of_the_last_finished_step(interrupted):
    step, _ = CheckpointStore(interrupted.directory / "checkpoints", keep=2).latest()
    assert step == interrupted.rows[-1]["step"] >= 1
    assert f"after step {step} of" in interrupted.errors


def test_no_process_is_left(interrupted):
    assert interrupted.family > 6 and interrupted.left == []


def test_an_interrupted_run_does_not_look_like_a_finished_one(interrupted):
    assert not interrupted.names & {"summary.json", "model"}


def test_the_ledger_of_an_interrupted_run_adds_up_with_samples_under_way(interrupted):
    assert interrupted.problems == []


def test_its_checkpoint_becomes_the_model_that_was_interrupted(interrupted, tmp_path):
    step = interrupted.rows[-1]["step"]
    model = export_checkpoint(interrupted.directory, output=tmp_path / "model").files["model"]
    saved = TrainingState(interrupted.directory / f"checkpoints/step_{step}/policy_learner")
    loaded = AutoModelForCausalLM.from_pretrained(model)
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight.flatten(), saved.whole("weights", f"model.{name}", weight.numel())), name
    assert f"{step} updates" in (model / "README.md").read_text()


def test_resume_finishes_the_run(interrupted, resumed_outside):
    assert resumed_outside.code == 0, resumed_outside.errors
    step = interrupted.rows[-1]["step"]
    assert f"resuming after step {step}" in resumed_outside.output
    steps = [row["step"] for row in read_metrics(interrupted.directory) if "reward/mean" in row]
    assert steps == list(range(1, step + 3))
    assert (interrupted.directory / "model/model.safetensors").is_file()
    assert (interrupted.directory / "summary.json").is_file()
