"""What a reward server may answer: scores as agreed, or an error of ours that names the server; no other number."""

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_ray.config.rewards import HTTPReward
from rlhf_ray.errors import RewardError
from rlhf_ray.rewards.http.source import HTTPSource
from rlhf_ray.rewards.http.wire import AnswerError, scores_of
from tests.fuzz.budget import cases
from tests.fuzz.values import ANYTHING, TEXTS
from tests.unit.rewards.http.conftest import requests_of

COUNT = 2
BODIES = st.one_of(
    st.builds(
        lambda given, more: json.dumps({"scores": given, **more}).encode("utf-8", "replace"),
        st.lists(ANYTHING, max_size=3),
        st.dictionaries(st.sampled_from(["version", "model", "scores", "x"]), ANYTHING, max_size=2),
    ),
    ANYTHING.map(lambda value: json.dumps(value).encode("utf-8", "replace")),
    st.sampled_from(
        [
            b"",
            b"[" * 100_000,
            b'{"scores":' * 20_000,
            b'{"scores": [1e999, 1]}',
            b'{"scores": [NaN, 1]}',
            b'{"scores": [-Infinity, 1]}',
            b'{"scores": [' + b"1" * 5000 + b", 1]}",
            b'{"scores": [1, 2]}',
            b'{"scores": [1, 2]',
            b'\xff{"scores": [1, 2]}',
            b'{"scores": [1, 2], "scores": [3, 4]}',
            b'{"scores": ["1", 2]}',
            b'{"scores": [true, 2]}',
            b"\xef\xbb\xbf{}",
            '{"scores": [1, 2]}'.encode("utf-16"),
        ]
    ),
    st.binary(max_size=50),
)


def finite(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@given(BODIES)
@cases(300)
def test_a_body_is_scores_or_an_error(body):
    try:
        scores, _ = scores_of(body, COUNT)
    except AnswerError as error:
        assert str(error)
        return
    told = json.loads(body)["scores"]
    assert scores.shape == (COUNT,) and np.isfinite(scores).all() and all(map(finite, told))
    assert scores.tolist() == [float(np.float32(x)) for x in told]


def in_chunks(body, size):
    """A body as chunks of some bytes (RFC 9112, section 7.1)."""
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def body_of(reply):
    """The body of a reply that was taken, by its headers alone."""
    head, _, rest = reply.partition(b"\r\n\r\n")
    headers = [line.partition(b":") for line in head.split(b"\r\n")[1:]]
    if not any(name == b"Transfer-Encoding" for name, *_ in headers):
        (length,) = {int(value) for name, _, value in headers if name == b"Content-Length"}
        return rest[:length]
    body = b""
    while (size := int(rest.partition(b"\r\n")[0], 16)) > 0:
        start = rest.index(b"\r\n") + 2
        body, rest = body + rest[start : start + size], rest[start + size + 2 :]
    return body


@st.composite
def replies(draw):
    """The bytes of an answer to a request: mostly HTTP."""
    body = draw(BODIES)
    status = draw(
        st.one_of(
            st.just(b"200 OK"),
            st.sampled_from(
                [b"204 x", b"301 x", b"408 x", b"429 x", b"500 x", b"999 x", b"99999 x", b"-1", b"", b"abc"]
            ),
        )
    )
    headers = draw(
        st.lists(
            st.sampled_from(
                [
                    b"Content-Type: application/json",
                    b"Content-Type: text/html",
                    b"Content-Type: application/json; charset=\xff",
                    b"Content-Encoding: gzip",
                    b"Transfer-Encoding: chunked",
                    b"Location: http://169.254.169.254/",
                    b"Retry-After: 0",
                    b"Retry-After: -1",
                    b"Retry-After: Mon, 01 Jan 0001 00:00:00 +2359",
                    b"Retry-After: \xb2",
                    b"Connection: close",
                    b"Retry-After: Fri, 31 Dec 9999 23:59:59 -2359",
                    b"Retry-After: Mon, 01 Jan 0001 00:00:00",
                    b"Content-Length: x",
                    b"X: " + b"y" * 70_000,
                    b"no colon",
                    b"Set-Cookie: a=b",
                ]
            ),
            max_size=4,
        )
    )
    length = draw(st.sampled_from([len(body), len(body), 0, len(body) + 5, 10**30]))
    if draw(st.booleans()):
        headers, body = [*headers, b"Transfer-Encoding: chunked"], in_chunks(body, draw(st.integers(1, 40)))
    else:
        headers.append(b"Content-Length: %d" % length)
    whole = b"\r\n".join([b"HTTP/1.1 " + status, *headers, b"", body])
    return draw(
        st.one_of(st.just(whole), st.binary(max_size=30), st.integers(0, len(whole)).map(lambda end: whole[:end]))
    )


class Replying:
    """A server whose answers to /score are the bytes it is told."""

    def __init__(self) -> None:
        self.reply = b""

    async def answer(self, reader, writer):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if b" /health " in head.splitlines()[0]:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
            else:
                writer.write(self.reply)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@pytest.fixture(scope="module")
def asking():
    """asking(reply) -> scores of two samples from a server that replies so; one server and one loop for all."""
    loop, server = asyncio.new_event_loop(), Replying()
    listening = loop.run_until_complete(asyncio.start_server(server.answer, "127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"

    async def ask(reply):
        server.reply = reply
        source = HTTPSource(
            "far",
            HTTPReward.model_validate(
                {"type": "http", "urls": [url], "retries": 0, "timeout_s": 0.5, "request_timeout_s": 0.3}
            ),
        )
        await source.start()
        try:
            return (await source.score(requests_of(COUNT))).scores.tolist()
        finally:
            await source.stop()

    yield lambda reply: loop.run_until_complete(ask(reply))
    listening.close()
    loop.close()


@given(replies())
@cases(100)
def test_a_reply_is_scores_or_an_error_that_names_the_server(asking, reply):
    try:
        scores = asking(reply)
    except RewardError as error:
        assert "'far'" in str(error) and "http://127.0.0.1:" in str(error) and "A missing score is never" in str(error)
        return
    assert scores == [float(np.float32(x)) for x in json.loads(body_of(reply))["scores"]]


@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_a_reply_as_agreed_is_its_scores_however_it_is_framed(asking, framing):
    body = b'{"scores": [0.25, -3]}'
    rest = (b"Content-Length: %d\r\n\r\n%s" % (len(body), body) if framing == "length"
            else b"Transfer-Encoding: chunked\r\n\r\n" + in_chunks(body, 5))
    reply = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + rest
    assert asking(reply) == [0.25, -3] and json.loads(body_of(reply)) == json.loads(body)


@given(TEXTS)
@cases(50)
def test_a_url_is_an_address_or_refused(text):
    from pydantic import ValidationError

    try:
        HTTPReward.model_validate({"type": "http", "urls": [f"https://{text}"]})
    except ValidationError as error:
        assert all(e["type"] == "value_error" for e in error.errors())
