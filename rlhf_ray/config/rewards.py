"""Where rewards come from: `rewards: {NAME: {type: ..., weight: ...}}`, a weighted sum of named components."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import Field, model_validator

from rlhf_ray.config.loopback import is_loopback
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.section import Section

Aggregate = Literal["min", "prod", "mean", "last"]


class ModelReward(ModelConfig):
    """A reward model: any sequence classifier with one label."""

    type: Literal["model"]
    """A local reward model."""
    weight: float = 1.0
    """Factor of this component in the sum; negative for a penalty."""


class ProcessReward(ModelConfig):
    """A process reward model, which judges each step of a response (made by `rlhf-ray process-reward`)."""

    type: Literal["process"]
    """A local process reward model."""
    weight: float = 1.0
    """Factor of this component in the sum; negative for a penalty."""
    placement: Literal["tokens", "outcome"] = "tokens"
    """Each step's reward on the last token of the step (Wang et al. 2024, section 3.4), or one number for the whole
    response on its last token."""
    value: Literal["probability", "centred"] = "probability"
    """Reward of a step: the probability p that it is good (Wang et al. 2024), or 2p - 1, so that a bad step costs and
    more steps are not more reward by themselves."""
    aggregate: Aggregate = "min"
    """The response's probability out of its steps', for `placement: outcome`: the least (Wang et al. 2024), the product
    (Lightman et al. 2023), the mean, or the last step's."""


class FunctionReward(Section):
    """A Python function of your own, batch in and scores out, in a process of its own."""

    type: Literal["function"]
    """A Python function."""
    weight: float = 1.0
    """Factor of this component in the sum; negative for a penalty."""
    function: str
    """`module:name`, or `file.py:name`."""
    timeout_s: float = Field(60.0, gt=0)
    """Longest wait for the scores of a chunk; its process is killed then. (Its import may take two minutes.)"""


class VerifiableReward(Section):
    """What all rewards by a rule have in common."""

    weight: float = 1.0
    """Factor of this component in the sum; negative for a penalty."""
    right: float = 1.0
    """Score of a response that passes."""
    wrong: float = 0.0
    """Score of one that does not."""


Normalisation = Literal["case", "space", "punctuation"]


class ExactMatchReward(VerifiableReward):
    """Whether the response is the row's answer."""

    type: Literal["exact_match"]
    """The response must equal the answer."""
    answer: str = "answer"
    """Column of the prompts with the answer."""
    after: str | None = Field(None, min_length=1)
    """Compare only what follows the last occurrence of this text, such as "####"; the whole response when empty."""
    ignore: list[Normalisation] = Field(["space"])
    """Differences that do not count: letters' case, runs of white space, punctuation."""


class NumberReward(VerifiableReward):
    """Whether the number in the response is the row's answer."""

    type: Literal["number"]
    """The last number of the response must equal the answer."""
    answer: str = "answer"
    """Column of the prompts with the answer: a number, or a text whose last number counts (after `after`, if there)."""
    after: str | None = Field(None, min_length=1)
    """Take the first number that follows the last occurrence of this text, such as "####"; else the last one of all."""
    tolerance: float = Field(1e-6, ge=0)
    """Largest absolute difference that still counts as equal."""


class RegexReward(VerifiableReward):
    """Whether a regular expression finds what it looks for."""

    type: Literal["regex"]
    """A regular expression must match."""
    pattern: str = Field(min_length=1)
    """Python regular expression; `.` matches line ends too, `^` and `$` each line's."""
    match: Literal["search", "full"] = "search"
    """Somewhere in the response, or the whole of it."""
    group: int | str | None = None
    """Group whose text must equal the answer, by number or name; with none, a match is enough."""
    answer: str = "answer"
    """Column of the prompts with the answer, read when `group` is set."""
    timeout_s: float = Field(10.0, gt=0)
    """Longest wait for a chunk; patterns can take for ever on unlucky texts."""

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        try:
            groups = re.compile(self.pattern).groupindex, re.compile(self.pattern).groups
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"pattern={self.pattern!r} is no regular expression: {error}") from None
        known = self.group in groups[0] if isinstance(self.group, str) else (self.group or 0) in range(groups[1] + 1)
        if not known:
            raise ValueError(f"group={self.group!r} is no group of pattern={self.pattern!r}, which has {groups[1]} "
                             f"and names {sorted(groups[0])}")
        return self


class JSONSchemaReward(VerifiableReward):
    """Whether the response is JSON of a given shape."""

    type: Literal["json_schema"]
    """The response must be JSON that a schema accepts."""
    accepts: dict[str, Any] | str
    """JSON schema, or the path of a file that holds it."""
    answer: str | None = None
    """Column of the prompts with a JSON value that the response must equal as well; not looked at when empty."""
    timeout_s: float = Field(10.0, gt=0)
    """Longest wait for a chunk; a schema's patterns can take for ever on unlucky texts."""


class HTTPReward(Section):
    """A service that scores batches over HTTP, such as `rlhf-ray serve-reward`."""

    type: Literal["http"]
    """A reward service."""
    weight: float = 1.0
    """Factor of this component in the sum; negative for a penalty."""
    urls: list[str] = Field(min_length=1)
    """Addresses of servers of one and the same model, such as https://scorer:8008; requests are balanced between
    them."""
    send: Literal["text", "tokens"] = "text"
    """What a service is sent: prompt and response as text, or token ids, for a model with the policy's tokenizer."""
    columns: list[str] = Field(default_factory=list)
    """Columns of the prompts' rows to send along, as `metadata` of each sample."""
    batch_size: int = Field(64, ge=1)
    """Samples of one request."""
    timeout_s: float = Field(120.0, gt=0)
    """Longest wait for the scores of one batch, all tries and pauses included; the run ends then."""
    request_timeout_s: float = Field(30.0, gt=0)
    """Longest wait for the answer to one request, before it is repeated (elsewhere, if there are several urls)."""
    retries: int = Field(8, ge=0)
    """How often a request is repeated at most, with growing pauses and as `Retry-After` says."""
    token_file: str | None = None
    """File that holds the bearer token of the service; on every node where reward scorers run."""
    token_variable: str | None = Field(None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable that holds the bearer token, by name; on every node where reward scorers run."""
    allow_hosts: list[str] = Field(default_factory=list)
    """Hosts of `urls` that may be asked by plain http or have private addresses: those of a network you trust."""
    ca_file: str | None = None
    """Certificates (PEM) of authorities to trust beside the usual ones."""

    @model_validator(mode="after")
    def _urls(self) -> Self:
        for url in self.urls:
            if problem := _url_problem(url, {host.lower() for host in self.allow_hosts}):
                raise ValueError(f"urls: {_shown_url(url)!r} {problem}")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("urls: an address stands there twice; give each server once")
        return self

    @model_validator(mode="after")
    def _one_token(self) -> Self:
        if self.token_file and self.token_variable:
            raise ValueError("token_file and token_variable both say where the token is; keep one")
        return self


RewardConfig = Annotated[
    ModelReward | ProcessReward | HTTPReward | FunctionReward | ExactMatchReward | NumberReward | RegexReward
    | JSONSchemaReward,
    Field(discriminator="type"),
]


def rewards_in_words(rewards: Mapping[str, Mapping[str, Any]]) -> str:
    """Sections of `rewards` on one line: "quality (model runs/rm/model), length (function rewards.py:short, x 0.1)"."""
    return ", ".join(f"{name} ({_in_words(reward)})" for name, reward in rewards.items())


def _in_words(reward: Mapping[str, Any]) -> str:
    what = next((str(reward[key]) for key in ("path", "function", "pattern", "urls") if reward.get(key)), "")
    weight = reward.get("weight", 1.0)
    return " ".join(filter(None, (str(reward.get("type")), what))) + ("" if weight == 1.0 else f", x {weight:g}")


def _url_problem(url: str, allowed: set[str]) -> str | None:
    """What is wrong with a URL; None if nothing is."""
    if any(c.isspace() or not c.isprintable() for c in url):
        return "holds white space or an invisible character; write https://host:port"
    try:
        parts, port = urlsplit(url), urlsplit(url).port
    except ValueError as error:
        return f"is no URL: {error}"
    if parts.scheme not in ("https", "http") or not parts.hostname or port == 0:
        return "is no http or https URL; write https://host:port"
    if parts.username is not None or parts.password is not None:
        return "holds a user name or password, which would end up in logs; use token_file or token_variable"
    if parts.query or parts.fragment:
        return "has a query or fragment; give the address alone, to which /score and /health are added"
    if parts.scheme == "http" and not is_loopback(parts.hostname) and parts.hostname not in allowed:
        return (f"is plain http, and texts and token could be read on the way; use https, or name "
                f"{parts.hostname!r} in allow_hosts if the network between is yours")
    return None


def _shown_url(url: str) -> str:
    """A URL for an error message: what stands before @ is left out."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "a URL"
    return SplitResult(parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "").geturl() or url[:80]
