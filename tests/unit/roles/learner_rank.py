"""Learners of every kind on one rank of DeepSpeed; what they return is pickled to the file named.

A process of its own: joining a process group and choosing an accelerator are for life.
"""

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlhf_ray.checkpoint.model_card import ModelCardInfo
from rlhf_ray.config.algorithm import PtxConfig
from rlhf_ray.config.learner import LoRAConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.supervised_records import Pairs
from rlhf_ray.engine import distributed
from rlhf_ray.roles.actor_critic_learner import ActorCriticLearner
from rlhf_ray.roles.critic_learner import CriticLearner
from rlhf_ray.roles.learner import Learner
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.roles.supervised_learner import ProcessRewardLearner, RewardModelLearner, SFTLearner
from tests.cluster.learners.plain_torch import (
    LEAVING_OUT,
    SMALL,
    STEPS,
    algorithm,
    critic_arguments,
    make_experiences,
    make_rollout,
    make_sequences,
    make_step_rows,
    partly_useless,
    policy_arguments,
    supervised_arguments,
)

CARD = ModelCardInfo("ppo", 2, "base", "rows")
BALANCED = 0.5
"""Coefficient of the routers' loss."""
MARGINS = np.linspace(0, 2, 9, dtype=np.float32)


def weights(it: Learner) -> dict[str, np.ndarray]:
    names = [name for name, _ in it.engine.parameter_shapes()]
    return {name: tensor.float().numpy().copy() for name, tensor in it.engine.gather(names).items()}


def buckets(it: Learner) -> list[list[str]]:
    """Publish the weights whole: the names of the tensors in each bucket."""
    plan = it.plan_weights(20_000, [])
    published = [it.weight_bucket(1, index) for index in range(plan.whole.buckets)]
    return [[entry.name for entry in bucket.entries] for bucket in published if bucket is not None]


def make(cls: Any, address: str, arguments: dict[str, Any]) -> Any:
    it = cls(rank=0, world=1, **arguments)
    it.started = it.start(address, 60.0)
    return it


def save(it: Learner, folder: Path) -> None:
    it.begin_save(str(folder))
    while not it.save_progress().done:
        pass


def resumed(cls: Any, address: str, arguments: dict[str, Any], folder: Path, update: Any, prepare: Any = None) -> Any:
    """Weights after a second update, of a learner that went on and of one that took back what it saved."""
    ends = []
    for number in range(2):
        it = make(cls, address, arguments)
        if prepare is not None:
            prepare(it)
        if number == 0:
            update(it, 1)
            save(it, folder / "new" / "state")
        else:
            it.load(str(folder / "new" / "state"))
        update(it, 2)
        ends.append(weights(it))
    return ends


def policy(files: Any, address: str, folder: Path) -> dict[str, Any]:
    experiences = make_experiences(files)
    arguments = policy_arguments(files, 1, SMALL, algo=algorithm(kl={"placement": "loss"}))
    arguments["config"] = arguments["config"].model_copy(update={"ema_decay": 0.5})

    def mix(it: PolicyLearner) -> None:
        it.take_pretraining_text(PtxConfig(path="unused", batch_size=3, coef=0.7), make_sequences(1))

    def update(it: PolicyLearner, step: int) -> Any:
        return it.update(step, 0.4, *experiences)

    it = make(PolicyLearner, address, arguments)
    result: dict[str, Any] = {"started": it.started, "before": weights(it)}
    result["logprobs"] = it.logprobs(*(make_rollout(e) for e in experiences)).values
    result["stats"] = update(it, 0)
    result["after"] = weights(it)
    result["again"] = update(it, 0) is result["stats"]
    it.export(str(folder / "model"), CARD)
    it.export_average(str(folder / "average"), CARD)
    save(it, folder / "saved")
    result["files"] = sorted(path.name for path in (folder / "saved").iterdir())
    result |= {"buckets": buckets(it), "unchanged": it.unchanged_weights()}
    result["ends"] = resumed(PolicyLearner, address, arguments, folder, update, mix)
    return result


def left_out(files: Any, address: str, _: Path) -> dict[str, Any]:
    """Updates of a policy with rows without advantage and truncated rows; then one of truncated rows alone."""
    experiences = partly_useless(make_experiences(files))
    it = make(PolicyLearner, address, policy_arguments(files, 1, SMALL, algo=algorithm(**LEAVING_OUT)))
    result: dict[str, Any] = {"before": weights(it), "stats": it.update(0, 0.0, *experiences), "after": weights(it)}
    truncated = [replace(e, finish_reasons=["length"] * len(e)) for e in experiences]
    return {**result, "nothing": it.update(1, 0.0, *truncated), "decayed": weights(it)}


def adapters(files: Any, address: str, folder: Path) -> dict[str, Any]:
    experiences = make_experiences(files)
    arguments = policy_arguments(files, 1, SMALL)
    arguments["config"] = arguments["config"].model_copy(update={"lora": LoRAConfig(rank=2, targets=["q_proj"])})
    it, rollout = make(PolicyLearner, address, arguments), make_rollout(experiences[0])
    result: dict[str, Any] = {"started": it.started, "first": it.logprobs(rollout).values}
    it.update(0, 0.0, *experiences)
    result |= {"later": it.logprobs(rollout).values, "reference": it.reference_logprobs(rollout).values}
    it.export(str(folder / "merged"), CARD)
    it.export_adapter(str(folder / "adapter"), CARD)
    save(it, folder / "adapters_saved")
    result["files"] = sorted(path.name for path in (folder / "adapters_saved").iterdir())
    result |= {"buckets": buckets(it), "unchanged": sorted(it.unchanged_weights() or {})}
    alone = make(PolicyLearner, address, {**arguments, "publishes_adapters": True})
    alone.update(0, 0.0, *experiences)
    plan = alone.plan_weights(20_000, [])
    assert plan.whole == plan.changing
    sent = [alone.weight_bucket(1, index) for index in range(plan.whole.buckets)]
    result["alone"] = {entry.name: array.view("float32").reshape(entry.shape) for bucket in sent if bucket is not None
                       for entry, array in zip(bucket.entries, bucket.arrays, strict=True)}
    return result


def critic(files: Any, address: str, folder: Path) -> dict[str, Any]:
    experiences = make_experiences(files)
    it = make(CriticLearner, address, critic_arguments(files, 1, SMALL))
    result = {"before": weights(it), "values": it.values(*(make_rollout(e) for e in experiences)).values}
    result |= {"stats": it.update(0, *experiences), "after": weights(it)}
    arguments = critic_arguments(files, 1, SMALL)
    fresh = make(CriticLearner, address, {
        **arguments, "config": arguments["config"].model_copy(update={"init": "policy"}),
        "model": ModelConfig(path=str(files.tied))})
    named = {name: weights(make(CriticLearner, address, {
        **arguments, "config": arguments["config"].model_copy(update={"init": "policy", "path": str(path)}),
        "model": ModelConfig(path=str(path))}))
        for name, path in (("kept", files.reward), ("fresh_of_path", files.tied))}
    return {**result, "fresh": weights(fresh), **named}


def actor_critic(files: Any, address: str, folder: Path) -> dict[str, Any]:
    experiences = make_experiences(files)
    it = make(ActorCriticLearner, address, policy_arguments(files, 1, SMALL))
    logprobs, values = it.logprobs_and_values(*(make_rollout(e) for e in experiences))
    head = it.engine.module.value_head.weight.detach().float().numpy().copy()
    it.export_value_head(str(folder / "head.safetensors"))
    result = {"logprobs": logprobs.values, "values": values.values, "head": head, "before": weights(it)}
    policy, of_critic = it.update_both(0, 0.0, *experiences)
    return {**result, "policy": policy, "critic": of_critic, "after": weights(it)}


def supervised(cls: Any, path: Path, train: Any, held_out: Any, address: str, **options: Any) -> dict[str, Any]:
    it = make(cls, address, {**supervised_arguments(path, 1, SMALL), **options})
    it.take(train, held_out)
    result = {"before": weights(it), "evaluated": it.evaluate()}
    result |= {"stats": [it.update(step) for step in (1, 2)], "after": weights(it)}
    it.take(train, held_out.select([]))
    return {**result, "without": it.evaluate(), "learner": it}


def mixture(files: Any, address: str, _: Path) -> dict[str, Any]:
    """SFT of a mixture of experts whose routers are balanced, in one micro-batch; the same in several."""
    train, held_out = make_sequences(1), make_sequences(2)
    found = []
    for tokens in (4096, SMALL):
        config = supervised_arguments(files.mixture, 1, tokens)["config"].model_copy(
            update={"router_aux_loss_coef": BALANCED})
        found.append(supervised(SFTLearner, files.mixture, train, held_out, address, config=config))
        learner = found[-1].pop("learner")
        found[-1]["parts"] = [part for part, _ in learner.parts(train)]
    return {**found[0], "several": found[1]}


def main(files: Any, folder: Path) -> dict[str, Any]:
    address = distributed.free_address("127.0.0.1")
    distributed.join(address, 0, 1, 60.0)
    results = {make_all.__name__: make_all(files, address, folder)
             for make_all in (policy, left_out, adapters, critic, actor_critic, mixture)}
    for cls, path, data, options in (
        (SFTLearner, files.tied, [make_sequences(seed) for seed in (1, 2)], {}),
        (RewardModelLearner, files.reward,
         [Pairs(make_sequences(3), make_sequences(4), MARGINS), Pairs(make_sequences(5), make_sequences(6))], {}),
        (ProcessRewardLearner, files.tied, [make_step_rows(seed, soft=False) for seed in (3, 4)], {"steps": STEPS}),
    ):
        results[cls.__name__] = supervised(cls, path, *data, address, **options)
        it = results[cls.__name__].pop("learner")
        it.export(str(folder / cls.__name__), CARD)
    return results


if __name__ == "__main__":
    tied, reward, mixed, folder = map(Path, sys.argv[1:])
    results = main(SimpleNamespace(tied=tied, reward=reward, mixture=mixed), folder)
    (folder / "results.pickle").write_bytes(pickle.dumps(results))
    distributed.leave()
