"""One attempt at an episode by an agent, which asks for the policy's turns until it ends.

A turn that was recorded, or sampled in a run of the agent whose process was lost, is given again to an agent that asks
after the same tokens. So an agent that does the same again continues where it was.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.data.chat import TOOLS
from rlhf_ray.environments.agent_run import Pace
from rlhf_ray.environments.pool import EnvironmentPool
from rlhf_ray.environments.protocol import AgentSession, Message
from rlhf_ray.environments.tool_calls import plain_turn
from rlhf_ray.errors import DataError, EpisodeFailed, ModelError, RLHFError, WorkerBroken, first_line
from rlhf_ray.gateway.chat import ChatReply, ChatRequest, Policy, Refused, SessionAddress
from rlhf_ray.records import SampleKey
from rlhf_ray.roles.agent_conversations import (
    AgentTurn,
    Conversations,
    recorded_key,
    tokens_of,
    turns_of,
    with_reward,
)
from rlhf_ray.roles.engines.interface import Completion, SampleRequest
from rlhf_ray.roles.episode import Activity, Ended, SampleTurn, TextTools, turn_seed
from rlhf_ray.roles.episode_journal import RecordedEpisode, RecordedTurn
from rlhf_ray.roles.episode_record import EpisodeRecord, RecordMisfit
from rlhf_ray.roles.episode_tokens import EpisodeTokens
from rlhf_ray.roles.rollout_rows import sample_request

GRACE_S = 0.2
"""An equal request that arrives while another one is open waits so long for that one's client to be gone: it may be a
retry, and the end of a connection passes through two event loops."""
LOOK_S = 0.01
MODEL = "policy"
"""What sessions call the policy."""
UNREADABLE = (ModelError, DataError, ValueError, TypeError)
"""What a chat template or a tokenizer raises for messages that it refuses."""
OVER = "the episode is over"


class SessionServer(Protocol):
    """Where agents reach policies (`gateway.server.Gateway`)."""

    def open(self, policy: Policy, model: str) -> SessionAddress:
        """A new session, whose requests this policy answers."""
        ...

    async def close(self, address: SessionAddress) -> None:
        """The session answers no more; when this returns, none of its requests is under way."""
        ...

    async def out_of_reach(self) -> str:
        """Why agents cannot reach it any more; "" if they can."""
        ...


class AgentAttempt:
    """One attempt at an episode by an agent; it answers the requests of its sessions (`gateway.chat.Policy`)."""

    def __init__(
        self, key: SampleKey, config: EnvironmentConfig, sampling: SamplingConfig, texts: TextTools,
        sample: SampleTurn, seed: int, activity: Activity, options: dict[str, Any], record: EpisodeRecord,
        recorded: RecordedEpisode, gateway: SessionServer,
    ) -> None:
        """As `Attempt`.

        Args:
            options: of the chat template. An agent's tools are those of its requests.
            gateway: where its sessions are opened.
        """
        self._config = config
        self._sampling = sampling
        self._texts = texts
        self._sample = sample
        self._seed = seed
        self._activity = activity
        self._options = {name: value for name, value in options.items() if name != TOOLS}
        self._record = record
        self._recorded = recorded
        self._gateway = gateway
        self._place = f"environments.{activity.environment}, row {key.row}"
        self.events: Counter[str] = Counter()
        self.metrics: dict[str, float] = {}
        self.messages: list[Message] = []
        """What the policy read first."""
        self.tools: list[dict[str, Any]] = []
        self._conversations = self._none()
        self._known = {recorded_key(turn): turn for turn in recorded.turns if turn.asked}
        """The turns that were sampled before this run of the agent, by `AgentTurn.key`."""
        self._of_record = set(self._known)
        self._used: set[str] = set()
        """Of what is known in this run of the agent."""
        self._sampling_tasks: dict[AgentTurn, asyncio.Task[None]] = {}
        """Of the turns that are not answered yet."""
        self._answered = 0
        self._pace = Pace()
        self._runs = 0
        self._address: SessionAddress | None = None
        self._open = False
        self._stopped: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
        """Cause and error, if the episode ends whatever the agent does; or an error of the run."""
        self._refusal: tuple[str, str] | None = None
        """Cause and error of a request that had no room, after which none was answered."""
        self._reward: float | None = None

    async def play(
        self, pool: EnvironmentPool, row: dict[str, Any], seed: int, prompt: list[Message], deadline: float
    ) -> Ended:
        """Play it to its end, as `Attempt.play`.

        Raises:
            RecordMisfit: it has ended, and cannot be rebuilt from its record.
            WorkerBroken: its agent could not reach the policy.
            RLHFError: a generator's error, or that no generator is available.
        """
        if self._recorded.outcome is not None:
            return self._rebuilt(prompt)
        cause, error = "error_agent", ""
        try:
            async with asyncio.timeout_at(deadline) as limit:
                cause, error = await self._run(pool, row, seed)
        except EpisodeFailed as failure:
            cause, error = failure.cause, str(failure)
            if cause == "error_agent" and self._refusal is not None:
                cause, error = self._refusal
        except TimeoutError:
            if not limit.expired():
                raise
            cause, error = "error_timeout", self._activity.overdue(self._config)
        finally:
            self._stopped.cancel()
            self._activity.enter("close")
            await asyncio.shield(self._close_session())
        if why := await self._gateway.out_of_reach():  # so the agent failed because of us, or has given up
            raise WorkerBroken(f"agents cannot reach the policy: the gateway of their runner is out of reach: {why}")
        return self.ended(cause, error, prompt)

    async def _run(self, pool: EnvironmentPool, row: dict[str, Any], seed: int) -> tuple[str, str]:
        """Let the agent run to its end; returns cause and error."""
        async def begin() -> AgentSession:
            await self._begin_again()
            self._address = address = self._gateway.open(self, MODEL)
            self._open = True
            self._look()
            return AgentSession(
                address.base_url, address.anthropic_url, address.api_key, MODEL, seed, self._config.max_tokens,
                self._config.max_turns)

        self._activity.turn = 0
        self._activity.enter("a process")
        running: asyncio.Future[Any] = asyncio.ensure_future(pool.run(row, begin, self._pace))
        try:
            either: list[asyncio.Future[Any]] = [running, self._stopped]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._stopped.done():
                return self._stopped.result()
            answer = running.result()
        finally:
            running.cancel()
            await asyncio.wait([running])
        self._reward = answer["reward"]
        self.metrics = {name: float(number) for name, number in answer["info"].items()}
        if self._refusal is not None:
            return self._refusal
        return ("truncated_turns" if answer["truncated"] else "completed"), ""

    async def _begin_again(self) -> None:
        """Keep what was sampled for a run whose process was lost, and begin without turns."""
        await self._close_session()
        self.events["interrupted"] = self._runs
        self._runs += 1
        for turn in self._conversations.turns:
            if turn.completion is not None:
                self._known[turn.key] = self._recorded_turn(turn, turn.completion)
        self._conversations = self._none()
        self._used.clear()
        self._answered = 0
        self._refusal = None

    async def _close_session(self) -> None:
        """Answer no more. Turns that are being sampled are given up; a request to a generator is open until the
        generator has confirmed that it ended."""
        self._open = False
        if self._address is not None:
            address, self._address = self._address, None
            await self._gateway.close(address)
        tasks = list(self._sampling_tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _none(self) -> Conversations:
        return Conversations(self._texts.template, self._texts.stop_tokens, self._options, self._place)

    # Requests

    async def reply(self, request: ChatRequest) -> ChatReply:
        """See `gateway.chat.Policy`."""
        self._pace.asks()
        refused = False
        try:
            await self._until_others_left(request)
            turn = self._asked(request)
            task = self._sampling_tasks.get(turn)
            if task is not None:
                turn.waiting += 1
                try:
                    await asyncio.wait([task])
                finally:
                    turn.waiting -= 1
            if turn.reply is None:
                raise Refused(410, OVER)
            if turn.errors and self._config.on_failure.parse != "feedback" and self._ends_by(turn):
                raise Refused(403, turn.errors[0])
            turn.on_way = request
            return turn.reply
        except Refused:
            refused = True
            raise
        finally:
            self._pace.answered(refused=refused)

    async def _until_others_left(self, request: ChatRequest) -> None:
        """Wait for the client of an equal request to be gone, for `GRACE_S` at most."""
        end = time.monotonic() + (0.0 if request.is_retry else GRACE_S)
        while self._conversations.is_awaited(request) and time.monotonic() < end:
            await asyncio.sleep(LOOK_S)

    def delivered(self, reply: ChatReply) -> None:
        """See `gateway.chat.Policy`."""
        for turn in self._conversations.turns:
            if turn.reply is reply:
                turn.received, turn.on_way = True, None

    def left(self, request: ChatRequest) -> None:
        """See `gateway.chat.Policy`."""
        for turn in self._conversations.turns:
            if turn.on_way is request:
                turn.on_way = None

    def _asked(self, request: ChatRequest) -> AgentTurn:
        """The turn of a request, which is sampled unless it is an earlier one. Raises Refused."""
        if not self._open:
            raise Refused(410, OVER)
        again = self._conversations.not_received(request)
        if again is not None:
            return again
        name = self._activity.environment
        if len(self._conversations.turns) >= self._config.max_turns:
            message = f"the episode has had all its turns (environments.{name}.max_turns={self._config.max_turns})"
            self._refusal = "truncated_turns", message
            raise Refused(403, message)
        try:
            turn = self._conversations.placed(request)
        except UNREADABLE as error:
            raise Refused(400, f"the messages cannot be read: {first_line(error)}") from error
        room = self._config.max_tokens - len(turn.context)
        if room < 1:
            # In OpenAI's words, by which clients know it (LiteLLM 1.110, exception_mapping_utils.py).
            message = (f"This model's maximum context length is {self._config.max_tokens} tokens with its answer "
                       f"(environments.{name}.max_tokens), and this conversation has {len(turn.context)} tokens")
            self._refusal = "truncated_episode", message
            raise Refused(400, message)
        turn.answered_before = self._answered
        turn.sampled = self._request(turn)
        self._conversations.add(turn)
        task = self._sampling_tasks[turn] = asyncio.ensure_future(self._sampled(turn, turn.sampled))
        task.add_done_callback(lambda _: self._done(turn))
        self._look()
        return turn

    def _request(self, turn: AgentTurn) -> SampleRequest:
        """What a generator is asked."""
        room = self._config.max_tokens - len(turn.context)
        most = min(self._sampling.max_tokens, room)
        if turn.request.max_tokens is not None:
            most = min(most, turn.request.max_tokens)
        sampling = self._sampling
        if turn.request.stop:
            sampling = sampling.model_copy(update={"stop": [*sampling.stop, *turn.request.stop]})
        return sample_request(turn.context, sampling, most, turn_seed(self._seed, turn.digest, turn.asked_before),
                              self._texts.stop_tokens, self._texts.vocabulary)

    async def _sampled(self, turn: AgentTurn, request: SampleRequest) -> None:
        """Have a turn sampled, or take it as it was sampled before, and read it."""
        known = self._known.get(turn.key)
        if known is not None and _answers(known, turn, request.max_tokens):
            completion = known.completion
            assert known.asked is not None
            turn.answered_before = known.asked["answered_before"]
            self._used.add(turn.key)
        else:
            try:
                completion = await self._sample(request)
            except RLHFError as error:
                self._fail(error)
                return
            self._of_record.add(turn.key)
            await self._record.asked(self._recorded_turn(turn, completion))
        self._read(turn, completion)
        self._answered += 1
        self._refusal = None

    def _recorded_turn(self, turn: AgentTurn, completion: Completion) -> RecordedTurn:
        return RecordedTurn(turn.digest, completion, None, interrupted=self.events["interrupted"], asked=turn.asked())

    def _done(self, turn: AgentTurn) -> None:
        """A turn is answered, or was given up."""
        task = self._sampling_tasks.pop(turn)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
        self._look()

    def _fail(self, error: BaseException) -> None:
        """It is no failure of the agent, and ends the call that has episodes played."""
        if not self._stopped.done():
            self._stopped.set_exception(error)
            self._stopped.exception()  # perhaps nobody waits for it any more

    def _look(self) -> None:
        """Say what the episode waits for."""
        number = len(self._sampling_tasks)
        self._activity.turn = max(0, len(self._conversations.turns) - 1)
        self._activity.enter("the agent" if not number else "a generator" if number == 1 else f"{number} open requests")

    def _read(self, turn: AgentTurn, completion: Completion) -> None:
        """What the policy said in a turn, as a reply and as a message for later turns."""
        texts, tools = self._texts, turn.request.tools
        opened = texts.template.opens_reasoning(tools, self._options)
        text = texts.text_of(completion.tokens.tolist())
        shown, stop = self._without_stop(turn, completion, text)
        parsed = texts.parsed(shown, tools, opened)
        turn.errors = parsed.errors
        if parsed.errors:  # the agent reads it as it is
            parsed = plain_turn(shown, opened=opened)
        calls = [replace(call, id=turn.call_id(i)) for i, call in enumerate(parsed.calls)]
        reason = "tool_calls" if calls and completion.finish_reason == "stop" else completion.finish_reason
        turn.reply = ChatReply(parsed.content, parsed.reasoning, calls, reason, len(turn.context),
                               len(completion.tokens), turn.number, stop if stop in turn.request.stop else None)
        turn.completion = completion
        content = parsed.content if shown == text or turn.errors else texts.parsed(text, tools, opened).content
        self._conversations.answered(turn, texts.template.assistant(
            text, content=content, reasoning=parsed.reasoning,
            tool_calls=[{"name": call.name, "arguments": call.arguments, "id": call.id} for call in calls]))

    def _without_stop(self, turn: AgentTurn, completion: Completion, text: str) -> tuple[str, str | None]:
        """The text of a turn without the stop text that ended it, and that, if one did."""
        assert turn.sampled is not None
        tokens = completion.tokens.tolist()
        if completion.finish_reason != "stop" or self._texts.stopped_by(tokens) is not None:
            return text, None
        # A stop text ends in the last token, as may a character, which is U+FFFD, once or more, without that token.
        before = len(self._texts.decode(tokens[:-1]).rstrip("\ufffd"))
        for stop in turn.sampled.sampling.stop:
            found = text.find(stop, max(0, before - len(stop) + 1))
            if found >= 0:
                return text[:found], stop
        return text, None

    def _ends_by(self, turn: AgentTurn) -> bool:
        """Whether the episode ends by a tool call that cannot be read; a turn that was cut off may be such a call."""
        if turn.completion is None or turn.completion.finish_reason != "stop":
            return False
        turn.received = True
        if not self._stopped.done():
            self._stopped.set_result(("error_parse", turn.errors[0]))
        return True

    # The end

    def ended(self, cause: str, error: str, prompt: list[Message]) -> Ended:
        """As `Attempt.ended`."""
        rows = self._conversations.rows()
        kept = [turn for row in rows for turn in row]
        self._count(kept)
        left_out = sorted((self._of_record | self._used) - {turn.key for turn in kept})
        if not rows:
            self.messages = prompt
            opened = self._texts.template.open(prompt, None, options=self._options, place=self._place)
            return Ended(cause, error, EpisodeTokens(opened[:self._config.max_tokens]), [], self._reward, left_out)
        self.messages = rows[0][0].request.messages
        self.tools = rows[0][0].request.tools
        turns = with_reward(turns_of(rows), self._reward)
        return Ended(cause, error, tokens_of(rows), turns, self._reward, left_out)

    def _count(self, kept: Sequence[AgentTurn]) -> None:
        """Count what happened."""
        for turn in kept:
            assert turn.reply is not None
            self.events["tool_calls"] += len(turn.reply.tool_calls)
            self.events["parse_failures"] += len(turn.errors)
            self.events["overridden"] += turn.request.is_overridden
        answered = sum(turn.reply is not None for turn in self._conversations.turns)
        self.events["abandoned"] = answered - len(kept)
        if self._known.keys() - self._used:  # the agent did not do the same again
            self.events["restarted"] += 1
            if self._recorded.turns:
                self.events["continued"] -= 1

    def _rebuilt(self, prompt: list[Message]) -> Ended:
        """An episode that has ended, from its record alone. Raises RecordMisfit."""
        outcome = self._recorded.outcome
        assert outcome is not None
        newest: dict[str, RecordedTurn] = {}
        for recorded in self._recorded.turns:
            key = recorded_key(recorded)
            newest.pop(key, None)  # it was sampled again, with other bounds
            newest[key] = recorded
        by_key: dict[str, AgentTurn] = {}
        for key, recorded in newest.items():
            asked = recorded.asked
            if asked is None or key in outcome.left_out:
                continue
            follows = by_key.get(asked["follows"])
            before = follows.request if follows else ChatRequest([])
            request = ChatRequest(
                [*before.messages[:asked["kept"]], *asked["messages"]],
                before.tools if asked["tools"] is None else asked["tools"], asked["max_tokens"], tuple(asked["stop"]))
            try:
                turn = self._conversations.made(request, follows, asked["continues"])
            except UNREADABLE as error:
                raise RecordMisfit(f"a turn's messages cannot be read: {first_line(error)}") from error
            turn.first_line = asked["first_line"]
            turn.answered_before = asked["answered_before"]
            turn.asked_before = asked["asked_before"]
            if turn.key != key or (asked["follows"] is not None and follows is None):
                raise RecordMisfit("a turn was sampled after other tokens")
            self._conversations.add(turn)
            turn.sampled = self._request(turn)
            self._read(turn, recorded.completion)
            turn.received = True
            by_key[key] = turn
        self._used = set(self._known)
        self._reward, self.metrics = outcome.reward, dict(outcome.metrics)
        return self.ended(outcome.cause, outcome.error, prompt)


def _answers(known: RecordedTurn, turn: AgentTurn, most: int) -> bool:
    """Whether the same would be sampled for a turn of at most so many tokens."""
    assert known.asked is not None
    return (known.asked["max_tokens"] == turn.request.max_tokens and len(known.completion.tokens) <= most
            and tuple(known.asked["stop"]) == turn.request.stop)
