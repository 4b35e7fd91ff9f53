"""What a supervised run refuses to resume with: another order of rows than that of the steps it has made."""

import asyncio
from contextlib import nullcontext

import pytest

from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.config.load import as_yaml
from rlhf_ray.config.stages import SFTConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.roles.learner_state import SaveProgress
from rlhf_ray.stages import sft, supervised_stage
from rlhf_ray.stages.geometry import supervised_geometry
from rlhf_ray.stages.supervised_loop import SupervisedRun


class Learners:
    """One rank, whose part is on disk at once."""

    role = "sft_learner"

    async def values(self, method, *given):
        return [SaveProgress(True, (0, 0), "nothing")] if method.__name__ == "save_progress" else [None]


def config_of(run_dir, seed=0, batch_size=8, held_out=0.1, max_tokens=64, weights=(1.0, 2.0), row=None, system=None,
              **more):
    columns = row or {"text": "text"}
    mix = [{"path": f"{number}.jsonl", "weight": weight, **columns} for number, weight in enumerate(weights)]
    return SFTConfig(run={"dir": str(run_dir), "seed": seed, "steps": 9}, model={"path": "m"},
                     data={"mix": mix, "held_out": held_out, "max_tokens": max_tokens, "system": system},
                     training={"batch_size": batch_size}, **more)


@pytest.fixture
def resume(tmp_path, monkeypatch):
    """Resumes the run in tmp_path, which has a checkpoint of step 4, up to where it would start its workers."""
    config = config_of(tmp_path)
    directory = RunDirectory.create(tmp_path)
    store = CheckpointStore(directory.checkpoints, 2)
    run = SupervisedRun(config, "sft", Learners(), directory, store, None, None, None, None, [],
                        supervised_geometry(config), step=4)
    asyncio.run(run.save())
    monkeypatch.setattr(supervised_stage, "owned_directory", lambda *_: nullcontext(directory))
    monkeypatch.setattr(sft, "check_supervised", lambda _: None)
    monkeypatch.setattr(supervised_stage, "run_stage", lambda *_: {"resumed": True})
    return lambda **given: sft.run(config_of(tmp_path, **given), resume=True)


def test_a_resumed_run_reads_the_columns_that_it_saved(tmp_path):
    rows, text = tmp_path / "rows.jsonl", {"text": "body"}
    config = SFTConfig(run={"dir": str(tmp_path / "run")}, model={"path": "m"}, data={"path": str(rows)})
    rows.write_text('{"text": "We saw"}\n')
    started = sft.with_columns(config, resume=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(as_yaml(started))
    rows.write_text('{"text": "We saw", "messages": []}\n')
    assert sft.with_columns(config, resume=True) == started
    assert sft.with_columns(config, resume=False).data.named_columns == {"messages": "messages"}
    now = SFTConfig(run=config.run, model=config.model, data={"path": str(rows), **text})
    assert sft.with_columns(now, resume=True).data.named_columns == text, "what is set now wins"
    spoken = SFTConfig(run=config.run, model=config.model, data={"path": str(rows), "as_chat": True})
    with pytest.raises(ConfigError, match="data.as_chat=true has no effect: data.prompt is empty"):
        sft.with_columns(spoken, resume=True)


@pytest.mark.parametrize(("given", "said"), [
    ({"seed": 1}, r"run\.seed was 0 and is 1"),
    ({"batch_size": 16}, r"training\.batch_size was 8 and is 16"),
    ({"held_out": 0.0}, r"data\.held_out was 0\.1 and is 0"),
    ({"max_tokens": 32}, r"data\.max_tokens was 64 and is 32"),
    ({"weights": (1.0, 3.0)}, r"data\.mix \(weights\) was 1, 2 and is 1, 3"),
    ({"row": {"text": "body"}}, r"data\.text was text, text and is body, body"),
    ({"row": {"messages": "talk"}}, r"data\.messages was None, None and is talk, talk"),
    ({"system": "Be brief."}, r"data\.system was None, None and is Be brief\., Be brief\."),
])
def test_rows_that_would_be_repeated_or_missed_are_refused_by_field(resume, given, said):
    with pytest.raises(ConfigError, match=said):
        resume(**given)


def test_what_does_not_order_rows_may_change(resume):
    assert resume(learner={"micro_batch_tokens": 128}) == {"resumed": True}
