"""Request and answer of a reward service as JSON. See docs/serve_reward.md for the schema, version 1."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.rewards.protocol import RewardRequest

SCHEMA_VERSION = 1


class AnswerError(Exception):
    """An answer without valid scores. `kind` is one of json, schema, not_finite."""

    def __init__(self, kind: str, words: str) -> None:
        super().__init__(words)
        self.kind = kind


def request_body(requests: Sequence[RewardRequest], send: Literal["text", "tokens"], columns: Sequence[str]) -> bytes:
    """The body of a request, UTF-8 JSON."""
    samples = [_sample(request, send, columns) for request in requests]
    return json.dumps({"version": SCHEMA_VERSION, "samples": samples}, ensure_ascii=False, allow_nan=False).encode()


def _sample(request: RewardRequest, send: Literal["text", "tokens"], columns: Sequence[str]) -> dict[str, Any]:
    if send == "tokens":
        sample: dict[str, Any] = {"tokens": request.tokens.tolist()}
    else:
        sample = {"prompt": request.prompt, "response": request.response,
                  "finished": request.finish_reason == "stop"}
        if request.messages is not None:
            sample["messages"] = request.messages
        if request.prefill:
            sample["prefill"] = request.prefill
    if columns:
        sample["metadata"] = {column: request.metadata[column] for column in columns if column in request.metadata}
    return sample


def idempotency_key(requests: Sequence[RewardRequest], body: bytes) -> str:
    """The same for every try of the same samples with the same texts, and different for all others."""
    keys = [(r.key.epoch, r.key.row, r.key.sample) for r in requests]
    return hashlib.blake2b(json.dumps(keys).encode() + body, digest_size=16).hexdigest()


def scores_of(body: bytes, count: int) -> tuple[NDArray[np.float32], str | None]:
    """([count] finite scores, digest of the model if the service reports it) of an answer.

    Raises:
        AnswerError: it is not JSON, not of the schema, of another length, or not finite in float32.
    """
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise AnswerError("json", f"is not JSON: {error}") from None
    if not isinstance(answer, dict) or not isinstance(answer.get("scores"), list):
        raise AnswerError("schema", 'has no list "scores"')
    if answer.get("version", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise AnswerError("schema", f"is of version {answer['version']!r} of the schema, not {SCHEMA_VERSION}")
    given, digest = answer["scores"], answer.get("model")
    if len(given) != count:
        raise AnswerError("schema", f"has {len(given)} scores for {count} samples")
    if wrong := [x for x in given if isinstance(x, bool) or not isinstance(x, (int, float))]:
        raise AnswerError("schema", f"has a score that is not a number: {str(wrong[0])[:40]!r}")
    scores = _float32(given)
    if not np.isfinite(scores).all():
        first = int(np.flatnonzero(~np.isfinite(scores))[0])
        raise AnswerError("not_finite", f"has a score that is not finite: {str(given[first])[:40]} for samples.{first}")
    return scores, digest if isinstance(digest, str) else None


def _float32(numbers: list[float]) -> NDArray[np.float32]:
    """As float32; numbers beyond it become infinite, which the caller refuses."""
    with np.errstate(over="ignore"):
        return np.array([np.float32(_float(x)) for x in numbers], dtype=np.float32)


def _float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # an integer of hundreds of digits
        return float("inf")
