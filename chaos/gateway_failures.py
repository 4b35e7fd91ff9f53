"""Episode runners whose gateway fails on order. Otherwise they equal the real ones.

An order is a file beside the injection log that names the runner's process. The driver writes it; the runner takes it
away when it obeys.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from chaos import environments
from chaos.injection_log import INJECTION_LOG
from chaos.reward_function import LONG_S
from rlhf_ray.roles.episode_runner import EpisodeRunner

LISTENER, CONNECTIONS, THREAD, STUCK = FAILURES = "listener", "connections", "thread", "stuck"
"""Its listening socket is shut down; all its connections are reset; its thread ends by an exception, or blocks."""
AF_UNSPEC = 0
POLL_S = 0.02


def gateway_order_file(injections: Path) -> Path:
    """The file of an order."""
    return injections.with_suffix(".gateway_order")


def order_gateway_failure(injections: Path, number: int, failure: str, runner: int) -> None:
    """Order the gateway of a runner to fail now.

    Args:
        number: of the fault.
        runner: its process.
    """
    environments._write(gateway_order_file(injections), {"fault": number, "failure": failure, "runner": runner})


class FailingGateway(EpisodeRunner):
    """An episode runner that obeys such orders."""

    async def start(self) -> dict[str, Any]:
        """As the real runner; looks for orders."""
        facts = await super().start()
        place = os.environ.get(INJECTION_LOG)
        if place is not None:
            self._looking = asyncio.create_task(self._look(Path(place)))
        return facts

    async def stop(self) -> None:
        """As the real runner."""
        if (looking := getattr(self, "_looking", None)) is not None:
            looking.cancel()
        await super().stop()

    async def _look(self, injections: Path) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            file = gateway_order_file(injections)
            order = json.loads(environments._read(file) or "{}")
            if order.get("runner") != os.getpid() or environments._take(file) is None:
                continue
            environments._write(environments._unrecovered_file(injections), {
                "fault": order["fault"], "gateway_of": os.getpid(), "time": time.time()})
            self._fail(order["failure"])
            environments._log(injections, "confirmed", fault=order["fault"], state=f"gateway: {order['failure']}",
                              seconds=0.0)

    def _fail(self, failure: str) -> None:
        """Let the gateway fail. Its sockets are found by its port, its loop by the name that it has in it."""
        serving = self._gateway._serving
        assert serving is not None, "the gateway is not started"
        if failure == LISTENER:
            _shut_down(self._port)
        elif failure == CONNECTIONS:
            _reset(self._port)
        elif failure == THREAD:
            serving.call_soon_threadsafe(_die)
        else:
            serving.call_soon_threadsafe(time.sleep, LONG_S)

    @property
    def _port(self) -> int:
        return int(self._gateway._origin.rpartition(":")[2])


def _die() -> None:
    raise SystemExit("chaos")  # asyncio lets this end a loop


def _shut_down(port: int) -> None:
    for each, listens in _sockets(port):
        if listens:
            each.shutdown(socket.SHUT_RDWR)


def _reset(port: int) -> None:
    """Send RST on all connections: connecting a socket to no address disconnects it so."""
    connect = ctypes.CDLL(None, use_errno=True).connect
    for each, listens in _sockets(port):
        if not listens:
            connect(each.fileno(), (ctypes.c_uint16 * 8)(AF_UNSPEC), 16)


def _sockets(port: int) -> Iterator[tuple[socket.socket, bool]]:
    """Duplicates of this process's sockets with this local port, and whether each listens."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as each:
                if each.family == socket.AF_INET and each.type == socket.SOCK_STREAM and each.getsockname()[1] == port:
                    yield each, bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
