"""One of two ranks that hold a reference model and reward models together; what they say is pickled.

A process of its own: joining a process group and choosing an accelerator are for life.
"""

import asyncio
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.rewards import FunctionReward, ModelReward
from rlhf_ray.errors import ModelError, RewardError, UnscoredSamples
from rlhf_ray.internals.deepspeed import managed_shard
from rlhf_ray.models.shard import WHOLE, Shard
from rlhf_ray.records import Prompts, Rollout, offsets_of
from rlhf_ray.roles.reference_scorer import ReferenceScorer
from rlhf_ray.roles.reward_scorer import RewardScorer
from tests.unit.roles.conftest import rollout_of

BUDGET = 24
"""Several micro-batches, and not as many on each rank."""
SCORED = """def length(responses):
    return [float(len(text)) for text in responses]
def fails(responses):
    if any("w" in text for text in responses): raise ValueError("no score today")
    return [0.0 for _ in responses]
"""


def rollouts() -> list[Rollout]:
    """Batches of five rows, of one row (fewer than ranks), and of two."""
    masks = [[[0] * (2 + i % 3) + [1] * (3 + 2 * i) for i in range(rows)] for rows in (5, 1, 2)]
    return [rollout_of(rows, seed=len(rows)) for rows in masks]


def prompts_of(rollout: Rollout) -> Prompts:
    rows = len(rollout)
    return Prompts(offsets=offsets_of(np.ones(rows)), tokens=np.zeros(rows, dtype=np.int32), rows=np.arange(rows),
                   texts=["p"] * rows, metadata=[{}] * rows)


def reference(model: ModelConfig, shard: Shard, address: str) -> dict[str, Any]:
    """What a reference scorer says of each batch, and the bytes of the weights in this process."""
    scorer = ReferenceScorer(model, BUDGET, 0.7, shard=shard)
    started = scorer.start(address, 60.0)
    held = sum(managed_shard(p).nbytes if hasattr(p, "ds_id") else p.nbytes for p in scorer._model.parameters())
    return {"logprobs": [scorer.logprobs([rollout]) for rollout in rollouts()],
            "together": scorer.logprobs(rollouts()), "held": held, **started}


def rewards_of(reward: str, functions: Path, broken: bool) -> dict[str, Any]:
    function = f"{functions}:{'fails' if broken else 'length'}"
    return {"one": ModelReward(type="model", path=reward), "two": ModelReward(type="model", path=reward, weight=-2.0),
            "function": FunctionReward(type="function", function=function, weight=0.5)}


def reward(policy: ModelConfig, rewards: dict[str, Any], shard: Shard, address: str, on_failure: Any) -> Any:
    """What a reward scorer says of all batches at once, or its error."""

    async def ask() -> Any:
        judge = {"gold": ModelReward(type="model", path=rewards["one"].path, weight=3.0)}
        scorer = RewardScorer(rewards, policy, BUDGET, on_failure, judge=judge, shard=shard)
        try:
            await scorer.start(address, 60.0)
            try:
                return await scorer.score_each(rollouts(), [*map(prompts_of, rollouts())])
            except (RewardError, UnscoredSamples) as error:
                return error
        finally:
            await scorer.stop()

    return asyncio.run(ask())


def everything(policy: str, other: str, reward_model: str, functions: Path, shard: Shard, address: str
               ) -> dict[str, Any]:
    models = {"float32": ModelConfig(path=policy), "bfloat16": ModelConfig(path=policy, dtype="bfloat16"),
              "untied": ModelConfig(path=other)}
    said: dict[str, Any] = {name: reference(model, shard, address) for name, model in models.items()}
    for name, broken, on_failure in (("reward", False, "fail"), ("failed", True, "fail"),
                                     ("unscored", True, "quarantine")):
        said[name] = reward(models["float32"], rewards_of(reward_model, functions, broken), shard, address, on_failure)
    return said


def damaged(model: str, shard: Shard, address: str) -> str:
    """What a start says of a model whose passes are wrong on the second rank only."""
    from rlhf_ray.models import packed_model

    if shard.rank == 1:
        right = packed_model.token_logprobs
        packed_model.token_logprobs = lambda *args: 1.1 * right(*args)  # type: ignore[assignment]
    try:
        ReferenceScorer(ModelConfig(path=model), BUDGET, 1.0, shard=shard).start(address, 60.0)
        return "nothing"
    except ModelError as error:
        return str(error)


if __name__ == "__main__":
    policy, other, reward_model, functions, rank, address, target = sys.argv[1:]
    shard = Shard(int(rank), 2) if address else WHOLE
    found = everything(policy, other, reward_model, Path(functions), shard, address)
    if address:
        found["damaged"] = damaged(policy, shard, address)
    Path(target).write_bytes(pickle.dumps(found))
