"""What a job takes along, and what of a configuration it would not find."""

import logging
import subprocess
from pathlib import Path

import pytest

import rlhf_ray
from rlhf_ray.cluster.jobs import package as module
from rlhf_ray.cluster.jobs.package import check_module_names, check_paths, environment_of, list_package
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import ConfigError


@pytest.fixture
def project(tmp_path):
    for name in ("ppo.yaml", "data/prompts.jsonl", "runs/old/model.bin", ".venv/lib/x.py", ".git/config", "big/a.bin",
                 "code/__pycache__/a.pyc", "code/rewards.py", "code/runs/kept.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / ".gitignore").write_text("big/\n")
    return tmp_path


def config_of(**sections):
    return PPOConfig(**{"model": {"path": "org/name"}, "rewards": {"r": {"type": "model", "path": "org/reward"}},
                        "prompts": {"path": "data/prompts.jsonl"}, **sections})


def test_code_and_data_are_packed_and_outputs_environments_and_ignored_files_are_not(project):
    assert set(list_package(project).files) == {"ppo.yaml", "data/prompts.jsonl", "code/rewards.py",
                                                "code/runs/kept.txt", ".gitignore"}


def test_looking_into_a_directory_says_nothing(project, caplog):
    talker = logging.getLogger("ray._private.runtime_env.packaging")
    talker.addHandler(caplog.handler)
    try:
        list_package(project)
    finally:
        talker.removeHandler(caplog.handler)
    assert not caplog.messages


def test_a_rayignore_leaves_out_more(project):
    (project / ".rayignore").write_text("code/\n")
    assert "code/rewards.py" not in list_package(project).files


def test_too_much_is_refused_with_the_largest_files_and_what_to_do(project, monkeypatch):
    (project / "data/large.bin").write_bytes(bytes(3 * 2**20))
    monkeypatch.setattr(module, "largest_package", lambda: 2**20)
    with pytest.raises(ConfigError, match=r"3 MiB to pack.*at most 1 MiB.*data/large.bin \(3 MiB\).*\.rayignore"):
        list_package(project)


@pytest.mark.parametrize(("sections", "field"), [
    ({"model": {"path": "runs/old"}}, "model.path"), ({"evaluation": {"prompts": "big/a.bin"}}, "evaluation.prompts"),
    ({"rewards": {"r": {"type": "function", "function": "runs/r.py:score"}}}, "rewards.r.function"),
])
def test_a_relative_path_that_is_left_out_is_refused(project, sections, field):
    (project / "runs/r.py").write_text("")
    with pytest.raises(ConfigError, match=rf"{field}='.*is not packed.*absolute path"):
        check_paths(config_of(**sections), list_package(project))


def test_packed_files_names_on_the_hub_and_absolute_paths_are_left_alone(project):
    check_paths(config_of(run={"dir": str(project / "runs")}, model={"path": str(project / "runs/old")},
                          rewards={"r": {"type": "function", "function": "code/rewards.py:score"}}),
                list_package(project))


def test_this_package_goes_along_unless_the_directory_holds_it(project):
    home = Path(rlhf_ray.__file__).parent
    environment = environment_of(list_package(project), {"A": "b"}, ["einops"])
    assert environment["py_modules"] == [str(home)] and environment["pip"] == ["einops"]
    assert environment["env_vars"] == {"A": "b"} and environment["working_dir"] == str(project)
    (project / "here").mkdir()
    subprocess.run(["cp", "-r", str(home), str(project / "here")], check=True)
    packed = list_package(project)
    assert packed.holds(project / "here/rlhf_ray") and not packed.holds(home)


@pytest.mark.parametrize("name", ["json.py", "random/__init__.py", "tokenizers.py", "ray/__init__.py"])
def test_a_module_that_ray_would_import_in_place_of_an_installed_one_is_refused(project, name):
    (project / name).parent.mkdir(exist_ok=True)
    (project / name).write_text("")
    with pytest.raises(ConfigError, match=rf"{project}/{name} is named like an installed module"):
        check_module_names(list_package(project))


def test_other_modules_are_not(project, monkeypatch):
    for name in ("rewards.py", "mine/__init__.py", "mine/json.py", "json/rows.jsonl", "re.txt", "tests/__init__.py",
                 "torch"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("")
    monkeypatch.syspath_prepend(str(project))
    monkeypatch.chdir(project)
    check_module_names(list_package(project))
