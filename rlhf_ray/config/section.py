"""Base class of every section of the configuration: typed, frozen, and strict about unknown keys."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the configuration. Each field has a type, a default, bounds and one sentence."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )
