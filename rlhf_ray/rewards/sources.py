"""From the configuration's sections to sources of rewards."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.rewards import (
    ExactMatchReward,
    FunctionReward,
    HTTPReward,
    JSONSchemaReward,
    ModelReward,
    NumberReward,
    ProcessReward,
    RegexReward,
    RewardConfig,
)
from rlhf_ray.rewards.composition import WeightedSum
from rlhf_ray.rewards.exact_match import exact_match_source
from rlhf_ray.rewards.function import FunctionSource
from rlhf_ray.rewards.http.source import HTTPSource
from rlhf_ray.rewards.local_model import ModelSource
from rlhf_ray.rewards.local_source import PROBED
from rlhf_ray.rewards.number import number_source
from rlhf_ray.rewards.patterns import json_schema_source, regex_source
from rlhf_ray.rewards.process_model import ProcessModelSource
from rlhf_ray.rewards.protocol import RewardSource


def make_sources(
    rewards: Mapping[str, RewardConfig], policy: ModelConfig, micro_batch_tokens: int, longest: int = PROBED
) -> WeightedSum:
    """All components of a run's reward, not started yet."""
    return WeightedSum({name: (config.weight, make_source(name, config, policy, micro_batch_tokens, longest))
                        for name, config in rewards.items()})


def make_source(
    name: str, config: RewardConfig, policy: ModelConfig, micro_batch_tokens: int, longest: int = PROBED
) -> RewardSource:
    """One component, not started yet.

    Args:
        name: of the component, for messages.
        policy: whose tokenizer made the token ids of requests.
        micro_batch_tokens: most tokens of one forward pass, for local models.
        longest: most tokens of the policy's rows.
    """
    match config:
        case ModelReward():
            return ModelSource(name, config, policy, micro_batch_tokens, longest)
        case FunctionReward():
            return FunctionSource(name, config)
        case ExactMatchReward():
            return exact_match_source(name, config)
        case NumberReward():
            return number_source(name, config)
        case RegexReward():
            return regex_source(name, config)
        case JSONSchemaReward():
            return json_schema_source(name, config)
        case ProcessReward():
            return ProcessModelSource(name, config, policy, micro_batch_tokens, longest)
        case HTTPReward():
            return HTTPSource(name, config)
