"""What a resume is refused for before anything starts, by names and small files alone."""

import pytest

from rlhf_ray.checkpoint.state_files import save_state
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.stages.preflight import check_resume

GEOMETRY = {"coordinator.prompts_per_step": 16, "policy.workers": 1}


@pytest.fixture
def config(tmp_path):
    """A run of 8 steps whose newest checkpoint is that of step 8."""
    for step in (6, 8):
        (tmp_path / f"checkpoints/step_{step}").mkdir(parents=True)
        save_state(tmp_path / f"checkpoints/step_{step}/coordinator.json", {"geometry": GEOMETRY})
    return PPOConfig(run={"dir": str(tmp_path)}, model={"path": "m"}, prompts={"path": "p"},
                     rewards={"main": {"type": "model", "path": "r"}})


@pytest.mark.parametrize("steps", [8, 9])
def test_as_many_steps_or_more_are_welcome(config, steps):
    check_resume(config, steps, GEOMETRY)


def test_fewer_steps_than_were_made_are_refused(config):
    with pytest.raises(ConfigError, match=r"run.steps=2: .* has made 8 steps already; set run.steps to 8 or more"):
        check_resume(config, 2, GEOMETRY)


def test_another_geometry_is_refused_by_field(config):
    with pytest.raises(ConfigError, match="coordinator.prompts_per_step was 16 and is 32.*another run.dir"):
        check_resume(config, 8, {**GEOMETRY, "coordinator.prompts_per_step": 32})


def test_what_cannot_be_read_is_left_to_the_verification(config, tmp_path):
    (tmp_path / "checkpoints/step_8/coordinator.json").write_text("{")
    check_resume(config, 8, GEOMETRY)


def test_a_directory_without_checkpoints_begins_a_run(config, tmp_path):
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    check_resume(config, 1, GEOMETRY)
