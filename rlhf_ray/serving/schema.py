"""JSON of `/score` and `/health`, version 1. The service's documentation page is generated from these models. An
unknown key in a request is an error."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

TokenId = Annotated[int, Field(ge=0, strict=True)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class Sample(_Message):
    """One text to score: `prompt` and `response`, or `tokens`."""

    prompt: str | None = None
    """Prompt as the policy saw it (chat template applied)."""
    response: str | None = None
    """Text after the prompt, including a leading space, without special tokens."""
    finished: bool = True
    """Whether the response is complete; an end-of-sequence token is then appended. Only with texts."""
    messages: list[dict[str, Any]] | None = None
    """The prompt as chat messages, in addition to `prompt`; a model with its own chat template uses these instead."""
    prefill: str = ""
    """What the prompt, which ends with it, begins of the answer, such as <think>; not a part of `response`."""
    tokens: list[TokenId] | None = Field(None, min_length=1)
    """Token ids of prompt and response together, in the service's own vocabulary, instead of texts."""

    metadata: dict[str, Any] | None = None
    """Other columns of the prompt's row, for custom services; a reward model ignores them."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        texts = (self.prompt is not None, self.response is not None)
        if any(texts) == (self.tokens is not None) or any(texts) != all(texts):
            raise ValueError("give either prompt and response, or tokens")
        return self


class ScoreRequest(_Message):
    """Samples to score together."""

    version: Literal[1] = 1
    """Version of this schema."""
    samples: list[Sample] = Field(min_length=1)
    """At most as many as the service's queue length."""


class ScoreAnswer(_Message):
    """One score per sample."""

    version: Literal[1] = 1
    """Version of this schema."""
    scores: list[float]
    """Finite numbers in the order of the samples, exact float32 values."""
    model: str
    """Digest of the model that computed them."""


class HealthAnswer(_Message):
    """The model being served, and its load."""

    status: Literal["ok", "stopping"]
    """"stopping" comes with status code 503."""
    model: str
    """Path or Hub name."""
    digest: str
    """Digest of weights and tokenizer: equal digests give equal scores, up to rounding."""
    tokenizer: str
    """Digest of the vocabulary; if it equals the policy's, token ids may be sent."""
    dtype: str
    version: str
    """Version of rlhf-ray."""
    schema_version: Literal[1] = 1
    """Version of the request schema."""
    max_tokens: int
    """Maximum sample length in tokens."""
    queue: int
    """Queued samples."""
    requests: int
    """Requests answered with scores so far."""
    samples: int
    """Samples scored so far."""
    forward_passes: int
    """Passes of the model so far."""


class ErrorAnswer(_Message):
    """Why there are no scores."""

    error: str
