"""A learner's engine on one rank, on a model of two weights; what happened is written as JSON to the file named.

A process of its own: joining a process group and choosing an accelerator are for life.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from rlhf_ray.config.learner import LearnerConfig, OptimizerConfig
from rlhf_ray.engine import distributed
from rlhf_ray.engine.deepspeed_engine import StepResult, TrainEngine
from rlhf_ray.errors import RLHFError
from tests.not_finite import NoNumber

X = torch.tensor([[3.0, -4.0]])


class TwoWeights(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            self.model.weight.copy_(torch.tensor([[1.0, 2.0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.told = self.model.training
        return self.model(x)


def engine(zero_stage: int = 1) -> TrainEngine:
    optimizer = OptimizerConfig(learning_rate=0.1, warmup_steps=2, betas=(0.9, 0.99))
    return TrainEngine(TwoWeights(), LearnerConfig(optimizer=optimizer, zero_stage=zero_stage), total_steps=10)


def step(it: TrainEngine, losses: Iterable[torch.Tensor] | None = None) -> StepResult:
    """One optimizer step; without losses by the module's output."""
    for loss in [it.forward(X).sum()] if losses is None else losses:
        it.backward(loss)
    return it.step()


def modes(it: TrainEngine) -> list[bool]:
    """Whether layers that were loaded for use, as transformers loads them, are told of training in each pass."""
    it.module.model.eval()
    found = []
    for work in (it.forward, it.infer, it.infer, it.forward, it.forward):
        work(X)
        found.append(it.module.told)
    return found


def save(it: TrainEngine, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    it.snapshot().write(folder / "rank_0.safetensors")
    return folder


def at_another_stage(folder: Path) -> list[list[Any]]:
    """Weights and norm after one more step, where one stage goes on from what another saved, after steps or none."""
    found = []
    for before, after, steps in ((0, 3, 0), (0, 3, 2), (3, 0, 0), (3, 0, 2)):
        first, second = engine(before), engine(after)
        for _ in range(steps):
            step(first)
        second.load(save(first, folder / f"{before}{after}{steps}"))
        found.append([[vars(step(it)), weights(it), it.optimizer_steps]
                      for it in (first, second)])
    return found


def weights(it: TrainEngine) -> list[float]:
    return it.gather(["weight"])["weight"].flatten().tolist()


SPOILED = {
    "loss": lambda y: y * float("nan"),
    "infinite loss without a gradient": lambda y: y.clamp(max=1.0) + float("inf"),
    "gradient": NoNumber.apply,
}


def failing_step(spoil: Any, zero_stage: int) -> dict[str, Any]:
    """A step, one of whose two losses or gradients is not finite, between two that are well; and the two alone."""
    disturbed, plain = engine(zero_stage), engine(zero_stage)
    found = []
    for it in (disturbed, plain):
        step(it)
        if it is disturbed:
            losses = (way(it.forward(X)).sum() for way in (spoil, lambda y: y))
            between = weights(it), step(it, losses), weights(it)
        after = vars(step(it))
        found.append({"weights": weights(it), "steps": it.optimizer_steps, "after": after})
    return {"before": between[0], "applied": between[1].applied, "norm": str(between[1].grad_norm), "left": between[2],
            "disturbed": found[0], "plain": found[1]}


def dropped_step(zero_stage: int) -> list[dict[str, Any]]:
    """Two steps, between which the gradients of two other losses are dropped; and the two steps alone."""
    found = []
    for drops in (True, False):
        it = engine(zero_stage)
        results = [vars(step(it))]
        if drops:
            for factor in (0.3, 5.0):
                it.backward(factor * it.forward(X).sum())
            it.drop_gradients()
        results.append(vars(step(it)))
        found.append({"results": results, "weights": weights(it), "steps": it.optimizer_steps})
    return found


def skipped_updates() -> dict[str, Any]:
    """The count of consecutive skipped updates after each update, and the error; an applied update resets the count."""
    it, counts, message = engine(), [], "nothing"
    for applied in (0, 0, 4, 0, 0, 0):
        try:
            it.count_update(applied)
        except RLHFError as error:
            message = f"{type(error).__name__}: {error}"
        counts.append(it.consecutive_skipped_updates)
    return {"counts": counts, "error": message}


class Sentinel:
    """Unpickling it makes a file: what a poisoned checkpoint would do, but harmless."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def poisoned(folder: Path) -> str:
    """What loading says where somebody has put a pickle with a call into the place of a file; "fired" if it ran."""
    it = engine()
    save(it, folder)
    torch.save({"weights": Sentinel(folder / "fired")}, folder / "rank_0.safetensors")
    try:
        it.load(folder)
        told = "nothing"
    except RLHFError as error:
        told = f"{type(error).__name__}: {error}"
    return "fired" if (folder / "fired").exists() else told


def put_aside(folder: Path) -> list[list[Any]]:
    """Three steps, saved after the second, of an engine that puts its state aside between them, and of one that keeps
    it."""
    found = []
    for stage in (0, 3):
        made = []
        for aside in (True, False):
            it, results = engine(stage), []
            for number in range(3):
                if aside and number:
                    it.reload_state()
                results.append(vars(step(it)))
                if aside:
                    it.offload_state()
                if number == 1:
                    save(it, folder / f"aside{stage}{aside}")
            resumed = engine(stage)
            resumed.load(folder / f"aside{stage}{aside}")
            made.append([results, weights(it), vars(step(resumed))])
        found.append(made)
    return found


def main(folder: Path) -> dict[str, Any]:
    distributed.join(distributed.free_address("127.0.0.1"), 0, 1, 60.0)
    whole, parts, unsharded = engine(), engine(), engine(zero_stage=0)
    results = [vars(step(whole))]
    first = weights(whole)
    step(parts, (parts.forward(X).sum() * share for share in (0.25, 0.75)))
    save(whole, folder)
    resumed = engine()
    resumed.load(folder)
    restored = {"weights": weights(resumed), "steps": resumed.optimizer_steps}
    results += [vars(step(it)) for it in (whole, resumed)]
    try:
        resumed.load(folder / "nowhere")
        missing = "nothing"
    except RLHFError as error:
        missing = f"{type(error).__name__}: {error}"
    plain = vars(step(unsharded))
    return {
        "unsharded": {"result": plain, "first": weights(unsharded)},
        "first": first, "in_parts": weights(parts), "results": results, "restored": restored, "missing": missing,
        "second": [weights(whole), weights(resumed)], "graph": whole.infer(X).requires_grad,
        "spoiled": {kind: [failing_step(spoil, stage) for stage in range(4)] for kind, spoil in SPOILED.items()},
        "dropped": [dropped_step(stage) for stage in range(4)],
        "skipped_updates": skipped_updates(), "modes": modes(engine()),
        "at_another_stage": at_another_stage(folder),
        "put_aside": put_aside(folder),
        "poisoned": poisoned(folder / "poisoned"),
    }


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(json.dumps(main(target.parent)))
    distributed.leave()
