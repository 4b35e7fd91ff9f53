"""Sources of rewards by a rule, from their sections. Nothing here imports torch: readers of prompts check answers."""

from __future__ import annotations

from rlhf_ray.config.rewards import ExactMatchReward, JSONSchemaReward, NumberReward, RegexReward
from rlhf_ray.rewards.answer_matching import exact_match_source, number_source
from rlhf_ray.rewards.regex_and_json_schema import json_schema_source, regex_source
from rlhf_ray.rewards.rules import GuardedRuleSource, RuleSource

RuleReward = ExactMatchReward | NumberReward | RegexReward | JSONSchemaReward


def rule_source(name: str, config: RuleReward) -> RuleSource | GuardedRuleSource:
    """The source of a section, not started yet."""
    match config:
        case ExactMatchReward():
            return exact_match_source(name, config)
        case NumberReward():
            return number_source(name, config)
        case RegexReward():
            return regex_source(name, config)
        case JSONSchemaReward():
            return json_schema_source(name, config)
