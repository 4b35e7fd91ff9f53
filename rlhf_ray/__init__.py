"""GRPO and PPO on Ray, from rewards or human feedback.

    from rlhf_ray import GRPOConfig, run

    run(GRPOConfig(model={"path": "..."}, rewards={...}, prompts={"path": "..."}))

Names are imported when they are first used, so that importing the package is instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_ray.config.load import load
    from rlhf_ray.config.stages import (
        GRPOConfig,
        PPOConfig,
        PreferencesStageConfig,
        ProcessRewardConfig,
        ReinforceConfig,
        RewardModelConfig,
        RLOOConfig,
        SFTConfig,
    )
    from rlhf_ray.errors import RLHFError
    from rlhf_ray.stages.run_stage import run

HOMES = {
    "run": "stages.run_stage",
    "load": "config.load",
    "SFTConfig": "config.stages",
    "PreferencesStageConfig": "config.stages",
    "RewardModelConfig": "config.stages",
    "ProcessRewardConfig": "config.stages",
    "PPOConfig": "config.stages",
    "GRPOConfig": "config.stages",
    "RLOOConfig": "config.stages",
    "ReinforceConfig": "config.stages",
    "RLHFError": "errors",
}
"""Public name -> its module."""

__all__ = ["GRPOConfig", "PPOConfig", "PreferencesStageConfig", "ProcessRewardConfig", "RLHFError", "RLOOConfig",
           "ReinforceConfig", "RewardModelConfig", "SFTConfig", "load", "run"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("rlhf-ray")
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *HOMES, "__version__"])
