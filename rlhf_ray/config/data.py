"""Data sets: prompts for PPO, demonstrations for SFT, preferences and judged steps for reward models.

Rows of each kind come from one data set, or from several that are mixed by weight.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from rlhf_ray.config.given_objects import DataPath, is_rows
from rlhf_ray.config.section import Section

FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
"""Suffixes of files of rows; other paths are directories or data sets of the Hub."""


def is_file_of_rows(path: str) -> bool:
    """Whether a path or pattern names files of rows, by its suffix."""
    return Path(path).suffix.lower() in FILE_SUFFIXES


class NumberedRows(Section):
    """Rows without texts, for environments that make their own tasks: `numbered: 1000`, or with settings
    `numbered: {count: 1000}`. Row i has the columns {"prompt": "", "index": first + i}."""

    count: int = Field(ge=1)
    """How many rows there are."""
    first: int | None = Field(None, ge=0)
    """Index of the first row; if empty 0, and for an evaluation the one after the last that training has."""
    columns: dict[str, Any] = Field(default_factory=dict)
    """Further columns, the same in every row: {environment: NAME}, where there are several environments."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        short = type(given) is int or (isinstance(given, str) and given.isdecimal())  # as the command line has it
        return {"count": given} if short else given

    @model_validator(mode="after")
    def _own_columns(self) -> Self:
        if taken := {"prompt", "index"} & self.columns.keys():
            raise ValueError(f"columns has {', '.join(sorted(taken))}, which the numbered rows have already; give it "
                             "another name")
        return self

    @property
    def indices(self) -> range:
        """The indices of the rows."""
        first = self.first or 0
        return range(first, first + self.count)


class MixedSource(Section):
    """One data set of a mix. Empty fields are taken from the section."""

    path: DataPath
    """File, pattern, saved directory or Hub data set name."""
    subset: str | None = None
    """Subset (configuration) of a Hub data set."""
    revision: str | None = None
    """Revision of a Hub data set (branch, tag or commit)."""
    split: str | None = None
    """Split of a Hub data set, or of a directory saved by `datasets` that has several."""
    limit: int | None = Field(None, ge=1)
    """Use only its first rows."""
    weight: float = Field(1.0, gt=0)
    """Its share of all rows visited, relative to the other weights; it starts over when its rows are used up."""


class DataSection(Section):
    """Fields of every data section."""

    SECTION: ClassVar[str] = "data"
    """Name of the section in a stage's configuration."""
    PATH: ClassVar[str] = "path"
    """Name of the field `path` in that section."""
    SPLIT: ClassVar[str] = "train"
    """Split that is read if `split` is empty."""
    COLUMNS: ClassVar[tuple[str, ...]] = ()
    """Fields that name columns."""

    path: DataPath | None = None
    """jsonl, parquet or csv file, a pattern such as data/*.jsonl, a directory saved by `datasets`, or a Hub data set
    name; or use `mix`."""
    subset: str | None = None
    """Subset (configuration) of a Hub data set."""
    revision: str | None = None
    """Revision of a Hub data set (branch, tag or commit); the newest if empty."""
    split: str | None = None
    """Split of a Hub data set, or of a directory saved by `datasets` that has several; `train` if empty."""
    limit: int | None = Field(None, ge=1)
    """Use only the first rows (of each data set of a mix)."""

    @property
    def sources(self) -> Sequence[MixedSource]:
        """The data sets of a mix; empty if there is one `path`."""
        return getattr(self, "mix", ())

    @property
    def numbers(self) -> NumberedRows | None:
        """The numbered rows, in place of `path`."""
        return None

    @property
    def weights(self) -> list[float]:
        """The weight of each of `parts`."""
        return [source.weight for source in self.sources] or [1.0]

    @property
    def title(self) -> str:
        """Names of the data sets, for messages."""
        return " + ".join(Path(part.location).name for part in self.parts())

    @property
    def column_fields(self) -> dict[str, str]:
        """The columns to read, and the fields that name them: {"text": "data.text"}."""
        return {column: f"{self.SECTION}.{field}" for field in self.COLUMNS if (column := getattr(self, field))}

    @property
    def location(self) -> str:
        """Where the rows of a section that is not a mix come from: its path, or "numbered rows 0 to 999"."""
        if self.numbers is not None:
            return f"numbered rows {self.numbers.indices[0]} to {self.numbers.indices[-1]}"
        return self.path or ""

    @property
    def selection(self) -> str:
        """The data set of a section that is not a mix, and which of its rows: "eval.jsonl (split=train, limit=100)"."""
        chosen = {"subset": self.subset, "revision": self.revision, "split": self.split or self.SPLIT,
                  "limit": self.limit}
        return f"{self.location} ({', '.join(f'{k}={v}' for k, v in chosen.items() if v is not None)})"

    def parts(self) -> list[Self]:
        """The section once for each data set: itself, or with each member of the mix filled in."""
        return [self._of(source) for source in self.sources] or [self]

    def named_parts(self) -> list[tuple[str, Self]]:
        """`parts`, each with the field that names its data set: "prompts.path", or "prompts.mix.0.numbered"."""
        parts = self.parts()
        of_one = [self.PATH if part.numbers is None else "numbered" for part in parts]
        of_mix = [f"mix.{i}.{'path' if part.numbers is None else 'numbered'}" for i, part in enumerate(parts)]
        return [(f"{self.SECTION}.{field}", part)
                for field, part in zip(of_mix if self.sources else of_one, parts, strict=True)]

    def _of(self, source: MixedSource) -> Self:
        given = {name: value for name in type(source).model_fields if (value := getattr(source, name)) is not None}
        given.pop("weight")
        if "numbered" in given:  # which has a count of its own
            given["limit"] = None
        return self.model_copy(update={**given, "mix": []})

    @model_validator(mode="before")
    @classmethod
    def _rows_alone(cls, given: Any) -> Any:
        """Rows in place of the section, from Python."""
        return {"path": given} if is_rows(given) else given

    @model_validator(mode="after")
    def _path_or_mix(self) -> Self:
        given = [name for name in ("path", "numbered", "mix") if getattr(self, name, None)]
        if len(given) > 1 and "numbered" in given:
            raise ValueError(f"{' and '.join(given)} are set; keep one")
        if len(given) != 1:
            raise ValueError("set path, or mix with several data sets" + (", not both" if given else ""))
        return self


class ChatSection(DataSection):
    """Fields of sections whose prompts may be chat messages."""

    system: str | None = None
    """System message to prepend to chat messages without one."""
    as_chat: bool = False
    """Treat a prompt given as text as a user message, so that the chat template is applied to it."""


class PromptsSource(MixedSource):
    """Prompts of a mix."""

    path: DataPath | None = None  # type: ignore[assignment]  # of this source it may be missing
    """File, pattern, saved directory or Hub data set name."""
    numbered: NumberedRows | None = None
    """Rows without texts, in place of `path`."""
    column: str | None = None
    """Column that holds the prompt."""

    @model_validator(mode="after")
    def _path_or_numbered(self) -> Self:
        if (self.path is None) == (self.numbered is None):
            raise ValueError("path and numbered are set; keep one" if self.path else "set path, or numbered")
        return self


class PromptsConfig(ChatSection):
    """Prompts that rollouts start from."""

    SECTION = "prompts"
    COLUMNS = ("column",)

    numbered: NumberedRows | None = None
    """Rows without texts, in place of `path`, for environments that give the first message themselves."""
    mix: list[PromptsSource] = Field(default_factory=list)
    """Several data sets in place of `path`, visited in turns that follow their weights."""
    column: str = "prompt"
    """Column that holds the prompt: text, or chat messages for the tokenizer's template."""
    max_tokens: int = Field(512, ge=1)
    """Longer prompts are left out, counted and reported; never cut."""
    shuffle: bool = True
    """Visit rows in a new pseudo-random order in each epoch."""
    held_out: float = Field(0.0, ge=0, lt=1)
    """Share of prompts held out of training, for an evaluation without `evaluation.prompts`; equal prompts stay
    together."""

    @property
    def numbers(self) -> NumberedRows | None:
        """The numbered rows, in place of `path`."""
        return self.numbered


class EvaluationPrompts(PromptsConfig):
    """Prompts of `evaluation`; its missing fields are taken from the training prompts."""

    SECTION = "evaluation"
    PATH = "prompts"
    SPLIT = "test"


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


class DemonstrationsConfig(ChatSection):
    """Texts to imitate: prompts with responses, conversations, or whole texts. Columns that are not set are found by
    their usual names: prompt and completion (or response), messages (or conversations), or text, in this order (TRL's);
    the run saves those that it found."""

    COLUMNS = ("text", "prompt", "response", "messages")

    mix: list[DemonstrationsSource] = Field(default_factory=list)
    """Several data sets in place of `path`, visited in turns that follow their weights."""
    text: str | None = None
    """Column with the whole text; if no column is set, `text`, where the columns below are not found."""
    prompt: str | None = None
    """Column with the prompt (text or chat messages); its tokens carry no loss. If no column is set, `prompt`, where
    there is one with a response."""
    response: str | None = None
    """Column with the response to `prompt`; if empty, `completion` or `response`."""
    messages: str | None = None
    """Column with whole conversations as chat messages; the assistant's turns carry loss. If no column is set,
    `messages` or `conversations`."""
    max_tokens: int = Field(512, ge=2)
    """Longer rows are left out, counted and reported; never cut."""
    held_out: float = Field(0.01, ge=0, lt=1)
    """Share of rows held out to measure the loss: the last ones of each data set."""

    @property
    def named_columns(self) -> dict[str, str]:
        """The columns that are set, by field."""
        return {field: column for field in self.COLUMNS if (column := getattr(self, field)) is not None}

    @property
    def names_format(self) -> bool:
        """Whether the format is set, not found."""
        return bool(self.text or self.prompt or self.messages)

    @property
    def names_all_columns(self) -> bool:
        """Whether every column that is read is set."""
        return bool(self.text or self.messages or (self.prompt and self.response))

    @property
    def column_fields(self) -> dict[str, str]:
        """Also names the fields for rows of another form."""
        if self.text is None or self.prompt or self.messages:
            return super().column_fields
        return super().column_fields | {
            self.text: "data.text (or data.prompt and data.response, or data.messages)"}

    @model_validator(mode="after")
    def _one_format(self) -> Self:
        for part in self.parts():
            if part.prompt is not None and part.messages is not None:
                raise ValueError(f"{part.path}: prompt={part.prompt!r} and messages={part.messages!r} are two formats; "
                                 "set the columns of one")
        return self


class ProcessRowsSource(MixedSource):
    """Labelled solutions of a mix."""

    prompt: str | None = None
    """Column with the problem."""
    steps: str | None = None
    """Column with the list of steps."""
    labels: str | None = None
    """Column with a label for each step."""


class ProcessRowsConfig(ChatSection):
    """Solutions in steps, each step labelled."""

    COLUMNS = ("prompt", "steps", "labels")

    mix: list[ProcessRowsSource] = Field(default_factory=list)
    """Several data sets in place of `path`, visited in turns that follow their weights."""
    prompt: str = "prompt"
    """Column with the problem: text, or chat messages for the tokenizer's template."""
    steps: str = "steps"
    """Column with the list of steps, each a text."""
    labels: str = "labels"
    """Column with a label for each step: true or 1, false or 0, a probability of being correct (soft labels; Wang et
    al. 2024; with two labels only), the text of a label's token (steps.good, bad or others), or null for none."""
    max_tokens: int = Field(512, ge=2)
    """Longer rows are left out, counted and reported; never cut."""
    held_out: float = Field(0.1, ge=0, lt=1)
    """Share of rows held out to measure accuracy; rows of one prompt stay together."""


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


class PreferencesConfig(ChatSection):
    """Pairs of responses, one of them preferred."""

    COLUMNS = ("prompt", "chosen", "rejected", "margin")

    mix: list[PreferencesSource] = Field(default_factory=list)
    """Several data sets in place of `path`, visited in turns that follow their weights."""
    prompt: str = "prompt"
    """Column with the shared prompt, text or chat messages (may be empty; not needed if both responses are
    whole conversations)."""
    chosen: str = "chosen"
    """Column with the preferred response: text, chat messages that answer the prompt, or a whole conversation."""
    rejected: str = "rejected"
    """Column with the other response, in the same form."""
    margin: str | None = None
    """Column with how far apart the two scores should be (Touvron et al. 2023), a number >= 0; none if empty."""
    max_tokens: int = Field(512, ge=2)
    """Pairs with a longer response are left out, counted and reported; never cut."""
    held_out: float = Field(0.1, ge=0, lt=1)
    """Share of pairs held out to measure accuracy; pairs of one prompt stay together."""


class StepsConfig(Section):
    """Tokens that a process reward model reads and predicts; saved with it as process_reward.json."""

    placeholder: str = Field(min_length=1)
    """Token after each step; the model's prediction there is its judgement. A single token of the vocabulary that does
    not occur in texts (Math-Shepherd, Wang et al. 2024, uses a Cyrillic word)."""
    good: str = Field("+", min_length=1)
    """Token predicted after a correct step (Math-Shepherd: +)."""
    bad: str = Field("-", min_length=1)
    """Token predicted after a wrong step (Math-Shepherd: -)."""
    others: dict[str, float] = Field(default_factory=dict)
    """Tokens of further labels, and how good a step with each is, from 0 (as a wrong one) to 1 (as a correct one).
    PRM800K has neutral steps, which Lightman et al. 2023 count as correct: {"=": 1}."""
    separator: str = Field("\n", min_length=1)
    """Text between steps: it follows each placeholder, and responses are split at it."""

    @model_validator(mode="after")
    def _differ(self) -> Self:
        if len({self.placeholder, self.good, self.bad}) < 3:
            raise ValueError(f"placeholder={self.placeholder!r}, good={self.good!r} and bad={self.bad!r} must be three "
                             "different tokens; change one")
        for token, value in self.others.items():
            if not token or token in (self.placeholder, self.good, self.bad):
                raise ValueError(f"others has {token!r}, which is empty or one of placeholder, good and bad; change it")
            if not 0 <= value <= 1:
                raise ValueError(f"others gives {token!r} the value {value:g}; give a number from 0 to 1")
        return self
