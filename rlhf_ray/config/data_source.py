"""Where rows come from, for every kind of data: one data set, or several that are mixed by weight."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, model_validator

from rlhf_ray.config.base import Section


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
