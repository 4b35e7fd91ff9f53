"""One run as a configuration: a model, a batch and GPUs, divided among roles, for `rlhf-ray plan` to judge.

Which configurations are tried is decided here; what they take and how long a step lasts is `rlhf_ray.planning`'s.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.planning.hardware import GPUS, Hardware
from rlhf_ray.planning.model_lookup import shape_of
from rlhf_ray.planning.model_shape import ModelShape
from rlhf_ray.planning.node_spec import Node, parse_nodes
from rlhf_ray.planning.roofline import Workload

MODELS = {"8B": "meta-llama/Meta-Llama-3-8B", "70B": "meta-llama/Llama-3.1-70B", "30B-A3B": "Qwen/Qwen3-30B-A3B"}
"""Models of the tables: two dense ones and a mixture of experts."""
WEIGHTS_SHARE = 0.6
"""Largest share of a GPU that the weights of a generator or of a frozen model may take, to leave room for the rest."""
MICRO_BATCHES = (16384, 8192, 4096)
"""Tokens of a micro-batch that are tried, the largest that fits is taken."""
EIGHTHS = (1, 2, 3, 4, 6)
"""Shares of the GPUs that generate, in eighths."""
SCORING = (16, 8, 4)
"""One in so many GPUs holds a frozen model."""


@dataclass(frozen=True)
class RunShape:
    """What is trained, on what, with which batch."""

    model: str
    """Name on the Hub, of the table of known models."""
    gpus: int
    gpu: str = "h100"
    prompts: int = 128
    samples_per_prompt: int = 16
    longest_prompt: int = 1024
    longest_response: int = 2048
    mini_batches: int = 4
    staleness: int = 1
    critic: bool = False
    """PPO with a critic and a reward model of the policy's size; if not, GRPO with a reward function. Both have a
    reference."""
    transport: Literal["object_store", "nccl"] = "nccl"
    work: Workload | None = None
    """Lengths, if known; None assumes them as `rlhf-ray plan` does."""
    training_share: float | None = None
    """Share of the GPU's peak that updates reach; None is that of `rlhf-ray plan`."""

    @property
    def hardware(self) -> Hardware:
        """The kind of GPU."""
        kind = GPUS[self.gpu]
        return kind if self.training_share is None else replace(kind, training_share=self.training_share)

    @property
    def shape(self) -> ModelShape:
        """The model's shape in bfloat16."""
        return shape_of(ModelConfig(path=self.model, dtype="bfloat16"), "model")

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.longest_prompt + self.longest_response

    @property
    def nodes(self) -> list[Node]:
        """The machines."""
        whole = self.hardware.gpus_per_node
        described = parse_nodes(f"{max(1, self.gpus // whole)}x{min(self.gpus, whole)}x{self.gpu}")
        return [replace(node, gpu=self.hardware) for node in described]


@dataclass(frozen=True)
class Division:
    """Who gets how many GPUs, and how."""

    generators: int
    tensor_parallel: int
    scorers: int
    """GPUs of each frozen model: the reference and, with a critic, the reward model."""
    shards: int
    """GPUs of one copy of a frozen model."""
    learners: int
    """GPUs of the policy; the critic has as many."""
    zero_stage: int = 3
    micro_batch_tokens: int = MICRO_BATCHES[-1]


def divisions(run: RunShape) -> Iterator[Division]:
    """Ways to divide the GPUs, each role in whole workers. No more learners than a mini-batch has rows, which are not
    split; the GPUs beyond stay idle."""
    least = smallest_group(run)
    for tensor_parallel in (size for size in (least, 2 * least) if size <= 8):
        for eighths in EIGHTHS:
            engines = max(1, run.gpus * eighths // 8 // tensor_parallel)
            for scorers in sorted({max(least, run.gpus // part // least * least) for part in SCORING}):
                left = run.gpus - engines * tensor_parallel - scorers * (1 + run.critic)
                learners = min(left // (1 + run.critic), run.prompts * run.samples_per_prompt // run.mini_batches)
                if learners > 0:
                    yield from (Division(engines * tensor_parallel, tensor_parallel, scorers, least, learners, stage)
                                for stage in stages(run) if stage == 3 or learners > 1)


def smallest_group(run: RunShape) -> int:
    """Fewest GPUs, a power of two, among which the weights in use leave room for a cache or a pass; at most 8."""
    room = WEIGHTS_SHARE * run.hardware.memory_bytes
    return next((size for size in (1, 2, 4) if run.shape.weight_bytes / size <= room), 8)


def stages(run: RunShape) -> tuple[int, ...]:
    """ZeRO stages worth trying: 3, and 2 where a GPU can hold the weights in float32 and their bfloat16 copy."""
    return (2, 3) if 6 * run.shape.parameters <= 0.7 * run.hardware.memory_bytes else (3,)


def configuration(run: RunShape, division: Division) -> PPOConfig:
    """The configuration of that division, not yet checked (`config.load.resolve`)."""
    model = {"path": run.model, "dtype": "bfloat16"}
    reward = {"preference": {"type": "model", **model}} if run.critic else {"right": {"type": "number"}}
    scorer = {"pool": "scoring", "workers": division.scorers, "shards": division.shards, "gpus": 1, "cpus": 1,
              "micro_batch_tokens": max(run.longest, 8192)}
    learner = {"workers": division.learners, "gpus": 1, "cpus": 1, "zero_stage": division.zero_stage,
               "autocast": "bfloat16", "gradient_checkpointing": True,
               "micro_batch_tokens": max(run.longest, division.micro_batch_tokens)}
    scoring = division.scorers * (1 + run.critic)
    values: dict[str, Any] = {
        "run": {"dir": "runs/cluster_model", "steps": 1}, "cluster": {"address": "auto"}, "model": model,
        "rewards": reward, "prompts": {"path": "data/prompts.jsonl", "max_tokens": run.longest_prompt},
        "algorithm": {"estimator": "gae" if run.critic else "grpo", "epochs": 1, "mini_batches": run.mini_batches,
                      "importance": {"tokens": "truncate"}, "kl": {"coef": 0.01}},
        "coordinator": {"prompts_per_step": run.prompts, "samples_per_prompt": run.samples_per_prompt,
                        "max_staleness": run.staleness},
        "pools": {"generation": pool(division.generators // division.tensor_parallel, division.tensor_parallel),
                  "scoring": pool(scoring), "policy": pool(division.learners)},
        "generator": {"pool": "generation", "workers": division.generators // division.tensor_parallel, "cpus": 1,
                      "gpus": division.tensor_parallel, "tensor_parallel": division.tensor_parallel,
                      "chunk": max(16, run.samples_per_prompt), "max_sequences": 256,
                      "sampling": {"max_tokens": run.longest_response}},
        "reference": scorer, "reward": scorer if run.critic else {"pool": "scoring", "cpus": 0.5},
        "assembler": {"pool": "scoring", "cpus": 0.5}, "policy": {"pool": "policy", **learner},
        "weights": {"transport": run.transport, "bucket_mb": 1024},
    }
    if run.critic:
        values["pools"]["critic"] = pool(division.learners)
        values["critic"] = {"pool": "critic", **learner}
    return PPOConfig(**values)


def pool(bundles: int, gpus: int = 1) -> dict[str, int]:
    """A pool of alike bundles."""
    return {"bundles": bundles, "cpus": 4 * gpus, "gpus": gpus}
