"""The records that travel between roles, one per stage: prompts, rollouts, scores, experience, batch, statistics.

Everything per token is a *ragged column*: one flat numpy array over all tokens of all rows, cut by `offsets`.
Nothing is padded. A numpy array comes out of Ray's object store without a copy (read-only), which is why records hold
numpy and not torch. All per-token columns of a record share its `offsets` and are aligned with `tokens`: entry `t` of
a column belongs to `tokens[t]` (its log-probability *given the tokens before it*, the value of the state *before* it).
On prompt tokens such entries are zero.

A sample is one or more rows (`SampleRows`): scores, keys and baselines are a sample's, tokens and passes a row's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray


def per_token() -> Any:
    """A field that is a flat array with one entry per token."""
    return field(metadata={"axis": "token"})


def per_row() -> Any:
    """A field with one entry per row: an array `[N]` or a list of length N."""
    return field(metadata={"axis": "row"})


def per_sample() -> Any:
    """A field of `SampleRows` with one entry per sample: a list of length S."""
    return field(metadata={"axis": "sample"})


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


def _entries_of(column: Any, places: NDArray[np.int64]) -> Any:
    return column[places] if isinstance(column, np.ndarray) else [column[i] for i in places]


def _by_appearance(numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`[S]` distinct numbers in order of first appearance, and `[N]` the place of each number among them."""
    distinct, first, places = np.unique(numbers, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return distinct[order], np.argsort(order)[places]


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
        return type(self)(offsets=offsets_of(self.lengths[rows]), **self._columns(rows))

    def _columns(self, rows: NDArray[np.int64], **places: NDArray[np.int64]) -> dict[str, Any]:
        """The columns of these rows. `places`: the entries to take along further axes."""
        places |= {"token": row_indices(self.offsets, rows), "row": rows}
        columns = {f.name: (getattr(self, f.name), f.metadata["axis"]) for f in fields(self) if "axis" in f.metadata}
        return {name: None if column is None else _entries_of(column, places[axis])
                for name, (column, axis) in columns.items()}

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
    """Identifies a sample of a run, independent of the attempt and of the worker that generated it."""

    epoch: int
    row: int
    sample: int

    @property
    def numbers(self) -> tuple[int, int, int]:
        """(epoch, row, sample); `SampleKey(*numbers)` is an equal key."""
        return self.epoch, self.row, self.sample


@dataclass(frozen=True)
class SampleRows(Ragged):
    """Base of records in which a sample has one or more rows; by default each row is a sample of its own.

    A selection numbers the samples of its rows from 0, in order of first appearance.
    """

    samples: NDArray[np.int64] = field(
        default_factory=lambda: np.empty(0, np.int64), kw_only=True, metadata={"axis": "row"})
    """[N] int64 number of each row's sample; all numbers from 0 to S-1 occur."""
    row_weights: NDArray[np.float32] = field(
        default_factory=lambda: np.empty(0, np.float32), kw_only=True, metadata={"axis": "row"})
    """[N] weight of the row's mean loss in the mean of its sample, where losses are aggregated by sequence. The weights
    of a sample add up to 1; by default its rows weigh the same."""
    mask_sizes: NDArray[np.int32] | None = field(default=None, kw_only=True, metadata={"axis": "token"})
    """[T] int32: n > 0: the token was sampled among its n tokens of `mask_tokens` only; n < 0: among all but its -n; 0:
    among all, or not sampled. None where every token was sampled among all."""
    mask_tokens: NDArray[np.int32] | None = field(default=None, kw_only=True, metadata={"axis": "mask"})
    """[M] int32: the sampling masks of all tokens, one after the other."""

    def __post_init__(self) -> None:
        if not len(self.samples):
            object.__setattr__(self, "samples", np.arange(len(self)))
        if not len(self.row_weights):
            row_counts = np.bincount(self.samples)[self.samples]
            object.__setattr__(self, "row_weights", (1 / row_counts).astype(np.float32))

    @property
    def sample_count(self) -> int:
        """Number of samples S."""
        return int(self.samples.max(initial=-1)) + 1

    @property
    def sample_rows(self) -> list[range]:
        """[S] the rows of each sample.

        Raises:
            ValueError: the rows are not in the order of their samples, as they are in a rollout.
        """
        if (np.diff(self.samples) < 0).any():
            raise ValueError(f"rows of samples {self.samples.tolist()} are not in the order of their samples")
        return [range(first, end) for first, end in pairwise(offsets_of(np.bincount(self.samples)).tolist())]

    @property
    def sample_starts(self) -> NDArray[np.int64]:
        """[S] position of each sample's first token; errors as `sample_rows`."""
        return self.offsets[[rows.start for rows in self.sample_rows]]

    def rows_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """All rows of some samples: sample by sample in the given order, and each sample's in their own order."""
        by_sample = np.argsort(self.samples, kind="stable")
        return by_sample[row_indices(offsets_of(np.bincount(self.samples)), samples)]

    @classmethod
    def concat(cls, parts: Any) -> Self:
        """As `Ragged.concat`, with the samples of all parts, in order."""
        parts = list(parts)
        whole, first = super().concat(parts), offsets_of([part.sample_count for part in parts])[:-1]
        return replace(whole, samples=whole.samples + np.repeat(first, [len(part) for part in parts]))

    def _columns(self, rows: NDArray[np.int64], **places: NDArray[np.int64]) -> dict[str, Any]:
        samples, numbers = _by_appearance(self.samples[rows])
        if self.mask_sizes is not None:
            places["mask"] = row_indices(offsets_of(np.abs(self.mask_sizes)), row_indices(self.offsets, rows))
        return {**super()._columns(rows, sample=samples, **places), "samples": numbers}


@dataclass(frozen=True)
class Prompts(Ragged):
    """Tokenised prompts: some rows of a data set. The coordinator handles only references to them and their row
    numbers."""

    tokens: NDArray[np.int32] = per_token()
    texts: list[str] = per_row()
    """[N] prompt text as the tokenizer saw it."""
    metadata: list[dict[str, Any]] = per_row()
    """[N] the other columns of the data row (an answer to check, a domain, ...)."""
    rows: NDArray[np.int64] = per_row()
    """[N] int64 row numbers in the data set, as in `SampleKey.row`."""
    messages: list[list[dict[str, Any]] | None] | None = field(default=None, metadata={"axis": "row"})
    """[N] the prompts as chat messages, None for one that is a text; None where all are texts."""


@dataclass(frozen=True)
class Turn:
    """One exchange of an episode: what the policy sampled, and what the environment answered."""

    row: int
    """The row of the sample that holds its tokens, counted from 0: its segment."""
    start: int
    """Place of its first sampled token in that row."""
    stop: int
    """Place after its last sampled token."""
    seed: int
    finish_reason: str
    """As in `Rollout.finish_reasons`."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """{"id", "name", "arguments"} of each call; {"error"} of one that could not be read."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """What the environment answered."""
    reward: float = 0.0
    """Of this turn, by the environment."""
    opens: list[dict[str, Any]] = field(default_factory=list)
    """What the policy read before this turn, where an agent begins another conversation with it; the first one begins
    with `Episode.messages`."""


@dataclass(frozen=True)
class Episode:
    """What happened in an episode, beside its tokens."""

    environment: str
    """Its name in the configuration."""
    cause: str
    """Why it ended (`config.environments.Cause`)."""
    use: Literal["train", "mask", "zero", "quarantine"] = "train"
    """What is done with it. One that is masked is in no loss, baseline or mean; one of "zero" has no reward."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """What the policy read first."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """JSON schemas of its tools."""
    turns: list[Turn] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers that the environment gave, the last of each name."""
    events: dict[str, int] = field(default_factory=dict)
    """How often something happened: "tool_calls", "tool_failures", "parse_failures"; "overridden" (turns for which an
    agent asked for other sampling than the run's), "abandoned" (turns whose answer an agent did not receive; no part of
    the sample), "retries", "interrupted" (its environment or agent was lost with a neighbour's), "continued" (after its
    runner or driver was lost, from a journal), "restarted" (it began again although turns were recorded: its
    environment could not be brought back, its agent did not ask for all of them again, or the record did not fit)."""
    error: str = ""
    """What went wrong, in words; empty for an episode without an error."""


@dataclass(frozen=True)
class Rollout(SampleRows):
    """A generator's responses to a chunk of prompts: tokens, log-probabilities, weight version of each token. The rows
    of a sample are adjacent and in order of time."""

    tokens: NDArray[np.int32] = per_token()
    response_mask: NDArray[np.bool_] = per_token()
    """True on tokens the policy sampled (the end-of-sequence token included); False on prompt and inserted tokens."""
    logprobs: NDArray[np.float32] = per_token()
    """Behaviour log-probability under the sampling distribution; 0 where response_mask is False."""
    versions: NDArray[np.int32] = per_token()
    """Weight version that sampled the token; -1 where response_mask is False."""
    keys: list[SampleKey] = per_sample()
    seeds: NDArray[np.int64] = per_row()
    finish_reasons: list[str] = per_row()
    """"stop" (a stop token or a stop string), "length" or "abort"."""
    episodes: list[Episode] | None = field(default=None, kw_only=True, metadata={"axis": "sample"})
    """[S] what happened in each episode; None where samples are single responses."""


@dataclass(frozen=True)
class GivenTokens(Ragged):
    """Rows of tokens that were not sampled, whose log-probabilities are compared."""

    tokens: NDArray[np.int32] = per_token()
    response_mask: NDArray[np.bool_] = per_token()
    """True on the compared tokens; False on the first of each row, which has no log-probability."""


@dataclass(frozen=True)
class LearnerPass:
    """A learner's log-probabilities of given tokens at temperature 1; arrays are [n] float32, one entry per compared
    token."""

    values: NDArray[np.float32]
    rounded: NDArray[np.float32]
    """The same in the precision of the generators, or of the learner if that is lower, with one rounding more."""
    precision: str
    """"float32" or "bfloat16"."""


@dataclass(frozen=True)
class TokenScores(Ragged):
    """One number per token of a rollout: log-probabilities under a model, or a critic's values. float32."""

    values: NDArray[np.float32] = per_token()


@dataclass(frozen=True)
class RewardScores:
    """One finite score per sample of a rollout, and its components. An episode that is masked has NaN for each."""

    scores: NDArray[np.float32]
    """[S] weighted sum of all components."""
    components: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """Name of a component -> [S] its scores, before its weight."""
    failures: dict[str, int] = field(default_factory=dict)
    """Name of a component -> number of failures (`rewards.protocol.RewardAnswer.failures`); NAME/KIND -> number of
    failures of that kind."""
    token_rewards: NDArray[np.float32] | None = None
    """[T] weighted rewards of single tokens, aligned with the rollout: part of `scores`. Zero where response_mask is
    False. The rest of a sample's score is on the response's last token; None: all of it."""
    gold: NDArray[np.float32] | None = None
    """[S] scores of the independent judge, which are no part of `scores`; None without one."""

    def select(self, samples: NDArray[np.int64], tokens: NDArray[np.int64]) -> RewardScores:
        """Those of some samples of the rollout; `failures` stay those of all.

        Args:
            samples: their numbers.
            tokens: flat positions of their tokens in the rollout.
        """
        return RewardScores(
            scores=self.scores[samples], failures=self.failures,
            components={name: scores[samples] for name, scores in self.components.items()},
            token_rewards=None if self.token_rewards is None else self.token_rewards[tokens],
            gold=None if self.gold is None else self.gold[samples])

    def numbers(self) -> dict[str, NDArray[np.float32]]:
        """[S] columns: "score", "reward/NAME" of each component, and "gold" if there is a judge."""
        components = {f"reward/{name}": scores for name, scores in self.components.items()}
        return {"score": self.scores, **components, **({} if self.gold is None else {"gold": self.gold})}


@dataclass(frozen=True)
class Sifted:
    """The samples of a rollout that dynamic sampling keeps: those of prompts whose scores differ."""

    kept: list[int]
    """Numbers of the samples."""
    others: dict[str, list[float]]
    """Scores of the other samples, by the names of `RewardScores.numbers`."""


@dataclass(frozen=True)
class Unscored:
    """A sample for which a reward could not be given."""

    key: SampleKey
    prompt: str
    """Text as the policy's tokenizer saw it."""
    response: str
    reason: str
    """The source's error message."""


@dataclass(frozen=True)
class Scores:
    """All scores of one rollout, from which the assembler makes experience."""

    rewards: RewardScores
    reference: TokenScores | None
    """Log-probabilities under the frozen reference; None where nothing needs it."""
    policy: TokenScores
    """Log-probabilities under the policy before the update ("old" log-probabilities)."""
    values: TokenScores | None
    """Critic's values; None for estimators without a critic."""


@dataclass(frozen=True)
class RewardTerms:
    """State of the run on which the rewards of a chunk depend, passed explicitly with the chunk."""

    kl_coef: float
    """Present coefficient of the KL penalty."""
    score_mean: float = 0.0
    """Subtracted from every score first."""
    score_deviation: float = 1.0
    """Divides the score after that."""


@dataclass(frozen=True)
class Batch(SampleRows):
    """The experience of one update in the order of admission, with advantages whitened if configured."""

    tokens: NDArray[np.int32] = per_token()
    response_mask: NDArray[np.bool_] = per_token()
    behaviour_logprobs: NDArray[np.float32] = per_token()
    old_logprobs: NDArray[np.float32] = per_token()
    reference_logprobs: NDArray[np.float32] | None = per_token()
    """None without a reference."""
    values: NDArray[np.float32] | None = per_token()
    """Critic's values when the experience was assembled; None without a critic."""
    advantages: NDArray[np.float32] = per_token()
    """Zero where response_mask is False, as are the returns."""
    returns: NDArray[np.float32] = per_token()
    finish_reasons: list[str] | None = field(default=None, kw_only=True, metadata={"axis": "row"})
    """As in the rollout; None in experience without one."""
    counted: NDArray[np.bool_] | None = field(default=None, kw_only=True, metadata={"axis": "row"})
    """[N] False on rows of episodes that are masked, which are in no loss; None where samples are no episodes."""


@dataclass(frozen=True)
class Experience(Batch):
    """Scored rollouts with advantages, not whitened yet; the replay buffer holds references to it."""

    keys: list[SampleKey] = per_sample()
    versions: NDArray[np.int32] | None = field(default=None, kw_only=True, metadata={"axis": "token"})
    """Weight version that sampled the token, as in the rollout; None in experience without a rollout."""
    episodes: list[Episode] | None = field(default=None, kw_only=True, metadata={"axis": "sample"})
    """As in the rollout."""


@dataclass(frozen=True)
class ExperienceSummary:
    """The small numbers about one experience that the coordinator keeps and logs. Arrays are per sample, [S]; scores,
    components and KL are NaN for an episode that is masked."""

    scores: NDArray[np.float32]
    kl: NDArray[np.float32] | None
    """Sum over response tokens of old minus reference log-probability: the k1 estimate of the sequence KL, in nats;
    None without a reference."""
    response_lengths: NDArray[np.int32]
    finished: NDArray[np.bool_]
    """True if the finish reason is "stop"."""
    min_version: int
    """Oldest weight version among the response tokens."""
    nbytes: int
    tokens: int
    """Prompt and response tokens together."""
    behaviour_gap: float
    """Mean absolute difference of behaviour and old log-probabilities over response tokens."""
    gap_histogram: NDArray[np.float32]
    """[BINS] number of response tokens by this difference (`algorithms.logprob_gap`)."""
    gold: NDArray[np.float32] | None
    """[S] gold scores, when configured."""
    components: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """Components of the scores by name, before their weights."""
    failures: dict[str, int] = field(default_factory=dict)
    """Number of failures by component; see `RewardScores`."""
    episodes: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """[S] numbers about episodes by the name of their metric; NaN for a sample without one. Empty where samples are
    single responses."""


@dataclass(frozen=True)
class EvaluationPart:
    """Small numbers about a chunk of held-out samples; [S] arrays, one entry per response."""

    rows: NDArray[np.int64]
    """Row of each response's prompt in the held-out set."""
    scores: NDArray[np.float32]
    gold: NDArray[np.float32] | None
    """Gold scores, when configured."""
    kl: NDArray[np.float32] | None
    """Sum over response tokens of policy minus reference log-probability, in nats; None without a reference."""
    reference_logprobs: NDArray[np.float32] | None
    """Sum over response tokens of the reference's log-probabilities; None without a reference."""
    lengths: NDArray[np.int64]
    finished: NDArray[np.bool_]
    digests: NDArray[np.int64]
    """A hash of each response's text."""
    bigrams: NDArray[np.int64]
    """A code per pair of adjacent response tokens of a row."""
    texts: list[dict[str, Any]]
    """A few rows: prompt, response, and the prompt's messages where it is a conversation."""
    components: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """Components of the scores by name, before their weights."""
    episodes: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """As in `ExperienceSummary`."""


@dataclass(frozen=True)
class UpdateStats:
    """Statistics of one learner's update. Means are over response tokens of the whole batch, all ranks, all
    mini-batches."""

    step: int
    applied: int
    """Optimizer steps that changed the weights."""
    skipped: int
    """Optimizer steps not applied because a loss or gradient was not finite."""
    seconds: float
    tokens: int
    """Tokens run forward and backward, on all ranks."""
    metrics: dict[str, float]
    """loss, grad_norm, learning_rate and the algorithm's own (clip_fraction, approx_kl, entropy, ...)."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a weight bucket."""

    name: str
    dtype: str
    """torch dtype name, e.g. "float32"."""
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class BucketHead:
    """The description of a bucket, a slice of a model's weights."""

    version: int
    index: int
    count: int
    """Buckets in this publication."""
    entries: list[TensorEntry]
    digests: list[str]
    """Hex digest of each tensor."""
    checksum: str
    """Hex digest of this description, in which `digests` stand for the bytes (see weights.manifest.checksum)."""


@dataclass(frozen=True)
class WeightBucket(BucketHead):
    """A bucket with its bytes (digests: weights.manifest.digest_of)."""

    arrays: list[NDArray[np.uint8]]
    """Each tensor's bytes. In the process that sends they may be the model's own memory: bytes that
    must outlive the next update have to be copied, which the object store does."""


@dataclass(frozen=True)
class WeightOffer(BucketHead):
    """A bucket whose bytes are sent from GPU to GPU (digests: weights.fingerprint)."""

    handles: list[dict[str, list[Any]]] = field(default_factory=list)
    """Per tensor, by the GPU's name: its handle in the sender's memory (see `weights.direct_transport`). Empty for a
    broadcast."""


@dataclass(frozen=True)
class WeightRoute:
    """How learner and generators connect to send weights from GPU to GPU."""

    transport: str
    """"nccl" or "ipc"; "gloo" stands in for nccl between processes without GPUs."""
    world: int = 0
    """Processes of a broadcast: the learner's first rank, and all of every generator."""
    nccl_id: str = field(default="", repr=False)
    """NCCL's unique id of the broadcast in base64. Whoever has it can join."""
    address: str = ""
    """Where the members of gloo's broadcast join: tcp://host:port."""


@dataclass(frozen=True)
class PublicationSize:
    """Size of one publication."""

    buckets: int
    nbytes: int


@dataclass(frozen=True)
class WeightsPlan:
    """Sizes of a learner's publications."""

    whole: PublicationSize
    changing: PublicationSize
    """Without the tensors that training does not change. Equal to `whole` if it changes all of them."""


@dataclass(frozen=True)
class WeightsConfirmed:
    """A generator has these weights in service."""

    version: int
    pause_seconds: float
    """For how long no token could be generated."""


@dataclass(frozen=True)
class OperatorTime:
    """One kind of operator in a profile."""

    name: str
    calls: int
    own_ms: float
    """Of all calls together, without nested operators: milliseconds of the GPU where there is one, else of the CPU."""


@dataclass(frozen=True)
class WorkerProfile:
    """Operators of one worker in a profile."""

    trace: str
    """File name of the Chrome trace."""
    seconds: float
    """Duration of the profile."""
    operators: list[OperatorTime]
    """The busiest, busiest first."""
