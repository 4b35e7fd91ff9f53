"""Stop strings: where a response's text completes one of some strings.

vLLM runs without a tokenizer here, and cannot search for them. So it reports responses with stop strings after every
token, they are decoded as rewards decode them, and the request is aborted at the token that completes a string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rlhf_ray.roles.engines.interface import Completion, SampleRequest

Decode = Callable[[list[int]], str]
UNFINISHED = "\ufffd"
"""What a decoder makes of the first bytes of a character."""


class ResponseWatch:
    """Watches one request's response token by token, decoding only its last few tokens each time.

    The text of a token is the difference that it makes to the text of the tokens before it, as decoders may treat the
    first token of a text differently. Incomplete characters wait for their other bytes.
    """

    def __init__(self, request: SampleRequest, decode: Decode) -> None:
        self._strings, self._decode = request.sampling.stop, decode
        self._min_tokens = request.sampling.min_tokens
        """Strings that are complete before the response has this many tokens do not end it."""
        self._tail_length = max(map(len, self._strings)) - 1
        self._tokens: list[int] = []
        """The response so far, up to `_end`; it begins with tokens that earlier requests sampled."""
        self._tail = ""
        """The end of the decoded text: the longest part in which a string may begin."""
        self._context, self._decoded = 0, 0
        """Tokens before `_decoded` are in the text; those from `_context` on are decoded again before the next."""
        self._end: int | None = None
        """Number of tokens up to the one that completes a string; None before that."""
        self._earlier = request.sampled
        self._read(request.prompt[len(request.prompt) - request.sampled :])

    def ended(self, tokens: Sequence[int]) -> bool:
        """Whether a string is complete, given all tokens that the request has sampled."""
        self._read(tokens[len(self._tokens) - self._earlier :])
        return self._end is not None

    def cut(self, completion: Completion) -> Completion:
        """The completion up to the token that completes a string, and finished there; the same without one."""
        self.ended(completion.tokens.tolist())
        if self._end is None:
            return completion
        return replace(completion.first(self._end - self._earlier), finish_reason="stop")

    def _read(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._end is not None:
                return
            self._tokens.append(int(token))
            if self._completes_a_string() and len(self._tokens) >= self._min_tokens:
                self._end = len(self._tokens)

    def _completes_a_string(self) -> bool:
        before = self._decode(self._tokens[self._context : self._decoded])
        text = self._decode(self._tokens[self._context :])
        seen = self._tail + text[len(before) :]
        complete = any(seen.find(string, max(0, len(self._tail) - len(string) + 1)) >= 0 for string in self._strings)
        if len(text) > len(before) and not text.endswith(UNFINISHED):
            self._tail = seen[-self._tail_length :] if self._tail_length else ""
            self._context, self._decoded = self._decoded, len(self._tokens)
        return complete


def watch_for(request: SampleRequest, decode: Decode) -> ResponseWatch | None:
    """The watch of a request; None if it has no stop strings."""
    return ResponseWatch(request, decode) if request.sampling.stop else None
