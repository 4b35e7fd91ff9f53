"""What an environment may be, besides code of one's own: each source is a section, whose module in
`environments/adapters/` makes of it a class with reset and step, tools, or an agent."""

from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from rlhf_ray.config.loopback import is_loopback
from rlhf_ray.config.sandbox import SandboxConfig
from rlhf_ray.config.section import Section

SOURCES = ("path", "command", "python", "gymnasium", "reasoning_gym", "mcp", "openenv", "nemo_gym")
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


class _Server(Section):
    """What is said of a server that is reached by a URL."""

    url: str | None = None
    token_variable: str | None = Field(None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Name of the environment variable with the server's bearer token, set on every node with episode runners."""

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.url is not None and (problem := _url_problem(self.url, secret=self.token_variable is not None)):
            raise ValueError(f"url: {problem}")
        if self.url is None and self.token_variable is not None:
            raise ValueError("token_variable is sent to a server at `url`, and there is none; give url, or leave "
                             "token_variable out")
        return self


class McpSource(_Server):
    """A server of the Model Context Protocol, whose tools the policy may call. It needs the extra `mcp`."""

    command: list[str] | None = Field(None, min_length=1)
    """The program of the server and its arguments (transport stdio), started for each episode."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Further variables of its environment, which has HOME, LOGNAME, PATH, SHELL, TERM and USER only, as those have
    that MCP's own client starts."""
    url: str | None = None
    """URL of a server that runs (transport streamable HTTP), with a session for each episode."""
    tools: list[str] | None = Field(None, min_length=1)
    """Names of the tools that the policy may call; empty for all but `reset_tool` and `reward_tool`."""
    reset_tool: str | None = None
    """Tool that begins an episode: it is called with the columns of the row, and with `seed`, that its schema names.
    What it answers is read after the prompt."""
    reward_tool: str | None = None
    """Tool that gives the reward at the end, a number; it is called like `reset_tool`. Empty for no reward: others are
    in `rewards`."""
    timeout_s: float = Field(30.0, gt=0)
    """Longest time for one call, below `timeout_s.step` of the environment: the policy reads that a tool took longer,
    and the server continues."""
    replayable: bool = False
    """The same calls are answered alike, so that an episode can be brought back by repeating them. Only whoever knows
    the server can say so."""

    @model_validator(mode="after")
    def _one_transport(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError(f"it has {'neither' if self.url is None else 'both'} of command and url; give one of them")
        if self.variables and self.command is None:
            raise ValueError("variables are those of a server that is started by `command`; leave them out")
        return self

    @property
    def label(self) -> str:
        """The server in messages."""
        return str(self.command or self.url)


class OpenEnvSource(_Server):
    """A server of OpenEnv that runs, with a session for each episode: its environment needs
    SUPPORTS_CONCURRENT_SESSIONS, and the server max_concurrent_envs, of at least the open episodes."""

    url: str
    """URL of the server: http://host:port."""
    action: Literal["auto", "text", "json", "tools"] = "auto"
    """What becomes of the policy's reply: its text is one `field` of the action; it is the action, as a JSON object;
    or its calls of tools are actions, if the server lists tools. "auto" is tools if it lists some, text if its actions
    have one field that is required, a text, and json otherwise."""
    field: str | None = None
    """Field of the action that takes the text; empty for the only one that is a required text."""
    observation: str | None = None
    """Field of observations that the policy reads; empty for all as JSON, or as it is where the only one is a text."""
    columns: list[str] | None = None
    """Columns of the row that reset gets, besides `seed` and `episode_id`; empty for all. The server takes those that
    its reset names."""
    connect_s: float = Field(30.0, gt=0)
    """Longest time to wait for a session while all are in use, below `timeout_s.reset` of the environment."""
    replayable: bool = True
    """The same actions are answered alike with the same seed, as OpenEnv's reset(seed) means it."""

    @model_validator(mode="after")
    def _field_of_text(self) -> Self:
        if self.field is not None and self.action in ("json", "tools"):
            raise ValueError(f"field is that of a text, and action={self.action} has none; leave field out")
        return self

    @property
    def label(self) -> str:
        """The server in messages."""
        return str(self.url)


class NemoGymSource(_Server):
    """A resources server of NeMo-Gym that runs. The rows are NeMo-Gym's: `responses_create_params` has the tools and
    what the policy reads, and the other columns are for `/seed_session` and `/verify`, which gives the reward."""

    url: str
    """URL of the resources server: http://host:port."""
    timeout_s: float = Field(30.0, gt=0)
    """Longest time for one call of a tool, below `timeout_s.step` of the environment; `/verify` may take that."""
    replayable: bool = False
    """The same calls are answered alike, so that an episode can be brought back by repeating them. Only whoever knows
    the server can say so."""

    @property
    def label(self) -> str:
        """The server in messages."""
        return str(self.url)


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


def _url_problem(url: str, *, secret: bool) -> str:
    """Why a server's URL cannot be used; "" if it can.

    Args:
        secret: a token is sent to it.
    """
    try:
        parts = urlsplit(url)
        host, scheme = parts.hostname or "", parts.scheme
        parts.port  # noqa: B018 - raises for one that is no number
    except ValueError as error:
        return f"it cannot be read: {error}"
    if parts.username or parts.password:
        return "it contains a user name or password, which would be logged; use token_variable"
    if scheme not in ("http", "https") or not host:
        return f"{url!r} is not of the form http://host:port or https://host"
    if secret and scheme == "http" and not is_loopback(host):
        return f"{url!r} is plain http, so the token could be intercepted; use https, or leave token_variable out"
    return ""
