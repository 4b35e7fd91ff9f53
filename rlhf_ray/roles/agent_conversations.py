"""The conversations of an agent, as the token sequences that they are.

An agent sends the whole conversation with each request. Where it is one that the policy has written in, with messages
after the policy's, its tokens are continued; else a new sequence begins. So the turns of an episode are trees: the
first continuation of a turn goes on in its row, every other one begins a row, whose context has the turn's tokens
again, and no token is trained on twice.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf_ray.data.chat import ASSISTANT
from rlhf_ray.data.turn_template import TurnTemplate, call_id
from rlhf_ray.environments.protocol import Message
from rlhf_ray.gateway.chat import ChatReply, ChatRequest
from rlhf_ray.records import Turn
from rlhf_ray.roles.engines.interface import Completion, SampleRequest
from rlhf_ray.roles.episode_journal import RecordedTurn, digest
from rlhf_ray.roles.episode_tokens import EpisodeTokens


@dataclass(eq=False)
class AgentTurn:
    """A turn that an agent has asked for."""

    number: int
    """In the order of the requests, from 0."""
    request: ChatRequest
    follows: AgentTurn | None
    """The turn of the policy that is the last one in the request's conversation, if it is known."""
    continues: bool
    """Its tokens are those of `follows`, and `read` after them."""
    read: list[int]
    """What the policy reads after the tokens of `follows`; all of it, if it does not continue them."""
    context: list[int]
    """All tokens before it."""
    digest: str
    """`episode_journal.digest` of them."""
    asked_before: int
    """Turns of the episode that were asked for after the same tokens before."""
    conversation: list[Message]
    """The messages that the policy reads; its own ones as they were sampled, where they are known."""
    first_line: bool
    """It is the first turn of the episode, or the first that follows such a turn."""
    answered_before: int = 0
    """Turns that were answered when its request came."""
    sampled: SampleRequest | None = None
    completion: Completion | None = None
    reply: ChatReply | None = None
    """Known once it is sampled."""
    errors: list[str] = field(default_factory=list)
    """Of its tool calls."""
    waiting: int = 0
    """Requests that wait for its answer."""
    on_way: ChatRequest | None = None
    """The request whose answer is given to the gateway, until it is received or the client has left."""
    received: bool = False
    """The agent has its answer."""
    followed: bool = False
    depth: int = field(init=False)
    """Turns before it in its conversation."""

    def __post_init__(self) -> None:
        self.depth = 0 if self.follows is None else self.follows.depth + 1

    @property
    def key(self) -> str:
        """Its name within the episode, whatever the order of requests."""
        return f"{self.digest}/{self.asked_before}"

    @property
    def order(self) -> tuple[int, str, int]:
        """By which turns are put in order: how many had been answered when it was asked for, then its tokens."""
        return self.answered_before, self.digest, self.asked_before

    @property
    def answers(self) -> list[Message]:
        """The messages after the policy's last one; all, where it is not known."""
        begin = 0 if self.follows is None else len(self.follows.request.messages) + 1
        return self.request.messages[begin:]

    @property
    def abandoned(self) -> bool:
        """It is of no consequence: its answer was neither received nor continued."""
        return not self.received and not self.followed

    def call_id(self, index: int) -> str:
        """Of its call of that number, unique within the episode: those of an environment's turns, where the agent does
        what an environment does; they must not follow from the order of requests that overlap."""
        if self.first_line:
            return call_id(self.depth, index)
        return f"d{hashlib.blake2b(f'{self.key}/{index}'.encode(), digest_size=4).hexdigest()}"

    def asked(self) -> dict[str, Any]:
        """What is recorded of its request, relative to the turn that it follows."""
        before = self.follows.request if self.follows else ChatRequest([])
        kept = 0
        while kept < min(len(before.messages), len(self.request.messages)) \
                and before.messages[kept] == self.request.messages[kept]:
            kept += 1
        return {
            "asked_before": self.asked_before, "answered_before": self.answered_before,
            "follows": self.follows.key if self.follows else None, "continues": self.continues,
            "first_line": self.first_line, "kept": kept,
            "messages": self.request.messages[kept:],
            "tools": None if self.request.tools == before.tools else self.request.tools,
            "max_tokens": self.request.max_tokens, "stop": list(self.request.stop)}


def recorded_key(turn: RecordedTurn) -> str:
    """The `AgentTurn.key` of a turn that was recorded."""
    assert turn.asked is not None
    return f"{turn.context}/{turn.asked['asked_before']}"


class Conversations:
    """The turns of one run of an agent.

    Example:
        turn = conversations.placed(request)
        conversations.add(turn)
        turn.completion = ...
        tokens, turns = conversations.rows()
    """

    def __init__(self, template: TurnTemplate, stop_tokens: Sequence[int], options: Mapping[str, Any], place: str
                 ) -> None:
        """
        Args:
            stop_tokens: of the model.
            options: of the chat template.
            place: names the episode in messages.
        """
        self.turns: list[AgentTurn] = []
        """In the order of their requests."""
        self._template = template
        self._stop_tokens = stop_tokens
        self._options = options
        self._place = place
        self._asked: Counter[str] = Counter()
        """Turns by the digest of their context."""
        self._call_ids: set[str] = set()

    def placed(self, request: ChatRequest) -> AgentTurn:
        """A request as a turn, which is not among `turns` yet.

        Raises:
            ModelError, DataError, ValueError, TypeError: the chat template or the tokenizer refuses its messages.
        """
        follows = self._followed_by(request.messages)
        continues = False
        if follows is not None and follows.request.tools == request.tools:
            answers = request.messages[len(follows.request.messages) + 1:]
            system = any(message["role"] == "system" for message in request.messages)
            continues = self._template.continues(answers, request.tools, options=self._options, system=system)
        return self.made(request, follows, continues)

    def made(self, request: ChatRequest, follows: AgentTurn | None, continues: bool) -> AgentTurn:
        """A turn whose place is known; raises as `placed`."""
        if follows is None:
            conversation = [self._readable(message) for message in request.messages]
        else:
            answers = request.messages[len(follows.request.messages) + 1:]
            conversation = [*follows.conversation, *answers]
        if continues:
            assert follows is not None and follows.completion is not None
            tokens = follows.completion.tokens.tolist()
            stopped_by = tokens[-1] if tokens and tokens[-1] in self._stop_tokens else None
            read = self._template.delta(answers, request.tools, stopped_by=stopped_by, options=self._options,
                                        place=self._place)
            if not read:
                raise ValueError("the chat template writes nothing for the messages after the policy's")
            context = [*follows.context, *tokens, *read]
        else:
            read = self._template.open(conversation, request.tools, options=self._options, place=self._place)
            context = read
        named = digest(context)
        first_line = not self.turns if follows is None else follows.first_line and not follows.followed
        return AgentTurn(len(self.turns), request, follows, continues, read, context, named, self._asked[named],
                         conversation, first_line)

    def add(self, turn: AgentTurn) -> None:
        """A turn is asked for."""
        self.turns.append(turn)
        self._asked[turn.digest] += 1
        if turn.follows is not None:
            turn.follows.followed = True

    def answered(self, turn: AgentTurn, message: Message) -> None:
        """A turn has its completion and its reply.

        Args:
            message: the turn as the policy's own message.
        """
        assert turn.reply is not None
        turn.conversation = [*turn.conversation, message]
        self._call_ids |= {call.id for call in turn.reply.tool_calls}

    def not_received(self, request: ChatRequest) -> AgentTurn | None:
        """The turn of an equal request whose answer nobody has, and for which nobody waits. That of a retry may have
        been written, and lost on the way: the newest one that is not continued."""
        equal = [turn for turn in self.turns if turn.request == request]
        left = [turn for turn in equal if turn.abandoned and not turn.waiting and turn.on_way is None]
        if request.is_retry:
            left += [turn for turn in reversed(equal) if not turn.followed]
        return next(iter(left), None)

    def is_awaited(self, request: ChatRequest) -> bool:
        """Whether a client waits for the answer to an equal request."""
        return any((turn.on_way is not None or (turn.reply is None and turn.waiting)) and turn.request == request
                   for turn in self.turns)

    def rows(self) -> list[list[AgentTurn]]:
        """The turns that the agent received, by the rows that hold them."""
        kept = sorted((turn for turn in self.turns if turn.reply is not None and not turn.abandoned),
                      key=lambda turn: turn.order)
        next_of: dict[AgentTurn, AgentTurn] = {}
        begins = []
        for turn in kept:
            if turn.follows is not None and turn.continues and turn.follows not in next_of:
                next_of[turn.follows] = turn
            else:
                begins.append(turn)
        rows = []
        for turn in begins:
            row = [turn]
            while row[-1] in next_of:
                row.append(next_of[row[-1]])
            rows.append(row)
        return sorted(rows, key=lambda row: row[-1].order)

    def _followed_by(self, messages: Sequence[Message]) -> AgentTurn | None:
        """The policy's turn that is the last one in these messages, with others after it."""
        last = max((i for i, message in enumerate(messages) if message["role"] == ASSISTANT), default=-1)
        if last < 0 or last == len(messages) - 1:
            return None
        found = [turn for turn in self.turns
                 if turn.reply is not None and len(turn.request.messages) == last
                 and self._is_reply(messages[last], turn.reply)
                 and all(map(self._same, turn.request.messages, messages[:last]))]
        return min(found, key=lambda turn: turn.followed, default=None)

    def _is_reply(self, message: Message, reply: ChatReply) -> bool:
        """Whether an assistant's message is what was answered."""
        issued = {"role": ASSISTANT, "content": reply.content, "reasoning_content": reply.reasoning,
                  "tool_calls": [{"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                                 for call in reply.tool_calls]}
        return self._same(issued, message)

    def _same(self, one: Message, other: Message) -> bool:
        """Whether two messages say the same: in role, text, and names and arguments of tool calls. Beside calls whose
        ids the policy made, the text may be left out, and space around it. Reasoning may be left out."""
        if one["role"] != other["role"]:
            return False
        calls, others = one.get("tool_calls") or [], other.get("tool_calls") or []
        if len(calls) != len(others):
            return False
        ids, other_ids = ([call.get("id") or "" for call in each] for each in (calls, others))
        texts = [message.get("content") or "" for message in (one, other)]
        if calls and self._call_ids.issuperset(ids) and self._call_ids.issuperset(other_ids):
            if ids != other_ids:
                return False
            texts = [text for text in map(str.strip, texts) if text]
        reasons = {message.get("reasoning_content") or "" for message in (one, other)} - {""}
        return (len(set(texts)) < 2 and len(reasons) < 2 and one.get("tool_call_id") == other.get("tool_call_id")
                and list(map(_called, calls)) == list(map(_called, others)))

    def _readable(self, message: Message) -> Message:
        """A message as the chat template takes it, with the assistant's reasoning and calls where it has them."""
        if message["role"] != ASSISTANT:
            return message
        reasoning = message.get("reasoning_content") or ""
        calls = [{"id": call.get("id") or "", **dict(zip(("name", "arguments"), _called(call), strict=True))}
                 for call in message.get("tool_calls") or []]
        if not (reasoning or calls):
            return message
        content = message.get("content") or ""
        written = [json.dumps({"name": call["name"], "arguments": call["arguments"]}, ensure_ascii=False)
                   for call in calls]
        return self._template.assistant("\n".join(filter(None, [content, *written])), content=content,
                                        reasoning=reasoning, tool_calls=calls)


def _called(call: Mapping[str, Any]) -> tuple[Any, Any]:
    """(name, arguments) of a tool call; arguments that are JSON as what it says."""
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return function.get("name"), arguments


def tokens_of(rows: Sequence[Sequence[AgentTurn]]) -> EpisodeTokens:
    """The tokens of some rows, of which there is one at least."""
    tokens = EpisodeTokens(rows[0][0].context)
    for number, row in enumerate(rows):
        if number:
            tokens.begin_segment(row[0].context)
        for i, turn in enumerate(row):
            if i:
                tokens.read(turn.read)
            assert turn.sampled is not None and turn.completion is not None
            tokens.sample(turn.sampled, turn.completion)
    return tokens


def turns_of(rows: Sequence[Sequence[AgentTurn]]) -> list[Turn]:
    """The turns of some rows, in their order, as they are saved."""
    found = []
    for number, row in enumerate(rows):
        for i, turn in enumerate(row):
            assert turn.sampled is not None and turn.completion is not None and turn.reply is not None
            start = len(turn.context)
            calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in turn.reply.tool_calls]
            found.append(Turn(
                number, start, start + len(turn.completion.tokens), turn.sampled.seed, turn.completion.finish_reason,
                tool_calls=[*calls, *({"error": error} for error in turn.errors)],
                messages=row[i + 1].answers if i + 1 < len(row) else [],
                opens=turn.request.messages if number and not i else []))
    return found


def with_reward(turns: list[Turn], reward: float | None) -> list[Turn]:
    """The turns, the last of which has the agent's reward."""
    if not turns or reward is None:
        return turns
    return [*turns[:-1], replace(turns[-1], reward=turns[-1].reward + reward)]
