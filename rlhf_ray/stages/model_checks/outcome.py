"""The outcome of one part of a model's check."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import ModelError
from rlhf_ray.models.model_families import Use, check_family, refusals

Verdict = Literal["works", "warning", "fails", "refused", "not checked", "does not apply"]
"""
works: checked, and right.
warning: works, but a property of the model's files may surprise.
fails: checked, and wrong.
refused: not checked, because the family is known not to work.
not checked: skipped on request, or could not be checked here.
does not apply: the model does not have this part.
"""


@dataclass(frozen=True)
class Outcome:
    """One row of the table."""

    name: str
    """What was checked."""
    verdict: Verdict
    detail: str
    """The figure, or what is wrong."""
    advice: str = ""
    """What to do; empty if there is nothing to do."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Measurements, for programs."""


def refusal(name: str, model: ModelConfig, use: Use, tokens: int | None = None) -> Outcome | None:
    """The outcome if this use of the model's family, or rows of `tokens` tokens, are known not to work; else None.

    Raises:
        ModelError: the configuration cannot be read.
    """
    if use in (reasons := refusals(model)):
        return Outcome(name, "refused", reasons[use], "use a model of another family (docs/models.md)")
    try:
        check_family(model, "MODEL", {use}, None if tokens is None else (tokens, "--tokens"))
    except ModelError as error:
        return Outcome(name, "refused", str(error), "use rows of at most that length, and check with --tokens")
    return None
