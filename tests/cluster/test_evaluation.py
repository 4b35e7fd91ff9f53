"""Held-out responses drawn in a way of their own, the best step kept, a run given up and taken up again."""

import json
import shutil

import pytest

from rlhf_ray.checkpoint.manifest import verify_manifest
from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import StoppedEarly
from rlhf_ray.observability.metrics import read_metrics
from tests.cluster.conftest import RESPONSE_TOKENS, SMALL

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
STEPS, HELD_OUT, LONGER = 5, 4, 20
SECTIONS = {
    **SMALL, "run": {"steps": STEPS},
    "checkpoint": {"every": 0, "keep": 1, "best_metric": "length", "best_mode": "min"},
    "rewards": {"seen": {"type": "regex", "pattern": r"\bw1\d\b", "weight": 0.0}},
    "evaluation": {"limit": HELD_OUT, "every": 1, "samples_per_prompt": 2,
                   "sampling": {"temperature": 0.5, "top_p": 0.9, "max_tokens": LONGER}},
}


def run(configure, directory, resume=False, **early_stop):
    from rlhf_ray.stages import ppo

    return ppo.run(load(PPOConfig, configure(directory, **SECTIONS, early_stop=early_stop), []), resume=resume)


@pytest.fixture(scope="module")
def given_up(configure, tmp_path_factory):
    """(directory, the error it ended with): a run that is given up after two steps in a row away from the reference."""
    directory = tmp_path_factory.mktemp("given_up") / "run"
    with pytest.raises(StoppedEarly) as stopped:
        run(configure, directory, kl_above=0.01, patience=2)
    return directory, stopped.value


@pytest.fixture(scope="module")
def resumed(given_up, configure, tmp_path_factory):
    """(directory, summary) of that run, resumed without the limit and made to its end."""
    directory = tmp_path_factory.mktemp("resumed") / "run"
    shutil.copytree(given_up[0], directory)
    return directory, run(configure, directory, resume=True)


def evaluations(directory):
    return {row["step"]: {name: value for name, value in row.items() if name.startswith("eval/")}
            for row in read_metrics(directory) if "eval/reward" in row}


def test_evaluation_draws_its_own_responses_and_tells_no_kl(resumed):
    found = evaluations(resumed[0])
    assert list(found) == list(range(STEPS + 1))
    assert all(row["eval/responses"] == 2 * HELD_OUT and "eval/kl" not in row for row in found.values())
    assert max(row["eval/length"] for row in found.values()) > RESPONSE_TOKENS, "longer than training allows"


def test_pass_at_k_is_told_of_the_verifiable_component_alone(resumed):
    for row in evaluations(resumed[0]).values():
        assert {name for name in row if "pass@" in name} == {"eval/pass@1/seen", "eval/pass@2/seen"}
        assert row["eval/pass@1/seen"] == pytest.approx(row["eval/reward/seen"])
        assert row["eval/pass@1/seen"] <= row["eval/pass@2/seen"] <= 2 * row["eval/pass@1/seen"]
    assert any(0 < row["eval/pass@1/seen"] < row["eval/pass@2/seen"] for row in evaluations(resumed[0]).values())


def test_the_best_step_is_kept_and_exported(resumed):
    directory, summary = resumed
    values = {step: row["eval/length"] for step, row in evaluations(directory).items()}
    best = min(values, key=values.get)
    assert (summary["best_step"], summary["best_value"]) == (best, values[best])
    mark = json.loads((directory / "best.json").read_text())
    assert mark == {"step": best, "metric": "length", "mode": "min", "value": values[best],
                    "checkpoint": f"checkpoints/step_{best}", "model": "best"}
    assert 0 < best < STEPS, "otherwise this says nothing of what is pruned"
    kept = {path.name for path in (directory / "checkpoints").iterdir()}
    assert kept == {f"step_{best}", f"step_{STEPS}"}
    assert verify_manifest(directory / mark["checkpoint"]).step == best
    assert f"{best} updates" in (directory / "best/README.md").read_text()
    assert (directory / "best/model.safetensors").read_bytes() != (directory / "model/model.safetensors").read_bytes()
    assert f"at step {best}; that model is in best/" in (directory / "report.html").read_text()


def test_a_run_that_was_given_up_says_so_everywhere(given_up):
    directory, error = given_up
    reason = "kl/sequence was above early_stop.kl_above=0.01 nats in each of the steps 2 to 3"
    assert error.exit_code == 3 and f"stopped early after step 3 of {STEPS}: {reason}" in str(error)
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["stopped_early"].startswith(reason) and summary["steps"] == 3
    assert f"Stopped early: {reason}" in (directory / "report.html").read_text()
    assert (directory / "model/model.safetensors").is_file() and 3 in evaluations(directory)
    assert verify_manifest(directory / "checkpoints/step_3").step == 3


def test_a_run_taken_up_again_forgets_that_it_was_given_up(resumed):
    assert "stopped_early" not in resumed[1] and resumed[1]["steps"] == STEPS


@pytest.mark.slow
def test_a_run_taken_up_again_with_another_limit_is_the_same_run(configure, tmp_path, resumed):
    """As one that nothing ended early."""
    whole = tmp_path / "run", run(configure, tmp_path / "run")
    for name in ("model/model.safetensors", "best/model.safetensors", "best.json"):
        assert (resumed[0] / name).read_bytes() == (whole[0] / name).read_bytes(), name
    assert evaluations(resumed[0]) == evaluations(whole[0])
    last = f"checkpoints/step_{STEPS}/coordinator.json"
    first, second = (json.loads((directory / last).read_text())["run"] for directory in (whole[0], resumed[0]))
    assert first == second and second["early_stop"]["start"] == first["early_stop"]["start"] != []
