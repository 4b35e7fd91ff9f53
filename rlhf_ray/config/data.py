"""Data sets: prompts for PPO, demonstrations for SFT, preferences and judged steps for reward models."""

from pydantic import Field

from rlhf_ray.config.base import Section


class PromptsConfig(Section):
    """Prompts that rollouts start from."""

    path: str
    """jsonl, parquet or csv file, or a Hub data set name."""
    split: str = "train"
    """Split of a Hub data set."""
    column: str = "prompt"
    """Column that holds the prompt: text, or chat messages for the tokenizer's template."""
    max_tokens: int = Field(512, ge=1)
    """Longer prompts are left out, counted and reported; never cut."""
    shuffle: bool = True
    """Visit rows in a new pseudo-random order each epoch."""
    limit: int | None = Field(None, ge=1)
    """Use the first rows only."""


class DemonstrationsConfig(Section):
    """Texts to imitate."""

    path: str
    """jsonl, parquet or csv file, or a Hub data set name."""
    split: str = "train"
    """Split of a Hub data set."""
    text: str = "text"
    """Column with the whole text, when there is no prompt column."""
    prompt: str | None = None
    """Column with the prompt; its tokens carry no loss."""
    response: str = "response"
    """Column with the response, when `prompt` is set."""
    max_tokens: int = Field(512, ge=2)
    """Longer rows are left out, counted and reported; never cut."""
    limit: int | None = Field(None, ge=1)
    """Use the first rows only."""
    held_out: float = Field(0.01, ge=0, lt=1)
    """Share of rows, the last ones, kept aside to measure the loss."""


class ProcessRowsConfig(Section):
    """Solutions in steps, each step judged."""

    path: str
    """jsonl or parquet file, or a Hub data set name."""
    split: str = "train"
    """Split of a Hub data set."""
    prompt: str = "prompt"
    """Column with the problem: text, or chat messages for the tokenizer's template."""
    steps: str = "steps"
    """Column with the list of steps, each a text."""
    labels: str = "labels"
    """Column with a label for each step: true or 1, false or 0, a probability of being right in between (soft labels;
    Wang et al. 2024), the text of the good or bad token, or null for none."""
    max_tokens: int = Field(512, ge=2)
    """Longer rows are left out, counted and reported; never cut."""
    limit: int | None = Field(None, ge=1)
    """Use the first rows only."""
    held_out: float = Field(0.1, ge=0, lt=1)
    """Share of rows kept aside to measure accuracy; rows of one prompt stay together."""


class PreferencesConfig(Section):
    """Pairs of responses of which one was preferred."""

    path: str
    """jsonl, parquet or csv file, or a Hub data set name."""
    split: str = "train"
    """Split of a Hub data set."""
    prompt: str = "prompt"
    """Column with the shared prompt (may be an empty string)."""
    chosen: str = "chosen"
    """Column with the preferred response."""
    rejected: str = "rejected"
    """Column with the other response."""
    margin: str | None = None
    """Column with how far apart the two scores should be (Touvron et al. 2023), a number of at least 0; none when
    empty."""
    max_tokens: int = Field(512, ge=2)
    """Pairs with a longer side are left out, counted and reported; never cut."""
    limit: int | None = Field(None, ge=1)
    """Use the first rows only."""
    held_out: float = Field(0.1, ge=0, lt=1)
    """Share of pairs kept aside to measure accuracy."""
