"""Data sets: prompts for PPO, demonstrations for SFT, preferences and judged steps for reward models.

Rows of each kind come from one data set, or from several that are mixed by weight.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, model_validator

from rlhf_ray.config.section import Section


class MixedSource(Section):
    """One of the data sets of a mix. What is empty is as the section says."""

    path: str
    """File, pattern, saved directory or Hub data set name."""
    subset: str | None = None
    """Subset (configuration) of a Hub data set."""
    split: str | None = None
    """Split of a Hub data set."""
    limit: int | None = Field(None, ge=1)
    """Use its first rows only."""
    weight: float = Field(1.0, gt=0)
    """Its share of all rows that are visited, beside the other weights; it begins anew when its rows are used up."""


class DataSection(Section):
    """What every data section has."""

    SECTION: ClassVar[str] = "data"
    """Where it stands in the configuration of a stage."""
    COLUMNS: ClassVar[tuple[str, ...]] = ()
    """Its fields that name columns."""

    path: str | None = None
    """jsonl, parquet or csv file, several by a pattern such as data/*.jsonl, a directory that `datasets` saved, or a
    Hub data set name; or give `mix`."""
    subset: str | None = None
    """Subset (configuration) of a Hub data set."""
    split: str = "train"
    """Split of a Hub data set."""
    limit: int | None = Field(None, ge=1)
    """Use the first rows only, of each data set of a mix."""
    system: str | None = None
    """System message put before chat messages that begin without one."""
    as_chat: bool = False
    """Take a prompt that is a text for a user's message, so that it goes through the chat template too."""

    @property
    def sources(self) -> Sequence[MixedSource]:
        """The data sets of a mix; none where there is one `path`."""
        return getattr(self, "mix", ())

    @property
    def weights(self) -> list[float]:
        """The weight of each of `parts`."""
        return [source.weight for source in self.sources] or [1.0]

    @property
    def title(self) -> str:
        """Names of the data sets, for people."""
        return " + ".join(Path(part.location).name for part in self.parts())

    @property
    def column_fields(self) -> dict[str, str]:
        """Columns that are read, and the fields that name them: {"text": "data.text"}."""
        return {column: f"{self.SECTION}.{field}" for field in self.COLUMNS if (column := getattr(self, field))}

    @property
    def location(self) -> str:
        """The path, of a section that is no mix."""
        return self.path or ""

    def parts(self) -> list[Self]:
        """The section once for each data set: itself, or with each member of the mix filled in."""
        return [self._of(source) for source in self.sources] or [self]

    def _of(self, source: MixedSource) -> Self:
        given = {name: value for name in type(source).model_fields if (value := getattr(source, name)) is not None}
        given.pop("weight")
        return self.model_copy(update={**given, "mix": []})

    @model_validator(mode="after")
    def _path_or_mix(self) -> Self:
        if (self.path is None) != bool(self.sources):
            raise ValueError("give a path or a mix of several data sets" + (", not both" if self.path else ""))
        return self


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


class StepsConfig(Section):
    """What a process reward model reads and predicts; saved with it as process_reward.json."""

    placeholder: str = Field(min_length=1)
    """Token that stands after each step; what the model predicts there is its judgement. A single token of the
    vocabulary that texts do not contain (Math-Shepherd, Wang et al. 2024, uses a Cyrillic word)."""
    good: str = Field("+", min_length=1)
    """Token that is predicted after a right step (Math-Shepherd: +)."""
    bad: str = Field("-", min_length=1)
    """Token that is predicted after a wrong step (Math-Shepherd: -)."""
    separator: str = Field("\n", min_length=1)
    """Text between steps: it follows a placeholder, and a policy's response is split at it."""

    @model_validator(mode="after")
    def _differ(self) -> Self:
        if len({self.placeholder, self.good, self.bad}) < 3:
            raise ValueError(f"placeholder={self.placeholder!r}, good={self.good!r} and bad={self.bad!r} must be three "
                             "different tokens; change one")
        return self
