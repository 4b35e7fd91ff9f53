"""Updates by the project's policy learner, alone in its process: one rank, gloo, one thread, DeepSpeed around it."""

from pathlib import Path

import torch

from benchmarks.learner_rows import experience
from benchmarks.workload import SEED, model_config
from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.learner import OptimizerConfig, PolicyConfig
from rlhf_ray.records import Experience
from rlhf_ray.roles.policy_learner import PolicyLearner

LEARNING_RATE = 1e-5
ALGORITHM = AlgorithmConfig(epochs=1, mini_batches=4, whiten_advantages=False)
"""Four optimizer steps of 32 rows a turn. (Whitening happens once an update and is not what is compared.)"""
LEARNER = PolicyConfig(micro_batch_tokens=2048, optimizer=OptimizerConfig(learning_rate=LEARNING_RATE))
"""As in the quickstart: a mini-batch in one pass."""


class LearnerSide:
    """`PolicyLearner.update` on the workload's rows, which lie end to end without padding."""

    learner = PolicyLearner

    def __init__(self, directory: Path) -> None:
        torch.set_num_threads(1)
        whole = experience(directory)
        self._learner = self.learner(LEARNER, model_config(directory), rank=0, world=1, seed=SEED, total_steps=10**6,
                                     algorithm=ALGORITHM, temperature=1.0)
        self._learner.start(self._learner.rendezvous("127.0.0.1"), timeout_s=600.0)
        self._tokens = float(len(whole.tokens))
        self._experience = self.rows(whole)
        self._step, self._grad_norm = 0, 0.0

    def rows(self, whole: Experience) -> Experience:
        """What the learner is given."""
        return whole

    def run(self) -> float:
        """One update; returns its tokens, padding not counted."""
        self._step += 1
        self._grad_norm = self._learner.update(self._step, 0.0, self._experience).metrics["grad_norm"]
        return self._tokens

    def proof(self) -> list[float]:
        """Mean norm of the update's gradients."""
        return [self._grad_norm]
