"""The roles that are measured: the project's own, on one thread, with the settings of the grid."""

import asyncio
import time
from typing import Any

from benchmarks.growth.measured_role import Role, Task, Work
from benchmarks.growth.settings import CONTEXT, MICRO_BATCH_TOKENS, SEQUENCES, Size
from benchmarks.growth.workload import POLICY, REWARD, experience, policy_config, prompts, rollout
from benchmarks.workload import SEED
from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.generation import GenerationConfig, SamplingConfig, WeightsConfig
from rlhf_ray.config.learner import PolicyConfig
from rlhf_ray.config.rewards import ModelReward
from rlhf_ray.config.stages import CriticConfig
from rlhf_ray.records import SampleKey

ALGORITHM = AlgorithmConfig(epochs=1, mini_batches=1)
"""One optimizer step over all rows."""


class GeneratorRole(Role):
    """vLLM in this process: drawing responses whose lengths are given, and taking new weights."""

    ACTIVITIES, ANY = ("generation",), ("receive weights",)

    @classmethod
    def samples(cls, size: Size, task: Task) -> int:
        return SEQUENCES if task[0] == "generation" else 1

    def start(self) -> None:
        from safetensors.torch import load_file

        from rlhf_ray.roles.generator import Generator
        from rlhf_ray.weights.publication import SealedBuckets

        config = GenerationConfig(engine="in_process", threads=1, max_sequences=SEQUENCES, chunk=SEQUENCES,
                                  kv_cache_mb=self.size.kv_cache_mb)
        self._loop, self._version = asyncio.new_event_loop(), 0
        self._generator = Generator(policy_config(self.directory), config, SEED, CONTEXT)
        self._loop.run_until_complete(self._generator.start())
        self._generator._stop_tokens = []  # a random model ends one response in a thousand tokens; these have a length
        weights = load_file(self.directory / POLICY / "model.safetensors")
        specs = [(name, tuple(tensor.shape), "float32") for name, tensor in weights.items()]
        self._sealed_buckets = SealedBuckets(specs, weights.keys(), WeightsConfig().bucket_bytes,
                                             lambda names: {name: weights[name] for name in names})

    def work(self, activity: str, length: int, rows: int) -> Work:
        if activity == "receive weights":
            return self._receive()
        asked = prompts(rows)
        keys = [SampleKey(0, row, 0) for row in range(rows)]
        sampling = SamplingConfig(max_tokens=length)

        def generate() -> None:
            drawn = self._loop.run_until_complete(self._generator.generate(asked, keys, SEED, sampling))
            if drawn.response_mask.sum() != rows * length:
                raise RuntimeError(f"{rows} responses of {length} tokens were asked for, "
                                   f"{drawn.response_mask.sum()} tokens came")

        return generate

    def _receive(self) -> Work:
        async def receive() -> None:
            self._version += 1
            count = self._sealed_buckets.plan.whole.buckets
            buckets = [bucket for i in range(count) if (bucket := self._sealed_buckets.bucket(self._version, i))]
            began = time.process_time()
            await self._generator.begin_weights(self._version, self._version, count)
            for bucket in buckets:
                await self._generator.load_weights(bucket, self._version)
            await self._generator.finish_weights(self._version)
            self._received_s = time.process_time() - began

        def work() -> float:
            self._loop.run_until_complete(receive())
            return self._received_s

        return work


class ReferenceRole(Role):
    """The frozen reference."""

    ACTIVITIES = ("reference",)

    def start(self) -> None:
        from rlhf_ray.roles.reference_scorer import ReferenceScorer

        self._scorer = ReferenceScorer(policy_config(self.directory), MICRO_BATCH_TOKENS, 1.0)
        self._scorer.start()

    def work(self, activity: str, length: int, rows: int) -> Work:
        made = rollout(rows, length)
        return lambda: self._scorer.logprobs([made])


class RewardRole(Role):
    """A reward model of the policy's shape."""

    ACTIVITIES = ("reward",)

    def start(self) -> None:
        from rlhf_ray.roles.reward_scorer import RewardScorer

        source = ModelReward(type="model", path=str(self.directory / REWARD))
        self._loop = asyncio.new_event_loop()
        self._scorer = RewardScorer({"model": source}, policy_config(self.directory), MICRO_BATCH_TOKENS)
        self._loop.run_until_complete(self._scorer.start())

    def work(self, activity: str, length: int, rows: int) -> Work:
        made, asked = rollout(rows, length), prompts(rows)
        return lambda: self._loop.run_until_complete(self._scorer.score(made, asked))


class PolicyRole(Role):
    """The policy learner on one rank: old log-probabilities, updates, and the sending side of a publication."""

    ACTIVITIES, ANY = ("log-probabilities", "policy update"), ("send weights",)

    def start(self) -> None:
        from rlhf_ray.engine.distributed import free_address
        from rlhf_ray.roles.policy_learner import PolicyLearner

        config = PolicyConfig(micro_batch_tokens=MICRO_BATCH_TOKENS)
        self._learner = PolicyLearner(config, policy_config(self.directory), rank=0, world=1, seed=SEED,
                                      total_steps=10**6, algorithm=ALGORITHM, temperature=1.0)
        self._learner.start(free_address("127.0.0.1"), timeout_s=600.0)
        plan = self._learner.plan_weights(WeightsConfig().bucket_bytes, fused_groups=[])
        self._buckets, self._step, self._version = plan.whole.buckets, 0, 0

    def work(self, activity: str, length: int, rows: int) -> Work:
        if activity == "send weights":
            return self._send
        if activity == "log-probabilities":
            made = rollout(rows, length)
            return lambda: self._learner.logprobs(made)
        learned = experience(rows, length)
        return lambda: self._update(learned)

    def _update(self, learned: Any) -> None:
        self._step += 1
        self._learner.update(self._step, 0.0, learned)

    def _send(self) -> None:
        self._version += 1
        for index in range(self._buckets):
            self._learner.weight_bucket(self._version, index)


class CriticRole(Role):
    """The critic learner on one rank: values and updates."""

    ACTIVITIES = ("values", "critic update")

    def start(self) -> None:
        from rlhf_ray.engine.distributed import free_address
        from rlhf_ray.roles.critic_learner import CriticLearner

        config = CriticConfig(micro_batch_tokens=MICRO_BATCH_TOKENS)
        self._learner = CriticLearner(config, policy_config(self.directory), rank=0, world=1, seed=SEED,
                                      total_steps=10**6, algorithm=ALGORITHM)
        self._learner.start(free_address("127.0.0.1"), timeout_s=600.0)
        self._step = 0

    def work(self, activity: str, length: int, rows: int) -> Work:
        if activity == "values":
            made = rollout(rows, length)
            return lambda: self._learner.values(made)
        learned = experience(rows, length)
        return lambda: self._update(learned)

    def _update(self, learned: Any) -> None:
        self._step += 1
        self._learner.update(self._step, learned)


ROLES: dict[str, type[Role]] = {"generator": GeneratorRole, "reference scorer": ReferenceRole,
                                "reward scorer": RewardRole, "policy learner": PolicyRole,
                                "critic learner": CriticRole}
