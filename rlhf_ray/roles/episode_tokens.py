"""The tokens of an episode under way: what the policy read and what it sampled, in segments that only grow.

Token ids are the record, and text is a view: what was sampled is never decoded and encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_ray.roles.engines.interface import Completion, SampleRequest
from rlhf_ray.roles.rollout_rows import Sampled, Segment


class EpisodeTokens:
    """Segments of an episode: a segment is a token sequence to which tokens are only appended. Where the chat template
    rewrites what came before, a new one begins.

    Example:
        >>> tokens = EpisodeTokens([1, 5, 6])
        >>> tokens.sample(request, completion)  # whose tokens are 7 and 2
        >>> tokens.read([8, 9])
        >>> tokens.context
        [1, 5, 6, 7, 2, 8, 9]
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        """
        Args:
            prompt: what the policy reads first.
        """
        self._rows: list[list[Sampled]] = [[]]
        self._read = list(prompt)
        self.context = list(prompt)
        """All tokens of the present segment."""

    @property
    def row(self) -> int:
        """Number of the present segment."""
        return len(self._rows) - 1

    @property
    def sampled(self) -> int:
        """Number of sampled tokens, in all segments."""
        return sum(len(part.completion.tokens) for parts in self._rows for part in parts)

    def sample(self, request: SampleRequest, completion: Completion) -> None:
        """Append what the policy sampled.

        Raises:
            ValueError: the columns of the completion differ in length, or the request's prompt is not the context.
        """
        columns = [len(completion.tokens), len(completion.logprobs), len(completion.versions)]
        if completion.masks:
            columns.append(len(completion.masks))
        if len(set(columns)) > 1:
            raise ValueError(f"a completion has columns of {columns} tokens")
        if request.prompt != self.context:
            raise ValueError(f"a turn was sampled after other tokens than the {len(self.context)} of its episode")
        self._rows[-1].append(Sampled(self._read, request, completion))
        self._read = []
        self.context = self.context + completion.tokens.tolist()

    def read(self, tokens: Sequence[int]) -> None:
        """Append what the policy reads.

        Raises:
            ValueError: there are no tokens, so two turns would be one.
        """
        if not tokens:
            raise ValueError("an observation has no tokens; the chat template writes nothing between two turns")
        self._read = [*self._read, *tokens]
        self.context = self.context + list(tokens)

    def begin_segment(self, prompt: Sequence[int]) -> None:
        """Begin a new segment: what the policy reads next is not a continuation of the present one. What was read last
        and not answered is left out of that."""
        self._rows.append([])
        self._read = list(prompt)
        self.context = list(prompt)

    def segments(self, seed: int, finish_reason: str) -> list[Segment]:
        """The rows of the episode.

        Args:
            seed: of the sample.
            finish_reason: of the last segment; earlier ones end with "stop".
        """
        if self._rows[-1] or len(self._rows) == 1:
            rows = self._rows
            rest: Sequence[int] = self._read if not rows[-1] else ()
        else:
            rows = self._rows[:-1]
            rest = ()
        reasons = ["stop"] * (len(rows) - 1) + [finish_reason]
        return [Segment(parts, seed, reason, rest if i == len(rows) - 1 else ())
                for i, (parts, reason) in enumerate(zip(rows, reasons, strict=True))]
