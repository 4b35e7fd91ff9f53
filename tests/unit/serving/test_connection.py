"""What callers without a token can hold: a real server on loopback, and connections that do not go on."""

import asyncio
import socket
import time
from contextlib import asynccontextmanager, suppress

import pytest
import uvicorn

from rlhf_ray.serving import connection
from rlhf_ray.serving.connection import BoundedConnection

GET = b"GET / HTTP/1.1\r\nhost: t\r\n"
SHORT_S, SLOW_S, LONG = 0.4, 0.8, 20_000_000


async def app(scope, receive, send):
    """Answers at once, later than headers may take, or with more than buffers hold."""
    await asyncio.sleep(SLOW_S if scope["path"] == "/slow" else 0.0)
    body = b"a" * (LONG if scope["path"] == "/long" else 2)
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def limits(monkeypatch):
    monkeypatch.setattr(connection, "HEADERS_TIMEOUT_S", SHORT_S)
    monkeypatch.setattr(connection, "WRITE_TIMEOUT_S", SHORT_S)
    monkeypatch.setattr(connection, "KEEPALIVE_S", 0)
    return monkeypatch


def serving(script):
    """What script(server, connect) returns beside a running server."""

    @asynccontextmanager
    async def running():
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, http=BoundedConnection, lifespan="off", log_config=None, ws="none"))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield server, lambda: asyncio.open_connection(*listener.getsockname())
        finally:
            server.should_exit = True
            await task

    async def run():
        async with running() as (server, connect), asyncio.timeout(20):
            return await script(server, connect)

    return asyncio.run(run())


async def everything(reader):
    """What the server sends until it ends the connection."""
    received = b""
    with suppress(ConnectionError):
        while part := await reader.read(65536):
            received += part
    return received


async def asked(connect, path=b"/"):
    reader, writer = await connect()
    writer.write(b"GET %s HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n" % path)
    answer = await everything(reader)
    writer.close()
    return answer


def test_half_requests_are_closed_in_time_and_others_are_answered_meanwhile(limits):
    async def script(server, connect):
        began, half = time.monotonic(), [await connect() for _ in range(200)]
        for i, (_, writer) in enumerate(half):
            writer.write((b"", b"G", GET)[i % 3])
        good = await asked(connect)
        took = time.monotonic() - began

        async def dripping(writer):
            with suppress(ConnectionError):
                while True:
                    writer.write(b"x-more: 1\r\n")
                    await writer.drain()
                    await asyncio.sleep(SHORT_S / 10)

        drips = [asyncio.create_task(dripping(writer)) for _, writer in half[2::3]]
        received = await asyncio.gather(*(everything(reader) for reader, _ in half))
        for drip in drips:
            drip.cancel()
        return good, took, received, len(server.server_state.connections)

    good, took, received, left = serving(script)
    assert good.startswith(b"HTTP/1.1 200") and took < 5
    assert received == [b""] * 200 and left == 0


def test_an_answer_may_take_longer_than_headers(limits):
    assert serving(lambda _, connect: asked(connect, b"/slow")).endswith(b"aa")


def test_a_half_request_after_a_whole_one_is_closed_too(limits):
    async def script(server, connect):
        reader, writer = await connect()
        writer.write(GET + b"\r\n")
        answer = await reader.readuntil(b"aa")
        writer.write(GET)
        return answer, await everything(reader)

    answer, rest = serving(script)
    assert answer.startswith(b"HTTP/1.1 200") and not rest


def test_headers_have_a_size_limit(limits):
    async def script(server, connect):
        reader, writer = await connect()
        writer.write(GET + b"x: " + b"a" * 200_000)
        return await everything(reader)

    limits.setattr(connection, "HEADERS_TIMEOUT_S", 60.0)
    assert not serving(script).startswith(b"HTTP/1.1 200")


def test_a_caller_that_does_not_read_is_disconnected(limits):
    async def script(server, connect):
        _, writer = await connect()
        writer.transport.pause_reading()
        writer.write(b"GET /long HTTP/1.1\r\nhost: t\r\n\r\n")
        while not server.server_state.connections:
            await asyncio.sleep(0.01)
        while server.server_state.connections:
            await asyncio.sleep(0.01)
        return len(server.server_state.tasks)

    assert serving(script) == 0


def test_connections_have_a_limit_and_one_beyond_it_hears_so(limits):
    async def script(server, connect):
        held = [await connect() for _ in range(2)]
        while len(server.server_state.connections) < 2:
            await asyncio.sleep(0.01)
        reader, one_more = await connect()
        refused = await everything(reader)
        one_more.close()
        held[0][1].close()
        while len(server.server_state.connections) > 1:
            await asyncio.sleep(0.01)
        return refused, await asked(connect)

    limits.setattr(connection, "HEADERS_TIMEOUT_S", 60.0)
    limits.setattr(connection, "MAX_CONNECTIONS", 2)
    refused, later = serving(script)
    assert refused.startswith(b"HTTP/1.1 503") and b"try again later" in refused
    assert later.startswith(b"HTTP/1.1 200")
