"""The process of `rlhf-ray serve-reward`: socket, server and shutdown.

The first SIGTERM or Ctrl-C lets accepted requests finish, while new ones get status 503; the second ends at once.
"""

import asyncio
import errno
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import uvicorn

from rlhf_ray.config.serving import ServingConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.serving.app import Gate, Service, build_app
from rlhf_ray.serving.batcher import Batcher
from rlhf_ray.serving.connection import KEEPALIVE_S, BoundedConnection
from rlhf_ray.serving.served_model import ServedModel

GRACE_S = 30.0
"""Maximum wait for accepted requests at shutdown; orchestrators usually kill after this time (Kubernetes: 30 s)."""

BACKLOG = 2048
"""Connections that may wait to be taken (uvicorn's own default)."""


def serve(config: ServingConfig, say: Callable[[str], None]) -> None:
    """Load the model and serve requests until stopped.

    Args:
        say: called with each status line, such as the address.

    Raises:
        ConfigError: the address cannot be listened on, or the certificate not be read.
        ModelError: there is no such reward model.
        KeyboardInterrupt: a second signal requested an immediate stop.
    """
    from transformers.utils.logging import disable_progress_bar

    tls, listener = _check_certificate(config), _listen(config)
    disable_progress_bar()
    with listener:
        model = ServedModel(config.model, config.max_batch_tokens, config.label)
        asyncio.run(_serve(config, model, listener, tls, say))


async def _serve(config: ServingConfig, model: ServedModel, listener: socket.socket, tls: bool,
                 say: Callable[[str], None]) -> None:
    batcher = Batcher(model.score, config.max_batch_tokens, config.linger_ms / 1000, config.max_queue)
    service = Service(model, batcher)
    gate = Gate(build_app(service), config.token, int(config.max_request_mb * 2**20))  # type: ignore[arg-type]
    settings = uvicorn.Config(
        gate, http=BoundedConnection, log_config=None, access_log=False, server_header=False, lifespan="on", ws="none",
        timeout_graceful_shutdown=int(GRACE_S), timeout_keep_alive=KEEPALIVE_S,
        ssl_certfile=config.tls_cert, ssl_keyfile=config.tls_key,
    )
    host, port = listener.getsockname()[:2]
    address = f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
    access = "a token is required" if config.token else "open to this machine, no token"
    greeting = (f"serving {model.path} (digest {model.digest}) at {address}",
                f"schema at {address}/docs; {access}; Ctrl-C stops")
    server = _Server(settings, gate, service, say, greeting)
    await server.serve(sockets=[listener])
    if server.force_exit:
        say(f"stopped at once; {gate.under_way} requests were not answered")
        raise KeyboardInterrupt
    say(f"stopped after {service.requests} requests, {batcher.samples} samples, {batcher.forward_passes} forward "
        "passes")


class _Server(uvicorn.Server):
    """A uvicorn server that announces its start and stops in two steps."""

    def __init__(self, config: uvicorn.Config, gate: Gate, service: Service, say: Callable[[str], None],
                 greeting: Sequence[str]) -> None:
        super().__init__(config)
        self._gate, self._service, self._say, self._greeting = gate, service, say, greeting
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start serving, then print the greeting."""
        await super().startup(sockets)
        if self.started:
            for line in self._greeting:
                self._say(line)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        """Take both signals for as long as the server runs. uvicorn would raise them again at the end, and a service
        that stopped as it was asked would exit as if it had been killed."""
        loop, names = asyncio.get_running_loop(), ("SIGINT", "SIGTERM")
        for name in names:
            loop.add_signal_handler(getattr(signal, name), self._asked, name)
        try:
            yield
        finally:
            for name in names:
                loop.remove_signal_handler(getattr(signal, name))

    def _asked(self, name: str) -> None:
        if self._draining:
            self.should_exit = self.force_exit = True
            return
        self._gate.stopping = self._service.stopping = True
        self._say(f"{name}: finishing {self._gate.under_way} requests, refusing new ones; once more stops at once")
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._gate.drained(), GRACE_S)
        self.should_exit = True


def _listen(config: ServingConfig) -> socket.socket:
    """A socket that listens on the address, before minutes go into loading a model: bound alone, it would not keep a
    second service from taking the address meanwhile (`SO_REUSEADDR` lets two bind, and one listen). Callers that come
    while the model loads wait for it."""
    # asyncio switches Nagle's algorithm off only where the protocol is named; with it, answers on a kept connection
    # wait 40 ms.
    listener = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET, proto=socket.IPPROTO_TCP)
    try:
        # The connections of a service that has just ended would keep its address taken for a minute.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        listener.listen(BACKLOG)
        return listener
    except OSError as error:
        listener.close()
        taken = ", another program has it" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error.strerror or error}{taken}; give "
                          "another --host or --port (0 takes a free port)") from None


def _check_certificate(config: ServingConfig) -> bool:
    """Whether to serve https."""
    if not config.tls_cert or not config.tls_key:
        return False
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--tls-cert {config.tls_cert} and --tls-key {config.tls_key} cannot be used: "
                          f"{error.strerror or error}") from None
    return True
