"""Settings of `rlhf-ray serve-reward`, a reward model served over HTTP."""

from pydantic import Field, SecretStr, model_validator

from rlhf_ray.config.loopback import is_loopback
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.paths import UserPath
from rlhf_ray.config.section import Section

SHORTEST_TOKEN = 16
"""Minimum length of a bearer token; shorter ones could be guessed."""


class ServingConfig(Section):
    """`rlhf-ray serve-reward`: the model, the address, and limits."""

    model: ModelConfig
    """Reward model to serve."""
    label: str | None = None
    """Label whose logit is the score, by name (of `id2label` in config.json) or number; needed for a classifier with
    several."""
    host: str = "127.0.0.1"
    """Address to listen on; a token is required unless it is a loopback address."""
    port: int = Field(8008, ge=0, le=65535)
    """Port to listen on; 0 takes a free one and prints it."""
    token: SecretStr | None = None
    """Bearer token required in every request."""
    max_batch_tokens: int = Field(8192, ge=8)
    """Maximum number of tokens in one forward pass, and in one sample."""
    linger_ms: float = Field(5.0, ge=0, le=1000)
    """How long the first sample of a batch waits for others while the model is idle, in milliseconds."""
    max_queue: int = Field(4096, ge=1)
    """Maximum number of queued samples; a request that would exceed it gets status 429 with Retry-After."""
    max_request_mb: float = Field(16.0, gt=0)
    """Maximum request body in MiB."""
    tls_cert: UserPath | None = None
    """Certificate chain (PEM) to serve https with."""
    tls_key: UserPath | None = None
    """Private key (PEM) of `tls_cert`."""

    @model_validator(mode="after")
    def _scalar(self) -> "ServingConfig":
        if self.model.float32_head:
            raise ValueError("model.float32_head=true has no effect: the scalar head of a reward model is float32 in "
                             "any case; leave it out")
        return self

    @model_validator(mode="after")
    def _guarded(self) -> "ServingConfig":
        token = self.token.get_secret_value() if self.token else None
        if token is None and not is_loopback(self.host):
            raise ValueError(f"host={self.host} can be reached from other machines, so a token is required: "
                             "give --token-file or set RLHF_RAY_REWARD_TOKEN, or listen on 127.0.0.1")
        if token is not None and (len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable()):
            raise ValueError(f"the token must be at least {SHORTEST_TOKEN} printable ASCII characters (make one with "
                             "`openssl rand -hex 32`)")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be set together; give both or none")
        return self
