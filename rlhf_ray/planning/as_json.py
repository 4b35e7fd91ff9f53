"""A plan as JSON: bytes, seconds and words, for programs."""

import json
from typing import Any

from rlhf_ray.planning.plan import Plan


def plan_as_json(plan: Plan) -> str:
    """One object: nodes, roles with a worker's memory by part, places, loads, batch, disk, time, findings."""
    return json.dumps(plan_as_values(plan), indent=2, ensure_ascii=False)


def plan_as_values(plan: Plan) -> dict[str, Any]:
    """The same as plain values."""
    return {
        "fits": not plan.refused,
        "nodes": [{"name": n.name, "cpus": n.cpus, "gpus": n.gpus, "gpu": n.gpu.name if n.gpu else None,
                   "memory_bytes": n.memory_bytes, "labels": dict(n.labels), "resources": n.custom}
                  for n in plan.nodes],
        "roles": {r.name: {"workers": r.placement.workers, "pool": r.placement.pool, "gpus": r.placement.gpus,
                           "cpus": r.placement.cpus, "model": r.named,
                           "parameters": [shape.parameters for shape in r.models],
                           "device_bytes": dict(plan.memory[r.name].device),
                           "host_bytes": dict(plan.memory[r.name].host)}
                  for r in plan.roles},
        "places": [{"worker": w.name, "pool": w.pool, "bundle": w.bundle, "node": w.node, "gpus": list(w.devices)}
                   for w in plan.placement.workers],
        "loads": [{"node": load.node, "gpu": load.device, "kind": load.kind, "bytes": round(load.bytes),
                   "capacity_bytes": round(load.capacity), "share": round(load.share, 4)} for load in plan.loads],
        "batch": plan.geometry,
        "disk_bytes": {name: round(amount) for name, amount in plan.disk.items()},
        "step": None if plan.pace is None else {
            "seconds": plan.pace.seconds, "bottleneck": plan.pace.bottleneck, "samples": plan.pace.samples,
            "roles_seconds": dict(plan.pace.roles)},
        "findings": [{"level": finding.level, "text": finding.text} for finding in plan.findings],
    }
