"""The plan of a run: what would lie where, what it would hold and take, and whether it can work at all.

Nothing is started and no weight is loaded: a configuration, the shapes of its models and a list of nodes are enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.config.stages import PPOConfig, StageConfig
from rlhf_ray.planning.batch_layout import counted, geometry_of
from rlhf_ray.planning.config_suggestions import remedy
from rlhf_ray.planning.device_memory import Load, loads_of, memories
from rlhf_ray.planning.findings import Finding, gib, verdicts
from rlhf_ray.planning.learner_memory import MOMENTS, trained
from rlhf_ray.planning.nodes import Node
from rlhf_ray.planning.roles import Role, Shapes, roles_of
from rlhf_ray.planning.step_time import Pace, pace_of
from rlhf_ray.planning.worker_memory import Memory
from rlhf_ray.planning.worker_placement import Placement, place


@dataclass(frozen=True)
class Plan:
    """All that is known of a run before it is paid for."""

    config: StageConfig
    nodes: tuple[Node, ...]
    roles: tuple[Role, ...]
    memory: dict[str, Memory]
    """One worker's, by role."""
    placement: Placement
    loads: tuple[Load, ...]
    geometry: dict[str, str]
    disk: dict[str, float]
    """Bytes by what they are."""
    pace: Pace | None
    findings: tuple[Finding, ...]

    @property
    def refused(self) -> list[str]:
        """Why it cannot work; nothing where it can."""
        return [finding.text for finding in self.findings if finding.level == "refused"]


def make_plan(config: StageConfig, nodes: Sequence[Node], shapes: Shapes, free_disk: float | None = None) -> Plan:
    """Plan a stage on some nodes.

    Args:
        shapes: of the models that the configuration names.
        free_disk: bytes free where the run would be written, where that is known.

    Raises:
        ModelError: the shape of a model is not known.
    """
    roles = roles_of(config, shapes)
    placement = place(config.pools, {role.name: role.placement for role in roles}, nodes)
    memory, loads = memories(roles, placement, nodes), loads_of(config, roles, placement, nodes)
    disk = disk_of(config, roles)
    findings = [Finding("refused", text) for text in placement.shortages]
    findings += _too_full(config, nodes, shapes, loads)
    findings += verdicts(config, roles, memory, loads, sum(disk.values()), free_disk)
    findings.sort(key=lambda finding: finding.level != "refused")
    whole = not placement.shortages
    return Plan(config, tuple(nodes), tuple(roles), memory, placement, tuple(loads), geometry_of(config), disk,
                pace_of(config, roles, placement, nodes) if whole else None, tuple(findings))


def worst_load(config: StageConfig, nodes: Sequence[Node], shapes: Shapes, on: Load) -> float:
    """How full a device with the same roles would be at most, were this the configuration."""
    roles = roles_of(config, shapes)
    placement = place(config.pools, {role.name: role.placement for role in roles}, nodes)
    return max((load.share for load in loads_of(config, roles, placement, nodes) if load.is_like(on)), default=0.0)


def _too_full(config: StageConfig, nodes: Sequence[Node], shapes: Shapes, loads: Sequence[Load]) -> list[Finding]:
    """A refusal for each set of roles whose GPU or main memory is over its capacity, about the fullest such device."""
    found: list[Finding] = []
    full = sorted((load for load in loads if load.share > 1), key=lambda load: (load.device is None, -load.share))
    while full:
        worst = full[0]
        more = len([load for load in full[1:] if load.is_like(worst)])
        full = [load for load in full if not load.is_like(worst)]
        role, parts = next(iter(worst.roles.items()))
        part = max(parts, key=lambda name: parts[name])
        change = remedy(config, worst, lambda changed, on=worst: worst_load(changed, nodes, shapes, on))  # type: ignore[misc]
        found.append(Finding("refused", (
            f"{role} does not fit: {gib(worst.bytes - worst.capacity)} too much for {worst.name}"
            f"{f' ({worst.kind})' if worst.device is not None else ''}{f', and {more} more like it' if more else ''}. "
            f"{change}. Together the roles there would hold {gib(worst.bytes)} of {gib(worst.capacity)}; {role}'s part "
            f"is {gib(sum(parts.values()))}, {gib(parts[part])} of it {part}")))
    return found


FLOAT = 4
LOGS = 50 * 2**20
"""Metrics, samples, ledger, report: some dozen MiB of a usual run."""


def checkpoint_bytes(config: StageConfig, roles: Sequence[Role]) -> float:
    """One checkpoint: weights and AdamW's moments in float32 of what is trained, and the average where there is one;
    and the experience that may wait in the buffer."""
    learners = [role for role in roles if isinstance(role.placement, LearnerConfig)]
    whole = 0.0
    for role in learners:
        assert isinstance(role.placement, LearnerConfig)
        average = getattr(role.placement, "ema_decay", None) is not None
        whole += FLOAT * (1 + MOMENTS + average) * trained(role.placement, role.models[0])
    if isinstance(config, PPOConfig) and config.coordinator.max_staleness:
        longest = config.prompts.max_tokens + config.generator.sampling.max_tokens
        whole += 29.0 * config.coordinator.max_staleness * config.samples_per_step * longest
    return whole


def disk_of(config: StageConfig, roles: Sequence[Role]) -> dict[str, float]:
    """Bytes by what they are; nothing for a stage that keeps no checkpoints."""
    checkpoint = getattr(config, "checkpoint", None)
    models = [role for role in roles if role.name in ("policy", "learner")]
    if checkpoint is None or not models:
        return {"outputs": float(LOGS)}
    one, model = checkpoint_bytes(config, roles), float(models[0].models[0].weight_bytes)
    kept = checkpoint.keep + bool(checkpoint.best_metric)
    copies = 1 + bool(checkpoint.best_metric) + (getattr(models[0].placement, "ema_decay", None) is not None)
    return {
        f"{counted(kept, 'checkpoint')} kept": kept * one,
        "one being written": one,
        f"{counted(copies, 'model')} in Hugging Face format": copies * model,
        "metrics, samples, ledger": float(LOGS),
    }
