"""A reward that a service gives over HTTP: where it is, how long it may take, and what it is trusted with."""

from typing import Literal, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import Field, model_validator

from rlhf_ray.config.base import Section
from rlhf_ray.config.hosts import is_loopback


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
            if problem := _problem(url, {host.lower() for host in self.allow_hosts}):
                raise ValueError(f"urls: {_shown(url)!r} {problem}")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("urls: an address stands there twice; give each server once")
        return self

    @model_validator(mode="after")
    def _one_token(self) -> Self:
        if self.token_file and self.token_variable:
            raise ValueError("token_file and token_variable both say where the token is; keep one")
        return self


def _problem(url: str, allowed: set[str]) -> str | None:
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


def _shown(url: str) -> str:
    """A URL for an error message: what stands before @ is left out."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "a URL"
    return SplitResult(parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "").geturl() or url[:80]
