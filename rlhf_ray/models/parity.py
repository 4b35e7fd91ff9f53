"""Packed passes held against transformers' own, of the same weights, before a worker begins.

A family that packed attention or our output heads do not know (soft-caps, logit scales, sinks, biases of attention)
would be trained or scored wrong without a word. So each worker compares first: a few rows of random tokens, the longest
that the run admits among them, along every way that its rows can take through our code, with transformers' padded
forward pass; for learners their gradients too. Nothing of the run is touched: neither the state of any generator of
random numbers nor what gradients are added up in.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlhf_ray.errors import ModelError, first_line
from rlhf_ray.models.packed_model import PackedActorCritic, PackedLanguageModel, PackedScalarModel
from rlhf_ray.models.packing import Packing
from rlhf_ray.models.padded_reference import (
    PaddedRows,
    answers,
    attention_implementation_for,
    longest_affordable_row,
    transformers_layers,
)
from rlhf_ray.models.parity_pass import PassResult, dropout_disabled, logits_in_pieces, replace_forward, run_pass
from rlhf_ray.models.short_row_attention import LONGEST

SEED = 20240229
COMPARED = 256
"""Most positions compared of a set of rows, fewer where their logits would be over `LARGEST_LOGITS`."""
LARGEST_LOGITS = 2**24
"""Entries of the logits that exist at a time in the reference: 64 MiB of float32."""
VALUES = {torch.float32: 5e-5, torch.bfloat16: 0.01}
"""What answers may always differ by, by the lowest precision: nats of log-probabilities and entropies, shares of the
size of values and scores; root mean square over a row's positions."""
GRADIENTS = {torch.float32: 1e-3, torch.bfloat16: 0.02}
"""The same of gradients, as a share of their size."""
NOISE = 2.5
"""Differences of so many times that between two padded passes are rounding, too. The second of these has other padding,
and an embedding that is rounded once more: padding alone changes no bit of some kernels. Families that are right differ
by 0.5 to 1.5 times that, in either precision."""
SMALLEST_GRADIENT = {torch.float32: 1e-3, torch.bfloat16: 0.03}
"""Gradients that are smaller than this share of the largest are held to the same difference: those of keys' biases, for
one, are nothing but rounding."""
GRADIENT, SCALARS = "gradients of", ("scalar outputs", "values")
REMEDY = "Use a model of a supported family (docs/models.md)"
FAILURES = (TypeError, ValueError, AttributeError, NotImplementedError, LookupError)
"""What a pass of a family raises that is built otherwise than the passes expect."""


@dataclass(frozen=True)
class RowLimits:
    """What rows and passes a run admits."""

    longest: int
    """Most tokens of a row."""
    budget: int
    """Most tokens of a forward pass."""

    @classmethod
    def of(cls, config: Any, longest: int, budget: int) -> "RowLimits":
        """Those of a model of this transformers configuration, whose context rows do not exceed."""
        context = getattr(config.get_text_config(), "max_position_embeddings", None)
        return cls(min(longest, context or longest), budget)


@dataclass(frozen=True)
class ProbeRows:
    """Rows of random tokens in memory, and the positions in them that are compared."""

    rows: list[Tensor]
    """[N] tokens of each."""
    seen: list[Tensor]
    """[N] positions compared of each."""

    @property
    def tokens(self) -> Tensor:
        """[T] packed."""
        return torch.cat(self.rows)

    @property
    def flat(self) -> Tensor:
        """[n] packed positions compared."""
        starts = np.cumsum([0, *map(len, self.rows[:-1])])
        return torch.cat([seen + int(start) for seen, start in zip(self.seen, starts, strict=True)])

    @property
    def targets(self) -> Tensor:
        """[n] the tokens behind these."""
        return torch.cat([row[(seen + 1) % len(row)] for row, seen in zip(self.rows, self.seen, strict=True)])


@dataclass(frozen=True)
class CodePath:
    """One way of a set of rows through our code."""

    name: str
    block_tokens: int | None = None
    """As `Packing`'s; the device's when None."""
    pieces: bool = False
    """Make logits in several pieces, whatever their number."""


@dataclass(frozen=True)
class Difference:
    """How far one way is from the reference, and how far it may be."""

    of: str
    """Which numbers."""
    difference: float
    tolerated: float

    @property
    def excess(self) -> float:
        """Above zero where the two are not the same."""
        return self.difference - self.tolerated

    @property
    def is_gradient(self) -> bool:
        """Whether the numbers are gradients, and not answers."""
        return self.of.startswith(GRADIENT)


class ParityProbe:
    """Compares the packed passes of one module."""

    def __init__(
        self, module: nn.Module, limits: RowLimits, device: torch.device | str, *, gradients: bool = False,
        call: Callable[..., Any] | None = None, largest: Callable[[list[float]], list[float]] | None = None,
    ) -> None:
        """
        Args:
            module: one of the packed modules; its `model` is transformers'.
            gradients: compare these as well.
            call: runs the module's forward as the run will, where that is not by calling the module.
            largest: of each number the largest that a rank gives, where every pass is a collective call of theirs: they
                go on, or stop, together.
        """
        self._module, self._limits, self._device = module, limits, device
        self._model: Any = module.model
        self._gradients, self._call, self._largest = gradients, call or module, largest or list
        # What a pass raises where others are waited for may be of their making.
        self._failures = FAILURES if largest else (*FAILURES, RuntimeError)
        self._random = np.random.default_rng(SEED)
        halves = any(p.dtype is torch.bfloat16 for p in module.parameters())
        self._precision = torch.bfloat16 if halves else torch.float32

    def check(self, who: str) -> dict[str, float]:
        """Compare, along every way.

        Args:
            who: the role and its model, for messages.

        Returns:
            `probe_seconds`, and `probe_difference`: the largest of answers.

        Raises:
            ModelError: the two differ by more than rounding, or one of them cannot be computed.
        """
        began, largest = time.perf_counter(), 0.0
        with dropout_disabled(self._module), torch.set_grad_enabled(self._gradients):
            try:
                for rows, ways in self._sets():
                    largest = max(largest, self._compare(rows, ways, who))
            except torch.OutOfMemoryError:
                raise
            except self._failures as error:
                raise ModelError(
                    f"{who} ({self._family}) could not be compared with transformers' own forward pass, which comes "
                    f"before any work on packed rows: {type(error).__name__}: {first_line(error)}. {REMEDY}") from error
        return {"probe_seconds": time.perf_counter() - began, "probe_difference": largest}

    def _compare(self, rows: ProbeRows, ways: list[CodePath], who: str) -> float:
        """The largest difference of answers of these rows; a second reference is made where one is over what is always
        tolerated."""
        found = [self._packed(rows, way) for way in ways]
        expected, noise, largest = self._padded(rows, extra=3), None, 0.0
        for way, packed in zip(ways, found, strict=True):
            findings = self._findings(rows, packed, expected)
            if max(f.excess for f in findings) > 0:
                noise = noise or {f.of: f.difference for f in self._findings(
                    rows, self._padded(rows, 7, self._rounding), expected)}
                findings = [replace(f, tolerated=f.tolerated + NOISE * noise[f.of]) for f in findings]
                if max(f.excess for f in findings) > 0:
                    raise ModelError(self._refusal(who, way, findings))
            largest = max(largest, *(f.difference for f in findings if not f.is_gradient))
        return largest

    def _sets(self) -> Iterator[tuple[ProbeRows, list[CodePath]]]:
        """Short rows in one grid and in several, two of one length among them; the longest among shorter ones."""
        top = min(self._limits.longest, LONGEST)
        short = [top, top, *(max(2, top * part // 12) for part in (9, 6, 4))]
        yield self._draw(short), [
            CodePath("short rows in one grid", block_tokens=sum(short)),
            CodePath("short rows in several blocks, logits in several pieces", block_tokens=2 * top, pieces=True)]
        longest = longest_affordable_row(self._model, self._limits.longest)
        if longest > top:
            room = max(self._limits.budget - longest, 24)
            yield (self._draw([longest, min(longest // 2, room * 2 // 3), min(longest // 4, room // 3)]),
                   [CodePath(f"rows of up to {longest} tokens")])

    def _draw(self, lengths: list[int]) -> ProbeRows:
        """Rows of these lengths; compared are the first and the last position of each and some between."""
        config = self._model.config.get_text_config()
        most = max(2, min(COMPARED, LARGEST_LOGITS // config.vocab_size) // len(lengths))
        ids = np.array([i for i in range(config.vocab_size) if i != config.pad_token_id])
        rows, seen, scalar = [], [], isinstance(self._module, PackedScalarModel)
        for length in lengths:
            places = length if scalar else length - 1  # the last token of a row has none behind it
            between = self._random.permutation(np.arange(1, max(1, places - 1)))[: most - 2]
            rows.append(torch.as_tensor(self._random.choice(ids, length), device=self._device))
            seen.append(torch.as_tensor(np.unique([0, *between, places - 1]), device=self._device))
        return ProbeRows(rows, seen)

    def _packed(self, rows: ProbeRows, way: CodePath) -> PassResult:
        """One pass of ours."""
        packing = replace(Packing.of(np.array([len(row) for row in rows.rows]), self._device),
                          block_tokens=way.block_tokens)
        elements = -(-len(rows.flat) // 3) * self._model.config.get_text_config().vocab_size
        with logits_in_pieces(self._module, elements) if way.pieces else ExitStack():
            return run_pass(self._module, lambda: self._answers(rows, packing),
                           torch.arange(packing.tokens, device=self._device), self._weights(len(rows.flat)))

    def _answers(self, rows: ProbeRows, packing: Packing) -> tuple[Tensor, ...]:
        """The columns of `padded_reference.answers`, by our packed pass."""
        match self._module:
            case PackedScalarModel():
                return (self._call(rows.tokens, packing)[rows.flat],)
            case PackedLanguageModel() | PackedActorCritic():
                return tuple(self._call(rows.tokens, packing, rows.flat + 1, entropy=True))
            case _:
                logits = self._call(rows.tokens, packing, rows.flat)
                return (logits.float().log_softmax(-1).gather(-1, rows.targets[:, None])[:, 0],)

    def _padded(self, rows: ProbeRows, extra: int, rounding: float = 0.0) -> PassResult:
        """The reference: short rows in one padded grid, long ones each alone, since a grid of them would be larger than
        any pass of the run."""
        every, parts, first = list(range(len(rows.rows))), [], 0
        weights = self._weights(len(rows.flat))
        for group in [every] if max(map(len, rows.rows)) <= LONGEST else [[i] for i in every]:
            seen = [rows.seen[i] for i in group]
            those = slice(first, first := first + sum(map(len, seen)))
            grid = PaddedRows.of([rows.rows[i] for i in group], seen, rows.targets[those], extra)
            with (transformers_layers(self._model, attention_implementation_for(self._model, *grid.tokens.shape)),
                  replace_forward(self._module, partial(self._reference, grid))):
                parts.append(run_pass(self._module, self._call, grid.cells,
                                     None if weights is None else weights[:, those], rounding))
        return PassResult.joined(parts)

    def _reference(self, grid: PaddedRows) -> tuple[Tensor, ...]:
        if torch.is_autocast_enabled(torch.device(self._device).type):
            self._precision = torch.bfloat16
        return answers(self._module, grid)

    def _weights(self, positions: int) -> Tensor | None:
        """[columns, n] by which answers are added up, for gradients."""
        if not self._gradients:
            return None
        drawn = np.random.default_rng(SEED).standard_normal((len(self._names), positions))
        return torch.as_tensor(drawn, dtype=torch.float32, device=self._device)

    @property
    def _names(self) -> tuple[str, ...]:
        match self._module:
            case PackedScalarModel():
                return ("scalar outputs",)
            case PackedActorCritic():
                return ("log-probabilities", "entropies", "values")
            case PackedLanguageModel():
                return ("log-probabilities", "entropies")
            case _:
                return ("log-probabilities",)

    def _findings(self, rows: ProbeRows, one: PassResult, other: PassResult) -> list[Difference]:
        """How far `one` is from `other`, and what is always tolerated; the same on all ranks."""
        found = list(self._differences(rows, one, other))
        numbers = self._largest([f.difference for f in found] + [f.tolerated for f in found])
        return [replace(f, difference=apart, tolerated=tolerated)
                for f, apart, tolerated in zip(found, numbers[: len(found)], numbers[len(found) :], strict=True)]

    def _differences(self, rows: ProbeRows, one: PassResult, other: PassResult) -> Iterator[Difference]:
        counts = [len(seen) for seen in rows.seen]
        for name, ours, theirs in zip(self._names, one.columns, other.columns, strict=True):
            unit = _size(theirs) if name in SCALARS else 1.0
            yield Difference(name, max(map(_size, _apart(ours, theirs).split(counts))), VALUES[self._precision] * unit)
        typical = max(map(_size, other.gradients.values()), default=0.0)
        for name, theirs in other.gradients.items():
            unit = max(_size(theirs), SMALLEST_GRADIENT[self._precision] * typical)
            ours = one.gradients.get(name, torch.zeros_like(theirs))
            yield Difference(
                f"{GRADIENT} {name}", _size(_apart(ours, theirs)) / (unit or 1.0), GRADIENTS[self._precision])

    @property
    def _rounding(self) -> float:
        """By which share one rounding changes a number, at most."""
        return torch.finfo(self._precision).eps / 2

    @property
    def _family(self) -> str:
        return str(self._model.config.model_type)

    def _refusal(self, who: str, way: CodePath, findings: list[Difference]) -> str:
        """Of answers rather than of gradients, which follow them."""
        worst = max(findings, key=lambda f: (f.excess > 0, not f.is_gradient, f.excess))
        unit = " of their size" if worst.is_gradient or worst.of in SCALARS else " nats"
        return (f"{who} ({self._family}): {worst.of} of packed rows differ by {worst.difference:.3g}{unit} from those "
                "of transformers' own padded forward pass of the same weights, and rounding in "
                f"{str(self._precision).removeprefix('torch.')} explains {worst.tolerated:.3g}; seen with {way.name}. "
                f"What is computed on packed rows would not be this model's. {REMEDY}")


def _apart(one: Tensor, other: Tensor) -> Tensor:
    """The difference; none where both are the same number that is not finite: damage is not this probe's to find."""
    same = (one == other) | (one.isnan() & other.isnan())
    return torch.where(same, 0.0, one - other).nan_to_num(nan=torch.inf)


def _size(numbers: Tensor) -> float:
    """Root mean square."""
    return float(numbers.double().square().mean().sqrt()) if numbers.numel() else 0.0
