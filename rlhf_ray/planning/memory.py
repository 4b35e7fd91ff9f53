"""Bytes of one worker by what they are for, at the moment when it holds most."""

from collections.abc import Mapping
from dataclasses import dataclass, field

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
ACTIVATIONS, LOGITS, CACHE = "activations", "logits", "KV cache"
BUFFERS, COPIES, RUNTIME = "buffers", "checkpoint copies", "runtime"
PARTS = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS, CACHE, BUFFERS, COPIES, RUNTIME)
"""In the order in which they are shown."""
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Memory:
    """What one worker holds at most: on each of its GPUs, and in its node's main memory."""

    device: Mapping[str, float] = field(default_factory=dict)
    """Bytes on each GPU by part; nothing for a worker on the CPU."""
    host: Mapping[str, float] = field(default_factory=dict)
    """Bytes of main memory by part."""
    first: Mapping[str, float] = field(default_factory=dict)
    """That of the role's first worker, where it holds more: what is gathered from all is gathered there."""
    fixed: float = 0.0
    """Of the bytes on a device, what is reserved whatever the model needs: vLLM's share of a GPU."""

    @property
    def device_bytes(self) -> float:
        """On each GPU."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> float:
        """In main memory."""
        return sum(self.host.values())

    @property
    def shown(self) -> Mapping[str, float]:
        """The parts where the model lies."""
        return self.device or self.host


def at_the_peak(*moments: Mapping[str, float]) -> dict[str, float]:
    """Of what is held at several moments, that at which it is most."""
    return dict(moments[max(range(len(moments)), key=lambda i: sum(moments[i].values()))])
