"""Data sets: prompts for PPO, demonstrations for SFT, preferences and judged steps for reward models."""

from typing import Self

from pydantic import Field, model_validator

from rlhf_ray.config.data_source import DataSection, MixedSource


class PromptsSource(MixedSource):
    """Prompts of a mix."""

    column: str | None = None
    """Column that holds the prompt."""


class PromptsConfig(DataSection):
    """Prompts that rollouts start from."""

    SECTION = "prompts"
    COLUMNS = ("column",)

    mix: list[PromptsSource] = Field(default_factory=list)
    """Several data sets in place of `path`, visited in turns that follow their weights."""
    column: str = "prompt"
    """Column that holds the prompt: text, or chat messages for the tokenizer's template."""
    max_tokens: int = Field(512, ge=1)
    """Longer prompts are left out, counted and reported; never cut."""
    shuffle: bool = True
    """Visit rows in a new pseudo-random order each epoch."""
    held_out: float = Field(0.0, ge=0, lt=1)
    """Share of prompts kept out of training, for an evaluation without `evaluation.prompts`; equal prompts stay
    together."""


class EvaluationPrompts(PromptsConfig):
    """Prompts of `evaluation`, with what it does not say taken from the training prompts."""

    SECTION = "evaluation"


class DemonstrationsSource(MixedSource):
    """Demonstrations of a mix."""

    text: str | None = None
    """Column with the whole text."""
    prompt: str | None = None
    """Column with the prompt."""
    response: str | None = None
    """Column with the response."""
    messages: str | None = None
    """Column with whole conversations."""


class DemonstrationsConfig(DataSection):
    """Texts to imitate: whole texts, or prompts with responses, or conversations."""

    COLUMNS = ("text", "prompt", "response", "messages")

    mix: list[DemonstrationsSource] = Field(default_factory=list)
    """Several data sets in place of `path`, visited in turns that follow their weights."""
    text: str = "text"
    """Column with the whole text, when there is no prompt column."""
    prompt: str | None = None
    """Column with the prompt (text or chat messages); its tokens carry no loss."""
    response: str = "response"
    """Column with the response, when `prompt` is set."""
    messages: str | None = None
    """Column with whole conversations as chat messages; the assistant's turns carry loss."""
    max_tokens: int = Field(512, ge=2)
    """Longer rows are left out, counted and reported; never cut."""
    held_out: float = Field(0.01, ge=0, lt=1)
    """Share of rows, the last ones of each data set, kept aside to measure the loss."""

    @model_validator(mode="after")
    def _one_format(self) -> Self:
        for part in self.parts():
            if part.prompt is not None and part.messages is not None:
                raise ValueError(f"{part.path}: prompt={part.prompt!r} and messages={part.messages!r} are two formats; "
                                 "name the columns of one")
        return self


class ProcessRowsSource(MixedSource):
    """Judged solutions of a mix."""

    prompt: str | None = None
    """Column with the problem."""
    steps: str | None = None
    """Column with the list of steps."""
    labels: str | None = None
    """Column with a label for each step."""


class ProcessRowsConfig(DataSection):
    """Solutions in steps, each step judged."""

    COLUMNS = ("prompt", "steps", "labels")

    mix: list[ProcessRowsSource] = Field(default_factory=list)
    """Several data sets in place of `path`, visited in turns that follow their weights."""
    prompt: str = "prompt"
    """Column with the problem: text, or chat messages for the tokenizer's template."""
    steps: str = "steps"
    """Column with the list of steps, each a text."""
    labels: str = "labels"
    """Column with a label for each step: true or 1, false or 0, a probability of being right in between (soft labels;
    Wang et al. 2024), the text of the good or bad token, or null for none."""
    max_tokens: int = Field(512, ge=2)
    """Longer rows are left out, counted and reported; never cut."""
    held_out: float = Field(0.1, ge=0, lt=1)
    """Share of rows kept aside to measure accuracy; rows of one prompt stay together."""


class PreferencesSource(MixedSource):
    """Preferences of a mix."""

    prompt: str | None = None
    """Column with the shared prompt."""
    chosen: str | None = None
    """Column with the preferred response."""
    rejected: str | None = None
    """Column with the other response."""
    margin: str | None = None
    """Column with the margin."""


class PreferencesConfig(DataSection):
    """Pairs of responses of which one was preferred."""

    COLUMNS = ("prompt", "chosen", "rejected", "margin")

    mix: list[PreferencesSource] = Field(default_factory=list)
    """Several data sets in place of `path`, visited in turns that follow their weights."""
    prompt: str = "prompt"
    """Column with the shared prompt, text or chat messages (may be empty; not needed where the sides are whole
    conversations)."""
    chosen: str = "chosen"
    """Column with the preferred response: text, chat messages that answer the prompt, or a whole conversation."""
    rejected: str = "rejected"
    """Column with the other response, in the same form."""
    margin: str | None = None
    """Column with how far apart the two scores should be (Touvron et al. 2023), a number of at least 0; none when
    empty."""
    max_tokens: int = Field(512, ge=2)
    """Pairs with a longer side are left out, counted and reported; never cut."""
    held_out: float = Field(0.1, ge=0, lt=1)
    """Share of pairs kept aside to measure accuracy; pairs of one prompt stay together."""
