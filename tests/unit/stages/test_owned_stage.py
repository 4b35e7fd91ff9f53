"""A stage owns its directory from before it reads anything of the run to after its last file, and writes nothing more
once another driver has taken over."""

import json
from contextlib import nullcontext

import pytest

from rlhf_ray.checkpoint.manifest import read_manifest
from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.config.stages import SFTConfig
from rlhf_ray.errors import ConfigError, SupersededError
from rlhf_ray.observability.metrics import MetricsWriter, read_metrics
from rlhf_ray.observability.owner_record import Term, read_owner
from rlhf_ray.stages import runtime
from rlhf_ray.stages.runtime import newest_checkpoint, owned_directory, run_stage
from tests.checkpoints import new_checkpoint
from tests.unit.owners import take_over


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "ray_session", lambda *_: nullcontext())
    return SFTConfig(run={"dir": str(tmp_path / "run")}, data={"path": "d"}, model={"path": "m"},
                     logging={"tensorboard": False, "ray_metrics": False})


def run(config, resume=False, steps=(1,), during=lambda directory: None):
    """A stage that makes some steps, each with a row and a checkpoint; what it began from."""
    with owned_directory(config, resume) as directory:
        store = CheckpointStore(directory.checkpoints, 9, term=directory.term)

        async def main(_):
            start = newest_checkpoint(store, resume, directory)
            metrics = MetricsWriter(directory.path, config.logging, start.step if start else -1, directory.term)
            for step in steps:
                metrics.write(step, {"loss": 1.0})
                with new_checkpoint(store, step) as place:
                    (place / "weights").write_text(str(step))
                during(directory)
            return {"stage": "sft", "steps": step, "from": start.step if start else None}

        return run_stage(config, directory, resume, main)


def test_a_stage_owns_its_directory_to_its_end(config, tmp_path):
    assert run(config)["from"] is None
    owner = read_owner(tmp_path / "run")
    assert (owner.term, owner.ended, owner.went_on_from) == (1, True, -1)
    assert run(config, resume=True, steps=(2, 3))["from"] == 1
    owner = read_owner(tmp_path / "run")
    assert (owner.term, owner.ended, owner.went_on_from) == (2, True, 1)
    found = CheckpointStore(tmp_path / "run/checkpoints", 9).latest()
    assert (found.step, read_manifest(found.path).term) == (3, 2)


def test_while_it_runs_another_is_refused_with_its_name(config):
    def other(_):
        with pytest.raises(ConfigError, match="being written by another run, process "), owned_directory(config, True):
            pass

    run(config, during=other)


def test_a_stage_whose_directory_is_taken_over_writes_nothing_more(config, tmp_path):
    def lose(directory):
        term = take_over(directory.path)
        assert term.number == 2
        (directory.path / "summary.json").write_text('{"of": "b"}')

    with pytest.raises(SupersededError, match=r"process 4711 on b \(term 2\)"):
        run(config, steps=(1, 2, 3), during=lose)
    here = tmp_path / "run"
    assert [row["step"] for row in read_metrics(here)] == [1]
    assert json.loads((here / "summary.json").read_text()) == {"of": "b"}
    assert {path.name for path in (here / "checkpoints").iterdir()} == {"step_1"}
    assert [path.name for path in (here / "owner").iterdir()] == ["term_2.json"]


def test_what_earlier_terms_were_writing_goes_before_anything_is_read(config, tmp_path):
    run(config)
    here = tmp_path / "run"
    for name in ("checkpoints/.tmp-step_2-t1", ".tmp-model-t1", ".old-model_ema-7", ".tmp-model-t9"):
        (here / name).mkdir()
    with owned_directory(config, resume=True):
        assert {path.name for path in here.iterdir() if path.name.startswith(".")} == {".tmp-model-t9"}
        assert (here / "model_ema").is_dir(), "the last whole one is back"
        assert {path.name for path in (here / "checkpoints").iterdir()} == {"step_1"}


def test_a_directory_whose_owner_cannot_be_written_is_refused_by_name(config, tmp_path):
    (tmp_path / "run").mkdir()
    Term(tmp_path / "run", 1).path.parent.touch()
    said = "the owner record of run.dir=.* cannot be read or written"
    with pytest.raises(ConfigError, match=said), owned_directory(config, False):
        pass
