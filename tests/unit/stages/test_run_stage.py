"""The public names of the package, and a stage that is run from Python."""

import asyncio
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

import rlhf_ray
import rlhf_ray.config
from rlhf_ray.config.fields import section_of_items, sections_of, sections_of_values
from rlhf_ray.config.load import STAGES, resolve
from rlhf_ray.errors import StoppedEarly
from rlhf_ray.internals.asyncio import run_coroutine
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
    assert rlhf_ray.run(config) == {"seen": resolve(config)} != {"seen": config}


def test_a_configuration_that_was_loaded_is_not_resolved_again(monkeypatch):
    config = rlhf_ray.PPOConfig(model={"path": "a"}, rewards={"r": {"type": "number"}}, prompts={"path": "b"})
    monkeypatch.setattr(ppo, "run", lambda config, resume: {"seen": config, "resume": resume})
    assert run_stage.run_loaded("grpo", config, True) == {"seen": config, "resume": True}


def test_the_class_of_a_configuration_determines_the_stage(monkeypatch):
    config = rlhf_ray.SFTConfig(model={"path": "a"}, data={"path": "b"})
    monkeypatch.setattr(sft, "run", lambda config, resume: {"seen": config, "resume": resume})
    assert rlhf_ray.run(config, resume=True) == {"seen": config, "resume": True}


def test_values_without_effect_are_named_before_the_stage_starts(monkeypatch, caplog):
    def stage(config, resume):
        assert "algorithm.estimator.lam=0.9 has no effect" in caplog.text and len(caplog.records) == 1
        return {}

    monkeypatch.setattr(ppo, "run", stage)
    config = rlhf_ray.GRPOConfig(model={"path": "a"}, rewards={"r": {"type": "number"}}, prompts={"path": "b"},
                                 algorithm={"estimator": {"lam": 0.9}})
    assert rlhf_ray.run(config) == {}


def sections_below(section, found):
    if section not in found:
        found.add(section)
        for field in section.model_fields.values():
            kind = field.annotation
            for inner in (*sections_of(kind), *sections_of_values(kind), *filter(None, [section_of_items(kind)])):
                sections_below(inner, found)


def test_every_section_can_be_imported_from_the_configuration():
    found = set()
    for stage in STAGES.values():
        sections_below(stage, found)
    public = [getattr(rlhf_ray.config, name) for name in rlhf_ray.config.__all__]
    assert set(public) == found and set(rlhf_ray.config.__all__) <= set(dir(rlhf_ray.config))
    assert [section.__name__ for section in public] == rlhf_ray.config.__all__
    with pytest.raises(AttributeError, match="has no attribute 'PPOSection'"):
        rlhf_ray.config.PPOSection  # noqa: B018


@pytest.fixture
def config(tmp_path):
    return rlhf_ray.SFTConfig(run={"dir": str(tmp_path)}, model={"path": "a"}, data={"path": "b"})


def test_a_stage_runs_within_a_loop_that_runs_already(config, monkeypatch):
    async def stage():
        await asyncio.sleep(0)
        return {"steps": 3}

    async def cell():
        return rlhf_ray.run(config)

    monkeypatch.setattr(sft, "run", lambda config, resume: run_coroutine(stage()))
    assert asyncio.run(cell()) == {"steps": 3}


@pytest.fixture
def displayed(monkeypatch):
    """What a notebook shows; `displayed.shell` is what IPython says that it runs in."""
    seen = SimpleNamespace(pages=[], shell=SimpleNamespace(kernel=object()))
    ipython, module = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: seen.shell
    module.HTML, module.display = str, seen.pages.append
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return seen


def stage_with_report(error=None):
    def run(config, resume):
        with open(f"{config.run.dir}/report.html", "w") as file:
            file.write('<p title="x">reward</p>')
        if error:
            raise error
        return {}

    return run


def test_a_notebook_shows_the_report(config, displayed, monkeypatch):
    monkeypatch.setattr(sft, "run", stage_with_report())
    rlhf_ray.run(config)
    (page,) = displayed.pages
    assert page.startswith('<iframe srcdoc="&lt;p title=&quot;x&quot;&gt;reward&lt;/p&gt;"')


def test_a_notebook_shows_the_report_of_a_run_that_stopped_itself(config, displayed, monkeypatch):
    monkeypatch.setattr(sft, "run", stage_with_report(StoppedEarly("enough")))
    with pytest.raises(StoppedEarly):
        rlhf_ray.run(config)
    assert len(displayed.pages) == 1


@pytest.mark.parametrize("shell", [None, SimpleNamespace()], ids=["no shell", "a terminal"])
def test_nothing_is_shown_elsewhere(config, displayed, monkeypatch, shell):
    displayed.shell = shell
    monkeypatch.setattr(sft, "run", stage_with_report())
    rlhf_ray.run(config)
    assert not displayed.pages
