"""What an environment may be, besides code of one's own: each source is a section, whose module in
`environments/adapters/` makes of it a class with reset and step, tools, or an agent."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rlhf_ray.config.section import Section

SOURCES = ("path", "command", "gymnasium", "reasoning_gym")
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


class GymnasiumSource(Section):
    """An environment of gymnasium, as text: `gymnasium: {id: FrozenLake-v1}`. It needs the package, which
    `pip install 'rlhf-ray[gymnasium]'` installs.

    The policy reads the observation, and what it writes is read as an action. What is no action is answered with what
    one looks like, and counted (`episodes/NAME/invalid_action`); the world does not move then.
    """

    id: str = Field(min_length=1)
    """Name of a registered environment, or `module:name`, for which the module is imported first."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `gymnasium.make`: {is_slippery: false}."""
    actions: list[str] = Field(default_factory=list)
    """Names of the actions of a Discrete space, in order: [left, down, right, up]. The policy may write a name or a
    number; without names, a number."""
    rendering: bool = True
    """Show the world as the environment draws it in text (render_mode ansi), if it does; otherwise its observation is
    written as a number, a list, or JSON."""
    prompt: str | None = None
    """What the policy reads first, where the row has no text; {observation} stands for the first observation, which
    otherwise follows. A sentence about the actions if empty."""

    @model_validator(mode="after")
    def _own_rendering(self) -> Self:
        if "render_mode" in self.options:
            raise ValueError(f"options.render_mode={self.options['render_mode']!r} cannot be set: the policy reads "
                             "text; leave it out, or set rendering to false to write the observation itself")
        if len(set(map(str.lower, self.actions))) < len(self.actions):
            raise ValueError(f"actions={self.actions} has a name twice; capitals do not count")
        return self

    @property
    def label(self) -> str:
        """The environment in messages."""
        return self.id


class ReasoningGymSource(Section):
    """Tasks of reasoning-gym, which makes and scores them: `reasoning_gym: {task: chain_sum}`. It needs the package,
    which `pip install 'rlhf-ray[reasoning-gym]'` installs."""

    task: str = Field(min_length=1)
    """Name of a task family."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Its settings: {max_digits: 2}. `seed` is 0 if it is not among them. A row's column `index` chooses the item;
    without it, one of the first `size` (500, as the library has it) is chosen by the seed of the episode."""
    answer: Literal["tags", "text"] = "tags"
    """What is scored: the last text within <answer> and </answer>, as the library reads it, or all that the policy
    wrote."""
    system: str | None = "default"
    """Name of one of the library's system prompts (default, simple, direct, chain_of_draft, DeepSeekZero), which all
    ask for tags; empty for none."""
    tries: int = Field(1, ge=1)
    """Answers to a question: after a wrong one (a score below 1) the policy is asked again, and the score of the last
    answer counts."""

    @model_validator(mode="after")
    def _tags_are_asked_for(self) -> Self:
        if self.answer == "text" and self.system is not None:
            raise ValueError(f"answer=text scores all that is written, and system={self.system!r} asks for an answer "
                             "within tags; set system to null")
        return self

    @property
    def label(self) -> str:
        """The tasks in messages."""
        return self.task
