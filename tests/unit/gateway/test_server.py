"""The gateway over raw sockets: connections that are half open, abandoned or cut, sessions that close, and many of
them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
import threading
import time
import urllib.request
from contextlib import suppress

import httpx
import pytest

from rlhf_ray.errors import ConfigError
from rlhf_ray.gateway import app, server, sessions
from rlhf_ray.gateway.chat import Refused
from rlhf_ray.gateway.server import Gateway
from rlhf_ray.serving import connection
from tests.unit.gateway.stand import Script, played, reply

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
SHORT_S = 0.4


def head(stand, length, *, path="/chat/completions", method="POST", address=None):
    address = address or stand.address
    route = address.base_url.split("/", 3)[3] + path
    return (f"{method} /{route} HTTP/1.1\r\nhost: t\r\nauthorization: Bearer {address.api_key}\r\n"
            f"content-length: {length}\r\n\r\n").encode()


def turn(stand, body=HELLO, **where):
    written = json.dumps(body).encode() if not isinstance(body, bytes) else body
    return head(stand, len(written), **where) + written


async def connect(stand):
    host, _, port = stand.address.base_url.split("/")[2].partition(":")
    return await asyncio.open_connection(host, int(port))


async def read_answer(reader):
    """(status, headers, body) of an answer with a length."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
    return int(lines[0].split()[1]), headers, json.loads(await reader.readexactly(int(headers["content-length"])))


async def ask(stand, body=HELLO, **where):
    reader, writer = await connect(stand)
    writer.write(turn(stand, body, **where))
    answer = await read_answer(reader)
    writer.close()
    return answer


def closes_the_listener(stand):
    port = int(stand.address.base_url.split(":")[2].split("/")[0])
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as each:
            if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and each.getsockname()[1] == port:
                each.shutdown(socket.SHUT_RDWR)


def ends_the_thread(stand):
    def dies():
        raise SystemExit("as ordered")  # asyncio lets this end a loop

    stand.gateway._server.servers[0].get_loop().call_soon_threadsafe(dies)


def holds_the_thread(stand):
    stand.gateway._server.servers[0].get_loop().call_soon_threadsafe(time.sleep, 1.5)


@pytest.mark.parametrize(("fault", "why"), [
    (closes_the_listener, "cannot be reached|closes connections"), (ends_the_thread, "thread has ended|reached"),
    (holds_the_thread, "did not answer within 0.2 s")])
def test_a_gateway_that_answers_no_more_says_so(fault, why, monkeypatch):
    monkeypatch.setattr(server, "BETWEEN_TRIES_S", 0.05)

    async def scenario(stand):
        assert await stand.gateway.out_of_reach() == ""
        monkeypatch.setattr(server, "ANSWER_S", 0.2)
        fault(stand)
        found = ""
        for _ in range(50):
            if found := await stand.gateway.out_of_reach():
                break
        assert re.search(why, found), found

    played(scenario)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


def connections(stand):
    return stand.gateway._server.server_state.connections


def waiting(event_of):
    """A turn that ends when `event_of()` is set."""

    async def wait(request):
        await event_of().wait()
        return reply()

    return wait


class TestDisconnects:
    def test_the_policy_hears_at_once_that_nobody_waits_for_a_request(self):
        async def script(stand):
            ended = []

            async def slow(request):
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.append(request)

            stand.policy.turns = [slow, reply("next", turn=1)]
            _, writer = await connect(stand)
            writer.write(turn(stand))
            await until(lambda: stand.policy.asked)
            writer.close()
            await until(lambda: ended)
            status, _, body = await ask(stand)
            await asyncio.sleep(0.1)
            return status, body["choices"][0]["message"]["content"], stand.policy.delivered_turns

        assert played(script) == (200, "next", [1])

    def test_a_session_that_closes_when_its_agent_has_the_answer_hears_that_it_was_delivered(self):
        """The gateway's own thread writes the answer, and may say so only after the agent has ended."""
        async def script(stand):
            session = stand.gateway._session(stand.address)
            said = session.delivered

            def late(reply):
                time.sleep(0.2)
                said(reply)

            session.delivered = late
            assert (await ask(stand))[0] == 200
            await stand.gateway.close(stand.address)
            return stand.policy.delivered_turns

        assert played(script, reply()) == [0]

    def test_a_turn_is_delivered_before_the_policy_is_asked_again(self):
        """Over a kept connection and others in turn; the client asks as soon as it has the last byte."""

        async def script(stand):
            seen = []

            async def numbered(request):
                seen.append(len(stand.policy.delivered_turns))
                return reply(turn=len(seen) - 1)

            stand.policy.turns = [numbered]
            kept = await connect(stand)
            for number in range(150):
                reader, writer = kept if number % 3 else await connect(stand)
                writer.write(turn(stand, {**HELLO, "stream": number % 2 == 0}))
                await reader.readuntil(b"data: [DONE]\n\n" if number % 2 == 0 else b'"total_tokens": 10}}')
            await until(lambda: len(stand.policy.delivered_turns) == 150)
            return seen

        assert played(script) == list(range(150))

    @pytest.mark.parametrize("leaves", [True, False])
    def test_a_long_answer_that_is_not_read_is_not_delivered(self, monkeypatch, leaves):
        monkeypatch.setattr(connection, "WRITE_TIMEOUT_S", 60.0 if leaves else SHORT_S)

        async def script(stand):
            _reader, writer = await connect(stand)
            writer.transport.pause_reading()
            writer.write(turn(stand))
            await until(lambda: stand.policy.asked)
            await asyncio.sleep(0.3)
            if leaves:
                writer.transport.abort()
            await until(lambda: not connections(stand))
            await until(lambda: stand.policy.left_requests)
            before = list(stand.policy.delivered_turns)
            assert (await ask(stand))[0] == 200
            await until(lambda: stand.policy.delivered_turns)
            assert [each is stand.policy.asked[0] for each in stand.policy.left_requests] == [True]
            return before, stand.policy.delivered_turns

        assert played(script, reply("a" * 20_000_000), reply(turn=1)) == ([], [1])

    def test_a_body_that_is_cut_asks_nothing(self):
        async def script(stand):
            for part in (b"", b'{"messages": [', json.dumps(HELLO).encode()):
                _, writer = await connect(stand)
                writer.write(head(stand, 1_000) + part)
                await writer.drain()
                await asyncio.sleep(0.05)
                writer.close()
            await asyncio.sleep(0.1)
            session = stand.gateway._session(stand.address)
            return list(stand.policy.asked), session.requests, (await ask(stand))[0], stand.warnings

        assert played(script) == ([], 0, 200, [])


class TestHalfOpen:
    def test_bodies_that_do_not_arrive_are_answered_408_and_hold_nobody_up(self, monkeypatch):
        monkeypatch.setattr(app, "BODY_TIMEOUT_S", SHORT_S)

        async def script(stand):
            half = [await connect(stand) for _ in range(30)]
            for _, writer in half:
                writer.write(head(stand, 1_000) + b"{")
            began = time.monotonic()
            assert (await ask(stand))[0] == 200
            took = time.monotonic() - began
            answers = [await read_answer(reader) for reader, _ in half]
            ends = [await reader.read() for reader, _ in half]
            return took, {answer[0] for answer in answers}, answers[0][2]["error"]["code"], set(ends)

        took, statuses, code, ends = played(script)
        assert took < SHORT_S and statuses == {408} and code == "timeout" and ends == {b""}

    def test_headers_that_do_not_arrive_are_closed_and_hold_nobody_up(self, monkeypatch):
        monkeypatch.setattr(connection, "HEADERS_TIMEOUT_S", SHORT_S)

        async def script(stand):
            half = [await connect(stand) for _ in range(100)]
            for number, (_, writer) in enumerate(half):
                writer.write((b"", b"P", head(stand, 10)[:-2])[number % 3])
            status = (await ask(stand))[0]
            return status, {await reader.read() for reader, _ in half}

        assert played(script) == (200, {b""})

    def test_connections_are_bounded_and_one_more_hears_so(self, monkeypatch):
        monkeypatch.setattr(server, "MOST_CONNECTIONS", 2)

        async def script(stand):
            held = [await connect(stand) for _ in range(2)]
            await asyncio.sleep(0.1)
            reader, writer = await connect(stand)
            refused = await read_answer(reader)
            for _, other in [*held, (reader, writer)]:
                other.close()
            await asyncio.sleep(0.1)
            return refused, (await ask(stand))[0]

        (status, headers, body), later = played(script)
        assert (status, headers["retry-after"], body["error"]["type"], later) == (503, "1", "server_error", 200)

    def test_what_is_not_http_is_refused(self):
        async def script(stand):
            for junk in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"a" * 200_000 + b"\r\n\r\n"):
                reader, writer = await connect(stand)
                writer.write(junk)
                with suppress(ConnectionError):
                    assert b" 200 " not in await reader.read()
            return (await ask(stand))[0]

        assert played(script) == 200


class TestBodies:
    @pytest.mark.parametrize("body", [
        b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"\xff\xfe", b'{"messages": NaN}', b"", b"[1]",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}'])
    def test_what_cannot_be_read_is_refused_and_the_connection_goes_on(self, body):
        async def script(stand):
            reader, writer = await connect(stand)
            writer.write(turn(stand, body))
            refused = await read_answer(reader)
            writer.write(turn(stand))
            return refused[0], (await read_answer(reader))[0], len(stand.policy.asked), stand.warnings

        assert played(script) == (400, 200, 1, [])

    def test_a_conversation_of_many_messages_is_read(self):
        async def script(stand):
            many = [{"role": "user" if number % 2 else "assistant", "content": str(number)}
                    for number in range(100_001)]
            status, _, _ = await ask(stand, {"messages": many})
            return status, stand.policy.asked[0].messages == many

        assert played(script) == (200, True)


class TestSessions:
    def test_many_sessions_see_only_their_own_requests(self):
        async def script(stand):
            policies = {}
            for number in range(200):
                policy = Script([lambda request, number=number: answer(request, number)])
                policies[stand.gateway.open(policy, f"model {number}")] = policy

            async def answer(request, number):
                await asyncio.sleep(0.01)
                return reply(f"{number} {request.messages[0]['content']}")

            async def agent(address, number, question):
                reader, writer = await connect(stand)
                for again in range(2):
                    content = f"{number} {question} {again}"
                    writer.write(turn(stand, {"messages": [{"role": "user", "content": content}]}, address=address))
                    status, _, body = await read_answer(reader)
                    assert status == 200 and body["model"] == f"model {number}"
                    assert body["choices"][0]["message"]["content"] == f"{number} {content}"
                writer.close()

            await asyncio.gather(*(agent(address, number, question)
                                   for number, address in enumerate(policies) for question in range(3)))
            await until(lambda: all(len(policy.delivered_turns) == 6 for policy in policies.values()))
            for number, policy in enumerate(policies.values()):
                asked = sorted(request.messages[0]["content"] for request in policy.asked)
                assert asked == sorted(f"{number} {question} {again}" for question in range(3) for again in range(2))
            assert stand.policy.asked == []
            urls = {address.base_url for address in policies}
            return len(urls), len({address.api_key for address in policies}), {len(url.split("/")[3]) for url in urls}

        assert played(script) == (200, 200, {32})

    def test_closing_cancels_requests_and_returns_when_none_runs(self):
        async def script(stand):
            ended, reached_end = [], asyncio.Event()

            async def slow(request):
                try:
                    await asyncio.sleep(30)
                finally:
                    await asyncio.sleep(0.2)
                    ended.append(request)
                return reply()

            stand.policy.turns = [slow]
            other_policy = Script([waiting(lambda: reached_end)])
            other = stand.gateway.open(other_policy, "other")
            asking = [asyncio.create_task(ask(stand)) for _ in range(5)]
            other_asking = asyncio.create_task(ask(stand, address=other))
            await until(lambda: len(stand.policy.asked) == 5 and other_policy.asked)
            await stand.gateway.close(stand.address)
            ended_at_close = len(ended)
            answers = await asyncio.gather(*asking)
            later = await ask(stand)
            reached_end.set()
            return (ended_at_close, [answer[0] for answer in answers], later[0], later[2]["error"]["code"],
                    (await other_asking)[0], stand.policy.delivered_turns)

        assert played(script) == (5, [410] * 5, 410, "session_closed", 200, [])

    def test_a_request_that_does_not_end_after_closing_is_named(self, monkeypatch):
        monkeypatch.setattr(sessions, "CLOSE_WARNING_S", 0.1)

        async def script(stand):
            async def stubborn(request):
                until_s = time.monotonic() + 0.5
                while time.monotonic() < until_s:
                    with suppress(asyncio.CancelledError):
                        await asyncio.sleep(0.05)
                return reply()

            stand.policy.turns = [stubborn]
            asking = asyncio.create_task(ask(stand))
            await until(lambda: stand.policy.asked)
            await stand.gateway.close(stand.address)
            await asyncio.sleep(0.05)
            return (await asking)[0], stand.warnings, stand.policy.delivered_turns

        status, warnings, delivered = played(script)
        assert status in (200, 410) and delivered == []
        assert len(warnings) == 1 and "1 requests of a session that closes" in warnings[0]

    def test_the_last_closed_sessions_are_remembered(self, monkeypatch):
        monkeypatch.setattr(sessions, "MOST_CLOSED", 2)

        async def script(stand):
            addresses = [stand.gateway.open(stand.policy, "m") for _ in range(3)]
            for address in addresses:
                await stand.gateway.close(address)
            return [(await ask(stand, address=address))[0] for address in addresses]

        assert played(script) == [404, 410, 410]

    def test_open_requests_of_a_session_are_bounded_and_those_that_were_abandoned_are_not_open(self):
        async def script(stand):
            finish = asyncio.Event()
            stand.policy.turns = [waiting(lambda: finish)]
            held = [await connect(stand) for _ in range(sessions.MOST_OPEN)]
            for _, writer in held:
                writer.write(turn(stand))
            await until(lambda: len(stand.policy.asked) == sessions.MOST_OPEN)
            status, headers, body = await ask(stand)
            for _, writer in held[:40]:
                writer.close()
            session = stand.gateway._session(stand.address)
            await until(lambda: session.requests == sessions.MOST_OPEN - 40)
            other = stand.gateway.open(Script([reply()]), "other")
            in_other = (await ask(stand, address=other))[0]
            finish.set()
            await asyncio.gather(*(read_answer(reader) for reader, _ in held[40:]))
            return status, headers["retry-after"], body["error"]["type"], in_other, (await ask(stand))[0]

        assert played(script) == (429, "1", "rate_limit_error", 200, 200)

    def test_a_connection_serves_many_requests(self):
        async def script(stand):
            reader, writer = await connect(stand)
            for _ in range(20):
                writer.write(turn(stand))
                assert (await read_answer(reader))[0] == 200
            writer.write(turn(stand) * 3)
            served = next(iter(connections(stand))).transport.get_extra_info("socket")
            no_delay = served.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            return [(await read_answer(reader))[0] for _ in range(3)], bool(no_delay)

        assert played(script) == ([200] * 3, True), "with Nagle's algorithm answers wait 40 ms"

    def test_stopping_ends_requests_and_the_port(self):
        async def script(stand):
            stand.policy.turns = [waiting(asyncio.Event)]
            asking = asyncio.create_task(ask(stand))
            await until(lambda: stand.policy.asked)
            began = time.monotonic()
            await stand.gateway.stop()
            took = time.monotonic() - began
            with pytest.raises(ConnectionError):
                await connect(stand)
            await until(lambda: "gateway" not in [thread.name for thread in threading.enumerate()])
            return (await asking)[0], took < 5

        assert played(script) == (410, True)


class TestPolicies:
    def test_an_error_is_500_without_internals_and_warned_of_once(self):
        async def script(stand):
            answers = [await ask(stand) for _ in range(3)]
            await asyncio.sleep(0.05)
            return answers, stand.warnings

        answers, warnings = played(script, RuntimeError("secret path /a/b"))
        assert [answer[0] for answer in answers] == [500] * 3
        assert answers[0][2] == {"error": {"message": "the policy failed; the run's log says why",
                                           "type": "server_error", "param": None, "code": None}}
        assert len(warnings) == 1 and "RuntimeError: secret path /a/b" in warnings[0] and "stand.py:" in warnings[0]

    def test_a_turn_that_is_cancelled_from_within_is_500(self):
        async def script(stand):
            return (await ask(stand))[0]

        assert played(script, asyncio.CancelledError()) == 500

    @pytest.mark.parametrize("status, wait, written", [
        (400, None, None), (429, 0.2, "1"), (503, 2.5, "3"), (410, None, None)])
    def test_a_refusal_keeps_its_status_and_wait(self, status, wait, written):
        async def script(stand):
            return await ask(stand)

        answered, headers, body = played(script, Refused(status, "because", wait))
        assert (answered, headers.get("retry-after"), body["error"]["message"]) == (status, written, "because")

    @pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
    def test_it_is_called_in_the_loop_that_opened_the_session(self, kind):
        """Under uvloop, as Ray's asynchronous actors run; answers that need no policy do not wait for that loop."""
        factory = pytest.importorskip("uvloop").new_event_loop if kind == "uvloop" else None

        async def script(stand):
            answers = await asyncio.gather(*(ask(stand) for _ in range(20)))
            await until(lambda: len(stand.policy.delivered_turns) == 20)
            request = urllib.request.Request(f"{stand.address.base_url}/models",
                                             headers={"Authorization": f"Bearer {stand.address.api_key}"})
            with urllib.request.urlopen(request, timeout=5) as answered:  # blocks the loop
                listed = json.load(answered)["data"][0]["id"]
            return {answer[0] for answer in answers}, stand.policy.loops == {asyncio.get_running_loop()}, listed

        assert played(script, loop_factory=factory) == ({200}, True, "policy")


def test_neither_keys_nor_ids_are_logged(caplog, capfd):
    async def script(stand):
        stand.policy.turns = [RuntimeError("no"), reply(), Refused(400, "no")]
        for body in (HELLO, HELLO, HELLO, b"{", {"messages": 1, "n": 2}, {**HELLO, "made_up": 1}):
            await ask(stand, body)
        await ask(stand, path="/other")
        _, writer = await connect(stand)
        writer.write(head(stand, 1_000) + b"{")
        writer.close()
        await stand.gateway.close(stand.address)
        await ask(stand)
        return stand.address, stand.warnings

    with caplog.at_level(logging.DEBUG):
        address, warnings = played(script)
    session = address.anthropic_url.rpartition("/")[2]
    printed = "".join(capfd.readouterr())
    assert warnings
    for secret in (session, address.api_key):
        assert secret not in caplog.text and secret not in printed and secret not in "".join(warnings)


@pytest.mark.parametrize("host", ["203.0.113.1", "no such host"])
def test_a_host_that_is_not_of_this_machine_is_named(host):
    with pytest.raises(ConfigError, match=f"episode_runner.gateway_host='{host}'"):
        asyncio.run(Gateway(host, print).start())


@pytest.mark.parametrize("host, where", [
    ("0.0.0.0", "http://"), ("::1", "http://[::1]:"), ("localhost", "http://localhost:")])
def test_a_sessions_address_can_be_reached(host, where):
    async def script():
        gateway = Gateway(host, print)
        try:
            await gateway.start()
        except ConfigError:
            pytest.skip(f"no {host} here")
        address = gateway.open(Script([reply()]), "policy")
        async with httpx.AsyncClient() as client:
            answered = await client.get(f"{address.base_url}/models",
                                        headers={"Authorization": f"Bearer {address.api_key}"})
        await gateway.stop()
        return address.base_url, answered.status_code

    url, status = asyncio.run(script())
    assert status == 200 and url.startswith(where) and "0.0.0.0" not in url
