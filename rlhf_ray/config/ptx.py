"""Pretraining text that is mixed into the policy's update."""

from pydantic import Field

from rlhf_ray.config.base import Section


class PtxConfig(Section):
    """PPO-ptx (Ouyang et al. 2022, eq. 2): against forgetting what the model knew, a language-modelling loss on
    pretraining text joins the policy's loss in every optimizer step."""

    path: str
    """jsonl, parquet or csv file, or a Hub data set name."""
    split: str = "train"
    """Split of a Hub data set."""
    column: str = "text"
    """Column that holds the text."""
    limit: int | None = Field(None, ge=1)
    """Use the first texts only."""
    max_tokens: int = Field(512, ge=2)
    """Longer texts are cut into rows of this many tokens; nothing is left out."""
    batch_size: int = Field(32, ge=1)
    """Rows of one optimizer step, over all ranks; as many as the samples of a mini-batch by default (OpenRLHF; Ouyang
    et al. 2022 took 8 times as many)."""
    coef: float = Field(0.05, ge=0)
    """Weight of the text's mean loss per token beside the policy's (OpenRLHF, whose two losses are means over tokens
    as ours; InstructGPT's 27.8 belongs to a normalisation that is not published). 0 measures the loss alone."""
