"""The sessions of a gateway: who may ask which policy, and the requests under way.

A session's policy is called in the event loop in which the session was opened. What the gateway's own thread does with
a session is said where it differs.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from traceback import extract_tb

from rlhf_ray.gateway.chat import ChatReply, ChatRequest, Policy, Refused

SECRET_BYTES = 16
"""Of a session's id, and of its key: 128 random bits each."""
MOST_OPEN = 64
"""Requests of a session that are under way."""
MOST_CLOSED = 10_000
"""Closed sessions that are answered 410; those that were closed before them are unknown."""
CLOSE_WARNING_S = 10.0
"""A cancelled request that takes longer to end is named in a warning."""
WRITTEN_S = 1.0
"""Longest wait of a closing session for answers that are being written."""
CLOSED = "the episode's attempt has ended, and its session is closed; nothing is sampled for it any more"


class Session:
    """A session from `open` to `close`, and what is known of it later."""

    def __init__(self, policy: Policy, model: str, warn_once: Callable[[str, str], None]) -> None:
        self.id = secrets.token_hex(SECRET_BYTES)
        self.key = secrets.token_hex(SECRET_BYTES)
        self.model = model
        self.requests = 0
        """Under way; changed in the gateway's thread."""
        self.writing = 0
        """Answers that are being written; changed in the gateway's thread."""
        self.closed = False
        self._policy: Policy | None = policy
        self._loop = asyncio.get_running_loop()
        self._replies: set[asyncio.Task[ChatReply | Refused]] = set()
        self._warn_once = warn_once

    def admits(self, key: bytes) -> bool:
        """Compared in constant time, so that the time of an answer does not reveal the key."""
        return hmac.compare_digest(key, self.key.encode())

    def ask(self, request: ChatRequest) -> Future[ChatReply | Refused]:
        """The policy's next turn, or why there is none. Called in the gateway's thread; does not raise."""
        reply = self._reply(request)
        try:
            return asyncio.run_coroutine_threadsafe(reply, self._loop)
        except RuntimeError:  # the loop is closed: the runner ends
            reply.close()
            refused: Future[ChatReply | Refused] = Future()
            refused.set_result(Refused(410, CLOSED))
            return refused

    def delivered(self, reply: ChatReply) -> None:
        """The answer was written. Called in the gateway's thread, before it reads the client's next request, so that
        the policy hears of it before it is asked again."""
        self._tell(lambda policy: policy.delivered(reply))

    def left(self, request: ChatRequest) -> None:
        """Nobody reads the answer to a request. Called in the gateway's thread."""
        self._tell(lambda policy: policy.left(request))

    async def written(self) -> None:
        """Wait, but not long, for answers that are being written: their agent may have read them already, although the
        policy has not heard of it. Called in the gateway's thread."""
        deadline = time.monotonic() + WRITTEN_S
        while self.writing and time.monotonic() < deadline:
            await asyncio.sleep(0.001)

    def end(self) -> None:
        """The policy hears nothing any more."""
        self._policy = None

    async def close(self) -> None:
        """Refuse requests from now on, and cancel those under way; returns when none runs any more."""
        self.closed = True
        while self._replies:
            for reply in self._replies:
                reply.cancel()
            _, running = await asyncio.wait(self._replies, timeout=CLOSE_WARNING_S)
            if running:
                self._warn_once("close", f"gateway: {len(running)} requests of a session that closes were cancelled "
                                         f"{CLOSE_WARNING_S:g} s ago and have not ended")

    async def _reply(self, request: ChatRequest) -> ChatReply | Refused:
        if self.closed or self._policy is None:
            return Refused(410, CLOSED)
        task = asyncio.current_task()
        assert task is not None
        self._replies.add(task)
        try:
            reply = await self._policy.reply(request)
            return Refused(410, CLOSED) if self.closed else reply
        except Refused as refused:
            return refused
        except asyncio.CancelledError:
            if self.closed or task.cancelling():
                return Refused(410, CLOSED)
            return Refused(500, "the policy's turn was cancelled")
        except Exception as error:
            frames = extract_tb(error.__traceback__)
            where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
            self._warn_once(f"policy {type(error).__name__}", "gateway: a request was answered 500, because the policy "
                            f"raised {type(error).__name__}: {error}{where}")
            return Refused(500, "the policy failed; the run's log says why")
        finally:
            self._replies.discard(task)

    def _tell(self, what: Callable[[Policy], None]) -> None:
        def told() -> None:
            if self._policy is not None:
                what(self._policy)

        with suppress(RuntimeError):  # the loop is closed: the runner ends
            self._loop.call_soon_threadsafe(told)


class Sessions:
    """Sessions by id, open and recently closed. Read in the gateway's thread, changed in the runner's."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()

    def add(self, session: Session) -> None:
        """Make it known."""
        self._sessions[session.id] = session

    def find(self, session_id: str) -> Session | None:
        """A session, open or recently closed."""
        return self._sessions.get(session_id)

    def opened(self) -> list[Session]:
        """Those that are not closed."""
        return [session for session in self._sessions.values() if not session.closed]

    def retire(self, session: Session) -> None:
        """Keep a closed session among the last `MOST_CLOSED`."""
        self._closed[session.id] = None
        while len(self._closed) > MOST_CLOSED:
            self._sessions.pop(self._closed.popitem(last=False)[0], None)
