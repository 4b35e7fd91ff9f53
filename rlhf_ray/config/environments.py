"""Environments of episodes: where they are, how long they may take, and what their failures mean."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from rlhf_ray.config.environment_sources import (
    SOURCES,
    CommandSource,
    GymnasiumSource,
    McpSource,
    NemoGymSource,
    OpenEnvSource,
    PythonSource,
    ReasoningGymSource,
)
from rlhf_ray.config.paths import UserPath
from rlhf_ray.config.run import PlacementConfig
from rlhf_ray.config.section import Section

Cause = Literal[
    "completed", "truncated_turn", "truncated_episode", "truncated_turns",
    "error_parse", "error_timeout", "error_environment", "error_agent",
]
"""Why an episode ended: its environment or agent was done; a turn was cut off at its longest; the next turn did not fit
the episode's tokens; the turns were used up; the policy's tool call could not be read; a deadline passed; the
environment failed; the agent failed."""
CAUSES: tuple[str, ...] = Cause.__args__  # type: ignore[attr-defined]


class EpisodeTimeouts(Section):
    """Deadlines of an environment, in seconds."""

    reset: float = Field(60.0, gt=0)
    """Of the start of an episode; of an agent, until its first request."""
    step: float = Field(60.0, gt=0)
    """Of the answer to one turn, and of closing the environment; of an agent, between an answer and its next request,
    or its end. While the policy writes, no time of an agent passes."""
    episode: float = Field(600.0, gt=0)
    """Of the whole episode, with all sampling and waiting, however often it is begun again: a step waits no longer for
    a sample."""


class FailurePolicy(Section):
    """What is done with an episode that did not complete: "train" on it with the reward that it has, "mask" it (it is
    in no loss, baseline or mean), give it "zero" reward, "quarantine" its prompt within `reward.quarantine_limit`, or
    begin it again ("retry", up to `retries` times within `timeout_s.episode`, then quarantine)."""

    parse: Literal["feedback", "train", "mask", "zero"] = "feedback"
    """A tool call that cannot be read: "feedback" lets the policy read what was wrong, and the episode continues; the
    others end it."""
    timeout: Literal["train", "mask", "zero", "retry", "quarantine"] = "mask"
    """A deadline passed."""
    environment: Literal["mask", "zero", "retry", "quarantine"] = "retry"
    """The environment raised an error, answered nonsense, or lost its process."""
    agent: Literal["mask", "zero", "retry", "quarantine"] = "zero"
    """The agent raised an error, gave no reward, or lost its process. What an unchanged program fails on is mostly what
    the policy wrote, so by default it is the policy's failure."""
    overflow: Literal["train", "mask", "zero"] = "train"
    """The turns or tokens were used up, or a turn was cut off at its longest."""
    retries: int = Field(2, ge=0)
    """How often an episode is begun again at most."""


def _with_name(path: str) -> str:
    module, _, name = path.rpartition(":")
    if not (module and name.isidentifier()):
        raise ValueError(f"{path!r} does not say what in the file is meant; write file.py:name or module:name")
    return path


class EnvironmentConfig(Section):
    """One environment: exactly one of `path` and the other sources says what it is."""

    path: Annotated[UserPath, AfterValidator(_with_name)] | None = None
    """Tools, a class with tools, an environment, or an agent: `file.py:name` or `module:name`. A list of functions is
    tools, too."""
    command: CommandSource | None = None
    """A program that is an agent: started for each episode, it asks the policy by OpenAI's or Anthropic's API."""
    python: PythonSource | None = None
    """A tool that runs programs in a sandbox."""
    gymnasium: GymnasiumSource | None = None
    """An environment of gymnasium, as text."""
    reasoning_gym: ReasoningGymSource | None = None
    """A family of tasks of reasoning-gym."""
    mcp: McpSource | None = None
    """A server of the Model Context Protocol: its tools are the policy's."""
    openenv: OpenEnvSource | None = None
    """A server of OpenEnv."""
    nemo_gym: NemoGymSource | None = None
    """A resources server of NeMo-Gym."""
    max_turns: int = Field(16, ge=1)
    """Turns of an episode at most, which are the requests of an agent."""
    max_tokens: int = Field(16384, ge=2)
    """Tokens of an episode at most: prompt, what the policy samples, and what the environment answers; of each segment,
    where the chat template rewrites history. A turn has at most `generator.sampling.max_tokens`."""
    timeout_s: EpisodeTimeouts = Field(default_factory=EpisodeTimeouts)
    """Deadlines."""
    on_failure: FailurePolicy = Field(default_factory=FailurePolicy)
    """What the causes mean by which episodes end early."""
    tool_format: str = "auto"
    """How the model writes tool calls: "hermes", "llama3", "mistral", "json", or the name of a parser of vLLM; "auto"
    chooses by the chat template."""
    concurrency: int = Field(64, ge=1)
    """Open episodes of this environment in each runner."""
    processes: int = Field(2, ge=1)
    """Processes of each runner that the open episodes share."""
    isolated: bool = False
    """Give each episode a process of its own, which costs the start of one. A `command` always has one."""
    memory_mib: int | None = Field(4096, ge=64)
    """Memory that a process may allocate, in MiB; empty for no bound."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"it has {' and '.join(given) or 'no source'}; give exactly one of {', '.join(SOURCES)}")
        return self

    @model_validator(mode="after")
    def _turns_for_tries(self) -> Self:
        if self.reasoning_gym is not None and self.reasoning_gym.tries > self.max_turns:
            raise ValueError(f"reasoning_gym.tries={self.reasoning_gym.tries} needs as many turns, and max_turns="
                             f"{self.max_turns}; raise it, or lower tries")
        return self

    @property
    def own_process(self) -> bool:
        """Whether each episode has a process of its own: what a program starts ends with it then."""
        return self.isolated or self.command is not None

    @property
    def source(self) -> tuple[str, Any]:
        """What the environment is: the name of the field that says so, and its value as JSON holds it."""
        name = next(name for name in SOURCES if getattr(self, name) is not None)
        return name, self.model_dump(mode="json")[name]

    @property
    def label(self) -> str:
        """The source in messages: "'shop.py:Shop'", "command ['python', 'agent.py']"."""
        name, value = self.source
        if name == "path":
            return repr(value)
        section = getattr(self, name)
        return f"{name} {section.label}"


class EpisodeRunnerConfig(PlacementConfig):
    """Workers that run episodes: they call generators and environments, and wait."""

    column: str = "environment"
    """Column of the prompts' rows that names the environment, where there are several."""
    gateway_host: str = "127.0.0.1"
    """Address at which agents reach the policy. Only programs of the same machine reach the default; an agent in a
    container needs another one, which lets in whoever has an episode's URL and key."""
