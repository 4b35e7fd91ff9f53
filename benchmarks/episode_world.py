"""Environments of the benchmarks of episodes: they answer at once, always with as much."""

from typing import Any

TURNS = 8
ANSWER = "the answer to this turn is a row of words of about the same length each time. " * 2
"""About 60 tokens."""


class Talk:
    """Answers every turn with the same text, `TURNS` times."""

    def reset(self, row: dict[str, Any], seed: int) -> dict[str, Any]:
        """Begin with the row's prompt."""
        self.turn = 0
        return {"messages": [{"role": "user", "content": row["prompt"]}]}

    def step(self, reply: Any) -> dict[str, Any]:
        """Answer."""
        self.turn += 1
        return {"messages": [{"role": "user", "content": ANSWER}], "reward": 0.5, "done": self.turn >= TURNS}
