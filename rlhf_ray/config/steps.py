"""How the steps of a solution are shown to a process reward model, and the words it answers with."""

from typing import Self

from pydantic import Field, model_validator

from rlhf_ray.config.base import Section


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
