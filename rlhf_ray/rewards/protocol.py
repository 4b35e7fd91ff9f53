"""The protocol of reward sources: requests, answers, their checks, and `RewardSource` itself.

A source is built from its section of `rewards`, started once in the reward scorer's process, called many times and
stopped once. All three methods are coroutines: a source that waits for a service or another process does not block the
event loop, one that computes does so in a thread (`asyncio.to_thread`). Several chunks may be scored concurrently; a
source that cannot do so holds a lock of its own.

An answer depends on the requests alone, never on earlier ones, so a request may be repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.data.answers import Prefills
from rlhf_ray.data.chat import NO_OPTIONS, PromptText, template_options
from rlhf_ray.data.encoding import decode_after
from rlhf_ray.errors import RewardError, SampleError, with_lines
from rlhf_ray.records import Batch, Episode, Experience, Prompts, Rollout, SampleKey, response_start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NEVER_REPLACED = "A missing score is never replaced by a default"
SHOWN = 200
"""Characters of a prompt or a response that an error message shows."""
NAMED = 3
"""Samples that an error message names."""
BETWEEN_TURNS = "\n"
"""Stands in the text of a response where the policy read something in between."""
SampledRows = Rollout | Experience


@dataclass(frozen=True)
class RewardRequest:
    """One response to judge, as text and as the policy's tokens."""

    key: SampleKey
    prompt: str
    """Prompt text as the policy's tokenizer saw it (a rendered chat template where the prompt is messages)."""
    response: str
    """The policy's text, without special tokens; of an episode that of all turns, a line break between two. What the
    environment answered is in `turns`."""
    tokens: NDArray[np.int32]
    """[T] prompt and response in the policy's token ids."""
    response_mask: NDArray[np.bool_]
    """[T] True on tokens the policy sampled."""
    finish_reason: str
    """"stop" (ended by itself), "length" or "abort"."""
    metadata: dict[str, Any]
    """The other columns of the prompt's row: an answer, a label, a domain."""
    messages: list[dict[str, Any]] | None = None
    """The prompt as chat messages, where the data set has messages."""
    prefill: str = ""
    """What the prompt begins of the answer, such as the <think> that a chat template opens; `prompt` ends with it."""
    marked_response: str | None = None
    """The response with its special tokens, but for the one that ended it; None if it has none."""
    episode: Episode | None = None
    """What happened in the episode; None for a single response."""
    turn_ends: tuple[int, ...] = ()
    """Position in `tokens` of the last token that the policy sampled in each turn of the episode."""

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The turns of an episode: what was called, what was answered, and the environment's reward."""
        turns = [] if self.episode is None else self.episode.turns
        return [{"tool_calls": turn.tool_calls, "messages": turn.messages, "reward": turn.reward} for turn in turns]

    def text(self, keep_special_tokens: bool = False) -> str:
        """The response.

        Args:
            keep_special_tokens: with its special tokens, but for the one that ended it.
        """
        return self.marked_response if keep_special_tokens and self.marked_response is not None else self.response


@dataclass(frozen=True)
class RewardAnswer:
    """Scores of N requests, in their order. A missing score is an error, never a default value."""

    scores: NDArray[np.float32]
    """[N] one finite number per response, before the component's weight."""
    token_rewards: NDArray[np.float32] | None = None
    """[sum of T] over the requests' tokens, one request after another: the positions of the scores within the
    responses. Zero where response_mask is False; each row's sum is its score. None: each score is on the response's
    last token."""
    failures: int = 0
    """Requests that have a score but needed more than one try, or whose response lacked the expected content, such as
    a number."""
    failure_kinds: dict[str, int] = field(default_factory=dict)
    """Number of failures by kind ("timeout", "http_503"); empty if a source does not distinguish kinds."""


class RewardSource(Protocol):
    """One component of the reward."""

    async def start(self) -> Mapping[str, float] | None:
        """Load the model, start the process, or connect to the service; unless a source defines it, do nothing.

        Returns:
            measurements of the start, if there are any.

        Raises:
            ModelError, RewardError: the source cannot work.
        """
        return {}

    async def score(self, requests: Sequence[RewardRequest]) -> RewardAnswer:
        """Score the responses, at least one.

        Raises:
            RewardError: a score is missing or not finite; names the source, the samples and the fix.
        """

    async def stop(self) -> None:
        """Release all resources, within a few seconds even when a call hangs. May be called twice. Unless a source
        defines it, there are none."""
        return


def sample_names(keys: Sequence[SampleKey]) -> str:
    """The first samples by name, for error messages: "epoch 0 row 4 sample 1, ... and 7 more"."""
    return first_of([f"epoch {k.epoch} row {k.row} sample {k.sample}" for k in keys])


def first_of(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def requests_of(rollout: Rollout, prompts: Prompts, tokenizer: PreTrainedTokenizerBase) -> list[RewardRequest]:
    """[S] requests of a rollout's samples. `prompts` contains their prompts, in any order."""
    places = {row: i for i, row in enumerate(prompts.rows.tolist())}
    texts, prefills = ResponseTexts(tokenizer), Prefills(tokenizer)
    return [_request(rollout, number, rows, prompts, places[rollout.keys[number].row], texts, prefills)
            for number, rows in enumerate(rollout.sample_rows)]


def _request(rollout: Rollout, number: int, rows: range, prompts: Prompts, row: int, texts: ResponseTexts,
             prefills: Prefills) -> RewardRequest:
    key = rollout.keys[number]
    first = int(rollout.offsets[rows.start])
    whole = slice(first, rollout.offsets[rows.stop])
    episode = None if rollout.episodes is None else rollout.episodes[number]
    ends = [int(rollout.offsets[rows.start + turn.row]) - first + turn.stop - 1 for turn in episode.turns
            ] if episode else []
    messages = None if prompts.messages is None else prompts.messages[row]
    options = NO_OPTIONS if messages is None else template_options(prompts.metadata[row], f"row {key.row}")
    return RewardRequest(
        key=key, prompt=prompts.texts[row], response=texts.plain(rollout, rows),
        tokens=rollout.tokens[whole], response_mask=rollout.response_mask[whole],
        finish_reason=rollout.finish_reasons[rows[-1]], metadata=prompts.metadata[row], messages=messages,
        prefill=prefills.of(PromptText(prompts.texts[row], messages, options)),
        marked_response=texts.marked(rollout, rows), episode=episode, turn_ends=tuple(ends),
    )


class ResponseTexts:
    """Decodes responses: the text by which they continue their prompts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._specials = np.array(sorted({*tokenizer.all_special_ids, *(i for i, t in added if t.special)}), np.int64)

    def plain(self, rollout: SampledRows, rows: range) -> str:
        """The responses of a sample's rows as one text, without special tokens: what was sampled, and nothing that the
        policy read in between."""
        return BETWEEN_TURNS.join(self._text(*part, skip=True) for i in rows for part in self._parts(rollout, i))

    def marked(self, rollout: Rollout, rows: range) -> str | None:
        """The same with special tokens, but for the one that ended the sample; None if there are none."""
        parts = [part for i in rows for part in self._parts(rollout, i)]
        stopped = (rollout.finish_reasons or [""])[rows[-1]] == "stop"
        if parts and stopped and self._is_special(parts[-1][1][-1:])[0]:
            parts[-1] = parts[-1][0], parts[-1][1][:-1]
        if not any(self._is_special(tail).any() for _, tail in parts):
            return None
        return BETWEEN_TURNS.join(self._text(head, tail, skip=False) for head, tail in parts)

    @staticmethod
    def _parts(rollout: SampledRows, row: int) -> list[tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """(the tokens before it, the tokens of it) of each part of a row that was sampled."""
        tokens = rollout.row(row, "tokens")
        mask = rollout.row(row, "response_mask")
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
        return [(tokens[:start], tokens[start:stop]) for start, stop in edges.tolist()]

    def _is_special(self, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        return np.isin(tokens, self._specials)

    def _text(self, head: NDArray[np.int32], tail: NDArray[np.int32], skip: bool) -> str:
        return decode_after(self._tokenizer, head.tolist(), tail.tolist(), skip_special_tokens=skip)


def rollout_texts(
    tokenizer: PreTrainedTokenizerBase, rollout: SampledRows, samples: int
) -> tuple[list[str], list[str]]:
    """Prompts and responses of the first `samples` samples (or of all, if there are fewer), without special tokens; a
    row without a response is all prompt."""
    prompts, responses, texts = [], [], ResponseTexts(tokenizer)
    for rows in rollout.sample_rows[:samples]:
        tokens, mask = rollout.row(rows.start, "tokens"), rollout.row(rows.start, "response_mask")
        prompts.append(tokenizer.decode(tokens[: response_start(mask)].tolist(), skip_special_tokens=True))
        responses.append(texts.plain(rollout, rows))
    return prompts, responses


def finished(samples: Rollout | Batch) -> np.ndarray:
    """[S] bool: which samples ended with a stop token or a stop string.

    Raises:
        ValueError: there are no finish reasons.
    """
    reasons = samples.finish_reasons
    if reasons is None:
        raise ValueError("experience without a rollout has no finish reasons, by which truncated samples are known")
    return np.array([reasons[rows[-1]] == "stop" for rows in samples.sample_rows], dtype=bool)


def shown_sample(request: RewardRequest) -> str:
    """Prompt and response for a message, on a line each, shortened in the middle."""
    prompt = request.prompt
    if request.messages is not None:
        prompt = "\n".join(f"{message['role']}: {message['content']}" for message in request.messages)
    return f"  prompt: {_shortened(prompt)}\n  response: {_shortened(request.text())}"


def _shortened(text: str) -> str:
    if len(text) > SHOWN:
        text = f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"
    return repr(text)


def finite_scores(
    values: Any, requests: Sequence[RewardRequest], who: str, fix: str, place: str = ""
) -> NDArray[np.float32]:
    """[N] float32 of `values`, one for each request.

    Args:
        who: the source as the subject of the message: "the reward model 'x'".
        fix: what to do, as the end of the message.
        place: line of code that the message shows.

    Raises:
        RewardError: not as many values as requests, or one that is not finite; shows the first such sample.
    """
    with np.errstate(over="ignore"):  # numbers beyond float32 become infinite, and are refused below
        scores = np.asarray(values, dtype=np.float32)
    lines = f"  {place}" if place else ""
    if scores.shape != (len(requests),):
        raise SampleError(with_lines(f"{who} gave {_count(scores)} for {len(requests)} responses; it must give one "
                                     "number for each", lines, fix))
    wrong = np.flatnonzero(~np.isfinite(scores))
    if len(wrong):
        lines = "\n".join(filter(None, (lines, shown_sample(requests[wrong[0]]))))
        raise SampleError(with_lines(f"{who} gave {scores[wrong[0]]} for {len(wrong)} of {len(requests)} responses",
                                     lines, f"{NEVER_REPLACED}: {fix}"))
    return scores


def checked(answer: RewardAnswer, requests: Sequence[RewardRequest], name: str) -> RewardAnswer:
    """The answer, if it follows the protocol.

    Raises:
        RewardError: it does not; names the component.
    """
    who = f"rewards.{name}"
    finite_scores(answer.scores, requests, who, "fix its source")
    tokens = answer.token_rewards
    if tokens is None:
        return answer
    lengths = np.array([len(r.tokens) for r in requests])
    if tokens.shape != (lengths.sum(),) or not np.isfinite(tokens).all():
        raise RewardError(f"{who} gave token rewards of shape {tokens.shape} for {lengths.sum()} tokens, or some that "
                          "are not finite; fix its source")
    if tokens[~np.concatenate([r.response_mask for r in requests])].any():
        raise RewardError(f"{who} gave rewards to tokens that the policy did not sample; fix its source")
    sums = np.add.reduceat(tokens.astype(np.float64), lengths.cumsum() - lengths)
    if not np.allclose(sums, answer.scores, rtol=1e-4, atol=1e-4):
        row = int(np.argmax(np.abs(sums - answer.scores)))
        raise RewardError(f"{who} gave {answer.scores[row]} to {sample_names([requests[row].key])}, but its token "
                          f"rewards add up to {sums[row]}; fix its source")
    return answer


def _count(scores: NDArray[np.float32]) -> str:
    return f"{len(scores)} scores" if scores.ndim == 1 else f"scores of shape {scores.shape}"


async def all_ended(*calls: Awaitable[Any]) -> list[Any]:
    """Results in order, or the first failure in that order. Every call is awaited, so that none continues after a
    failure is raised."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)
