"""The templates that a stage's command starts early are those that its workers are forked from."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from rlhf_ray.cluster import worker_templates
from rlhf_ray.cluster.worker_environment import worker_environment
from rlhf_ray.cluster.worker_templates import LIBRARIES, VLLM_LIBRARIES, WorkerTemplates
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


def test_no_template_is_started_for_a_cluster_elsewhere_or_beside_gpus(templates, monkeypatch):
    config = SFTConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d.jsonl"}})
    elsewhere = config.model_copy(update={"cluster": config.cluster.model_copy(update={"address": "h:1"})})
    run_stage.start_templates(elsewhere, templates)
    with monkeypatch.context() as patch:
        patch.setattr(run_stage, "gpus_here", lambda: ["NVIDIA H100"])
        run_stage.start_templates(config, templates)
    assert not templates._started
    run_stage.start_templates(config, templates)
    assert len(templates._started) == 1


@pytest.mark.parametrize("name", sorted({*LIBRARIES, *VLLM_LIBRARIES}))
def test_what_templates_import_is_there(name):
    package, *rest = name.split(".")
    home = Path(find_spec(package).submodule_search_locations[0])  # finding a submodule would import the package
    assert home.joinpath(*rest).is_dir() or home.joinpath(*rest).with_suffix(".py").is_file()
