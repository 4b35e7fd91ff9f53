"""One attempt at an episode: turn by turn, from the first message to the reason why it ended."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.data.chat import TOOLS
from rlhf_ray.data.prompts import NO_PROMPT
from rlhf_ray.data.turn_template import TurnTemplate, call_id
from rlhf_ray.environments.pool import EnvironmentPool
from rlhf_ray.environments.protocol import Message, Reply, Start, Step
from rlhf_ray.environments.tool_calls import Parsed, ToolCallParser, plain_turn
from rlhf_ray.errors import DataError, EpisodeFailed, ModelError, first_line, with_lines
from rlhf_ray.records import SampleKey, Turn
from rlhf_ray.roles.engines.interface import Completion, SampleRequest
from rlhf_ray.roles.episode_journal import RecordedEpisode, RecordedTurn, digest
from rlhf_ray.roles.episode_record import AttemptEnvironment, EpisodeRecord, RecordMisfit
from rlhf_ray.roles.episode_tokens import EpisodeTokens
from rlhf_ray.roles.rollout_rows import sample_request

NOTHING_TO_READ = ("the policy has nothing to read: the row is one of `numbered`, without a text, and reset gave no "
                   "messages; return some, or set a path of prompts")
"""Why an episode cannot begin."""
SampleTurn = Callable[[SampleRequest], Awaitable[Completion]]
"""Has a turn sampled by a generator."""


def turn_seed(sample_seed: int, context: str, asked_before: int) -> int:
    """The seed of one turn, in [0, 2**63). It follows from what the policy reads, not from the order in which turns are
    sampled, since the requests of an agent may overlap.

    Args:
        context: `digest` of all tokens before the turn.
        asked_before: how many turns of the episode were sampled after the same tokens before.
    """
    named = f"{sample_seed}/{context}/{asked_before}".encode()
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest()) >> 1


def environment_seed(run_seed: int, key: SampleKey) -> int:
    """The seed of an environment, in [0, 2**31): all samples of a prompt meet one world."""
    named = f"environment/{run_seed}/{key.epoch}/{key.row}".encode()
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest()) >> 33


def observed(prompt: list[Message], observation: str) -> list[Message]:
    """The prompt's messages with what the reset of a class with tools returned at the end of the user's last one, as it
    is, or in a message of its own after another role's."""
    if not observation:
        return prompt
    if prompt and prompt[-1]["role"] == "user":
        return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + observation}]
    return [*prompt, {"role": "user", "content": observation}]


@dataclass(frozen=True)
class TextTools:
    """What turns messages into tokens and sampled tokens into messages."""

    template: TurnTemplate
    parser: ToolCallParser
    decode: Callable[[Sequence[int]], str]
    """Text of sampled tokens, special tokens included."""
    stop_tokens: Sequence[int]
    vocabulary: int
    """See `rollout_rows.sample_request`."""

    def stopped_by(self, tokens: Sequence[int]) -> int | None:
        """The token by which a sampled turn has ended itself; None if none did."""
        return tokens[-1] if len(tokens) and tokens[-1] in self.stop_tokens else None

    def text_of(self, tokens: Sequence[int]) -> str:
        """What the policy wrote in a turn, without the token that ended it."""
        return self.decode(tokens if self.stopped_by(tokens) is None else tokens[:-1])

    def parsed(self, text: str, tools: list[dict[str, Any]], opened: bool) -> Parsed:
        """A turn, read; nothing in it is a call where there are no tools.

        Args:
            opened: its prompt ended within <think>.
        """
        if not tools:
            return plain_turn(text, opened=opened)
        return self.parser.parse(text, opened=opened, tools=tools)


@dataclass
class Activity:
    """What an episode under way does."""

    key: SampleKey
    environment: str
    began: float
    """By the monotonic clock, as `since`."""
    turn: int = 0
    doing: str = "start"
    since: float = 0.0

    def enter(self, doing: str) -> None:
        """It does something else from now on."""
        self.doing = doing
        self.since = time.monotonic()

    def overdue(self, config: EnvironmentConfig) -> str:
        """That the episode's deadline has passed, in words."""
        return (f"the episode had not ended after {config.timeout_s.episode:g} s "
                f"(environments.{self.environment}.timeout_s.episode): in turn {self.turn + 1} it waited for "
                f"{self.doing} for {time.monotonic() - self.since:.1f} s")


class Ended(NamedTuple):
    """How an attempt ended."""

    cause: str
    error: str
    tokens: EpisodeTokens
    turns: list[Turn]
    reward: float | None
    """What the environment gave the whole episode beside its turns; None if it did not."""
    left_out: Sequence[str] = ()
    """See `RecordedOutcome`."""


class Attempt:
    """One attempt at an episode in an environment. Turns that a record has are taken as they were, through the same
    steps as those that are sampled now."""

    def __init__(
        self, key: SampleKey, config: EnvironmentConfig, sampling: SamplingConfig, texts: TextTools,
        sample: SampleTurn, seed: int, activity: Activity, options: dict[str, Any], record: EpisodeRecord,
        recorded: RecordedEpisode,
    ) -> None:
        """
        Args:
            seed: of the sample.
            activity: kept up to date.
            options: of the chat template, and the row's tools, for an environment that has none of its own.
            record: where it is recorded.
            recorded: what it goes on from.
        """
        self._key = key
        self._config = config
        self._sampling = sampling
        self._texts = texts
        self._sample = sample
        self._seed = seed
        self._activity = activity
        self._row_tools = options.pop(TOOLS, [])
        self._options = options
        self._record = record
        self._recorded = recorded
        self.events: Counter[str] = Counter()
        self.metrics: dict[str, float] = {}
        self.messages: list[Message] = []
        """What the policy read first."""
        self.tools: list[dict[str, Any]] = []
        self._conversation: list[Message] = []
        self._tokens = EpisodeTokens(())
        self._turns: list[Turn] = []
        self._reward: float | None = None
        self._reasoning_opened = False
        """Whether prompts end within <think>."""
        self._text = ""
        """What the policy wrote in its last turn."""

    async def play(
        self, pool: EnvironmentPool, row: dict[str, Any], seed: int, prompt: list[Message], deadline: float
    ) -> Ended:
        """Play it to its end. Whatever goes wrong in it becomes its cause.

        Args:
            row: the columns of the prompt's row.
            seed: of the environment.
            prompt: what the policy reads first, if the environment does not say.
            deadline: of the episode, in the event loop's time.

        Raises:
            ReplayDiverged: it has to begin again: its environment was lost because of another episode.
            RecordMisfit: it has to begin again: it cannot go on from its record.
            RLHFError: a generator's error, or that no generator is available.
        """
        environment = AttemptEnvironment(pool, row, seed, self._record, self._recorded)
        cause, error = "error_environment", ""
        try:
            async with asyncio.timeout_at(deadline if self._recorded.outcome is None else None) as limit:
                self._activity.turn = 0
                self._activity.enter("reset")
                start = await environment.start()
                begins = observed(prompt, start["observation"])
                if start["messages"] is None and begins == NO_PROMPT:
                    raise EpisodeFailed("error_environment", NOTHING_TO_READ)
                cause, error = await self._turn_by_turn(environment, Start(start["messages"], start["tools"]), begins)
                if self._turns:
                    self._activity.enter("its reward")
                    self._reward = await environment.reward()
                    self._turns[-1] = replace(self._turns[-1], reward=self._turns[-1].reward + self._reward)
        except EpisodeFailed as failure:
            cause, error = failure.cause, str(failure)
        except TimeoutError:
            if not limit.expired():
                raise
            cause, error = "error_timeout", self._activity.overdue(self._config)
        finally:
            self._activity.enter("close")
            await asyncio.shield(environment.close())
            self.events["interrupted"] += environment.interrupted
        return self.ended(cause, error, prompt)

    def ended(self, cause: str, error: str, prompt: list[Message]) -> Ended:
        """What was played, with the reason why it ended. One that did not begin has the tokens of the row's prompt:
        sums over the tokens of samples need at least one of each.

        Args:
            prompt: of the row.
        """
        if not self._tokens.context:
            self.messages = self.messages or prompt
            self._tokens = EpisodeTokens(self._opened(prompt)[: self._config.max_tokens])
        return Ended(cause, error, self._tokens, self._turns, self._reward)

    async def _turn_by_turn(
        self, environment: AttemptEnvironment, start: Start, prompt: list[Message]
    ) -> tuple[str, str]:
        """The turns; returns cause and error."""
        self.messages = prompt if start.messages is None else start.messages
        self.tools = start.tools or self._row_tools
        self._conversation = list(self.messages)
        with self._blaming_environment("reset", start.messages is not None or bool(start.tools)):
            self._tokens = EpisodeTokens(self._opened(self.messages))
        self._reasoning_opened = self._texts.template.opens_reasoning(self.tools, self._options)
        while True:
            # The policy's turn.
            turn = len(self._turns)
            self._activity.turn = turn
            room = self._config.max_tokens - len(self._tokens.context)
            if room < 1:
                at = "its first turn" if not turn else f"turn {turn + 1}"
                tokens = len(self._tokens.context)
                if not turn:  # other roles take no longer rows
                    self._tokens = EpisodeTokens(self._tokens.context[:self._config.max_tokens])
                return "truncated_episode", (
                    f"no token is left for {at}: the {tokens} tokens before it fill "
                    f"environments.{self._activity.environment}.max_tokens={self._config.max_tokens}")
            recorded = self._recorded.turns[turn] if turn < len(self._recorded.turns) else None
            completion = await self._sampled(environment, turn, room, recorded)
            parsed = self._parsed(completion)
            if completion.finish_reason != "stop":
                whole = len(completion.tokens) < self._sampling.max_tokens
                return "truncated_episode" if whole else "truncated_turn", ""

            # The environment's answer.
            if parsed.errors and self._config.on_failure.parse != "feedback":
                return "error_parse", parsed.errors[0]
            if parsed.errors:
                step = self._feedback(parsed)
            else:
                step = await self._stepped(environment, parsed, completion, recorded)
            self._turns[-1] = replace(self._turns[-1], messages=step.messages, reward=step.reward)
            snapshot = None if parsed.errors else environment.snapshot
            await self._record.answered(step, snapshot, environment.interrupted)
            over = self._how_it_ended(step)
            if over is not None:
                return over, ""
            with self._blaming_environment("step", not parsed.errors):
                self._read(step.messages)

    @contextmanager
    def _blaming_environment(self, call: str, answered: bool) -> Iterator[None]:
        """The chat template or the tokenizer refuses messages: if the environment gave them in `call`, its episode has
        failed, and not the run."""
        try:
            yield
        except (ModelError, DataError, ValueError, TypeError) as error:
            if not answered:
                raise
            raise EpisodeFailed("error_environment", with_lines(
                f"environments.{self._activity.environment}: {call} answered with messages that cannot be read: "
                f"{first_line(error)}", "", "Answer with other messages")) from error

    async def _sampled(
        self, environment: AttemptEnvironment, turn: int, room: int, recorded: RecordedTurn | None
    ) -> Completion:
        """What the policy samples in a turn, or has sampled according to the record."""
        most = min(self._sampling.max_tokens, room)
        context = self._tokens.context
        seed = turn_seed(self._seed, digest(context), 0)  # contexts only grow, so none is met twice
        request = sample_request(context, self._sampling, most, seed, self._texts.stop_tokens,
                                 self._texts.vocabulary)
        if recorded is None:
            await environment.open()
            self._activity.enter("a generator")
            completion = await self._sample(request)
            self._record.sampled(context, completion)
        elif recorded.context != digest(context) or len(recorded.completion.tokens) > most:
            raise RecordMisfit(f"turn {turn + 1} was sampled after other tokens, or has more than {most}")
        else:
            completion = recorded.completion
        self._tokens.sample(request, completion)
        self._turns.append(Turn(self._tokens.row, len(context), len(self._tokens.context), seed,
                                completion.finish_reason))
        return completion

    def _parsed(self, completion: Completion) -> Parsed:
        """What the policy said, in the conversation and in the record of its turn."""
        text = self._texts.text_of(completion.tokens.tolist())
        parsed = self._texts.parsed(text, self.tools, self._reasoning_opened)
        turn = len(self._turns) - 1
        self._text = text
        calls = [replace(call, id=call_id(turn, i)) for i, call in enumerate(parsed.calls)]
        parsed = replace(parsed, calls=calls)
        self._conversation.append(self._texts.template.assistant(
            text, content=parsed.content, reasoning=parsed.reasoning, tool_calls=[asdict(call) for call in calls]))
        written = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in calls]
        self._turns[-1] = replace(self._turns[-1], tool_calls=[*written, *({"error": e} for e in parsed.errors)])
        self.events["tool_calls"] += len(calls)
        self.events["parse_failures"] += len(parsed.errors)
        return parsed

    def _feedback(self, parsed: Parsed) -> Step:
        """What the policy reads after a tool call that could not be read."""
        said = "\n".join(parsed.errors)
        return Step([{"role": "tool", "name": "error", "tool_call_id": call_id(len(self._turns) - 1, 0),
                      "content": f"error: {said}"}])

    async def _stepped(self, environment: AttemptEnvironment, parsed: Parsed, completion: Completion,
                       recorded: RecordedTurn | None) -> Step:
        """The environment's answer to a turn."""
        names = ", ".join(f"`{call.name}`" for call in parsed.calls)
        self._activity.enter(f"tool {names}" if names else "the environment")
        step = await environment.step(Reply(
            self._text, parsed.content, parsed.reasoning, list(parsed.calls), completion.finish_reason), recorded)
        self.events["tool_failures"] += step.tool_errors
        self.metrics.update({name: float(value) for name, value in step.info.items()
                             if isinstance(value, (bool, int, float))})
        return step

    def _how_it_ended(self, step: Step) -> str | None:
        """The cause, if the episode ends with this answer."""
        if step.done:
            return "completed"
        if step.truncated or len(self._turns) >= self._config.max_turns:
            return "truncated_turns"
        return None

    def _read(self, messages: list[Message]) -> None:
        """Let the policy read an answer: in the present segment, or in a new one if the template rewrites history."""
        template = self._texts.template
        self._conversation += messages
        system = any(message["role"] == "system" for message in self._conversation)
        if template.continues(messages, self.tools, options=self._options, system=system):
            stopped_by = self._texts.stopped_by(self._tokens.context)
            self._tokens.read(template.delta(
                messages, self.tools, stopped_by=stopped_by, options=self._options, place=self._place))
        else:
            self._tokens.begin_segment(self._opened(self._conversation))

    def _opened(self, messages: list[Message]) -> list[int]:
        return self._texts.template.open(messages, self.tools, options=self._options, place=self._place)

    @property
    def _place(self) -> str:
        return f"environments.{self._activity.environment}, row {self._key.row}"
