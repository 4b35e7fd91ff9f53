"""The templates that a stage's command starts early are those that its workers are forked from."""

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from rlhf_ray.cluster import worker_templates
from rlhf_ray.cluster.worker_environment import worker_environment
from rlhf_ray.cluster.worker_templates import LIBRARIES, VLLM_LIBRARIES, WorkerTemplates, template_command
from rlhf_ray.config.derived import derive, placements_of
from rlhf_ray.config.load import resolve
from rlhf_ray.config.stages import PPOConfig, SFTConfig
from rlhf_ray.stages import run_stage
from rlhf_ray.workers.role_table import rows_of

PPO = {"model": {"path": "m"}, "rewards": {"good": {"type": "model", "path": "r"}}, "prompts": {"path": "p.jsonl"}}


@pytest.fixture
def templates(tmp_path, monkeypatch):
    """Templates that are listed and not started."""
    monkeypatch.setattr(worker_templates, "_start", lambda *_: None)
    return WorkerTemplates(tmp_path)


@pytest.mark.parametrize("more", [{}, {"policy": {"threads": 2}}, {"policy": {"zero_stage": 3, "workers": 2}}])
def test_a_run_starts_early_what_its_workers_need_and_nothing_else(templates, more):
    config = resolve(PPOConfig.model_validate({**PPO, **more}))
    run_stage.start_templates(config, templates)
    early = set(templates._started)
    for row in rows_of(config, derive(config)):
        own = row.environment(config) if row.environment else {}
        templates.command(worker_environment(placements_of(config)[row.section], own), row.libraries)
    assert set(templates._started) == early and len(early) == (2 if not more else 3)


@pytest.fixture
def sft():
    return SFTConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d.jsonl"}})


def test_no_template_is_started_early_beside_gpus(templates, monkeypatch, sft):
    with monkeypatch.context() as patch:
        patch.setattr(run_stage, "gpus_here", lambda: ["NVIDIA H100"])
        run_stage.start_templates(sft, templates)
    assert not templates._started
    run_stage.start_templates(sft, templates)
    assert len(templates._started) == 1


@pytest.mark.parametrize("place", ["own", "elsewhere", "open"])
def test_workers_of_a_cluster_that_others_started_are_never_forked(place, monkeypatch, sft):
    """Neither of one at an address nor of one that the process has joined: its nodes may be other machines."""
    found = []
    stage = SimpleNamespace(run=lambda *_, **__: found.append(template_command({}, ["json"])))
    monkeypatch.setattr(run_stage, "import_module", lambda _: stage)
    monkeypatch.setattr(run_stage, "start_templates", lambda *_: None)
    monkeypatch.setattr(worker_templates, "_start", lambda *_: Mock(poll=lambda: None))
    monkeypatch.setattr("ray.is_initialized", lambda: place == "open")
    address = "h:1" if place == "elsewhere" else None
    config = sft.model_copy(update={"cluster": sft.cluster.model_copy(update={"address": address})})
    run_stage.run_loaded("sft", config, False)
    assert [command is not None for command in found] == [place == "own"]


@pytest.mark.parametrize("name", sorted({*LIBRARIES, *VLLM_LIBRARIES}))
def test_what_templates_import_is_there(name):
    package, *rest = name.split(".")
    home = Path(find_spec(package).submodule_search_locations[0])  # finding a submodule would import the package
    assert home.joinpath(*rest).is_dir() or home.joinpath(*rest).with_suffix(".py").is_file()
