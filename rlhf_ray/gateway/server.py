"""The server of a runner's agents: one thread with an event loop of its own, however many sessions."""

from __future__ import annotations

import asyncio
import errno
import json
import resource
import socket
import threading
from collections.abc import Callable
from ipaddress import ip_address

import uvicorn

from rlhf_ray.errors import ConfigError, EnvironmentFailed
from rlhf_ray.gateway import openai_chat
from rlhf_ray.gateway.app import Application
from rlhf_ray.gateway.chat import Policy, SessionAddress
from rlhf_ray.gateway.sessions import Session, Sessions
from rlhf_ray.serving.connection import KEEPALIVE_S, BoundedConnection

MOST_CONNECTIONS = 4096
"""At a time; at most half of the files that the process may open."""
BACKLOG = 2048
"""Connections that may wait to be accepted."""
START_S = 30.0
ANSWER_S = 10.0
TRIES = 3
"""A gateway that does not answer so often, within `ANSWER_S` each, is out of reach."""
BETWEEN_TRIES_S = 0.5
STOP_S = 5.0
"""Maximum wait for answers that are being written when the gateway stops."""


class Gateway:
    """Serves the sessions of a runner's agents.

    Example:
        gateway = Gateway("127.0.0.1", print)
        await gateway.start()
        address = gateway.open(policy, "policy")    # an agent asks at address.base_url with address.api_key
        await gateway.close(address)
        await gateway.stop()

    Args:
        host: address to listen on (`episode_runner.gateway_host`). With 0.0.0.0 or ::, sessions have the address of the
            machine's interface to other networks.
        warn: called with each warning, once for each cause, in the loop in which the gateway was started.
    """

    def __init__(self, host: str, warn: Callable[[str], None]) -> None:
        self._host = host
        self._warn = warn
        self._warned: set[str] = set()
        self._sessions = Sessions()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: _Server | None = None
        self._serving: asyncio.AbstractEventLoop | None = None
        """The server's own loop."""
        self._ended: asyncio.Future[BaseException | None] | None = None
        self._origin = ""
        self._address = ("", 0)

    async def start(self) -> None:
        """Listen on a free port.

        Raises:
            ConfigError: the host is no address of this machine.
            EnvironmentFailed: the server did not start.
        """
        self._loop = asyncio.get_running_loop()
        listener = _listen(self._host)
        port = listener.getsockname()[1]
        host = _reachable(self._host, listener.family)
        self._address = (host, port)
        self._origin = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        started = self._loop.create_future()
        self._ended = self._loop.create_future()
        settings = uvicorn.Config(
            Application(self._sessions, self._warn_once), http=GatewayConnection, ws="none", lifespan="off",
            log_config=None, log_level="critical", access_log=False, server_header=False, proxy_headers=False,
            timeout_keep_alive=KEEPALIVE_S, timeout_graceful_shutdown=int(STOP_S), workers=1,
        )
        self._server = _Server(settings, lambda: self._tell(started, None))
        threading.Thread(target=self._run, args=(listener, self._server), name="gateway", daemon=True).start()
        await asyncio.wait((started, self._ended), timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            self._server.should_exit = True
            why = self._ended.result() if self._ended.done() else f"it takes longer than {START_S:g} s"
            raise EnvironmentFailed(f"the gateway for agents did not start at {self._origin}: {why}")

    def open(self, policy: Policy, model: str) -> SessionAddress:
        """A session of its own for each attempt at an episode. `policy` is called in the running loop.

        Args:
            model: the name that answers give; requests may name any.
        """
        assert self._server is not None, "the gateway is not started"
        session = Session(policy, model, self._warn_once)
        self._sessions.add(session)
        url = f"{self._origin}/{session.id}"
        return SessionAddress(f"{url}/v1", url, session.key)

    async def close(self, address: SessionAddress) -> None:
        """Requests under way are cancelled and answered 410, as later ones; returns when none runs any more."""
        session = self._session(address)
        await session.close()
        await self._written(session)
        session.end()
        self._sessions.retire(session)

    async def _written(self, session: Session) -> None:
        """Wait until a session has written its answers."""
        if self._serving is None:
            return
        writing = session.written()
        try:
            written = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(writing, self._serving))
        except RuntimeError:  # the server has ended
            writing.close()
            return
        await asyncio.wait((written,), timeout=STOP_S)

    async def out_of_reach(self) -> str:
        """Why agents cannot reach it any more; "" if they can. Its thread may have ended or hang, or its socket may
        be closed, without any other sign of it here."""
        why = ""
        for _ in range(TRIES):
            if self._ended is not None and self._ended.done():
                return f"its thread has ended: {self._ended.result()!r}"
            why = await self._silence()
            if not why:
                break
            await asyncio.sleep(BETWEEN_TRIES_S)
        return why

    async def _silence(self) -> str:
        """Why a request is not answered; "" if it is."""
        writer = None
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_connection(*self._address)
                writer.write(b"GET / HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n\r\n")
                return "" if await reader.readline() else "it closes connections"
        except TimeoutError:
            return f"it did not answer within {ANSWER_S:g} s"
        except OSError as error:
            return f"it cannot be reached: {error}"
        finally:
            if writer is not None:
                writer.close()

    async def stop(self) -> None:
        """Close all sessions, and the server."""
        await asyncio.gather(*(session.close() for session in self._sessions.opened()))
        if self._server is None or self._ended is None:
            return
        self._server.should_exit = True
        await asyncio.wait((self._ended,), timeout=2 * STOP_S)
        if not self._ended.done():
            self._warn_once("stop", f"gateway: its server has not ended after {2 * STOP_S:g} s")

    def _session(self, address: SessionAddress) -> Session:
        session = self._sessions.find(address.anthropic_url.rpartition("/")[2])
        assert session is not None, "not a session of this gateway"
        return session

    def _run(self, listener: socket.socket, server: _Server) -> None:
        """The server's thread."""
        failed: BaseException | None = None
        try:
            with listener, asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                self._serving = runner.get_loop()
                runner.run(server.serve(sockets=[listener]))
        except BaseException as error:
            failed = error
        assert self._ended is not None
        self._tell(self._ended, failed)

    def _tell(self, future: asyncio.Future[BaseException | None], result: BaseException | None) -> None:
        def settle() -> None:
            if not future.done():
                future.set_result(result)

        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(settle)
        except RuntimeError:  # the loop is closed, and nobody waits
            return

    def _warn_once(self, cause: str, line: str) -> None:
        """Callable in every thread."""
        if cause in self._warned or self._loop is None:
            return
        self._warned.add(cause)
        try:
            self._loop.call_soon_threadsafe(self._warn, line)
        except RuntimeError:
            return


class GatewayConnection(BoundedConnection):
    """A connection to the gateway."""

    refusal = json.dumps(openai_chat.error(503, "too many connections; try again later")).encode()

    def most_connections(self) -> int:
        """Connections at a time: the files of the others are the runner's own."""
        return min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class _Server(uvicorn.Server):
    """A uvicorn server that says when it accepts connections."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._when_started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start serving."""
        await super().startup(sockets)
        self._when_started()


def _listen(host: str) -> socket.socket:
    # asyncio switches Nagle's algorithm off only where the protocol is named; with it, each answer waits 40 ms.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, proto=socket.IPPROTO_TCP)
    try:
        listener.bind((host, 0))
        listener.listen(BACKLOG)
        return listener
    except OSError as error:
        listener.close()
        why = "it is no address of this machine" if error.errno == errno.EADDRNOTAVAIL else error.strerror or str(error)
        raise ConfigError(f"episode_runner.gateway_host={host!r}: cannot listen there: {why}; give an address of the "
                          "machines on which episodes run, 127.0.0.1, or 0.0.0.0 for all of them") from None


def _reachable(host: str, family: int) -> str:
    """The address at which others reach a listener."""
    try:
        if not ip_address(host).is_unspecified:
            return host
    except ValueError:  # a name
        return host
    outside, alone = ("2001:db8::1", "::1") if family == socket.AF_INET6 else ("192.0.2.1", "127.0.0.1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((outside, 9))  # of a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return alone
