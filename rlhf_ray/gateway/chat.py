"""What an agent asks the policy and what it is answered, whichever API it speaks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from rlhf_ray.environments.protocol import Message, ToolCall


@dataclass(frozen=True)
class ChatRequest:
    """A request for the policy's next turn, as far as it acts: sampling is the run's."""

    messages: list[Message]
    """The whole conversation, each message with "role" (system, user, assistant, tool) and "content" (a text, empty for
    none); an assistant's may have "tool_calls" ({"id", "type": "function", "function": {"name", "arguments": object, or
    a text if that is not JSON}}) and "reasoning_content"; a tool's has "tool_call_id", and "name" if the request said
    it."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """JSON schemas, as chat templates take them: {"type": "function", "function": {...}}. Empty with `tool_choice:
    none`."""
    max_tokens: int | None = None
    """Tokens of the turn at most; None for the run's bound, which holds in any case."""
    stop: tuple[str, ...] = ()
    """Texts that end the turn, besides those of the run."""
    is_overridden: bool = field(default=False, compare=False)
    """It asks for other sampling than the run's (temperature, seed, ...), which it does not get."""
    is_retry: bool = field(default=False, compare=False)
    """The client says that it sends an earlier request again, as the stock clients of OpenAI and Anthropic do."""


@dataclass(frozen=True)
class ChatReply:
    """The policy's turn, as a view: its token ids stay with the episode."""

    content: str
    """Without reasoning and tool calls, and without a stop text that ended it."""
    reasoning: str
    tool_calls: list[ToolCall]
    """With ids that are unique within the episode."""
    finish_reason: str
    """"stop", "length" or "tool_calls"."""
    prompt_tokens: int
    completion_tokens: int
    turn: int
    """Number of the turn in its attempt, from 0; the answer's id is made of it."""
    stopped_by: str | None = None
    """The text of `ChatRequest.stop` that ended the turn; Anthropic's API answers with it."""


class Refused(Exception):
    """A request that gets no turn. `status` is the HTTP status; `retry_after_s`, where waiting may help."""

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class Policy(Protocol):
    """Who answers the requests of one session. It is called in the event loop in which the session was opened."""

    async def reply(self, request: ChatRequest) -> ChatReply:
        """The policy's next turn. A request that equals one whose answer was not delivered gets the same turn.

        Raises:
            Refused: the episode is over, its tokens or turns are used up, or too many of its requests are open.
        """

    def delivered(self, reply: ChatReply) -> None:
        """The answer was written to a connection that was still open."""

    def left(self, request: ChatRequest) -> None:
        """The client of this very request left before its answer was written, or it could not be written."""


class SessionAddress(NamedTuple):
    """Where a session's requests go."""

    base_url: str
    """For OpenAI's clients; ends with /v1."""
    anthropic_url: str
    """For Anthropic's clients, which append /v1/messages."""
    api_key: str
