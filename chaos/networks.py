"""Networks that only the runs of this process use: a private one, in which each node may have its own address and can
be cut off from the others.

Everything is in network namespaces: no packet leaves them, and they end with the processes in them.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from chaos.requirements import NETWORK_NAMESPACES, lose_packets

CLONE_NEWNET = 0x40000000
"""unshare(2): a new network namespace."""
PR_SET_PDEATHSIG = 1
REACHABLE_S = 1.0
"""Longest wait for a connection inside the network."""
BRIDGE, PREFIX = "chaos0", "10.77.0."
"""The bridge between the nodes, and the first part of their addresses."""
HEAD_ADDRESS = f"{PREFIX}1"
PRIVATE_NETWORK = "RLHF_RAY_CHAOS_NETWORK"
"""Environment variable that is set where the runs have a private network."""


def use_private_network() -> bool:
    """Move this process, and its children from now on, into a network of their own, which has a bridge for nodes. Call
    it before any thread is started. Returns whether that was possible."""
    if NETWORK_NAMESPACES.missing() or ctypes.CDLL(None).unshare(CLONE_NEWNET) != 0:
        return False
    for command in (["link", "set", "lo", "up"], ["link", "add", BRIDGE, "type", "bridge"],
                    ["addr", "add", f"{HEAD_ADDRESS}/24", "dev", BRIDGE], ["link", "set", BRIDGE, "up"],
                    ["route", "add", "default", "dev", BRIDGE]):  # Ray's own address is that of the default route
        _ip(command)
    os.environ[PRIVATE_NETWORK] = "1"
    return True


def has_private_network() -> bool:
    """Whether nodes may have addresses of their own."""
    return PRIVATE_NETWORK in os.environ


@contextmanager
def losing_packets(share: float) -> Iterator[Callable[[], int]]:
    """Within the block this share of the packets between the head node and the others is dropped, at random, in both
    directions. Yields a function that returns how many were."""
    subprocess.run(lose_packets(BRIDGE, share), check=True)
    try:
        yield _dropped
    finally:
        subprocess.run(["tc", "qdisc", "delete", "dev", BRIDGE, "clsact"], check=True)


def _dropped() -> int:
    said = subprocess.run(["tc", "-json", "-statistics", "qdisc", "show", "dev", BRIDGE], check=True,
                          capture_output=True).stdout
    return sum(int(queue["drops"]) for queue in json.loads(said) if queue["kind"] == "clsact")


class NodeNetwork:
    """The network namespace of one node: its address is in it, and a pair of interfaces leads to the bridge."""

    def __init__(self, number: int) -> None:
        """`number`: of the node, from 1; unique while it exists."""
        self.address = f"{PREFIX}{10 + number}"
        self._holder = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; read line"], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, preexec_fn=end_with_parent)
        assert self._holder.stdout is not None
        self._holder.stdout.readline()
        outside = f"chaos{10 + number}"
        _remove(outside)  # of a driver that was killed
        _ip(["link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", str(self._holder.pid)])
        _ip(["link", "set", outside, "master", BRIDGE, "up"])
        for command in (["addr", "add", f"{self.address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"],
                        ["link", "set", "lo", "up"]):
            _ip(command, self._inside)

    def popen(self, command: Sequence[str], **settings: Any) -> subprocess.Popen[bytes]:
        """Start a process in the namespace, which ends when this process does."""
        return subprocess.Popen([*self._inside, *command], preexec_fn=end_with_parent, **settings)

    def is_reachable(self, port: int) -> bool:
        """Whether a port of the node takes connections from here."""
        try:
            socket.create_connection((self.address, port), timeout=REACHABLE_S).close()
        except OSError:
            return False
        return True

    def cut(self) -> None:
        """Discard all packets between the node and the others, in both directions, without a message to anyone."""
        _ip(["route", "add", "blackhole", f"{self.address}/32"])
        _ip(["route", "add", "blackhole", f"{HEAD_ADDRESS}/32"], self._inside)

    def heal(self) -> None:
        """Undo `cut`."""
        _ip(["route", "del", "blackhole", f"{self.address}/32"])
        _ip(["route", "del", "blackhole", f"{HEAD_ADDRESS}/32"], self._inside)

    def close(self) -> None:
        """Remove the namespace once no process is in it."""
        self._holder.kill()
        self._holder.communicate()

    @property
    def _inside(self) -> list[str]:
        return ["nsenter", "--target", str(self._holder.pid), "--net"]


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _remove(link: str) -> None:
    """Remove one end of a pair of interfaces, and so the other, if it is there."""
    subprocess.run(["ip", "link", "delete", link], check=False, capture_output=True)


def _ip(command: Sequence[str], before: Sequence[str] = ()) -> None:
    subprocess.run([*before, "ip", *command], check=True, capture_output=True)
