"""Compares packed passes with transformers' own, with the same weights, before a worker starts.

A family with features that packed attention does not support would silently be trained or scored wrong. So each worker
first compares: a few rows of random tokens, including one of the longest length that the run admits, through every code
path for such rows, against transformers' padded forward pass; for learners the gradients too. The run's state is not
touched: neither random-number generators nor gradient buffers.
"""

import sys
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
from rlhf_ray.models.config_json import context_of
from rlhf_ray.models.cpu.short_rows import LONGEST
from rlhf_ray.models.packed_model import PackedActorCritic, PackedLanguageModel, PackedScalarModel, runs_packed
from rlhf_ray.models.packing import Packing
from rlhf_ray.models.parity_pass import PassResult, dropout_disabled, logits_in_pieces, replace_forward, run_pass
from rlhf_ray.models.transformers_forward import (
    PaddedRows,
    attention_implementation_for,
    longest_affordable_row,
    reference_outputs,
    transformers_layers,
)

SEED = 20240229
COMPARED = 256
"""Maximum number of compared positions of a set of rows; fewer if their logits would exceed `LARGEST_LOGITS`."""
LARGEST_LOGITS = 2**24
"""Maximum number of logits at a time in the reference: 64 MiB of float32."""
VALUES = {torch.float32: 5e-5, torch.bfloat16: 0.01}
"""Tolerated differences of outputs, by the lowest precision: log-probabilities and entropies in nats, values and
scores relative to their size; root mean square over a row's positions."""

GRADIENTS = {torch.float32: 1e-3, torch.bfloat16: 0.02}
"""The same for gradients, relative to their size."""
NOISE = 2.5
"""Differences up to this multiple of the difference between two padded passes count as rounding, too. The second padded
pass has other padding and a perturbed embedding, since padding alone changes no bit in some kernels. Correct families
differ by 0.5 to 1.5 times that, in either precision."""
SMALLEST_GRADIENT = {torch.float32: 1e-3, torch.bfloat16: 0.03}
"""Gradients smaller than this fraction of the largest are compared relative to that fraction: some, such as those of
key biases, consist of rounding alone."""
GRADIENT, SCALARS = "gradients of", ("scalar outputs", "values")
REMEDY = "Use a model of a supported family (docs/models.md)"
FAILURES = (TypeError, ValueError, AttributeError, NotImplementedError, LookupError)
"""Errors that a pass raises for a family whose structure it does not support."""


@dataclass(frozen=True)
class RowLimits:
    """Largest rows and passes of a run."""

    longest: int
    """Maximum tokens of a row."""
    budget: int
    """Maximum tokens of a forward pass."""

    @classmethod
    def of(cls, config: Any, longest: int, budget: int) -> "RowLimits":
        """The limits for a model with this transformers configuration; rows do not exceed its context."""
        return cls(min(longest, context_of(config) or longest), budget)


@dataclass(frozen=True)
class ProbeRows:
    """Rows of random tokens and their compared positions."""

    rows: list[Tensor]
    """[N] tokens of each row."""
    compared: list[Tensor]
    """[N] compared positions of each row."""

    @property
    def tokens(self) -> Tensor:
        """[T] tokens of the packed rows."""
        return torch.cat(self.rows)

    @property
    def flat(self) -> Tensor:
        """[n] compared positions in the packed rows."""
        starts = np.cumsum([0, *map(len, self.rows[:-1])])
        return torch.cat([places + int(start) for places, start in zip(self.compared, starts, strict=True)])

    @property
    def targets(self) -> Tensor:
        """[n] the tokens after the compared positions."""
        return torch.cat([row[(places + 1) % len(row)] for row, places in zip(self.rows, self.compared, strict=True)])


@dataclass(frozen=True)
class CodePath:
    """One code path for packed rows."""

    name: str
    block_tokens: int | None = None
    """See `Packing`; None for the device's default."""
    chunked_logits: bool = False
    """Compute logits in several chunks, however few there are."""


@dataclass(frozen=True)
class Difference:
    """How far one quantity is from the reference, and how far it may be."""

    of: str
    """Name of the quantity."""
    value: float
    tolerated: float

    @property
    def excess(self) -> float:
        """Above zero if the difference is not tolerated."""
        return self.value - self.tolerated

    @property
    def is_gradient(self) -> bool:
        """Whether the quantity is a gradient rather than an output."""
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
            gradients: compare gradients as well.
            call: runs the module's forward pass as the run will; calls the module if None.
            largest: element-wise maximum over the ranks, if every pass is a collective call, so that all ranks decide
                alike.
        """
        self._module, self._limits, self._device = module, limits, device
        self._model: Any = module.model
        self._gradients, self._call, self._largest = gradients, call or module, largest or list
        # With collective calls, a RuntimeError may come from another rank.
        self._failures = FAILURES if largest else (*FAILURES, RuntimeError)
        self._random = np.random.default_rng(SEED)
        halves = any(p.dtype is torch.bfloat16 for p in module.parameters())
        self._precision = torch.bfloat16 if halves else torch.float32

    def check(self, worker: str) -> dict[str, float]:
        """Compare all code paths with the reference.

        Args:
            worker: the role and its model, for messages.

        Returns:
            `probe_seconds`, and `probe_difference`, the largest difference of an output.

        Raises:
            ModelError: packed passes differ from the reference by more than rounding, or one cannot be computed.
        """
        began, largest = time.perf_counter(), 0.0
        with dropout_disabled(self._module, self._gradients), torch.set_grad_enabled(self._gradients):
            try:
                for rows, paths in self._sets():
                    largest = max(largest, self._compare(rows, paths, worker))
            except torch.OutOfMemoryError:
                raise
            except self._failures as error:
                raise ModelError(
                    f"{worker} ({self._family}) could not be compared with transformers' own forward pass, which is "
                    f"required before any work on packed rows: {type(error).__name__}: {first_line(error)}. {REMEDY}"
                ) from error
        return {"probe_seconds": time.perf_counter() - began, "probe_difference": largest}

    def _compare(self, rows: ProbeRows, paths: list[CodePath], worker: str) -> float:
        """The largest difference of these rows' outputs. A second reference pass measures rounding if a difference
        exceeds the fixed tolerance."""
        results = [self._packed(rows, path) for path in paths]
        expected, noise, largest = self._padded(rows, extra=3), None, 0.0
        for path, packed in zip(paths, results, strict=True):
            differences = self._differences(rows, packed, expected)
            if max(d.excess for d in differences) > 0:
                noise = noise or {d.of: d.value for d in self._differences(
                    rows, self._padded(rows, 7, self._rounding), expected)}
                differences = [replace(d, tolerated=d.tolerated + NOISE * noise[d.of]) for d in differences]
                if max(d.excess for d in differences) > 0:
                    raise ModelError(self._message(worker, path, differences))
            largest = max(largest, *(d.value for d in differences if not d.is_gradient))
        return largest

    def _sets(self) -> Iterator[tuple[ProbeRows, list[CodePath]]]:
        """Short rows, two of them of one length, in one grid and in several; then the longest row with shorter ones."""
        top = min(self._limits.longest, LONGEST)
        short = [top, top, *(max(2, top * part // 12) for part in (9, 6, 4))]
        yield self._draw(short), [
            CodePath("short rows in one grid", block_tokens=sum(short)),
            CodePath("short rows in several blocks, logits in several chunks", block_tokens=2 * top,
                     chunked_logits=True)]
        longest = longest_affordable_row(self._model, self._limits.longest)
        if longest > top:
            rest = max(self._limits.budget - longest, 24)
            lengths = [longest, min(longest // 2, rest * 2 // 3), min(longest // 4, rest // 3)]
            if not runs_packed(self._model):  # each row takes as many cells as the longest
                lengths = lengths[: max(1, self._limits.budget // longest)]
            yield self._draw(lengths), [CodePath(f"rows of up to {longest} tokens")]

    def _draw(self, lengths: list[int]) -> ProbeRows:
        """Random rows of these lengths; their first and last positions and some in between are compared."""
        config = self._model.config.get_text_config()
        most = max(2, min(COMPARED, LARGEST_LOGITS // config.vocab_size) // len(lengths))
        ids = np.array([i for i in range(config.vocab_size) if i != config.pad_token_id])
        rows, compared, scalar = [], [], isinstance(self._module, PackedScalarModel)
        for length in lengths:
            places = length if scalar else length - 1  # a row's last token has no next token
            between = self._random.permutation(np.arange(1, max(1, places - 1)))[: most - 2]
            rows.append(torch.as_tensor(self._random.choice(ids, length), device=self._device))
            compared.append(torch.as_tensor(np.unique([0, *between, places - 1]), device=self._device))
        return ProbeRows(rows, compared)

    def _packed(self, rows: ProbeRows, path: CodePath) -> PassResult:
        """A packed pass."""
        packing = replace(Packing.of(np.array([len(row) for row in rows.rows]), self._device),
                          block_tokens=path.block_tokens)
        elements = -(-len(rows.flat) // 3) * self._model.config.get_text_config().vocab_size
        cells = torch.arange(packing.tokens, device=self._device) if runs_packed(self._model) else packing.grid_index
        with logits_in_pieces(self._module, elements) if path.chunked_logits else ExitStack():
            return run_pass(self._module, lambda: self._outputs(rows, packing), cells, self._weights(len(rows.flat)))

    def _outputs(self, rows: ProbeRows, packing: Packing) -> tuple[Tensor, ...]:
        """The columns of `reference_outputs` from a packed pass."""
        match self._module:
            case PackedScalarModel():
                return (self._call(rows.tokens, packing)[rows.flat],)
            case PackedLanguageModel() | PackedActorCritic():
                return tuple(self._call(rows.tokens, packing, rows.flat + 1, entropy=True))
            case _:
                logits = self._call(rows.tokens, packing, rows.flat)
                return (logits.float().log_softmax(-1).gather(-1, rows.targets[:, None])[:, 0],)

    def _padded(self, rows: ProbeRows, extra: int, rounding: float = 0.0) -> PassResult:
        """The reference: short rows in one padded grid, long rows one at a time, since a grid of them would be larger
        than any pass of the run."""
        every, parts, first = list(range(len(rows.rows))), [], 0
        weights = self._weights(len(rows.flat))
        for group in [every] if max(map(len, rows.rows)) <= LONGEST else [[i] for i in every]:
            compared = [rows.compared[i] for i in group]
            part = slice(first, first := first + sum(map(len, compared)))
            chosen = [rows.rows[i] for i in group]
            room = (context_of(self._model.config) or sys.maxsize) - max(map(len, chosen))
            grid = PaddedRows.of(chosen, compared, rows.targets[part], max(0, min(extra, room)))
            with (transformers_layers(self._model, attention_implementation_for(self._model, *grid.tokens.shape)),
                  replace_forward(self._module, partial(self._reference, grid))):
                parts.append(run_pass(self._module, self._call, grid.cells,
                                     None if weights is None else weights[:, part], rounding))
        return PassResult.concat(parts)

    def _reference(self, grid: PaddedRows) -> tuple[Tensor, ...]:
        if torch.is_autocast_enabled(torch.device(self._device).type):
            self._precision = torch.bfloat16
        return reference_outputs(self._module, grid)

    def _weights(self, positions: int) -> Tensor | None:
        """[columns, n] random weights of the sum of outputs whose gradients are compared; None without gradients."""
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

    def _differences(self, rows: ProbeRows, one: PassResult, other: PassResult) -> list[Difference]:
        """Differences between two results, with fixed tolerances; the same on all ranks."""
        own = list(self._own_differences(rows, one, other))
        numbers = self._largest([d.value for d in own] + [d.tolerated for d in own])
        return [replace(d, value=value, tolerated=tolerated)
                for d, value, tolerated in zip(own, numbers[: len(own)], numbers[len(own) :], strict=True)]

    def _own_differences(self, rows: ProbeRows, one: PassResult, other: PassResult) -> Iterator[Difference]:
        counts = [len(places) for places in rows.compared]
        for name, ours, theirs in zip(self._names, one.columns, other.columns, strict=True):
            unit = root_mean_square(theirs) if name in SCALARS else 1.0
            yield Difference(name, max(map(root_mean_square, _subtract(ours, theirs).split(counts))),
                             VALUES[self._precision] * unit)
        typical = max(map(root_mean_square, other.gradients.values()), default=0.0)
        for name, theirs in other.gradients.items():
            unit = max(root_mean_square(theirs), SMALLEST_GRADIENT[self._precision] * typical)
            ours = one.gradients.get(name, torch.zeros_like(theirs))
            yield Difference(
                f"{GRADIENT} {name}", root_mean_square(_subtract(ours, theirs)) / (unit or 1.0),
                GRADIENTS[self._precision])

    @property
    def _rounding(self) -> float:
        """Largest relative change by one rounding."""
        return torch.finfo(self._precision).eps / 2

    @property
    def _family(self) -> str:
        return str(self._model.config.model_type)

    def _message(self, worker: str, path: CodePath, differences: list[Difference]) -> str:
        """The error message; names an output rather than a gradient, whose difference follows from it."""
        worst = max(differences, key=lambda d: (d.excess > 0, not d.is_gradient, d.excess))
        unit = " of their size" if worst.is_gradient or worst.of in SCALARS else " nats"
        return (f"{worker} ({self._family}): {worst.of} of packed rows differ by {worst.value:.3g}{unit} from those "
                "of transformers' own padded forward pass of the same weights, and rounding in "
                f"{str(self._precision).removeprefix('torch.')} explains {worst.tolerated:.3g}; seen with {path.name}. "
                f"Packed passes do not compute this model. {REMEDY}")


def _subtract(one: Tensor, other: Tensor) -> Tensor:
    """The difference; zero where both are the same non-finite number, because other checks detect damaged weights."""
    same = (one == other) | (one.isnan() & other.isnan())
    return torch.where(same, 0.0, one - other).nan_to_num(nan=torch.inf)


def root_mean_square(numbers: Tensor) -> float:
    """Over all elements; 0 without any."""
    return float(numbers.double().square().mean().sqrt()) if numbers.numel() else 0.0
