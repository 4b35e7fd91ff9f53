"""What an environment may be, besides code of one's own: each source is a section, whose module in
`environments/adapters/` makes of it a class with reset and step, tools, or an agent."""

from typing import Any, Literal

from pydantic import Field, model_validator

from rlhf_ray.config.sandbox import SandboxConfig
from rlhf_ray.config.section import Section

SOURCES = ("path", "command", "python")
"""Fields of an environment that say what it is."""


class CommandSource(Section):
    """A program that is an agent: `command: [python, agent.py]`, or with settings `command: {run: [...]}`.

    It runs in a new, empty working directory with the variables OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL,
    ANTHROPIC_API_KEY, RLHF_RAY_ROW (a file with the prompt's row in JSON), RLHF_RAY_MODEL and RLHF_RAY_SEED.
    """

    run: list[str] = Field(min_length=1)
    """The program and its arguments. In an argument, `{NAME}` is replaced by the row's column of that name, and
    `{seed}` by the episode's seed."""
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
        return str(self.run)


class PythonSource(Section):
    """A tool `python(code)` that runs a program in a sandbox, and answers with what it printed: `python: {}`."""

    timeout_s: float = Field(10.0, gt=0)
    """Wall clock time of a program, after which it is killed. The default is verl's for programs in a sandbox
    (`sandbox_fusion/utils.py`)."""
    keep_state: bool = False
    """Run all programs of an episode in one interpreter, so that names and files stay, at the price of an interpreter
    for each open episode. Off, each program is a process of its own, and an episode has nothing that could be lost."""
    programs: int = Field(2, ge=1)
    """Programs that run at a time in each process of the environment; others wait, within `timeout_s.step`. With
    keep_state each episode has its own."""
    max_characters: int = Field(8000, ge=200)
    """What the policy reads of what a program printed at most; the middle is left out."""
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    """What holds programs back, and what they may use."""

    @property
    def label(self) -> str:
        """The source in messages."""
        return "tool"
