"""The records that travel between roles, one per stage: prompts, rollouts, scores, experience, batch, statistics.

Everything per token is a *ragged column*: one flat numpy array over all tokens of all rows, cut by `offsets`.
Nothing is padded. A numpy array comes out of Ray's object store without a copy (read-only), which is why records hold
numpy and not torch. All per-token columns of a record share its `offsets` and are aligned with `tokens`: entry `t` of
a column speaks of `tokens[t]` (its log-probability *given what precedes it*, the value of the state *before* it).
On prompt tokens such entries are zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


def per_token() -> Any:
    """A field that is a flat array with one entry per token."""
    return field(metadata={"axis": "token"})


def per_row() -> Any:
    """A field with one entry per row: an array `[N]` or a list of length N."""
    return field(metadata={"axis": "row"})


def row_indices(offsets: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Flat positions of the tokens of `rows`, in that order."""
    starts, lengths = offsets[rows], offsets[rows + 1] - offsets[rows]
    ends = np.cumsum(lengths)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    return np.repeat(starts, lengths) + within


def offsets_of(lengths: Any) -> NDArray[np.int64]:
    """`[N+1]` offsets from `[N]` lengths."""
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))]).astype(np.int64)


def response_start(mask: NDArray[np.bool_]) -> int:
    """Index of the first token that the policy sampled, of a row's `response_mask` [T]; T in a row without any."""
    return int(np.argmax(mask)) if mask.any() else len(mask)


def _rows_of(column: Any, rows: NDArray[np.int64]) -> Any:
    if column is None or isinstance(column, np.ndarray):
        return None if column is None else column[rows]
    return [column[i] for i in rows]


@dataclass(frozen=True)
class Ragged:
    """Base of records with rows of different lengths. Subclasses mark fields with `per_token()` or `per_row()`."""

    offsets: NDArray[np.int64]
    """[N+1] int64: row i holds tokens offsets[i]:offsets[i+1]."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[N] tokens per row."""
        return np.diff(self.offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of the array columns (lists of strings not counted)."""
        return sum(v.nbytes for v in self.__dict__.values() if isinstance(v, np.ndarray))

    def row(self, i: int, column: str) -> NDArray[Any]:
        """The slice of a per-token column that belongs to row i."""
        return getattr(self, column)[self.offsets[i] : self.offsets[i + 1]]

    def select(self, rows: Any) -> Self:
        """A record of the given rows, in the given order (copies)."""
        rows = np.asarray(rows, dtype=np.int64)
        flat = row_indices(self.offsets, rows)
        chosen: dict[str, Any] = {"offsets": offsets_of(self.lengths[rows])}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.metadata.get("axis") == "token":
                chosen[f.name] = None if value is None else value[flat]
            elif f.metadata.get("axis") == "row":
                chosen[f.name] = _rows_of(value, rows)
        return type(self)(**chosen)

    @classmethod
    def concat(cls, parts: Any) -> Self:
        """One record of all rows of `parts`, in order.

        Raises:
            ValueError: no parts, or a column present in some parts only.
        """
        parts = list(parts)
        if not parts:
            raise ValueError(f"cannot concatenate zero {cls.__name__} records")
        joined: dict[str, Any] = {"offsets": offsets_of(np.concatenate([p.lengths for p in parts]))}
        for f in fields(cls):
            values = [getattr(p, f.name) for p in parts]
            if f.metadata.get("axis") is None:
                continue
            if all(v is None for v in values):
                joined[f.name] = None
            elif any(v is None for v in values):
                raise ValueError(f"{cls.__name__}.{f.name} is present in some parts and missing in others")
            elif isinstance(values[0], np.ndarray):
                joined[f.name] = np.concatenate(values)
            else:
                joined[f.name] = [item for value in values for item in value]
        return cls(**joined)


@dataclass(frozen=True, order=True)
class SampleKey:
    """Names one sample of a run for ever, whatever attempt or worker made it."""

    epoch: int
    row: int
    sample: int

    @property
    def numbers(self) -> tuple[int, int, int]:
        """The three as they are written down; `SampleKey(*numbers)` is the key again."""
        return self.epoch, self.row, self.sample


@dataclass(frozen=True)
class Prompts(Ragged):
    """Tokenised prompts: some rows of a data set. The coordinator passes on references to them and speaks of their
    numbers only."""

    tokens: NDArray[np.int32] = per_token()
    texts: list[str] = per_row()
    """[N] prompt text as the tokenizer saw it."""
    metadata: list[dict[str, Any]] = per_row()
    """[N] the other columns of the data row (an answer to check, a domain, ...)."""
    rows: NDArray[np.int64] = per_row()
    """[N] int64 row numbers in the data set: what `SampleKey.row` names."""
    messages: list[list[dict[str, Any]] | None] | None = field(default=None, metadata={"axis": "row"})
    """[N] the prompts as chat messages, None for one that is a text; None where all are texts."""


@dataclass(frozen=True)
class Rollout(Ragged):
    """What a generator made of a chunk of samples: prompt and response tokens, and how each token came about."""

    tokens: NDArray[np.int32] = per_token()
    response_mask: NDArray[np.bool_] = per_token()
    """True on tokens the policy sampled (the end-of-sequence token included); False on prompt and inserted tokens."""
    logprobs: NDArray[np.float32] = per_token()
    """Behaviour log-probability under the sampling distribution; 0 where response_mask is False."""
    versions: NDArray[np.int32] = per_token()
    """Weight version that made the token; -1 where response_mask is False."""
    keys: list[SampleKey] = per_row()
    seeds: NDArray[np.int64] = per_row()
    finish_reasons: list[str] = per_row()
    """"stop" (end-of-sequence or stop token), "length" or "abort"."""


@dataclass(frozen=True)
class TokenScores(Ragged):
    """One number per token of a rollout: log-probabilities under a model, or a critic's values. float32."""

    values: NDArray[np.float32] = per_token()


@dataclass(frozen=True)
class RewardScores:
    """One finite score per row of a rollout, and what it is made of."""

    scores: NDArray[np.float32]
    """[N] weighted sum of all components."""
    components: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """Name of a component -> [N] its scores, before its weight."""
    failures: dict[str, int] = field(default_factory=dict)
    """Name of a component -> rows that it could not judge in the ordinary way (see `rewards.protocol`); NAME/KIND ->
    how often that kind of thing went wrong."""
    token_rewards: NDArray[np.float32] | None = None
    """[T] weighted rewards of single tokens, aligned with the rollout: where a part of `scores` falls. Zero where
    response_mask is False. What the sum over a row leaves of its score falls on the response's last token; None: all
    of it."""


@dataclass(frozen=True)
class Unscored:
    """A sample for which a reward could not be given."""

    key: SampleKey
    prompt: str
    """Text as the policy's tokenizer saw it."""
    response: str
    reason: str
    """What the source said."""


@dataclass(frozen=True)
class Scores:
    """All that was said about one rollout: what the assembler needs to turn it into experience."""

    rewards: RewardScores
    reference: TokenScores
    """Log-probabilities under the frozen reference."""
    policy: TokenScores
    """Log-probabilities under the policy as it stands before the update ("old" log-probabilities)."""
    values: TokenScores | None
    """Critic's values; None for estimators without a critic."""


@dataclass(frozen=True)
class RewardTerms:
    """Numbers of the run so far that enter the rewards of a chunk. Given with it, so that it depends on no more."""

    kl_coef: float
    """Present coefficient of the KL penalty."""
    score_mean: float = 0.0
    """Taken from every score before anything else."""
    score_deviation: float = 1.0
    """Divides it then."""


@dataclass(frozen=True)
class Batch(Ragged):
    """What learners train on: one update's worth of experience in key order, advantages whitened if asked."""

    tokens: NDArray[np.int32] = per_token()
    response_mask: NDArray[np.bool_] = per_token()
    behaviour_logprobs: NDArray[np.float32] = per_token()
    old_logprobs: NDArray[np.float32] = per_token()
    reference_logprobs: NDArray[np.float32] = per_token()
    values: NDArray[np.float32] | None = per_token()
    """Critic's values when the experience was assembled; None without a critic."""
    advantages: NDArray[np.float32] = per_token()
    """Zero where response_mask is False, as are the returns."""
    returns: NDArray[np.float32] = per_token()


@dataclass(frozen=True)
class Experience(Batch):
    """Scored rollouts with advantages, not whitened yet: what the replay buffer refers to and learners lease."""

    keys: list[SampleKey] = per_row()


@dataclass(frozen=True)
class ExperienceSummary:
    """The small numbers about one experience that the coordinator keeps and logs. Per-row arrays are [N]."""

    scores: NDArray[np.float32]
    kl: NDArray[np.float32]
    """Sum over response tokens of old minus reference log-probability: the k1 estimate of the sequence KL, in nats."""
    response_lengths: NDArray[np.int32]
    finished: NDArray[np.bool_]
    """True where the response ended by itself ("stop")."""
    min_version: int
    """Oldest weight version among the response tokens."""
    nbytes: int
    tokens: int
    """Prompt and response tokens together."""
    behaviour_gap: float
    """Mean absolute difference of behaviour and old log-probabilities over response tokens."""
    samples: list[dict[str, Any]]
    """A few rows as text, for the samples/ folder: prompt, response, score and its components (reward/NAME), kl, gold
    (when a judge is set)."""
    gold: NDArray[np.float32] | None
    """[N] independent judge's scores, when one is configured."""
    components: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """What the scores are made of, by name, before the weights."""
    failures: dict[str, int] = field(default_factory=dict)
    """Rows that a component could not judge in the ordinary way."""


@dataclass(frozen=True)
class EvaluationPart:
    """Small numbers about a chunk of held-out samples; [N] arrays, one entry per response."""

    rows: NDArray[np.int64]
    """Row of each response's prompt in the held-out set."""
    scores: NDArray[np.float32]
    gold: NDArray[np.float32] | None
    """Independent judge's scores, when one is configured."""
    kl: NDArray[np.float32]
    """Sum over response tokens of policy minus reference log-probability, in nats."""
    reference_logprobs: NDArray[np.float32]
    """Sum over response tokens of the reference's log-probabilities."""
    lengths: NDArray[np.int64]
    finished: NDArray[np.bool_]
    digests: NDArray[np.int64]
    """A hash of each response's text."""
    bigrams: NDArray[np.int64]
    """[sum of (length - 1)] a code per pair of neighbouring response tokens."""
    texts: list[dict[str, str]]
    """A few rows: prompt and response."""
    components: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """What the scores are made of, by name, before the weights."""


@dataclass(frozen=True)
class UpdateStats:
    """What one learner's update did. Means are over response tokens of the whole batch, all ranks, all mini-batches."""

    step: int
    applied: int
    """Optimizer steps that changed the weights."""
    skipped: int
    """Optimizer steps not applied because a loss or gradient was not finite."""
    seconds: float
    tokens: int
    """Tokens run forward and backward, on all ranks."""
    metrics: dict[str, float]
    """loss, grad_norm, learning_rate and what the algorithm adds (clip_fraction, approx_kl, entropy, ...)."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a weight bucket."""

    name: str
    dtype: str
    """torch dtype name, e.g. "float32"."""
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class WeightBucket:
    """A slice of a model's weights, with what is needed to trust it."""

    version: int
    index: int
    count: int
    """Buckets in this publication."""
    entries: list[TensorEntry]
    arrays: list[NDArray[np.uint8]]
    """Each tensor's bytes. In the process that sends they may be the model's own memory: what is to outlive the next
    update has to be copied, which the object store does."""
    digests: list[str]
    """Hex digest of each tensor (see weights.manifest.digest_of)."""
    checksum: str
    """Hex digest of everything but the bytes, which `digests` stand for (see weights.manifest.checksum)."""


@dataclass(frozen=True)
class WeightOffer:
    """A bucket whose bytes do not travel with its description, but from GPU to GPU."""

    version: int
    index: int
    count: int
    """Buckets in this publication."""
    entries: list[TensorEntry]
    digests: list[str]
    """Hex digest of each tensor (see weights.fingerprint)."""
    checksum: str
    """As `WeightBucket.checksum`."""
    handles: list[dict[str, list[Any]]] = field(default_factory=list)
    """Per tensor, by the GPU's name: its handle in the sender's memory (see `weights.direct_transport`). Empty for a
    broadcast."""


@dataclass(frozen=True)
class WeightRoute:
    """How learner and generators meet to hand weights over from GPU to GPU."""

    transport: str
    """"nccl" or "ipc"."""
    host: str = ""
    """Of the learner's first rank, for a broadcast."""
    port: int = 0
    world: int = 0
    """Processes of the broadcast: the learner's first rank, and all of every generator."""


@dataclass(frozen=True)
class PublicationSize:
    """What one publication sends."""

    buckets: int
    nbytes: int


@dataclass(frozen=True)
class WeightsPlan:
    """Sizes of a learner's publications."""

    whole: PublicationSize
    changing: PublicationSize
    """Without the tensors that training leaves as they are. Equal to `whole` where there are none."""


@dataclass(frozen=True)
class WeightsConfirmed:
    """A generator computes with these weights now."""

    version: int
    pause_seconds: float
    """For how long no token could be made."""


@dataclass(frozen=True)
class OperatorTime:
    """One kind of operator in a profile."""

    name: str
    calls: int
    own_ms: float
    """Of all calls together, without what they called: milliseconds of the GPU where there is one, else of the CPU."""


@dataclass(frozen=True)
class WorkerProfile:
    """What one worker computed while it was looked at."""

    trace: str
    """File name of the Chrome trace."""
    seconds: float
    """For how long it was looked at."""
    operators: list[OperatorTime]
    """The busiest, busiest first."""
