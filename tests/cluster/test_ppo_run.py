"""What one finished PPO run (two generators, two ranks of each learner, 4 steps) says and leaves behind."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from rlhf_ray.checkpoint.manifest import verify_manifest
from rlhf_ray.cli.main import main
from rlhf_ray.engine.training_state import TrainingState
from rlhf_ray.observability.metrics import read_metrics
from rlhf_ray.stages.export_checkpoint import export_checkpoint
from tests.cluster.tiny import PROMPT_TOKENS

STEPS, SAMPLES = 4, 16
pytestmark = pytest.mark.cluster

PROMISED = (
    "reward/mean", "reward/std", "kl/sequence", "kl/coef", "response/length", "response/finished", "policy/loss",
    "policy/total_loss", "policy/advantage_mean", "policy/approx_kl_k1", "policy/approx_kl_k2", "critic/return_mean",
    "critic/return_variance", "critic/value_mean", "critic/value_variance",
    "policy/entropy", "policy/clip_fraction", "policy/approx_kl", "policy/grad_norm", "policy/learning_rate",
    "critic/loss", "critic/explained_variance", "critic/grad_norm", "rollout/logprob_gap", "staleness/max",
    "weights/publish_seconds", "weights/version", "buffer/samples", "throughput/samples_per_second",
    "throughput/tokens_per_second", "time/step", "time/generate", "time/publish", "share/generator/busy",
    "share/policy_learner/busy", "share/critic_learner/busy", "share/reward_scorer/busy", "share/assembler/busy",
)


@pytest.fixture(scope="module")
def steps(finished):
    """The rows of the training steps."""
    return [row for row in read_metrics(finished.directory) if "reward/mean" in row]


@pytest.fixture(scope="module")
def model(finished):
    """The exported policy as transformers reads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(finished.directory / "model").eval()


def test_the_directory_holds_what_a_run_promises(finished):
    names = {path.name for path in finished.directory.iterdir()}
    assert names == {"config.yaml", "metrics.jsonl", "samples", "tensorboard", "checkpoints", "model", "model_ema",
                     "report.html", "status.json", "summary.json", "evaluation.json", "ledger.sqlite", "left_out.jsonl",
                     "owner"}
    left_out = [json.loads(line) for line in (finished.directory / "left_out.jsonl").read_text().splitlines()]
    assert [(Path(row["source"]).name, row["row"], row["reason"]) for row in left_out] == [
        ("prompts.jsonl", row, f"longer than max_tokens={PROMPT_TOKENS}") for row in (21, 22, 23)]
    assert {path.name for path in (finished.directory / "checkpoints").iterdir()} == {"step_2", "step_4"}
    resolved = yaml.safe_load((finished.directory / "config.yaml").read_text())
    assert resolved["buffer"]["capacity_mb"] == 64 and resolved["run"]["steps"] == STEPS
    assert json.loads((finished.directory / "summary.json").read_text()) == finished.summary


def test_every_step_has_one_row_with_the_promised_metrics(finished, steps):
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    for row in steps:
        assert [name for name in PROMISED if row.get(name) is None or not np.isfinite(row[name])] == [], "null is NaN"
    evaluated = [row["step"] for row in read_metrics(finished.directory) if "eval/reward" in row]
    assert evaluated == [0, STEPS]


def test_generators_and_learner_agree_on_every_token(steps):
    assert max(row["rollout/logprob_gap"] for row in steps) < 1e-4


def test_synchronous_training_is_on_policy_and_every_step_makes_a_version(steps):
    assert [row["staleness/max"] for row in steps] == [0] * STEPS
    assert [row["weights/version"] for row in steps] == [row["step"] for row in steps]


def test_the_first_batch_comes_from_the_reference_and_later_ones_leave_it(steps):
    assert abs(steps[0]["kl/sequence"]) < 1e-4
    assert all(row["kl/sequence"] > 0.1 for row in steps[1:])
    assert steps[0]["kl/coef"] == 0.1 and steps[1]["kl/coef"] < 0.1, "adaptive: no KL seen, so the coefficient falls"


def test_phases_lie_within_the_step(steps):
    for row in steps:
        phases = [value for name, value in row.items() if name.startswith("time/")]
        assert all(-1e-6 <= seconds <= row["time/step"] + 1e-6 for seconds in phases)
        assert row["share/policy_learner/busy"] > 0 and row["time/policy_update"] > 0


def test_every_role_s_time_is_accounted_for(finished, steps):
    for row in steps:
        for role in ("generator", "policy_learner", "critic_learner", "reward_scorer", "reference_scorer", "assembler"):
            shares = {name: value for name, value in row.items() if name.startswith(f"share/{role}/")}
            assert sum(shares.values()) == pytest.approx(1) and shares[f"share/{role}/busy"] > 0
    assert json.loads((finished.directory / "status.json").read_text())["ended"] == "finished"


def test_both_generators_worked_and_hold_the_last_version(finished, steps):
    assert finished.finals["version"] == [STEPS, STEPS]
    evaluated = [row for row in read_metrics(finished.directory) if "eval/length" in row]
    drawn = sum(row["response/length"] * SAMPLES for row in steps) + sum(
        row["eval/length"] * row["eval/responses"] for row in evaluated)
    made = finished.finals["tokens_made"]
    assert sum(made) == pytest.approx(drawn + len(made)), "each also drew one token when it started"
    assert min(made) > sum(made) / 4


def test_the_exported_model_is_what_the_generators_held_at_the_end(finished, model):
    for rollout in finished.finals["generate"]:
        assert set(rollout.versions[rollout.response_mask]) == {STEPS}
        for i in range(len(rollout)):
            tokens, mask = torch.from_numpy(rollout.row(i, "tokens").astype(np.int64)), rollout.row(i, "response_mask")
            with torch.no_grad():
                logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            assert np.abs(logprobs.numpy() - rollout.row(i, "logprobs")[1:])[mask[1:]].max() < 1e-4


def test_the_exported_weights_are_the_last_checkpoint_s(finished, files):
    exported = load_file(finished.directory / "model/model.safetensors")
    saved = TrainingState(finished.directory / "checkpoints/step_4/policy_learner")
    assert {f"model.{name}" for name in exported} == saved.names()
    assert all(torch.equal(tensor.view(-1), saved.whole("weights", f"model.{name}", tensor.numel()))
               for name, tensor in exported.items())
    first = load_file(files.policy / "model.safetensors")
    assert max(float((exported[name] - first[name]).abs().max()) for name in first) > 0.01


def test_the_exported_average_lies_between_where_the_weights_began_and_where_they_ended(finished, files):
    first, last, average = (load_file(directory / "model.safetensors") for directory in (
        files.policy, finished.directory / "model", finished.directory / "model_ema"))
    steps = [float((average[name] - last[name]).norm() / (first[name] - last[name]).norm()) for name in last]
    assert 0.1 < np.mean(steps) < 0.9, "16 optimizer steps at a decay of 0.9"
    assert "exponential moving average" in (finished.directory / "model_ema/README.md").read_text()


def test_exports_from_checkpoints_are_the_run_s_own_export_and_an_earlier_model(finished, tmp_path):
    exported = export_checkpoint(finished.directory, output=tmp_path / "last")
    assert exported.step == 4
    for name, own in (("model", "model"), ("model_ema", "model_ema")):
        for file in (finished.directory / own).iterdir():
            if file.name != "README.md":
                assert (exported.files[name] / file.name).read_bytes() == file.read_bytes(), file
    cards = [(place / "README.md").read_text().partition("Trained by")[2]
             for place in (exported.files["model"], finished.directory / "model")]
    assert cards[0] == cards[1]
    earlier = export_checkpoint(finished.directory, 2, tmp_path / "earlier").files["model"]
    saved = TrainingState(finished.directory / "checkpoints/step_2/policy_learner")
    for name, weight in load_file(earlier / "model.safetensors").items():
        assert torch.equal(weight.flatten(), saved.whole("weights", f"model.{name}", weight.numel())), name


def test_transformers_loads_the_model_and_generates_with_it(finished, model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(finished.directory / "model")
    inputs = tokenizer("w5 w6 w7", return_tensors="pt", return_token_type_ids=False)
    text = tokenizer.decode(model.generate(**inputs, max_new_tokens=5, do_sample=False)[0])
    assert text.startswith("w5 w6 w7 ") and len(text.split()) > 3
    assert "ppo" in (finished.directory / "model/README.md").read_text().lower()


def test_every_checkpoint_is_as_its_manifest_says(finished):
    for step in (2, 4):
        manifest = verify_manifest(finished.directory / f"checkpoints/step_{step}")
        assert manifest.step == step
        for learner in ("policy_learner", "critic_learner"):
            assert {f"{learner}/rng_{rank}.pt" for rank in (0, 1)} <= set(manifest.files)


def test_every_sample_of_a_step_is_saved_with_its_tokens(finished, files, steps):
    import pyarrow.parquet as pq

    prompts = {json.loads(line)["prompt"] for line in files.prompts.read_text().splitlines()}
    for step in range(1, STEPS + 1):
        file = finished.directory / f"samples/step_{step:06d}.parquet"
        rows, metrics = pq.read_table(file).to_pylist(), steps[step - 1]
        assert len(rows) == SAMPLES and {row["step"] for row in rows} == {step}
        assert metrics["samples/bytes"] == file.stat().st_size and metrics["samples/write_s"] > 0
        assert np.mean([row["score"] for row in rows]) == pytest.approx(metrics["reward/mean"], rel=1e-5)
        assert np.mean([sum(row["response_mask"]) for row in rows]) == pytest.approx(metrics["response/length"])
        gaps = [abs(old - behaviour) for row in rows for old, behaviour, sampled in zip(
            row["old_logprobs"], row["behaviour_logprobs"], row["response_mask"], strict=True) if sampled]
        assert np.mean(gaps) == pytest.approx(metrics["rollout/logprob_gap"], rel=1e-3)
        assert {version for row in rows for version in row["versions"]} == {-1, step - 1}
        assert all(row["prompt"] in prompts and np.isfinite(row["score"]) for row in rows)
        assert all(row["response"] or row["finish_reason"] == "stop" for row in rows), "some end at once"


def test_tensorboard_shows_the_same_numbers(finished, steps):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished.directory / "tensorboard")).Reload()
    for name in ("reward/mean", "kl/sequence", "policy/loss"):
        shown = {event.step: event.value for event in events.Scalars(name)}
        assert shown == pytest.approx({row["step"]: row[name] for row in steps}, rel=1e-5)


def test_the_report_is_one_page_about_this_run(finished):
    page = (finished.directory / "report.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html>") and "KL from the reference" in page
    assert '<script src="http' not in page and '<link rel="stylesheet" href="http' not in page


def test_summary_tells_before_and_after(finished):
    rows = {row["step"]: row for row in read_metrics(finished.directory) if "eval/reward" in row}
    summary = finished.summary
    assert summary["steps"] == STEPS and summary["samples"] == STEPS * SAMPLES
    assert summary["reward_before"] == rows[0]["eval/reward"] and summary["reward_after"] == rows[STEPS]["eval/reward"]
    assert summary["samples_per_second"] == pytest.approx(STEPS * SAMPLES / summary["seconds_loop"])


def test_every_sample_is_committed_and_the_audit_says_so(finished, capsys, monkeypatch):
    assert finished.summary["ledger"]["committed"] == STEPS * SAMPLES
    monkeypatch.setattr("sys.argv", ["rlhf-ray", "ledger", str(finished.directory), "--check"])
    with pytest.raises(SystemExit) as end:
        main()
    told = capsys.readouterr().out
    assert end.value.code == 0 and "ledger audit passed" in told and re.search(rf"committed +{STEPS * SAMPLES}", told)


def test_the_driver_handled_less_than_a_kilobyte_a_sample(finished):
    evaluated = 2 * 4
    assert 0 < finished.received / (STEPS * SAMPLES + evaluated) < 1024


def test_prompts_over_the_budget_are_counted_and_said(finished):
    said = " ".join(finished.output.split())
    assert "20 of 23 rows used; 3 left out: longer than max_tokens=8 (" in said


def test_no_process_and_no_shared_memory_is_left(finished):
    assert finished.children == []
    assert finished.segments == set()
