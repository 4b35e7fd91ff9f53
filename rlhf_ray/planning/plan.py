"""The plan of a run: placement, memory, disk and time, and whether the run can work.

Nothing is started and no weight is loaded: a configuration, the shapes of its models and a list of nodes suffice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_ray.config.combination_checks import experience_bytes_per_token
from rlhf_ray.config.derived import training_sample
from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.config.stages import EvaluateConfig, PPOConfig, StageConfig
from rlhf_ray.planning.batch_layout import batch_layout_of, counted
from rlhf_ray.planning.config_suggestions import suggest_change
from rlhf_ray.planning.device_memory import Load, loads_of, worker_memories
from rlhf_ray.planning.findings import Finding, find_problems, idle_gpus, unknown_gpus
from rlhf_ray.planning.learner_memory import MOMENTS, trained
from rlhf_ray.planning.memory_breakdown import Memory, gib
from rlhf_ray.planning.node_spec import Node
from rlhf_ray.planning.publication_size import publication_in_words
from rlhf_ray.planning.roles import Role, Shapes, roles_of
from rlhf_ray.planning.roofline import Workload
from rlhf_ray.planning.step_time import StepTime, estimate_step_time
from rlhf_ray.planning.worker_placement import Placement, place

FLOAT = 4
LOGS = 50 * 2**20
"""Metrics, samples, ledger and report, which take tens of MiB in a usual run."""


@dataclass(frozen=True)
class Plan:
    """Everything that is known about a run before it starts."""

    config: StageConfig
    nodes: tuple[Node, ...]
    roles: tuple[Role, ...]
    memory: dict[str, Memory]
    """Memory of one worker, by role."""
    placement: Placement
    loads: tuple[Load, ...]
    geometry: dict[str, str]
    disk: dict[str, float]
    """Bytes by kind of file."""
    step_time: StepTime | None
    findings: tuple[Finding, ...]

    @property
    def refused(self) -> list[str]:
        """Reasons why the run cannot work; empty if it can."""
        return [finding.text for finding in self.findings if finding.level == "refused"]


def make_plan(config: StageConfig, nodes: Sequence[Node], shapes: Shapes, free_disk: float | None = None,
              work: Workload | None = None) -> Plan:
    """Plan a stage on some nodes.

    Args:
        shapes: of the models that the configuration names.
        free_disk: bytes free on the disk of `run.dir`; None if not known.
        work: the batch with its lengths, if they are known; else they are assumed (`step_time.workload_of`).

    Raises:
        ModelError: the shape of a model is not known.
    """
    roles = roles_of(config, shapes)
    placement = place(config.pools, {role.name: role.placement for role in roles}, nodes)
    memory, loads = worker_memories(roles, placement, nodes), loads_of(config.cluster, roles, placement, nodes)
    disk = disk_of(config, roles)
    findings = [Finding("refused", text) for text in placement.shortages]
    findings += _too_full(config, nodes, shapes, loads)
    findings += find_problems(config, roles, memory, loads, sum(disk.values()), free_disk)
    if idle := idle_gpus(config, placement, nodes):
        findings.append(Finding("idle", idle))
    findings += unknown_gpus(nodes)
    findings.sort(key=lambda finding: finding.level != "refused")
    placed = not placement.shortages
    layout = batch_layout_of(config)
    if isinstance(config, PPOConfig) and not isinstance(config, EvaluateConfig):
        layout["weights"] = publication_in_words(config, shapes(config.model, "model"))
    return Plan(config, tuple(nodes), tuple(roles), memory, placement, tuple(loads), layout, disk,
                estimate_step_time(config, roles, placement, nodes, work) if placed else None, tuple(findings))


def worst_load(config: StageConfig, nodes: Sequence[Node], shapes: Shapes, on: Load) -> float:
    """How full the fullest device with the same roles would be with this configuration."""
    roles = roles_of(config, shapes)
    placement = place(config.pools, {role.name: role.placement for role in roles}, nodes)
    loads = loads_of(config.cluster, roles, placement, nodes)
    return max((load.share for load in loads if load.is_like(on)), default=0.0)


def _too_full(config: StageConfig, nodes: Sequence[Node], shapes: Shapes, loads: Sequence[Load]) -> list[Finding]:
    """One refusal for each set of roles that exceeds a GPU or main memory, about the fullest such device."""
    findings: list[Finding] = []
    full = sorted((load for load in loads if load.share > 1), key=lambda load: (load.device is None, -load.share))
    while full:
        worst = full[0]
        more = len([load for load in full[1:] if load.is_like(worst)])
        full = [load for load in full if not load.is_like(worst)]
        role, parts = next(iter(worst.roles.items()))
        part = max(parts, key=lambda name: parts[name])
        change = suggest_change(config, worst, lambda changed, on=worst: worst_load(changed, nodes, shapes, on))  # type: ignore[misc]
        findings.append(Finding("refused", (
            f"{role} does not fit: {worst.name}{f' ({worst.kind})' if worst.device is not None else ''} lacks "
            f"{gib(worst.bytes - worst.capacity)}{f', as do {more} more like it' if more else ''}. "
            f"{change}. The roles there would hold {gib(worst.bytes)} of {gib(worst.capacity)} together; {role} holds "
            f"{gib(sum(parts.values()))}, of which {gib(parts[part])} are {part}")))
    return findings


def checkpoint_bytes(config: StageConfig, roles: Sequence[Role]) -> float:
    """Bytes of one checkpoint: trained weights, AdamW's moments and the moving average (if any) in float32, and the
    experience that the buffer may hold."""
    learners = [role for role in roles if isinstance(role.placement, LearnerConfig)]
    total = 0.0
    for role in learners:
        assert isinstance(role.placement, LearnerConfig)
        average = getattr(role.placement, "ema_decay", None) is not None
        total += FLOAT * (1 + MOMENTS + average) * trained(role.placement, role.models[0])
    if isinstance(config, PPOConfig) and config.coordinator.max_staleness:
        longest, _ = training_sample(config)
        per_token = float(experience_bytes_per_token(config))
        total += per_token * config.coordinator.max_staleness * config.coordinator.samples_per_step * longest
    return total


def disk_of(config: StageConfig, roles: Sequence[Role]) -> dict[str, float]:
    """Bytes that the run leaves on disk, by kind: checkpoints, the one being written, exported models, logs."""
    checkpoint = getattr(config, "checkpoint", None)
    models = [role for role in roles if role.name in ("policy", "learner")]
    if checkpoint is None or not models:
        return {"outputs": float(LOGS)}
    checkpoint_size, model = checkpoint_bytes(config, roles), float(models[0].models[0].weight_bytes)
    kept = checkpoint.keep + bool(checkpoint.best_metric)
    copies = 1 + bool(checkpoint.best_metric) + (getattr(models[0].placement, "ema_decay", None) is not None)
    return {
        f"{counted(kept, 'checkpoint')} kept": kept * checkpoint_size,
        "one being written": checkpoint_size,
        f"{counted(copies, 'model')} in Hugging Face format": copies * model,
        "metrics, samples, ledger": float(LOGS),
    }
