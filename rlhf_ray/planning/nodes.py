"""One machine of a cluster, there or only thought of, and how a person writes some down."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf, nan

from rlhf_ray.errors import ConfigError
from rlhf_ray.planning.hardware import CORE, GPUS, Hardware, gpu_of
from rlhf_ray.planning.worker_memory import GIB

CPUS_PER_GPU, GIB_PER_GPU = 12, 240
"""Of a node that is named by its GPUs alone, about as NVIDIA's DGX H100 has them (112 cores and 2 TiB for eight)."""
GIB_PER_CPU = 4
"""Of a node that is named by its CPUs alone."""
FORM = "such as 2x8xH100, 4x(gpus=8,gpu=A100,cpus=96,memory=1024,label=team:rl) or 1x8xH100+2x(cpus=32,memory=128)"


INTERNAL = ("node:", "memory", "object_store_memory", "bundle_group", "accelerator_type:")
"""Beginnings of the names of resources that Ray gives nodes by itself."""


@dataclass(frozen=True)
class Node:
    """One machine of a cluster."""

    name: str
    """For people."""
    resources: Mapping[str, float]
    """All that it has, by Ray's names: CPU (logical ones), GPU, and those it was started with."""
    memory_bytes: float = 0.0
    """Main memory."""
    gpu: Hardware | None = None
    """Which kind; None without any, or of a kind whose figures are not known."""
    labels: Mapping[str, str] = field(default_factory=dict)
    free: Mapping[str, float] = field(default_factory=dict)
    """What nobody has reserved of its resources; nothing for a node that is only planned."""
    id: str = ""
    """Ray's."""
    real_cores: float | None = None
    """Processors, where they are fewer than the logical ones that Ray was told of."""

    @property
    def cpus(self) -> float:
        """Logical ones, as Ray counts them."""
        return self.resources.get("CPU", 0.0)

    @property
    def gpus(self) -> int:
        """Devices."""
        return int(self.resources.get("GPU", 0.0))

    @property
    def custom(self) -> dict[str, float]:
        """Resources that it was started with."""
        return {kind: amount for kind, amount in self.resources.items()
                if kind not in ("CPU", "GPU") and not kind.startswith(INTERNAL)}

    @property
    def cores(self) -> float:
        """What computes at a time."""
        return self.cpus if self.real_cores is None else self.real_cores

    @property
    def device(self) -> Hardware:
        """What its workers compute on: a GPU of the node, or a core."""
        return self.gpu or CORE


def parse_nodes(spec: str) -> list[Node]:
    """Nodes from groups joined by "+": NUMBERxGPUSxTYPE, or NUMBERx(key=value,...), or both one after the other.

    Keys are gpus, gpu (the type), cpus, memory (GiB), and label=key:value and resource=name:amount as often as needed.

    Raises:
        ConfigError: the text is none of that; says what is.
    """
    nodes: list[Node] = []
    for text in re.split(r"\+(?![^(]*\))", spec.replace(" ", "")):
        match = re.fullmatch(r"(\d+)x(?:(\d+)x([A-Za-z][\w-]*))?(?:\(([^()]*)\))?", text)
        if match is None or not (match[3] or match[4]):
            raise ConfigError(f"--nodes {spec!r}: {text!r} names no machines; write {FORM}")
        given = dict(_pairs(match[4] or "", spec))
        if match[3]:
            given = {"gpus": [match[2]], "gpu": [match[3]], **given}
        nodes += _group(int(match[1]), given, spec, len(nodes))
    if not nodes:
        raise ConfigError(f"--nodes {spec!r} names no machines; write {FORM}")
    return nodes


def _pairs(text: str, spec: str) -> Iterator[tuple[str, list[str]]]:
    found: dict[str, list[str]] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key not in ("gpus", "gpu", "cpus", "memory", "label", "resource"):
            raise ConfigError(f"--nodes {spec!r}: {part!r} is no key=value of a machine; keys are gpus, gpu, cpus, "
                              f"memory (GiB), label and resource, {FORM}")
        found.setdefault(key, []).append(value)
    yield from found.items()


def _group(number: int, given: Mapping[str, list[str]], spec: str, before: int) -> list[Node]:
    gpus = int(_number(given, "gpus", 0, spec))
    kind = given["gpu"][-1] if "gpu" in given else "H100" if gpus else ""
    gpu = gpu_of(kind) if kind else None
    if kind and gpu is None:
        raise ConfigError(f"--nodes {spec!r}: the figures of a {kind} are not known; they are of "
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
        raise ConfigError(f"--nodes {spec!r}: {key} {text!r} is no amount; write a number from 0 up")
    return amount


def _colon(text: str, spec: str) -> tuple[str, str]:
    key, colon, value = text.rpartition(":")
    if not colon:
        raise ConfigError(f"--nodes {spec!r}: {text!r} needs a colon: label=key:value, resource=name:amount")
    return key, value
