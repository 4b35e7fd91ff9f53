"""A reward function that raises in step 3 of a run without a pace of checkpoints: the steps before are saved, and the
run resumed with a function that was fixed is the run of another that saves a checkpoint at each step by time."""

import json
from types import SimpleNamespace

import pytest

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.errors import RewardError
from tests.cluster.conftest import SMALL
from tests.cluster.resumed import assert_equal_runs

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
PROMPTS, A_STEP, SEED = 24, 8, 5
FUNCTION = """
def score(responses, labels, **_):
    if {broken} and any(row.get("late") for row in labels):
        raise KeyError("it has no answer")
    return [len(response) / 10 for response in responses]
"""


@pytest.fixture(scope="module")
def runs(configure, tmp_path_factory):
    """`failed` after its error, with the state that it left, then resumed; `whole` without an error."""
    from rlhf_ray.stages import ppo

    root = tmp_path_factory.mktemp("saved_on_error")
    late = [row for _, row in PromptCursor(PROMPTS, SEED, shuffle=True).next(PROMPTS)][2 * A_STEP + 3]
    rows = [{"prompt": f"w{i + 2} w{i + 3}", "late": i == late} for i in range(PROMPTS)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = {**SMALL, "rewards": {"main": {"type": "function", "function": f"{root}/mine.py:score"}},
                "prompts": {"path": str(root / "prompts.jsonl")}, "run": {"steps": 4, "seed": SEED}}

    def run(name, minutes, broken, resume=False):
        (root / "mine.py").write_text(FUNCTION.format(broken=broken))
        saved = {"checkpoint": {"every": 0, "every_minutes": minutes, "keep": 9}}
        return ppo.run(load(PPOConfig, configure(root / name, **sections, **saved), []), resume)

    run("whole", 0.0001, broken=False)
    with pytest.raises(RewardError) as caught:
        run("failed", 10, broken=True)
    left = sorted(path.name for path in (root / "failed").iterdir())
    checkpoints = [path.name for path in (root / "failed/checkpoints").iterdir()]
    run("failed", 10, broken=False, resume=True)
    return SimpleNamespace(error=str(caught.value), left=left, checkpoints=checkpoints,
                           whole=root / "whole", failed=root / "failed")


def test_the_error_is_the_function_s_and_the_steps_before_it_are_saved(runs):
    assert "it has no answer" in runs.error
    assert runs.checkpoints == ["step_2"] and "summary.json" not in runs.left


def test_the_resumed_run_is_that_which_saved_by_time(runs):
    checkpoints = {path.name for path in (runs.whole / "checkpoints").iterdir()}
    assert "step_4" in checkpoints and len(checkpoints) >= 2, "the first steps are far more than 6 ms"
    assert_equal_runs(runs.whole, runs.failed)
