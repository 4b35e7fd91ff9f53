"""Prompts for PPO and for evaluation: how they are read, the order in which a run visits them, each sample's seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.config.data import PromptsConfig
from rlhf_ray.data.encoding import encode_prompts, flat_tokens, holds_messages
from rlhf_ray.data.report import LoadReport
from rlhf_ray.data.rows import stream_rows
from rlhf_ray.errors import CheckpointError, DataError
from rlhf_ray.records import Prompts, SampleKey, offsets_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def stream_prompts(config: PromptsConfig, tokenizer: PreTrainedTokenizerBase, report: LoadReport) -> Iterator[Prompts]:
    """Blocks of tokenised prompts in file order, numbered from 0; `report` says afterwards what was left out (prompts
    of more than `max_tokens` tokens).

    Raises:
        DataError: a file or row that cannot be used (named), or no prompt left.
        ModelError: chat messages that the tokenizer has no template for.
    """
    chat, shortest = None, np.inf
    for rows in stream_rows(config.path, config.split, config.limit):
        chat = holds_messages(rows, config.column) if chat is None else chat
        texts, tokens = encode_prompts(rows, config.column, tokenizer, chat=chat)
        lengths = np.array([len(t) for t in tokens], dtype=np.int64)
        shortest, first = min(shortest, lengths.min()), report.kept
        kept = report.keep(rows, {
            "no tokens": lengths == 0, f"longer than max_tokens={config.max_tokens}": lengths > config.max_tokens})
        yield Prompts(
            offsets=offsets_of(lengths[kept]), tokens=flat_tokens([tokens[i] for i in kept]),
            texts=[texts[i] for i in kept], metadata=[rows.others(i, config.column) for i in kept],
            rows=np.arange(first, report.kept),
            messages=[rows.value(i, config.column) for i in kept] if chat else None)
    report.require_rows(f"The shortest prompt has {shortest} tokens; raise max_tokens or shorten the prompts")


def sample_seed(run_seed: int, key: SampleKey) -> int:
    """The seed of one sample, in [0, 2**63): the same on every machine, attempt and Python, whatever came before."""
    named = f"{run_seed}/{key.epoch}/{key.row}/{key.sample}".encode()
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest()) >> 1


class PromptCursor:
    """Hands out (epoch, row) pairs: each epoch every row once, in an order that follows from the seed and the epoch.

    Nothing is dropped at an epoch's end; a batch may reach into the next one. The state is two numbers, so a resumed
    run continues exactly. Serves supervised batches as well.
    """

    def __init__(self, rows: int, seed: int, shuffle: bool):
        """
        Raises:
            DataError: no rows.
        """
        if rows < 1:
            raise DataError(f"cannot visit {rows} rows; at least one is needed")
        self._rows, self._seed, self._shuffle = rows, seed, shuffle
        self._epoch, self._position = 0, 0
        self._order = self._order_of(0)

    @property
    def epoch(self) -> int:
        """Epoch of the next row."""
        return self._epoch

    def next(self, n: int) -> list[tuple[int, int]]:
        """The next n pairs of (epoch, row)."""
        pairs: list[tuple[int, int]] = []
        while len(pairs) < n:
            taken = self._order[self._position : self._position + n - len(pairs)]
            pairs.extend((self._epoch, int(row)) for row in taken)
            self._move_to(self._epoch, self._position + len(taken))
        return pairs

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; plain numbers."""
        return {"rows": self._rows, "seed": self._seed, "shuffle": self._shuffle,
                "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the cursor that gave `state` stood.

        Raises:
            CheckpointError: the state is of another data set size, seed or order, or damaged.
        """
        mine = self.state_dict()
        if state.keys() != mine.keys():
            raise CheckpointError(f"a cursor's state has {sorted(mine)}, the checkpoint's has {sorted(state)}")
        for name in ("rows", "seed", "shuffle"):
            if state[name] != mine[name]:
                raise CheckpointError(
                    f"the checkpoint's data cursor has {name}={state[name]}, this run {name}={mine[name]}: rows would "
                    "repeat or be missed; resume with the same data and seed, or start a new run")
        if not (state["epoch"] >= 0 and 0 <= state["position"] < self._rows):
            raise CheckpointError(f"the checkpoint's data cursor stands at epoch {state['epoch']}, row "
                                  f"{state['position']} of {self._rows}, which cannot be; use another checkpoint")
        self._move_to(state["epoch"], state["position"])

    def _move_to(self, epoch: int, position: int) -> None:
        if position == self._rows:
            epoch, position = epoch + 1, 0
        if epoch != self._epoch:
            self._order = self._order_of(epoch)
        self._epoch, self._position = epoch, position

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(self._rows)
        # Raw words of a bit generator stay the same in all versions of numpy; `permutation` need not.
        return np.argsort(np.random.Philox(seed=[self._seed, epoch]).random_raw(self._rows), kind="stable")
