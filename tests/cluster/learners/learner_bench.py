"""A worker that builds learners one after another in one process, so that many of their settings can be compared."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rlhf_ray.engine import distributed
from rlhf_ray.engine.parameter_shards import gather_parameter
from rlhf_ray.roles.actor_critic_learner import ActorCriticLearner
from rlhf_ray.roles.critic_learner import CriticLearner
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.roles.supervised_learner import ProcessRewardLearner, RewardModelLearner, SFTLearner
from tests.not_finite import NoNumber

LEARNERS = (PolicyLearner, ActorCriticLearner, CriticLearner, SFTLearner, RewardModelLearner, ProcessRewardLearner)
CLASSES = {cls.__name__: cls for cls in LEARNERS}


class LearnerBench:
    """One rank. The process group is joined once; each learner starts as a stage starts it."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world

    def start(self, address: str, timeout_s: float) -> None:
        """Join the other ranks."""
        self._address = address
        distributed.join(address, self._rank, self._world, timeout_s)

    def make(self, cls: str, arguments: Mapping[str, Any], chunk_elements: int | None = None) -> str:
        """Build and start a learner in place of the previous one, whose logits exist for so many entries at a time.
        Returns which of its layers are compiled, in words."""
        self._learner = CLASSES[cls](rank=self._rank, world=self._world, **arguments)
        if chunk_elements:
            build = self._learner.build
            self._learner.build = lambda: in_chunks(build(), chunk_elements)
        return str(self._learner.start(self._address, 300.0)["compiled"])

    def spoil(self, rank: int) -> None:
        """From now on, on this rank alone, losses stay what they are and their gradients are not finite."""
        if rank == self._rank:
            loss = self._learner.loss
            self._learner.loss = lambda *given: replace(found := loss(*given), loss=NoNumber.apply(found.loss))

    def leave_out(self, step: int) -> None:
        """Let the learner take an update for made that was not."""
        self._learner.last_update = replace(self._learner.last_update, step=step)

    def save(self, directory: str) -> None:
        """Write a checkpoint's part and wait for it."""
        self._learner.begin_save(directory)
        while not self._learner.save_progress().done:
            time.sleep(0.01)

    def do(self, method: str, *args: Any) -> Any:
        """Call the learner."""
        return getattr(self._learner, method)(*args)

    def weights(self) -> dict[str, np.ndarray]:
        """Whole parameters by name (collective under ZeRO-3)."""
        engine = self._learner.engine
        names = [shape[0] for shape in engine.parameter_shapes()]
        return {name: tensor.float().numpy().copy() for name, tensor in engine.gather(names).items()}

    def value_head(self) -> dict[str, np.ndarray]:
        """The weight of the head that is no part of the language model (collective)."""
        weight = self._learner.engine.module.value_head.weight
        return {"value_head.weight": gather_parameter(weight).numpy().copy()}

    def average(self) -> dict[str, np.ndarray]:
        """Whole averages of the policy's weights by name (collective)."""
        engine = self._learner.engine
        names = [shape[0] for shape in engine.parameter_shapes()]
        found = self._learner.average.gather(names, True, engine.gather)
        return {name: tensor.numpy().copy() for name, tensor in found.items()}

    def leave(self) -> None:
        """Leave the process group."""
        distributed.leave()


def in_chunks(module: Any, elements: int) -> Any:
    """The module with smaller chunks of logits."""
    module.chunks = replace(module.chunks, elements=elements)
    return module
