"""The public names of the package, and a stage that is run from Python."""

import subprocess
import sys

import pytest

import rlhf_ray
from rlhf_ray.stages import ppo, run_stage, sft


def test_every_public_name_is_there():
    assert sorted(rlhf_ray.HOMES) == sorted(rlhf_ray.__all__)
    assert all(getattr(rlhf_ray, name).__name__ == name for name in rlhf_ray.__all__)
    assert rlhf_ray.run is run_stage.run and "PPOConfig" in dir(rlhf_ray) and rlhf_ray.__version__


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'rlhf_ray' has no attribute 'PPOTrainer'"):
        rlhf_ray.PPOTrainer  # noqa: B018


def test_importing_the_package_imports_nothing_else():
    code = "import sys, rlhf_ray; print([name for name in sys.modules if name.startswith('rlhf_ray.')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("cls", [rlhf_ray.PPOConfig, rlhf_ray.GRPOConfig, rlhf_ray.RLOOConfig,
                                 rlhf_ray.ReinforceConfig])
def test_configurations_of_several_methods_are_of_one_stage(cls, monkeypatch):
    config = cls(model={"path": "a"}, rewards={"r": {"type": "number"}}, prompts={"path": "b"})
    monkeypatch.setattr(ppo, "run", lambda config, resume: {"seen": config})
    assert rlhf_ray.run(config) == {"seen": config}


def test_the_class_of_a_configuration_determines_the_stage(monkeypatch):
    config = rlhf_ray.SFTConfig(model={"path": "a"}, data={"path": "b"})
    monkeypatch.setattr(sft, "run", lambda config, resume: {"seen": config, "resume": resume})
    assert rlhf_ray.run(config, resume=True) == {"seen": config, "resume": True}
