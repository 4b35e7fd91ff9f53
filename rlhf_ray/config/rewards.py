"""Where rewards come from: `rewards: {NAME: {type: ..., weight: ...}}`, a weighted sum of named components."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import SplitResult, urlsplit

from pydantic import BeforeValidator, Field, field_validator, model_validator

from rlhf_ray.config.given_objects import FunctionPath
from rlhf_ray.config.loopback import is_loopback
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.paths import UserPath, expand_path
from rlhf_ray.config.sandbox import SandboxConfig
from rlhf_ray.config.type_union import TypedSection, one_of

Aggregate = Literal["min", "prod", "mean", "last"]


class ModelReward(ModelConfig, TypedSection):
    """A reward model: any sequence classifier, such as one of sentiment."""

    type: Literal["model"]
    """A local reward model."""
    weight: float = 1.0
    """Factor of this component in the sum; negative for a penalty."""
    label: int | str | None = None
    """Label whose score is the reward, by name (of `id2label` in its config.json) or number; needed for a classifier
    with several."""
    value: Literal["logit", "probability"] = "logit"
    """The label's logit, or its probability: by softmax over the labels, or by the logistic function for a single label
    and for labels that do not exclude each other (`problem_type: multi_label_classification`)."""


class ProcessReward(ModelConfig, TypedSection):
    """A process reward model, which judges each step of a response (made by `rlhf-ray process-reward`)."""

    type: Literal["process"]
    """A local process reward model."""
    weight: float = 1.0
    """Factor of this component in the sum; negative for a penalty."""
    placement: Literal["tokens", "outcome"] = "tokens"
    """Whether each step's reward is on the last token of the step (Wang et al. 2024, section 3.4), or one reward for
    the response on its last token."""
    value: Literal["probability", "centred"] = "probability"
    """Reward of a step: the probability p that it is good (Wang et al. 2024), or 2p - 1, so that bad steps are negative
    and more steps do not give more reward."""
    aggregate: Aggregate = "min"
    """How the response's probability is computed from those of its steps, for `placement: outcome`: minimum (Wang et
    al. 2024), product (Lightman et al. 2023), mean, or last."""


LOCAL_MODELS = (ModelReward, ProcessReward)
"""Components whose model runs in the reward scorers, sharded with `reward.shards`."""


class FunctionReward(TypedSection):
    """A Python function of your own that maps a batch to scores, in a separate process."""

    type: Literal["function"]
    """A Python function."""
    weight: float = 1.0
    """Factor of this component in the sum; negative for a penalty."""
    function: FunctionPath
    """`module:name`, or `file.py:name`."""
    keep_special_tokens: bool = False
    """Give it responses with their special tokens, but for the one that ended each."""
    timeout_s: float = Field(60.0, gt=0)
    """Timeout for the scores of a chunk, after which the process is killed (importing the function may take two
    minutes)."""


class VerifiableReward(TypedSection):
    """Fields of all rewards by a rule."""

    weight: float = 1.0
    """Factor of this component in the sum; negative for a penalty."""
    right: float = 1.0
    """Score of a response that passes."""
    wrong: float = 0.0
    """Score of a response that does not."""


Normalisation = Literal["case", "space", "punctuation"]


class ExactMatchReward(VerifiableReward):
    """Whether the response equals the row's answer."""

    type: Literal["exact_match"]
    """The response must equal the answer."""
    answer: str = "answer"
    """Column of the prompts with the answer."""
    after: str | None = Field(None, min_length=1)
    """Compare only the text after the last occurrence of this one, such as "####"; the whole response if empty."""
    ignore: list[Normalisation] = Field(["space"])
    """Differences to ignore: letter case, runs of white space, punctuation."""


class NumberReward(VerifiableReward):
    """Whether the number in the response equals the row's answer."""

    type: Literal["number"]
    """The last number of the response must equal the answer."""
    answer: str = "answer"
    """Column of the prompts with the answer: a number, or a text with one number (after `after`, if present; else in
    its last `\\boxed{}`, or in its last line)."""
    after: str | None = Field(None, min_length=1)
    """Use the first number after the last occurrence of this text, such as "####"; otherwise the last number."""
    tolerance: float = Field(1e-6, ge=0)
    """Maximum absolute difference that counts as equal."""


class RegexReward(VerifiableReward):
    """Whether a regular expression matches."""

    type: Literal["regex"]
    """A regular expression must match."""
    pattern: str = Field(min_length=1)
    """Python regular expression; `.` also matches line ends, `^` and `$` match at each line. It reads what the prompt
    begins of the answer (such as <think>), then the response."""
    match: Literal["search", "full"] = "search"
    """Match anywhere in the response, or the whole response."""
    group: int | str | None = None
    """Group whose text must equal the answer, by number or name; if empty, a match is sufficient."""
    answer: str = "answer"
    """Column of the prompts with the answer, read when `group` is set."""
    keep_special_tokens: bool = False
    """Match the response with its special tokens, but for the one that ended it."""
    timeout_s: float = Field(10.0, gt=0)
    """Timeout for a chunk; a pattern can take exponential time on some texts."""

    @field_validator("group")
    @classmethod
    def _numbered(cls, group: int | str | None) -> int | str | None:
        """A number from the command line or the environment, where everything is text."""
        return int(group) if isinstance(group, str) and group.isdecimal() else group

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        try:
            groups = re.compile(self.pattern).groupindex, re.compile(self.pattern).groups
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"pattern={self.pattern!r} is not a regular expression: {error}; correct it") from None
        known = self.group in groups[0] if isinstance(self.group, str) else (self.group or 0) in range(groups[1] + 1)
        if not known:
            raise ValueError(f"group={self.group!r} is not a group of pattern={self.pattern!r}, which has "
                             f"{groups[1]} groups, named {sorted(groups[0])}; set group to one of them")
        return self


class JSONSchemaReward(VerifiableReward):
    """Whether the response is JSON that a schema accepts."""

    type: Literal["json_schema"]
    """The response must be valid JSON for the schema."""
    accepts: dict[str, Any] | str
    """JSON schema, or the path of a file that holds it."""
    answer: str | None = None
    """Column of the prompts with a JSON value that the response must also equal; not compared if empty."""
    timeout_s: float = Field(10.0, gt=0)
    """Timeout for a chunk; a schema's patterns can take exponential time on some texts."""

    @field_validator("accepts")
    @classmethod
    def _expanded(cls, accepts: dict[str, Any] | str) -> dict[str, Any] | str:
        return expand_path(accepts) if isinstance(accepts, str) else accepts


class CodeReward(VerifiableReward):
    """Whether the program in the response passes the row's tests, in a sandbox."""

    type: Literal["code"]
    """The response's program must pass the row's tests."""
    tests: str = "tests"
    """Column of the prompts with the tests: a program that asserts, a list of such, or an object with `inputs` and
    `outputs`."""
    program: Literal["last_block", "response"] = "last_block"
    """Where the program is: the last block ```python of the response after its reasoning, or all of the response."""
    score: Literal["all", "share"] = "all"
    """`right` if all tests pass, as in pass@k (Chen et al. 2021) and in verl's `prime_code` by default; or between
    `wrong` and `right` by the share of tests that pass, which also runs those after a failure."""
    timeout_s: float = Field(6.0, gt=0)
    """Wall clock time of a test; a program that takes longer fails it. The default is LiveCodeBench's."""
    total_s: float = Field(60.0, gt=0)
    """Time of all tests of a response together; those that do not get their turn have failed."""
    processes: int = Field(2, ge=1)
    """Tests that run at a time in each reward scorer."""
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    """What holds programs back, and what they may use."""


class VaderReward(TypedSection):
    """Sentiment of the response alone by a lexicon and rules (VADER, Hutto and Gilbert 2014), from -1 to 1."""

    type: Literal["vader"]
    """VADER's compound score."""
    weight: float = 1.0
    """Factor of this component in the sum; negative for a penalty."""


class EnvironmentReward(TypedSection):
    """The rewards that the environment of an episode gives: of each turn on the last token that the policy sampled in
    it, and of the whole episode (`get_reward`) on its last."""

    type: Literal["environment"]
    """The sum of the environment's rewards. It is the default where `environments` has any."""
    weight: float = 1.0
    """Factor of this component in the sum; negative for a penalty."""
    solved_at: float = 1.0
    """Sum of rewards from which an episode counts as solved, in evaluations."""


class HTTPReward(TypedSection):
    """A service that scores batches over HTTP, such as `rlhf-ray serve-reward`."""

    type: Literal["http"]
    """A reward service."""
    weight: float = 1.0
    """Factor of this component in the sum; negative for a penalty."""
    urls: list[str] = Field(min_length=1)
    """Addresses of servers of the same model, such as https://scorer:8008; requests are balanced between them."""
    send: Literal["text", "tokens"] = "text"
    """What is sent: prompt and response as text, or token ids (for a model with the policy's tokenizer)."""
    columns: list[str] = Field(default_factory=list)
    """Columns of the prompts' rows to send as `metadata` of each sample."""
    batch_size: int = Field(64, ge=1)
    """Samples per request."""
    timeout_s: float = Field(120.0, gt=0)
    """Timeout for the scores of one batch, including all retries and pauses, after which the run ends."""
    request_timeout_s: float = Field(30.0, gt=0)
    """Timeout of one request, after which it is retried (on another server, if there are several urls)."""
    retries: int = Field(8, ge=0)
    """Maximum retries of a request, with growing pauses or as `Retry-After` says."""
    token_file: UserPath | None = None
    """File with the bearer token of the service, present on every node with reward scorers."""
    token_variable: str | None = Field(None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Name of the environment variable with the bearer token, set on every node with reward scorers."""
    allow_hosts: list[str] = Field(default_factory=list)
    """Hosts of `urls` that may use plain http or have private addresses: those of a network that you trust."""
    ca_file: UserPath | None = None
    """Additional certificate authorities (PEM) to trust."""

    @model_validator(mode="after")
    def _urls(self) -> Self:
        for url in self.urls:
            if problem := _url_problem(url, {host.lower() for host in self.allow_hosts}):
                raise ValueError(f"urls: {_shown_url(url)!r} {problem}")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("urls: an address is given twice; give each server once")
        return self

    @model_validator(mode="after")
    def _one_token(self) -> Self:
        if self.token_file and self.token_variable:
            raise ValueError("token_file and token_variable are both set; keep one")
        return self


def _with_type(given: Any) -> Any:
    """The section of a function that is given in its place, or without `type`, from Python."""
    if callable(given):
        return {"type": "function", "function": given}
    if isinstance(given, dict) and "type" not in given and callable(given.get("function")):
        return {"type": "function", **given}
    return given


AnyReward = (
    ModelReward | ProcessReward | HTTPReward | FunctionReward | ExactMatchReward | NumberReward | RegexReward
    | JSONSchemaReward | CodeReward | VaderReward | EnvironmentReward
)
RewardConfig = Annotated[
    AnyReward, Field(discriminator="type"), one_of(get_args(AnyReward), None), BeforeValidator(_with_type)]


def rewards_in_words(rewards: Mapping[str, Mapping[str, Any]]) -> str:
    """Sections of `rewards` on one line: "quality (model runs/rm/model), length (function rewards.py:short, x 0.1)"."""
    return ", ".join(f"{name} ({_in_words(reward)})" for name, reward in rewards.items())


def _in_words(reward: Mapping[str, Any]) -> str:
    what = next((str(reward[key]) for key in ("path", "function", "pattern", "urls") if reward.get(key)), "")
    weight = reward.get("weight", 1.0)
    return " ".join(filter(None, (str(reward.get("type")), what))) + ("" if weight == 1.0 else f", x {weight:g}")


def _url_problem(url: str, allowed: set[str]) -> str | None:
    """What is wrong with a URL; None if it is valid."""
    if any(c.isspace() or not c.isprintable() for c in url):
        return "contains white space or an invisible character; write https://host:port"
    try:
        parts, port = urlsplit(url), urlsplit(url).port
    except ValueError as error:
        return f"is not a URL: {error}; write https://host:port"
    if parts.scheme not in ("https", "http") or not parts.hostname or port == 0:
        return "is not an http or https URL; write https://host:port"
    if parts.username is not None or parts.password is not None:
        return "contains a user name or password, which would be logged; use token_file or token_variable"
    if parts.query or parts.fragment:
        return "has a query or fragment; give only the address, to which /score and /health are added"
    if parts.scheme == "http" and not is_loopback(parts.hostname) and parts.hostname not in allowed:
        return (f"is plain http, so texts and token could be intercepted; use https, or add "
                f"{parts.hostname!r} to allow_hosts if you trust the network")
    return None


def _shown_url(url: str) -> str:
    """A URL for an error message, without user name and password."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "a URL"
    return SplitResult(parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "").geturl() or url[:80]
