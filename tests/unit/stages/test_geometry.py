"""A resume with other models, adapters or uses of the reference is refused by the field that changed."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

from rlhf_ray.config.derived import derive
from rlhf_ray.config.load import STAGES, load
from rlhf_ray.coordinator.recovery import check_geometry
from rlhf_ray.errors import ConfigError
from rlhf_ray.stages.geometry import ppo_geometry, supervised_geometry
from tests.unit.config.conftest import MINIMAL

FREE, KL_STOP = "--algorithm.kl.coef=0", "--early_stop.kl_above=0.5"


@pytest.fixture
def geometry_of(tmp_path):
    """geometry_of("ppo", ["--model.path=m"]), as it is after it was saved."""
    def _geometry_of(stage: str, changes: list[str]):
        path = tmp_path / f"{stage}.yaml"
        path.write_text(yaml.safe_dump(MINIMAL[stage]))
        config = load(STAGES[stage], path, changes)
        made = ppo_geometry(config, derive(config)) if stage == "ppo" else supervised_geometry(config)
        return json.loads(json.dumps(made))

    return _geometry_of


@pytest.mark.parametrize(("before", "after", "said"), [
    ([FREE], [FREE, KL_STOP], "what needs the reference was nothing and is early_stop.kl_above=0.5. "),
    ([], [FREE], r"what needs the reference was algorithm.kl.coef=0\.\d+ and is nothing\. "),
    ([FREE, KL_STOP], [FREE], "what needs the reference was early_stop.kl_above=0.5 and is nothing. "),
    ([FREE], [FREE, "--reference.path=r"],
     "the model at reference.path was none and is r; what .* and is reference.path=r"),
    ([], ["--critic.path=c"], "the model at critic.path was none and is c. "),
    ([], ["--run.seed=3"], "run.seed was 0 and is 3. "),
    ([], ["--prompts.shuffle=false"], "prompts.shuffle was True and is False. "),
    ([], ["--prompts.held_out=0.1", "--evaluation.every=2"], "prompts.held_out was 0 and is 0.1. "),
    ([], ["--model.path=n"], "the model at model.path was m and is n. "),
    ([], ["--model.revision=v2"], "the model at model.path was m and is m at revision v2. "),
    ([], ["--policy.lora.rank=4"], "policy.lora was none and is rank 4, alpha 32, targets all-linear. "),
    (["--policy.lora={}"], ["--policy.lora.alpha=64"], "policy.lora was rank 16, alpha 32, .* and is .*alpha 64"),
    ([], ["--critic.lora={}"], "the model at critic.path was none and is m; critic.lora was none and is rank 16"),
    ([], [KL_STOP], None), ([FREE, KL_STOP], [], None), (["--reference.path=r"], [FREE, "--reference.path=r"], None),
    (["--policy.lora={}"], ["--policy.lora.dropout=0.1"], None),
    (["--policy.lora.targets=[q_proj, v_proj]"], ["--policy.lora.targets=[v_proj, q_proj]"], None),
], ids=str)
def test_ppo(geometry_of, before, after, said):
    saved, wanted = geometry_of("ppo", before), geometry_of("ppo", after)
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        check_geometry(Path("step_8"), wanted, saved)


@pytest.mark.parametrize("stage", ["sft", "reward-model", "process-reward"])
def test_supervised(geometry_of, stage):
    for change, said in (("--model.path=n", "the model at model.path was m and is n. "),
                         ("--learner.lora={}", "learner.lora was none and is rank 16")):
        with pytest.raises(ConfigError, match=said):
            check_geometry(Path("step_8"), geometry_of(stage, [change]), geometry_of(stage, []))


def test_the_format_of_steps_stays(geometry_of):
    saved, wanted = (geometry_of("process-reward", [f"--steps.placeholder={mark}"]) for mark in "?!")
    with pytest.raises(ConfigError, match=r"cannot be resumed .*: steps\.placeholder was \? and is !\. "):
        check_geometry(Path("step_8"), wanted, saved)
