"""What `rlhf-ray plan` says of memory, beside what the workers of small real runs hold at most.

Runs of several model sizes, token budgets and ZeRO stages. Constants of
`rlhf_ray/planning/memory_breakdown.py` come from other runs than these, of other shapes; nothing is fitted to a case.
"""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure
from benchmarks.side_process import SideFailed

MIB = 2**20
TIMEOUT_S = 900.0
GOAL = 0.15
ROLES = {"Generator": "generator", "ReferenceScorer": "reference", "RewardScorer": "reward", "PolicyLearner": "policy",
         "CriticLearner": "critic", "SFTLearner": "learner"}
"""Classes of the workers that hold a model, and the sections of the configuration that planning speaks of."""


@dataclass(frozen=True)
class Case:
    """One run."""

    name: str
    stage: str
    shape: dict[str, Any]
    """Of the models, in transformers' words."""
    config: dict[str, Any]
    learner: dict[str, Any] = field(default_factory=dict)


def llama(hidden: int, layers: int, heads: int, intermediate: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    """A shape."""
    return {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "intermediate_size": intermediate, "vocab_size": vocabulary, "max_position_embeddings": 512,
            "tie_word_embeddings": False, **more}


CASES = (
    Case("PPO, 46M", "ppo", llama(640, 6, 10, 1920, 12000, num_key_value_heads=10), {}, {"micro_batch_tokens": 1536}),
    Case("SFT, 23M, two ranks, ZeRO 2", "sft", llama(512, 5, 8, 1408, 8000, num_key_value_heads=2), {},
         {"micro_batch_tokens": 1024, "workers": 2, "zero_stage": 2}),
    Case("SFT, 60M, two ranks, ZeRO 3", "sft", llama(640, 8, 10, 1792, 16000, num_key_value_heads=5), {},
         {"micro_batch_tokens": 512, "workers": 2, "zero_stage": 3, "gradient_checkpointing": True}),
)


def measure(directory: Path, repeats: int) -> dict[str, Figure]:
    """The largest error over all workers that hold a model. Every case runs once: memory hardly varies.

    Raises:
        SideFailed: a run failed.
    """
    rows = [row for case in CASES for row in compare(case, directory / f"plan-memory-{CASES.index(case)}")]
    errors = [abs(row["error"]) for row in rows]
    return {"plan_memory_error": Figure(
        max(errors), errors, "lower", GOAL, "memory planned, against the most that each worker held",
        more={"workers": rows})}


def compare(case: Case, directory: Path) -> list[dict[str, Any]]:
    """A row for each role of one run: MiB planned and measured, and how far the one is from the other."""
    from rlhf_ray.config.load import STAGES
    from rlhf_ray.planning.memory_breakdown import RUNTIME
    from rlhf_ray.planning.model_lookup import shape_of
    from rlhf_ray.planning.node_spec import parse_nodes
    from rlhf_ray.planning.plan import make_plan

    found = run(case, directory)
    plan = make_plan(STAGES[case.stage](**found["config"]), parse_nodes("1x(cpus=8,memory=64)"), shape_of)
    rows = []
    for name, role in ROLES.items():
        if name not in found["held_mib"]:
            continue
        planned, held = plan.memory[role].host_bytes / MIB, max(found["held_mib"][name])
        parts = {part: round(amount / MIB) for part, amount in plan.memory[role].host.items()}
        rows.append({"run": case.name, "role": role, "planned_mib": round(planned), "measured_mib": round(held),
                     "error": planned / held - 1, "parts_mib": parts,
                     "of_the_model_mib": round(planned - parts[RUNTIME])})
    return rows


def run(case: Case, directory: Path) -> dict[str, Any]:
    """The run in a separate process; errors as in `measure`."""
    directory.mkdir(parents=True, exist_ok=True)
    given, out = directory / "case.json", directory / "out.json"
    given.write_text(json.dumps({"stage": case.stage, "shape": case.shape, "config": whole_config(case, directory)}))
    command = [sys.executable, "-m", "benchmarks.plan_memory_run", str(given), str(out)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise SideFailed(f"{case.name} was not done in {TIMEOUT_S:g} s") from None
    if ended.returncode:
        raise SideFailed(f"{case.name} failed:\n{ended.stderr[-2000:]}")
    read: dict[str, Any] = json.loads(out.read_text())
    return read


def whole_config(case: Case, directory: Path) -> dict[str, Any]:
    """The case's configuration: two steps, a checkpoint after each, one core a worker."""
    policy, learner = {"path": str(directory / "policy")}, {"cpus": 0.4, **case.learner}
    rows = 2 * case.learner["micro_batch_tokens"] * case.learner.get("workers", 1) // 96
    whole = {
        "run": {"dir": str(directory / "run"), "steps": 2}, "pools": {"default": {"cpus": 4}}, "model": policy,
        "cluster": {"dashboard": False}, "logging": {"tensorboard": False, "ray_metrics": False},
        "checkpoint": {"every": 1, "keep": 1},
    }
    if case.stage != "ppo":
        return {**whole, "data": {"prompt": "prompt", "response": "response"}, "learner": learner,
                "training": {"batch_size": rows}}
    scorer = {"micro_batch_tokens": case.learner["micro_batch_tokens"]}
    return {
        **whole, "rewards": {"judge": {"type": "model", "path": str(directory / "reward")}}, "prompts": {},
        "generator": {"cpus": 0.4, "chunk": 8, "max_sequences": 8, "sampling": {"max_tokens": 80}},
        "reference": scorer, "reward": scorer, "policy": learner, "critic": learner,
        "algorithm": {"epochs": 1, "mini_batches": 1}, "coordinator": {"prompts_per_step": -(-rows // 8) * 8},
    }
