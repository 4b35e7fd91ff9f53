"""The grid: model sizes, response lengths, and how much work is measured at each."""

from dataclasses import asdict, dataclass
from typing import Any

from rlhf_ray.config.model import ArchitectureConfig

LENGTHS = (32, 128, 512, 1024)
"""Response tokens of every row."""
PROMPT = 16
"""Prompt tokens of every row."""
CONTEXT = PROMPT + LENGTHS[-1]
VOCABULARY = 1024
SEQUENCES = 8
"""Responses that a generator draws at the same time, and in one repeat. The same everywhere: a decoding step's time
depends on it."""
MICRO_BATCH_TOKENS = 2 * CONTEXT
REPEATS, REPEATS_S = 3, 4.0
"""Repeats of a cell; no further one begins after `REPEATS_S` seconds."""
CELL_S = 150.0
"""A cell that would take longer than this, judged by the one before, is skipped."""


@dataclass(frozen=True)
class Size:
    """A Llama-style model with random weights."""

    name: str
    hidden: int
    layers: int
    heads: int
    tokens: int
    """Tokens of the rows of a forward or training cell, about: larger models get fewer."""

    @property
    def architecture(self) -> ArchitectureConfig:
        """The shape; the feed-forward layer is three times as wide as the residual stream."""
        return ArchitectureConfig(hidden_size=self.hidden, layers=self.layers, heads=self.heads,
                                  intermediate_size=3 * self.hidden, max_positions=CONTEXT + 8)

    @property
    def parameters(self) -> int:
        """Weights of the language model, tied embedding counted once, norms included."""
        blocks = self.layers * (13 * self.hidden**2 + 2 * self.hidden)
        return blocks + self.hidden + VOCABULARY * self.hidden

    @property
    def kv_cache_mb(self) -> int:
        """Room for `SEQUENCES` whole rows in float32, and a quarter more (blocks are 128 tokens)."""
        return SEQUENCES * CONTEXT * 2 * self.layers * self.hidden * 4 * 5 // 4 // 2**20 + 8

    def rows(self, length: int) -> int:
        """Rows of a forward or training cell."""
        return max(1, self.tokens // (PROMPT + length))


SIZES = (
    Size("1M", hidden=128, layers=4, heads=4, tokens=8 * CONTEXT),
    Size("5M", hidden=256, layers=6, heads=4, tokens=8 * CONTEXT),
    Size("25M", hidden=512, layers=7, heads=8, tokens=4 * CONTEXT),
    Size("100M", hidden=768, layers=13, heads=12, tokens=CONTEXT),
)


def settings() -> dict[str, Any]:
    """All of the above in plain types: cells measured under other settings are not mixed in."""
    return {"lengths": list(LENGTHS), "prompt": PROMPT, "vocabulary": VOCABULARY, "sequences": SEQUENCES,
            "micro_batch_tokens": MICRO_BATCH_TOKENS, "sizes": {size.name: asdict(size) for size in SIZES}}
