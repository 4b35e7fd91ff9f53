"""Models: where they come from, or what to make from scratch."""

import re
from typing import Any, Literal

from pydantic import Field, model_validator

from rlhf_ray.config.section import Section

COMMIT = r"[0-9a-f]{40}"
"""A commit's whole hash: it names one state of a repository for ever."""
DType = Literal["float32", "bfloat16"]


class ArchitectureConfig(Section):
    """A Llama-style causal language model initialised at random."""

    hidden_size: int = Field(128, ge=8)
    """Width of the residual stream."""
    layers: int = Field(4, ge=1)
    """Transformer blocks."""
    heads: int = Field(4, ge=1)
    """Attention heads; hidden_size must be a multiple of it."""
    kv_heads: int | None = Field(None, ge=1)
    """Key and value heads (grouped-query attention); as many as heads when empty."""
    intermediate_size: int = Field(384, ge=8)
    """Width of the feed-forward layer."""
    max_positions: int = Field(256, ge=8)
    """Longest context, in tokens."""
    tie_embeddings: bool = True
    """Use the token embedding as the output projection too."""

    @model_validator(mode="after")
    def _divides(self) -> "ArchitectureConfig":
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size={self.hidden_size} is not a multiple of heads={self.heads}")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        return self


class ModelConfig(Section):
    """A model by path or Hub name."""

    path: str
    """Directory in Hugging Face format, or a Hub name."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""
    tokenizer: str | None = None
    """Directory or Hub name of the tokenizer; the model's own when empty."""
    dtype: DType = "float32"
    """Precision of the weights in memory: float32 on CPUs, bfloat16 on GPUs."""
    trust_remote_code: bool = False
    """Run model code that comes with the weights; needs a pinned `revision`."""

    @model_validator(mode="after")
    def _pinned(self) -> "ModelConfig":
        if self.trust_remote_code and not re.fullmatch(COMMIT, self.revision or ""):
            raise ValueError("trust_remote_code=true runs foreign code: pin it with `revision`, a commit hash of 40 "
                             "hex digits (branches and tags move)")
        return self

    @property
    def trust(self) -> dict[str, Any]:
        """Which files may be loaded, and whether code among them: arguments of every `from_pretrained`.

        Code is taken from the pinned commit alone. Code that lies in another repository has no such commit, and is
        not found.
        """
        code = {"code_revision": self.revision} if self.trust_remote_code else {}
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code, **code}


class NewModelConfig(Section):
    """A model made from scratch instead of loaded."""

    architecture: ArchitectureConfig
    """Shape of the new model."""
    tokenizer: str
    """Directory or Hub name of the tokenizer that fixes the vocabulary."""
    dtype: DType = "float32"
    """Precision of the weights in memory."""
