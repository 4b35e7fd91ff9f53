"""What goes over the wire: the JSON of `/score` and `/health`, version 1. The service's documentation page is made of
these models. Requests are read strictly: an unknown key is an error."""

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
    """What follows the prompt, a leading space included, without special tokens."""
    finished: bool = True
    """Whether the response ended by itself; an end-of-sequence token then follows it. Only with texts."""
    messages: list[dict[str, Any]] | None = None
    """The prompt as chat messages, beside `prompt`: a model with a chat template of its own reads these instead."""
    tokens: list[TokenId] | None = Field(None, min_length=1)
    """Token ids of prompt and response together, in the service's own vocabulary, instead of texts."""

    metadata: dict[str, Any] | None = None
    """Other columns of the prompt's row, for services of your own; a reward model does not read it."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        texts = (self.prompt is not None, self.response is not None)
        if any(texts) == (self.tokens is not None) or any(texts) != all(texts):
            raise ValueError("give prompt and response, or tokens, and not both")
        return self


class ScoreRequest(_Message):
    """Samples to score together."""

    version: Literal[1] = 1
    """Version of this schema."""
    samples: list[Sample] = Field(min_length=1)
    """In any number up to the service's queue length."""


class ScoreAnswer(_Message):
    """One score per sample."""

    version: Literal[1] = 1
    """Version of this schema."""
    scores: list[float]
    """Finite numbers in the order of the samples, exact float32 values."""
    model: str
    """Digest of the model that gave them."""


class HealthAnswer(_Message):
    """What is served, and how busy it is."""

    status: Literal["ok", "stopping"]
    """"stopping" comes with status code 503."""
    model: str
    """Path or Hub name."""
    digest: str
    """Digest of weights and tokenizer: equal digests give equal scores, up to rounding."""
    tokenizer: str
    """Digest of the vocabulary: where it equals the policy's, token ids may be sent."""
    dtype: str
    version: str
    """Version of rlhf-ray."""
    schema_version: Literal[1] = 1
    """Version of the request schema."""
    max_tokens: int
    """Longest sample in tokens."""
    queue: int
    """Samples waiting."""
    requests: int
    """Requests answered with scores so far."""
    samples: int
    """Samples scored so far."""
    forward_passes: int
    """Passes of the model so far."""


class ErrorAnswer(_Message):
    """Why there are no scores."""

    error: str
