"""Episodes of agents: whether the samples that were trained on are what the agents received.

Each attempt of an agent has a session of its own, and logs what the policy answered in it and that it has returned. So
each sample must have exactly the turns of one session that returned, each session answers for one sample, and a turn
that no agent has received, or turns of two attempts, are in none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from chaos.witness.journals import RECEIVED, RETURNED
from chaos.witness.markers import Mark

Turns = tuple[tuple[Mark, str], ...]
"""The place before each turn, and what the policy wrote in it, legibly."""
SHOWN = 3


def sessions(lines: Iterable[Mapping[str, Any]]) -> tuple[set[tuple[Mark, str]], Counter[Turns]]:
    """All turns that agents have received, and how often the turns of a session that returned were these."""
    received: dict[str, list[tuple[Mark, str]]] = {}
    returned = []
    for line in lines:
        if line["event"] == RECEIVED:
            received.setdefault(line["session"], []).append((Mark(*line["mark"]), line["text"]))
        elif line["event"] == RETURNED:
            returned.append(line["session"])
    turns = {turn for each in received.values() for turn in each}
    return turns, Counter(tuple(received.get(session, ())) for session in returned)


def agent_problems(lines: Sequence[Mapping[str, Any]], rows: set[int],
                   samples: Iterable[Sequence[tuple[Mark, frozenset[str]]]]) -> Iterator[str]:
    """A sentence for each way in which samples differ from what agents received.

    Args:
        lines: of the journals of agents.
        rows: of the data that agents play.
        samples: the turns of each, as `episodes.Segment.turns`.
    """
    received, returned = sessions(lines)
    trained = Counter[Turns]()
    unknown = Counter[int]()
    for sample in samples:
        if not sample or sample[0][0].row not in rows:
            continue
        turns = tuple((mark, next((text for text in sorted(texts) if (mark, text) in received), None))
                      for mark, texts in sample)
        if any(text is None for _, text in turns):
            unknown[sample[0][0].row] += 1
        else:
            trained[turns] += 1  # type: ignore[index]
    if unknown:
        yield f"{_shown(unknown)} have a turn that no agent has received"
    mixed, more = Counter[int](), Counter[int]()
    for turns, number in trained.items():
        if number > returned[turns]:
            (more if returned[turns] else mixed)[turns[0][0].row] += number - returned[turns]
    if mixed:
        yield f"{_shown(mixed)} have other turns than any session that has returned"
    if more:
        yield f"{_shown(more)} are there more often than sessions in which agents received their turns"


def _shown(rows: Counter[int]) -> str:
    names = ", ".join(f"row {row}" for row in list(rows)[:SHOWN])
    return f"{rows.total()} samples of agents ({names}{', ...' if len(rows) > SHOWN else ''})"
