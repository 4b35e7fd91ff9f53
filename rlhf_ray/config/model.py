"""Models: loaded from a path, or initialised from scratch."""

import re
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from rlhf_ray.config.paths import UserPath
from rlhf_ray.config.section import Section

COMMIT = r"[0-9a-f]{40}"
"""Full hash of a commit, which identifies one state of a repository permanently."""
DType = Literal["float32", "bfloat16"]


Family = Literal["llama", "qwen2", "gemma2", "mixtral"]
"""Families of new models, by their `model_type` in transformers."""
NEW_EXPERTS = 4, 2
"""Experts of a layer of a new mixture, and how many process a token: Mixtral's ratio is 8 to 2 (Jiang et al. 2024,
arXiv:2401.04088, table 1)."""


class ArchitectureConfig(Section):
    """A causal language model initialised at random."""

    family: Family = "llama"
    """Family of the model: Llama; Qwen2 (biases in attention); Gemma-2 (soft-caps, scaled embeddings, windows in every
    other layer); Mixtral (each token is processed by 2 of 4 feed-forward layers)."""
    hidden_size: int = Field(128, ge=8)
    """Width of the residual stream."""
    layers: int = Field(4, ge=1)
    """Transformer blocks."""
    heads: int = Field(4, ge=1)
    """Attention heads; hidden_size must be a multiple of this."""
    kv_heads: int | None = Field(None, ge=1)
    """Key and value heads (grouped-query attention); equal to heads if empty."""
    intermediate_size: int = Field(384, ge=8)
    """Width of the feed-forward layer."""
    max_positions: int = Field(256, ge=8)
    """Longest context, in tokens."""
    tie_embeddings: bool = True
    """Share the token embedding with the output projection."""
    initializer_range: float = Field(0.02, gt=0, le=1)
    """Standard deviation of the weights at the start: 0.02 as in transformers' configurations of these families, for
    widths of thousands. A narrow model learns sooner with about 1/sqrt(hidden_size)."""

    @model_validator(mode="after")
    def _divides(self) -> "ArchitectureConfig":
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size={self.hidden_size} is not a multiple of heads={self.heads}")
        if self.hidden_size // self.heads % 2:
            raise ValueError(f"hidden_size={self.hidden_size} / heads={self.heads} = {self.hidden_size // self.heads} "
                             "is odd, and rotary embeddings turn pairs of a head's dimensions; make it even")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.family == "gemma2" and not self.tie_embeddings:
            raise ValueError("tie_embeddings=false cannot be combined with family=gemma2, which always shares them; "
                             "leave it true, or choose another family")
        return self

    def config_entries(self) -> dict[str, Any]:
        """The shape as entries of transformers' config.json, without the vocabulary; other entries have the family's
        defaults."""
        entries = {
            "model_type": self.family,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads or self.heads,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tie_embeddings,
            "initializer_range": self.initializer_range,
        }
        if self.family == "gemma2":  # its defaults are a head's width of 256 and a scale of 1/16, whatever hidden_size
            width = self.hidden_size // self.heads
            entries |= {"head_dim": width, "query_pre_attn_scalar": width}
        if self.family == "mixtral":
            entries |= dict(zip(("num_local_experts", "num_experts_per_tok"), NEW_EXPERTS, strict=True))
        return entries


class ModelConfig(Section):
    """A model by path or Hub name."""

    path: UserPath
    """Directory in Hugging Face format, or a Hub name."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""
    tokenizer: UserPath | None = None
    """Directory or Hub name of the tokenizer; the model's own if empty."""
    dtype: DType = "float32"
    """Precision of the weights in memory: float32 on CPUs, bfloat16 on GPUs."""
    float32_head: bool = False
    """Compute the logits in float32 where the model computes in bfloat16, in learners, reference and generators: their
    log-probabilities then differ less (MiniMax 2025, arXiv:2506.13585, section 3.2), here by a tenth to a third
    (docs/models.md). Logits take twice the memory. False as TRL's `cast_lm_head_to_fp32`."""
    trust_remote_code: bool = False
    """Run Python code from the model's repository; requires a pinned `revision`."""

    @model_validator(mode="after")
    def _pinned(self) -> "ModelConfig":
        if self.trust_remote_code and not re.fullmatch(COMMIT, self.revision or ""):
            raise ValueError("trust_remote_code=true runs code from the model's repository: pin it with `revision`, a "
                             "commit hash of 40 hex digits (branches and tags can change)")
        return self

    @property
    def trust(self) -> dict[str, Any]:
        """Arguments of every `from_pretrained`: the revision, and whether code may be loaded.

        Code is only loaded from the pinned commit. Code in another repository has no such commit, so it is not found.
        """
        code = {"code_revision": self.revision} if self.trust_remote_code else {}
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code, **code}


class NewModelConfig(Section):
    """A model initialised from scratch."""

    architecture: ArchitectureConfig
    """Shape of the new model."""
    tokenizer: UserPath
    """Directory or Hub name of the tokenizer that fixes the vocabulary."""
    dtype: DType = "float32"
    """Precision of the weights in memory."""


def _kind(given: Any) -> str | None:
    if not isinstance(given, dict):
        return type(given).__name__
    kinds = [name for name, key in (("ModelConfig", "path"), ("NewModelConfig", "architecture")) if key in given]
    return kinds[0] if len(kinds) == 1 else None


StartModel = Annotated[
    Annotated[ModelConfig, Tag("ModelConfig")] | Annotated[NewModelConfig, Tag("NewModelConfig")],
    Discriminator(_kind, custom_error_type="model_or_architecture",
                  custom_error_message="needs the keys path, or architecture and tokenizer, not both"),
]
"""A model by its path, or a new one by its architecture."""
