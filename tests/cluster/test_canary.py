"""Generators that compute with other weights than they confirmed, or another model: the digests of all bytes are right.
Real learners and real engines, whose loading is broken in one place each; one update moves log-probabilities by about
ten times what is tolerated."""

import asyncio
import json
import shutil

import pytest

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import GeneratorMismatch, ModelError
from rlhf_ray.models.generator_parity import TOLERATED
from rlhf_ray.roles.generator import Generator
from tests.cluster.generators import make_generator
from tests.cluster.resumed import steps
from tests.cluster.tiny import SMALL
from tests.roles_in_runs import use_class

pytestmark = pytest.mark.cluster
RATE = {"learning_rate": 1e-5, "grad_clip": 1.0}
"""At which an update of two epochs moves the log-probabilities of these models by about ten tolerances."""
LAST, FIRST = "model.layers.1.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight"


class StaleHead(Generator):
    """Its tied head keeps the packed copy that vLLM made at the start."""

    async def start(self) -> None:
        from rlhf_ray.weights.double_buffer import DoubleBuffer, ParallelLMHead

        complete = DoubleBuffer._complete

        def without_head(self: DoubleBuffer, path: str) -> None:
            head = [tie for tie in self._routes.ties.get(path, ())
                    if isinstance(self._routes.layers[tie.other], ParallelLMHead)]
            if not head:
                complete(self, path)

        DoubleBuffer._complete = without_head  # type: ignore[method-assign]
        await super().start()


def loading(change):
    """A generator whose second set of weights gets `change(publication, tensors)` in place of the tensors by name of
    each bucket; `publication` counts those of this generator from 1."""
    class Loading(Generator):
        async def start(self) -> None:
            from rlhf_ray.weights import double_buffer

            unpack, opened = double_buffer.unpack, double_buffer.DoubleBuffer.__init__
            count = 0

            def counted(self, *args, **keywords) -> None:
                nonlocal count
                count += 1
                opened(self, *args, **keywords)

            def changed(tensors):
                return iter(change(count, {name: tensor.clone() for name, tensor in unpack(tensors)}).items())

            double_buffer.DoubleBuffer.__init__ = counted
            double_buffer.unpack = changed
            await super().start()

    return Loading


def once_without_a_tensor(publication, tensors):
    """The second publication leaves a layer as it was."""
    return {name: tensor for name, tensor in tensors.items() if publication != 2 or name != LAST}


def one_layer_twice(publication, tensors):
    """Layer 0's tensor is in layer 1, too. Version 0 is that of the files, so the layer is other weights altogether."""
    return {name: tensors[FIRST] if name == LAST else tensor for name, tensor in tensors.items()}


def run_with(kind, configure, directory, monkeypatch, **sections):
    """A run of 3 steps with generators of this class, without a critic, a reference and a reward model."""
    from rlhf_ray.stages import ppo

    if kind is not Generator:
        use_class(monkeypatch, kind)
    run = {**SMALL, "run": {"steps": 3}, "evaluation": None, "checkpoint": {"every": 0}, "critic": None,
           "rewards": {"main": {"type": "regex", "pattern": "w[0-9]*7"}},
           "algorithm": {"estimator": "grpo", "epochs": 2, "mini_batches": 2, "kl": {"coef": 0.0, "kind": "fixed"}},
           **sections, "policy": {"workers": 1, "optimizer": RATE, "ema_decay": None, **sections.get("policy", {})}}
    return ppo.run(load(PPOConfig, configure(directory, **run), []))


def scaled(model, directory):
    """A copy of a Llama with an entry by which vLLM's multiplies logits, and which transformers' does not read."""
    shutil.copytree(model, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "logit_scale": 0.9}))
    return directory


def moved(row):
    """By how many of the tolerances of the start an update moved log-probabilities."""
    return row["weights/canary_moved"] / TOLERATED["float32"]


def test_a_stale_tied_head_ends_the_run_saved(configure, files, tmp_path, monkeypatch, capsys):
    with pytest.raises(GeneratorMismatch, match=r"generator/0 confirmed version 1 .* also after all weights were pub"):
        run_with(StaleHead, configure, tmp_path / "run", monkeypatch, model={"path": str(files.tied)})
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_1"]
    assert capsys.readouterr().out.count("published again") == 1


@pytest.mark.slow
def test_a_tensor_that_is_left_out_once_is_found_and_repaired_before_its_samples_are_trained_on(
        configure, tmp_path, monkeypatch, capsys):
    summary = run_with(loading(once_without_a_tensor), configure, tmp_path / "run", monkeypatch)
    assert "generator/0 confirmed version 2 of the weights and does not compute with it" in capsys.readouterr().out
    rows = steps(tmp_path / "run")
    assert 5 < moved(rows[1]) < 20 and len(rows) == 3
    assert rows[2]["weights/canary_gap"] < rows[2]["weights/canary_bound"], "of the repaired generator"
    assert max(row["rollout/logprob_gap_p99"] for row in rows) < 1e-5, "trained on samples of the learner's own weights"
    assert summary["ledger"]["committed"] == 3 * 16 and summary["ledger"]["attempts given up"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_layer_that_is_loaded_twice_ends_the_run_saved(configure, tmp_path, monkeypatch, staleness):
    with pytest.raises(GeneratorMismatch, match="generator/0 confirmed version 1"):
        run_with(loading(one_layer_twice), configure, tmp_path / "run", monkeypatch,
                 coordinator={"max_staleness": staleness})
    assert (tmp_path / "run/checkpoints/step_1").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("sections", [
    {"model": {"dtype": "bfloat16"}}, {"model": {"dtype": "bfloat16"}, "policy": {"autocast": "bfloat16"}},
    {"policy": {"lora": {"rank": 4}}}, {"model": {"dtype": "bfloat16"}, "policy": {"lora": {"rank": 4}}},
    {"policy": {"zero_stage": 3, "workers": 2}, "weights": {"in_flight": "abort"}, "coordinator": {"max_staleness": 1}},
    {"generator": {"workers": 2, "engine": "async", "sampling": {"max_tokens": 12, "temperature": 0.7}}},
    {"model": {"dtype": "bfloat16", "float32_head": True}, "policy": {"autocast": "bfloat16"}},
    {"model": {"dtype": "bfloat16", "float32_head": True}, "policy": {"autocast": "bfloat16", "lora": {"rank": 4}}}],
    ids=["bfloat16", "autocast", "lora", "bfloat16-lora", "zero3", "async", "head", "head-lora"])
def test_runs_whose_generators_are_right_end_well(configure, tmp_path, monkeypatch, sections):
    """Updates are a thousand times as large as above."""
    large = {"optimizer": {"learning_rate": 0.01, "grad_clip": 1.0}}
    run_with(Generator, configure, tmp_path / "run", monkeypatch,
             **{**sections, "policy": {**large, **sections.get("policy", {})}})
    _, *rows = steps(tmp_path / "run")
    for row in rows:
        print({name: value for name, value in row.items() if "canary" in name})
        assert row["weights/canary_gap"] < row["weights/canary_bound"]
    assert len(rows) == 2 and moved(rows[0]) > 100


@pytest.mark.slow
def test_a_run_whose_generators_compute_another_model_does_not_start(configure, files, tmp_path, monkeypatch):
    model = scaled(files.policy, tmp_path / "scaled")
    with pytest.raises(ModelError, match=r"generator/0 and the policy learner compute .* from '.*scaled'"):
        run_with(Generator, configure, tmp_path / "run", monkeypatch, model={"path": str(model)})
    assert not steps(tmp_path / "run")


@pytest.mark.slow
def test_a_generator_alone_is_compared_with_transformers(files, tmp_path):
    model = scaled(files.policy, tmp_path / "scaled")

    async def compared(directory):
        generator = make_generator(directory)
        await generator.start()
        try:
            return await generator.compare_with_transformers()
        finally:
            await generator.stop()

    assert asyncio.run(compared(files.policy)) < 1e-4
    with pytest.raises(ModelError, match=r"vLLM computes another model from '.*scaled' than transformers"):
        asyncio.run(compared(model))
