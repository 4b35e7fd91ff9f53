"""Typed configuration: one file a section, `stages` for what a run reads as a whole, `load` to resolve it.

The classes of all sections can be imported from here:

    from rlhf_ray.config import FunctionReward, PromptsConfig

They are imported when they are first used, so that importing the package is instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_ray.config.algorithm import (
        AlgorithmConfig,
        DynamicSamplingConfig,
        KLConfig,
        PtxConfig,
        TextsSource,
    )
    from rlhf_ray.config.data import (
        DemonstrationsConfig,
        DemonstrationsSource,
        NumberedRows,
        PreferencesConfig,
        PreferencesSource,
        ProcessRowsConfig,
        ProcessRowsSource,
        PromptsConfig,
        PromptsSource,
        StepsConfig,
    )
    from rlhf_ray.config.environment_sources import (
        CommandSource,
        GymnasiumSource,
        McpSource,
        NemoGymSource,
        OpenEnvSource,
        PythonSource,
        ReasoningGymSource,
    )
    from rlhf_ray.config.environments import (
        EnvironmentConfig,
        EpisodeRunnerConfig,
        EpisodeTimeouts,
        FailurePolicy,
    )
    from rlhf_ray.config.estimators import (
        DrGRPOEstimator,
        GAEEstimator,
        GDPOEstimator,
        GRPOEstimator,
        ReinforceBaselineEstimator,
        ReinforceEstimator,
        ReinforcePPEstimator,
        RLOOEstimator,
    )
    from rlhf_ray.config.generation import (
        GenerationConfig,
        SamplingConfig,
        WeightsConfig,
    )
    from rlhf_ray.config.learner import (
        LoRAConfig,
        OptimizerConfig,
        PolicyConfig,
        RewardLearnerConfig,
        SFTLearnerConfig,
    )
    from rlhf_ray.config.losses import (
        CISPOLoss,
        ClipLoss,
        ImportanceConfig,
    )
    from rlhf_ray.config.model import (
        ArchitectureConfig,
        ModelConfig,
        NewModelConfig,
    )
    from rlhf_ray.config.rewards import (
        CodeReward,
        EnvironmentReward,
        ExactMatchReward,
        FunctionReward,
        HTTPReward,
        JSONSchemaReward,
        ModelReward,
        NumberReward,
        ProcessReward,
        RegexReward,
        VaderReward,
    )
    from rlhf_ray.config.run import (
        ClusterConfig,
        PlacementConfig,
        PoolConfig,
        RunConfig,
    )
    from rlhf_ray.config.sandbox import SandboxConfig
    from rlhf_ray.config.stages import (
        CriticConfig,
        PPOConfig,
        PreferencesStageConfig,
        ProcessRewardConfig,
        ReferenceConfig,
        RewardModelConfig,
        RewardModelTrainingConfig,
        RewardScorerConfig,
        SamplePairsConfig,
        SFTConfig,
        SupervisedTrainingConfig,
    )
    from rlhf_ray.config.training_loop import (
        BufferConfig,
        CheckpointConfig,
        CoordinatorConfig,
        EarlyStopConfig,
        EvaluationConfig,
        LoggingConfig,
    )

SECTIONS = {
    "algorithm": ("AlgorithmConfig", "DynamicSamplingConfig", "KLConfig", "PtxConfig", "TextsSource"),
    "data": ("DemonstrationsConfig", "DemonstrationsSource", "NumberedRows", "PreferencesConfig", "PreferencesSource",
             "ProcessRowsConfig", "ProcessRowsSource", "PromptsConfig", "PromptsSource", "StepsConfig"),
    "environment_sources": ("CommandSource", "GymnasiumSource", "McpSource", "NemoGymSource", "OpenEnvSource",
                            "PythonSource", "ReasoningGymSource"),
    "environments": ("EnvironmentConfig", "EpisodeRunnerConfig", "EpisodeTimeouts", "FailurePolicy"),
    "estimators": ("DrGRPOEstimator", "GAEEstimator", "GDPOEstimator", "GRPOEstimator", "RLOOEstimator",
                   "ReinforceBaselineEstimator", "ReinforceEstimator", "ReinforcePPEstimator"),
    "generation": ("GenerationConfig", "SamplingConfig", "WeightsConfig"),
    "learner": ("LoRAConfig", "OptimizerConfig", "PolicyConfig", "RewardLearnerConfig", "SFTLearnerConfig"),
    "losses": ("CISPOLoss", "ClipLoss", "ImportanceConfig"),
    "model": ("ArchitectureConfig", "ModelConfig", "NewModelConfig"),
    "rewards": ("CodeReward", "EnvironmentReward", "ExactMatchReward", "FunctionReward", "HTTPReward",
                "JSONSchemaReward", "ModelReward", "NumberReward", "ProcessReward", "RegexReward", "VaderReward"),
    "run": ("ClusterConfig", "PlacementConfig", "PoolConfig", "RunConfig"),
    "sandbox": ("SandboxConfig",),
    "stages": ("CriticConfig", "PPOConfig", "PreferencesStageConfig", "ProcessRewardConfig", "ReferenceConfig",
               "RewardModelConfig", "RewardModelTrainingConfig", "RewardScorerConfig", "SFTConfig",
               "SamplePairsConfig", "SupervisedTrainingConfig"),
    "training_loop": ("BufferConfig", "CheckpointConfig", "CoordinatorConfig", "EarlyStopConfig", "EvaluationConfig",
                      "LoggingConfig"),
}
"""Module -> the sections in it."""
HOMES = {name: module for module, names in SECTIONS.items() for name in names}

__all__ = ["AlgorithmConfig", "ArchitectureConfig", "BufferConfig", "CISPOLoss", "CheckpointConfig", "ClipLoss",
           "ClusterConfig", "CodeReward", "CommandSource", "CoordinatorConfig", "CriticConfig", "DemonstrationsConfig",
           "DemonstrationsSource", "DrGRPOEstimator", "DynamicSamplingConfig", "EarlyStopConfig", "EnvironmentConfig",
           "EnvironmentReward", "EpisodeRunnerConfig", "EpisodeTimeouts", "EvaluationConfig", "ExactMatchReward",
           "FailurePolicy", "FunctionReward", "GAEEstimator", "GDPOEstimator", "GRPOEstimator", "GenerationConfig",
           "GymnasiumSource", "HTTPReward", "ImportanceConfig", "JSONSchemaReward", "KLConfig", "LoRAConfig",
           "LoggingConfig", "McpSource", "ModelConfig", "ModelReward", "NemoGymSource", "NewModelConfig",
           "NumberReward", "NumberedRows", "OpenEnvSource", "OptimizerConfig", "PPOConfig", "PlacementConfig",
           "PolicyConfig", "PoolConfig", "PreferencesConfig", "PreferencesSource", "PreferencesStageConfig",
           "ProcessReward", "ProcessRewardConfig", "ProcessRowsConfig", "ProcessRowsSource", "PromptsConfig",
           "PromptsSource", "PtxConfig", "PythonSource", "RLOOEstimator", "ReasoningGymSource", "ReferenceConfig",
           "RegexReward", "ReinforceBaselineEstimator", "ReinforceEstimator", "ReinforcePPEstimator",
           "RewardLearnerConfig", "RewardModelConfig", "RewardModelTrainingConfig", "RewardScorerConfig", "RunConfig",
           "SFTConfig", "SFTLearnerConfig", "SamplePairsConfig", "SamplingConfig", "SandboxConfig", "StepsConfig",
           "SupervisedTrainingConfig", "TextsSource", "VaderReward", "WeightsConfig"]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *HOMES])
