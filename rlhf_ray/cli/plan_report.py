"""A plan for people (a table of roles, a bar of memory for every kind of device, what to change) and as JSON."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhf_ray.config.fields import format_value
from rlhf_ray.config.settled import value_at
from rlhf_ray.config.stages import EvaluateConfig, PPOConfig, StageConfig
from rlhf_ray.planning.device_memory import Load
from rlhf_ray.planning.gpu_settings import REASONS
from rlhf_ray.planning.memory_breakdown import PARTS, gib
from rlhf_ray.planning.model_shape import ModelShape
from rlhf_ray.planning.plan import Plan
from rlhf_ray.planning.roles import Role

STORE = "object store"
COLOURS = dict(zip((*PARTS, STORE), ("blue", "cyan", "magenta", "green", "yellow", "bright_blue", "bright_black",
                                     "bright_magenta", "white", "bright_green", "bright_yellow"), strict=True))
MARKS = dict(zip((*PARTS, STORE), "WGOALKBCRES", strict=True))
"""A letter for each part, so that bars are readable without colours."""
BAR = 56
"""Maximum width of a full bar in characters."""


def plan_page(plan: Plan, width: int = 100) -> RenderableType:
    """The plan as a rich renderable, in lines of at most `width` characters."""
    parts: list[RenderableType] = [_nodes(plan), Text(""), _roles(plan), Text("")]
    parts += _bars(plan.loads, min(BAR, max(20, width - 44)))
    parts += [Text(""), _facts(plan), Text("")]
    if plan.config.cluster.derived:
        parts += [_derived(plan), Text("")]
    parts += [_finding(finding.level, finding.text) for finding in plan.findings]
    parts.append(Text("the run cannot work", style="bold red") if plan.refused else
                 Text("the run fits", style="bold green"))
    return Group(*parts)


def _nodes(plan: Plan) -> Text:
    counts: dict[str, int] = {}
    for node in plan.nodes:
        gpus = f"{node.gpus} x {node.gpu.name if node.gpu else 'GPU of an unknown kind'}, " if node.gpus else ""
        labels = f", {', '.join(f'{k}={v}' for k, v in node.labels.items() if not k.startswith('ray.io/node'))}"
        declared = f" for {node.cpus:g} logical ones" if node.cores < node.cpus else ""
        cpus = f"{node.cores:g} CPUs{declared}"
        description = f"{gpus}{cpus}, {gib(node.memory_bytes)}{labels if len(labels) > 2 else ''}"
        counts[description] = counts.get(description, 0) + 1
    return Text("nodes  " + "\n       ".join(f"{count} x ({description})" for description, count in counts.items()))


def _roles(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column, right in (("role", False), ("workers", True), ("model", False), ("where", False), ("per worker", True),
                          ("host memory", True)):
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for role in plan.roles:
        memory = plan.memory[role.name]
        on_gpu = bool(memory.device)
        table.add_row(role.name, str(role.placement.workers), _model(role), _where(plan, role),
                      gib(memory.device_bytes if on_gpu else memory.host_bytes),
                      gib(memory.host_bytes) if on_gpu else "")
    return table


def _model(role: Role) -> str:
    return "" if not role.models else f"{role.named} ({', '.join(map(_weights, role.models))})"


def _weights(shape: ModelShape) -> str:
    return size(shape.parameters) + (f", {size(shape.active)} active" if shape.experts else "")


def size(parameters: float) -> str:
    """Number of weights as text: 0.5B, 25M."""
    return f"{parameters / 1e9:.3g}B" if parameters >= 1e8 else f"{parameters / 1e6:.3g}M"


def _where(plan: Plan, role: Role) -> str:
    """Pool, bundles and nodes of all workers of a role."""
    mine = [worker for worker in plan.placement.workers if worker.role == role.name]
    if not mine:
        return f"{role.placement.pool}: not placed"
    nodes = list(dict.fromkeys(worker.node for worker in mine))
    bundles = sorted({worker.bundle for worker in mine})
    where = nodes[0] if len(nodes) == 1 else f"{nodes[0]} to {nodes[-1]}"
    return f"{role.placement.pool}[{ranges(bundles)}] on {where}"


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers as ranges: 0-3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _bars(loads: Sequence[Load], width: int) -> list[RenderableType]:
    """A bar for each kind of load; equal loads share one."""
    groups: dict[tuple[object, ...], list[Load]] = {}
    for load in loads:
        held = tuple(sorted((name.partition("/")[0], round(sum(p.values()))) for name, p in load.holders.items()))
        groups.setdefault((load.kind, load.capacity, held), []).append(load)
    lines: list[RenderableType] = []
    for same in groups.values():
        first = same[0]
        roles = ", ".join(dict.fromkeys(name.partition("/")[0] for name in first.holders))
        lines.append(Text(f"{_names(same)}: {roles}", style="bold"))
        lines.append(_bar(first, width))
    held_parts = {part for load in loads for parts in load.holders.values() for part in parts}
    used = [part for part in (*PARTS, STORE) if part in held_parts]
    lines.append(Text.assemble("  ", *((f"{MARKS[part]} {part}  ", COLOURS[part]) for part in used)))
    return lines


def _names(same: Sequence[Load]) -> str:
    """Name of a group of equal loads: node-0 GPU 3-5; node-0 to node-1, 16 GPUs; node-2 to node-3 memory."""
    nodes = list(dict.fromkeys(load.node for load in same))
    where = nodes[0] if len(nodes) == 1 else f"{nodes[0]} to {nodes[-1]}"
    if same[0].device is None:
        return f"{where} memory"
    numbers = sorted(load.device for load in same if load.device is not None)
    return f"{where} GPU {ranges(numbers)}" if len(nodes) == 1 else f"{where}, {len(same)} GPUs"


def _bar(load: Load, width: int) -> Text:
    total: dict[str, float] = {}
    for parts in load.holders.values():
        for part, amount in parts.items():
            total[part] = total.get(part, 0.0) + amount
    scale = width / max(load.capacity, load.bytes, 1.0)
    bar, reached, drawn = Text("  "), 0.0, 0
    for part in (*PARTS, STORE):
        reached += total.get(part, 0.0)
        cells = round(reached * scale) - drawn
        bar.append(MARKS[part] * cells, style=f"{COLOURS[part]} reverse")
        drawn += cells
    bar.append("·" * (width - drawn))
    style = "bold red" if load.share > 1 else "yellow" if load.share > 0.9 else ""
    return bar.append(f" {gib(load.bytes)} of {gib(load.capacity)} ({load.share:.0%})", style=style)


def _facts(plan: Plan) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    if (method := _method(plan.config)) is not None:
        table.add_row("method", method)
    for name, text in plan.geometry.items():
        table.add_row(name, text)
    files = ", ".join(f"{gib(amount)} {name}" for name, amount in plan.disk.items())
    table.add_row("disk", f"{gib(sum(plan.disk.values()))}: {files}")
    if estimate := plan.step_time:
        by_role = ", ".join(f"{name} {seconds_of(s)}" for name, s in estimate.roles.items())
        step, run = estimate.seconds, plan.config.run
        table.add_row("time", f"about {seconds_of(step)} per step ({estimate.samples_per_second:.3g} samples/s; "
                              f"{by_role}); the bottleneck is {estimate.bottleneck}")
        if run.epochs is None:
            table.add_row("", f"all {run.steps} steps: about {seconds_of(step * run.steps)}; an estimate, within a "
                              "factor of two")
    return table


def _method(config: StageConfig) -> str | None:
    """The algorithm of a run that trains a policy."""
    if not isinstance(config, PPOConfig) or isinstance(config, EvaluateConfig):
        return None
    return config.algorithm.method


def _derived(plan: Plan) -> Table:
    """The values that nobody set, each with its reason."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("derived, since nobody set it", overflow="fold")
    table.add_column("why", overflow="fold")
    by_reason: dict[str, list[str]] = {}
    for path in plan.config.cluster.derived:
        name = path.rpartition(".")[2]
        shown = ("pools, and each role's pool, workers and gpus" if name in ("pools", "pool", "workers", "gpus") else
                 f"{path}={format_value(value_at(plan.config, path))}")
        by_reason.setdefault(REASONS.get(name, REASONS["pools"]), []).append(shown)
    for reason, values in by_reason.items():
        table.add_row(", ".join(dict.fromkeys(values)), reason)
    return table


def seconds_of(seconds: float) -> str:
    """A duration as text."""
    if seconds < 60:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def _finding(level: str, text: str) -> Text:
    colours: Mapping[str, str] = {"refused": "bold red", "tight": "yellow", "idle": "yellow", "assumed": "yellow"}
    return Text.assemble((f"{level}: ", colours[level]), text)


def plain(value: Any) -> Any:
    """A value of the configuration as JSON has it."""
    return {name: pool.model_dump() for name, pool in value.items()} if isinstance(value, dict) else value


def plan_as_json(plan: Plan) -> str:
    """The plan as a JSON object: nodes, roles, places, loads, batch, disk, step and findings."""
    return json.dumps(plan_as_values(plan), indent=2, ensure_ascii=False)


def plan_as_values(plan: Plan) -> dict[str, Any]:
    """The same as a dictionary."""
    config = plan.config
    return {
        "method": _method(config),
        "fits": not plan.refused,
        "nodes": [{"name": n.name, "cpus": n.cpus, "gpus": n.gpus, "gpu": n.gpu.name if n.gpu else None,
                   "memory_bytes": n.memory_bytes, "labels": dict(n.labels), "resources": n.custom}
                  for n in plan.nodes],
        "derived": {path: plain(value_at(plan.config, path)) for path in plan.config.cluster.derived},
        "roles": {r.name: {"workers": r.placement.workers, "pool": r.placement.pool, "gpus": r.placement.gpus,
                           "cpus": r.placement.cpus, "model": r.named,
                           "parameters": [shape.parameters for shape in r.models],
                           "active_parameters": [shape.active for shape in r.models],
                           "device_bytes": dict(plan.memory[r.name].device),
                           "host_bytes": dict(plan.memory[r.name].host)}
                  for r in plan.roles},
        "places": [{"worker": w.name, "pool": w.pool, "bundle": w.bundle, "node": w.node, "gpus": list(w.devices)}
                   for w in plan.placement.workers],
        "loads": [{"node": load.node, "gpu": load.device, "kind": load.kind, "bytes": round(load.bytes),
                   "capacity_bytes": round(load.capacity), "share": round(load.share, 4)} for load in plan.loads],
        "batch": plan.geometry,
        "disk_bytes": {name: round(amount) for name, amount in plan.disk.items()},
        "step": None if plan.step_time is None else {
            "seconds": plan.step_time.seconds, "bottleneck": plan.step_time.bottleneck,
            "samples": plan.step_time.samples, "roles_seconds": dict(plan.step_time.roles)},
        "findings": [{"level": finding.level, "text": finding.text} for finding in plan.findings],
    }
