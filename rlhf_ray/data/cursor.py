"""The order in which a run visits the rows of its data, one data set or several mixed ones."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.data.contents import Contents, check_contents
from rlhf_ray.errors import CheckpointError, DataError


class PromptCursor:
    """Hands out (epoch, row) pairs: each epoch every row once, in an order that follows from the seed and the epoch.

    Several sources take turns by their weights; each goes through epochs of its own, so a small one is repeated
    more often, and (its epoch, row) is unique. Rows are numbered over all sources. Nothing is dropped at an epoch's
    end; a batch may continue in the next one. The state is a few numbers, so a resumed run continues exactly; an order
    is computed when its epoch begins; it is kept, 4 bytes a row for up to 4 billion. Also used for supervised batches.
    """

    def __init__(self, rows: int | Sequence[int], seed: int, shuffle: bool, weights: Sequence[float] = (1.0,),
                 contents: Contents | None = None):
        """
        Args:
            rows: rows of the data set, or of each source.
            weights: of each source.
            contents: digests of the data sets, which a resumed run must have too.

        Raises:
            DataError: no rows.
        """
        self._rows = [rows] if isinstance(rows, int) else list(rows)
        if min(self._rows, default=0) < 1 or len(self._rows) != len(weights):
            raise DataError(f"cannot visit {self._rows[0] if len(self._rows) == 1 else self._rows} rows; at least one "
                            f"is needed of each of {len(weights)} sources")
        self._seed, self._shuffle, self._weights = seed, shuffle, list(weights)
        self._contents = contents or []
        self._first = np.concatenate([[0], np.cumsum(self._rows)])
        self._turns = Interleaving(self._weights)
        self._visited = [0] * len(self._rows)
        self._orders: list[tuple[int, NDArray[np.integer[Any]]]] = [(-1, np.empty(0, np.int64))] * len(self._rows)

    def next(self, n: int) -> list[tuple[int, int]]:
        """The next n pairs of (epoch of the row's source, row)."""
        if len(self._rows) == 1:
            return self._take_all(n)
        return [self._take(self._turns.next(self._visited)) for _ in range(n)]

    def peek(self, n: int) -> list[tuple[int, int]]:
        """The pairs that `next` will return, without taking them."""
        visited = list(self._visited)
        try:
            return self.next(n)
        finally:
            self._visited = visited

    @property
    def position(self) -> list[int]:
        """Rows handed out of each source so far, over all its epochs."""
        return list(self._visited)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; plain numbers."""
        return {"rows": self._rows, "weights": self._weights, "seed": self._seed, "shuffle": self._shuffle,
                "visited": list(self._visited), "contents": self._contents}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`.

        Raises:
            CheckpointError: the state is of other data (rows, number, weights), seed or order, or damaged.
        """
        mine = self.state_dict()
        if state.keys() != mine.keys():
            raise CheckpointError(f"a data cursor's state has {sorted(mine)}, the checkpoint's has {sorted(state)}: "
                                  "another version of this package wrote it. Resume with that version, or start a new "
                                  "run")
        check_contents(state["contents"], self._contents)
        for name in ("rows", "weights", "seed", "shuffle"):
            if state[name] != mine[name]:
                raise CheckpointError(
                    f"the checkpoint's data cursor has {name}={_shown(state[name])}, this run {name}="
                    f"{_shown(mine[name])}: rows would repeat or be missed; resume with the same data and seed, or "
                    "start a new run")
        if len(state["visited"]) != len(self._rows) or min(state["visited"]) < 0:
            raise CheckpointError(f"the checkpoint's data cursor has visited {state['visited']} rows of {self._rows}, "
                                  "which is impossible; use another checkpoint")
        self._visited = list(state["visited"])

    def _take(self, source: int) -> tuple[int, int]:
        epoch, position = divmod(self._visited[source], self._rows[source])
        self._visited[source] += 1
        return epoch, int(self._first[source] + self._order(source, epoch)[position])

    def _take_all(self, n: int) -> list[tuple[int, int]]:
        """The next n of the only source, an epoch at a time."""
        taken: list[tuple[int, int]] = []
        while len(taken) < n:
            epoch, position = divmod(self._visited[0], self._rows[0])
            rows = self._order(0, epoch)[position : position + n - len(taken)].tolist()
            self._visited[0] += len(rows)
            taken += [(epoch, row) for row in rows]
        return taken

    def _order(self, source: int, epoch: int) -> NDArray[np.integer[Any]]:
        """The order of a source's epoch; the newest one is cached."""
        if self._orders[source][0] != epoch:
            self._orders[source] = (epoch, self._computed_order(source, epoch))
        return self._orders[source][1]

    def _computed_order(self, source: int, epoch: int) -> NDArray[np.integer[Any]]:
        if not self._shuffle:
            return np.arange(self._rows[source])
        seed = [self._seed, epoch, source] if source else [self._seed, epoch]
        # Raw words of a bit generator stay the same in all versions of numpy; `permutation` need not.
        order = np.argsort(np.random.Philox(seed=seed).random_raw(self._rows[source]), kind="stable")
        return order.astype(np.min_scalar_type(self._rows[source]))


def _shown(value: Any) -> Any:
    """A list of one as its only item."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


class Interleaving:
    """Turns of sources by weight, without randomness: at any moment, each source's number of turns differs from its
    exact share by less than one (Tijdeman 1980, "The chairman assignment problem": by at most 1 - 1/(2k-2), for k
    sources). All arithmetic is in whole numbers, so it is the same after any number of turns and on every machine.

    Args:
        weights: positive, of any sum; taken for the decimal numbers they are written as.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(weight)) for weight in weights]
        scale = lcm(*(weight.denominator for weight in exact))
        self._weights = [int(weight * scale) for weight in exact]
        self._total = sum(self._weights)
        common = lcm(*self._weights)
        self._periods = [common // weight for weight in self._weights]

    def next(self, turns: Sequence[int]) -> int:
        """The source of the next turn, after each source has had `turns`.

        Of the sources that may have it (their share is far enough ahead of their turns), the one whose turn would
        first be late.
        """
        if len(self._weights) == 1:
            return 0
        now, slack = sum(turns) + 1, 2 * len(self._weights) - 2
        may = [i for i, weight in enumerate(self._weights)
               if slack * (weight * now - turns[i] * self._total) >= self._total]
        return min(may, key=lambda i: ((slack * (turns[i] + 1) - 1) * self._periods[i], i))
