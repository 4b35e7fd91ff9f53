"""One machine of a cluster, real or planned, and the --nodes notation for some."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf, nan

from rlhf_ray.errors import ConfigError
from rlhf_ray.planning.hardware import CORE, GPUS, Hardware, gpu_of
from rlhf_ray.planning.memory_breakdown import GIB

CPUS_PER_GPU, GIB_PER_GPU = 12, 240
"""Of a node that is described by its GPUs only, about as NVIDIA's DGX H100 has them (112 cores and 2 TiB for eight)."""
GIB_PER_CPU = 4
"""Of a node that is described by its CPUs only."""
FORM = "such as 2x8xH100, 4x(gpus=8,gpu=A100,cpus=96,memory=1024,label=team:rl) or 1x8xH100+2x(cpus=32,memory=128)"
INTERNAL = ("node:", "memory", "object_store_memory", "bundle_group", "accelerator_type:")
"""Prefixes of the resources that Ray adds to every node."""


@dataclass(frozen=True)
class Node:
    """One machine of a cluster."""

    name: str
    """Name for messages."""
    resources: Mapping[str, float]
    """All resources by Ray's names: CPU (logical), GPU, and custom ones."""
    memory_bytes: float = 0.0
    """Main memory in bytes."""
    gpu: Hardware | None = None
    """Kind of its GPUs; None without GPUs, or if the figures of the kind are not known."""
    labels: Mapping[str, str] = field(default_factory=dict)
    free: Mapping[str, float] = field(default_factory=dict)
    """Resources that are not reserved; empty for a planned node."""
    id: str = ""
    """Ray's node id; empty for a planned node."""
    real_cores: float | None = None
    """Physical processors, if fewer than the logical CPUs declared to Ray."""

    @property
    def cpus(self) -> float:
        """Logical CPUs, as Ray counts them."""
        return self.resources.get("CPU", 0.0)

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return int(self.resources.get("GPU", 0.0))

    @property
    def gpus_free(self) -> int:
        """GPUs that no other job has reserved. Ray leaves out what none is free of."""
        return int(self.free.get("GPU", 0.0)) if self.free else self.gpus

    @property
    def custom(self) -> dict[str, float]:
        """Custom resources, which the node was started with."""
        return {kind: amount for kind, amount in self.resources.items()
                if kind not in ("CPU", "GPU") and not kind.startswith(INTERNAL)}

    @property
    def cores(self) -> float:
        """Processors that can compute at the same time."""
        return self.cpus if self.real_cores is None else self.real_cores

    @property
    def device(self) -> Hardware:
        """Device on which its workers compute: a GPU of the node, or a CPU core."""
        return self.gpu or CORE


def parse_nodes(spec: str) -> list[Node]:
    """Parse groups of nodes joined by "+": NUMBERxGPUSxTYPE, NUMBERx(key=value,...), or
    NUMBERxGPUSxTYPE(key=value,...).

    Keys are gpus, gpu (the type), cpus, memory (GiB), and label=key:value and resource=name:amount as often as needed.

    Raises:
        ConfigError: the text has another form.
    """
    nodes: list[Node] = []
    for text in re.split(r"\+(?![^(]*\))", spec.replace(" ", "")):
        match = re.fullmatch(r"(\d+)x(?:(\d+)x([A-Za-z][\w-]*))?(?:\(([^()]*)\))?", text)
        if match is None or not (match[3] or match[4]):
            raise ConfigError(f"--nodes {spec!r}: {text!r} describes no machines; write {FORM}")
        given = dict(_pairs(match[4] or "", spec))
        if match[3]:
            given = {"gpus": [match[2]], "gpu": [match[3]], **given}
        nodes += _group(int(match[1]), given, spec, len(nodes))
    if not nodes:
        raise ConfigError(f"--nodes {spec!r} describes no machines; write {FORM}")
    return nodes


def _pairs(text: str, spec: str) -> Iterator[tuple[str, list[str]]]:
    values: dict[str, list[str]] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key not in ("gpus", "gpu", "cpus", "memory", "label", "resource"):
            raise ConfigError(f"--nodes {spec!r}: {part!r} is not a key=value pair of a machine; the keys are gpus, "
                              f"gpu, cpus, memory (GiB), label and resource, {FORM}")
        values.setdefault(key, []).append(value)
    yield from values.items()


def _group(number: int, given: Mapping[str, list[str]], spec: str, before: int) -> list[Node]:
    gpus = int(_number(given, "gpus", 0, spec))
    kind = given["gpu"][-1] if "gpu" in given else "H100" if gpus else ""
    gpu = gpu_of(kind) if kind else None
    if kind and gpu is None:
        raise ConfigError(f"--nodes {spec!r}: the figures of GPU type {kind!r} are not known; use one of "
                          f"{', '.join(sorted(GPUS))}")
    cpus = _number(given, "cpus", gpus * CPUS_PER_GPU, spec)
    memory = _number(given, "memory", gpus * GIB_PER_GPU or cpus * GIB_PER_CPU, spec) * GIB
    labels = dict(_colon(text, spec) for text in given.get("label", []))
    resources = {name: _amount(amount, f"resource={name}", spec)
                 for name, amount in (_colon(text, spec) for text in given.get("resource", []))}
    resources = {"CPU": cpus, "GPU": float(gpus), **resources}
    return [Node(f"node-{before + i}", resources, memory, gpu if gpus else None, labels) for i in range(number)]


def _number(given: Mapping[str, list[str]], key: str, default: float, spec: str) -> float:
    return _amount(given[key][-1], key, spec) if key in given else default


def _amount(text: str, key: str, spec: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = nan
    if not 0 <= amount < inf:
        raise ConfigError(f"--nodes {spec!r}: {key} {text!r} is not an amount; write a number >= 0")
    return amount


def _colon(text: str, spec: str) -> tuple[str, str]:
    key, colon, value = text.rpartition(":")
    if not colon:
        raise ConfigError(f"--nodes {spec!r}: {text!r} needs a colon: label=key:value, resource=name:amount")
    return key, value
