"""What an environment may be, besides code of one's own: each source is a section, whose module in
`environments/adapters/` makes of it a class with reset and step, tools, or an agent."""

from typing import Any, Literal

from pydantic import Field, model_validator

from rlhf_ray.config.section import Section

SOURCES = ("path", "command")
"""Fields of an environment that say what it is."""
LABEL_LENGTH = 120
"""Longest text of a source in messages, in characters."""


class CommandSource(Section):
    """A program that is an agent: `command: [python, agent.py]`, or with settings `command: {run: [...]}`.

    It runs in a new, empty working directory with the variables OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL,
    ANTHROPIC_API_KEY, RLHF_RAY_ROW (a file with the prompt's row in JSON), RLHF_RAY_MODEL and RLHF_RAY_SEED.
    """

    run: list[str] = Field(min_length=1)
    """The program and its arguments. In an argument, `{NAME}` is replaced by the row's column of that name, and
    `{seed}` by the episode's seed; `{{NAME}}` stands for `{NAME}` itself. An argument that is the relative path of a
    file where the run is started becomes the whole path."""
    reward: Literal["file", "stdout", "exit_code", "none"] = "file"
    """What its reward is: the number in reward.txt, or "reward" in reward.json, of its working directory (Harbor's
    files); the last line that it prints, as a number or as JSON; 1 if it exits with 0, and 0 otherwise; or nothing,
    where other components of `rewards` judge what the policy wrote."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Further variables of its environment."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        return {"run": given} if isinstance(given, list) else given

    @property
    def label(self) -> str:
        """The command in messages."""
        command = str(self.run)
        return command if len(command) <= LABEL_LENGTH else f"{command[:LABEL_LENGTH]} ..."
