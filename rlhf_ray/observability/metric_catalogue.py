"""Each metric's title and unit, and which direction is better; used by the report and the Ray gauges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeVar, cast

Value = TypeVar("Value", bound=float | None)


class Metric(NamedTuple):
    """A metric's description."""

    title: str
    unit: str = ""
    """Empty for plain numbers."""

    @property
    def axis(self) -> str:
        """Title with its unit, for an axis or a description."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


KL_ROUNDING = 1e-6
"""Nats a response below which a KL is shown as 0. Two passes in float32 over the same weights differ by less: 5e-7 in
the quickstart's first step, whose responses have 25 tokens."""
NONE_IF_ABSENT = ("share/", "reward/failed_tries/", "episodes/cause/")
"""Prefixes of metrics that a step's row has only if they are not 0."""
METRICS: dict[str, Metric] = {
    "reward/mean": Metric("Reward, mean", "reward units"),
    "reward/std": Metric("Reward, standard deviation", "reward units"),
    "reward/gold": Metric("Independent judge's score, mean", "judge units"),
    "kl/sequence": Metric("KL from the reference per response", "nats"),
    "kl/coef": Metric("KL penalty coefficient", "reward units per nat"),
    "response/length": Metric("Response length, mean", "tokens"),
    "response/finished": Metric("Responses that ended by themselves", "share"),
    "episodes/turns": Metric("Turns of an episode, mean", "turns"),
    "episodes/tool_calls": Metric("Tool calls of an episode, mean", "calls"),
    "episodes/tool_failures": Metric("Tool calls of an episode that the tool refused, mean", "calls"),
    "episodes/parse_failures": Metric("Tool calls of an episode that could not be read, mean", "calls"),
    "episodes/overridden": Metric("Turns of an episode for which its agent asked for other sampling, mean", "turns"),
    "episodes/abandoned": Metric("Turns of an episode whose answer its agent did not receive, mean", "turns"),
    "episodes/retries": Metric("Times that an episode was begun again, mean"),
    "episodes/interrupted": Metric("Times that an episode's environment or agent was lost with a neighbour's, mean"),
    "episodes/continued": Metric("Times that an episode went on after its runner or driver was lost, mean"),
    "episodes/restarted": Metric("Times that an episode with recorded turns began again, mean"),
    "episodes/masked": Metric("Episodes that are in no loss, baseline or mean", "share"),
    "episodes/cause/completed": Metric("Episodes whose environment was done", "share of episodes"),
    "episodes/cause/truncated_turn": Metric("Episodes of which a turn was cut off", "share of episodes"),
    "episodes/cause/truncated_episode": Metric("Episodes without tokens for another turn", "share of episodes"),
    "episodes/cause/truncated_turns": Metric("Episodes that used up their turns", "share of episodes"),
    "episodes/cause/error_parse": Metric("Episodes ended by a call that could not be read", "share of episodes"),
    "episodes/cause/error_timeout": Metric("Episodes past a deadline", "share of episodes"),
    "episodes/cause/error_environment": Metric("Episodes whose environment failed", "share of episodes"),
    "episodes/cause/error_agent": Metric("Episodes whose agent failed", "share of episodes"),
    "policy/loss": Metric("Policy loss, with the KL penalty and the entropy bonus that belong to it"),
    "policy/total_loss": Metric("Sum of the losses that the policy's optimizer minimises"),
    "policy/advantage_mean": Metric("Advantage before whitening, mean", "reward units"),
    "policy/entropy": Metric("Policy entropy", "nats per token"),
    "policy/clip_fraction": Metric("Tokens with a clipped policy ratio", "share"),
    "policy/approx_kl": Metric("KL from the policy before the update", "nats per token"),
    "policy/approx_kl_k1": Metric("KL from the policy before the update, mean log-ratio", "nats per token"),
    "policy/approx_kl_k2": Metric("KL from the policy before the update, half the mean square", "nats per token"),
    "policy/optimizer_steps": Metric("Policy's optimizer steps before algorithm.target_kl ended the update", "steps"),
    "policy/kl_penalty": Metric("KL penalty in the policy's loss, before its coefficient", "nats per token"),
    "policy/ptx_loss": Metric("Language-modelling loss on pretraining text", "nats per token"),
    "policy/router_aux_loss": Metric("Load-balancing loss of the policy's routers, before its coefficient"),
    "policy/ratio_mean": Metric("Probability ratio to the policy before the update, mean"),
    "policy/is_weight_mean": Metric("Importance weight of learner over generator, mean"),
    "policy/is_capped_fraction": Metric("Tokens whose importance weight was over the cap, or beyond the band", "share"),
    "policy/is_geometric_fraction": Metric("Tokens left out by the mask of geometric means", "share"),
    "policy/is_outlier_fraction": Metric("Tokens left out by the mask of outliers", "share"),
    "policy/zero_advantage_rows": Metric("Rows left out of the policy's passes, whose advantages are all 0", "share"),
    "policy/grad_norm": Metric("Policy gradient norm"),
    "policy/learning_rate": Metric("Policy learning rate"),
    "policy/skipped_steps": Metric("Policy's optimizer steps left out, not finite", "steps"),
    "critic/loss": Metric("Value loss"),
    "critic/clip_fraction": Metric("Tokens with a clipped value", "share"),
    "critic/value_mean": Metric("Values in the update, mean", "reward units"),
    "critic/value_variance": Metric("Values before the update, variance", "squared reward units"),
    "critic/return_mean": Metric("Returns, mean", "reward units"),
    "critic/return_variance": Metric("Returns, variance", "squared reward units"),
    "critic/error": Metric("Squared difference of values and returns, mean", "squared reward units"),
    "critic/explained_variance": Metric("Variance of returns explained by the critic", "share"),
    "critic/grad_norm": Metric("Critic gradient norm"),
    "critic/skipped_steps": Metric("Critic's optimizer steps left out, not finite", "steps"),
    "rollout/logprob_gap": Metric("Generator and learner log-probability gap, mean", "nats per token"),
    "rollout/logprob_gap_p99": Metric("Generator and learner log-probability gap, 99 % quantile", "nats per token"),
    "dynamic/drawn_per_kept": Metric("Prompts drawn for one that is trained on"),
    "dynamic/filtered": Metric("Prompts left out, since the scores of their samples are equal", "prompts"),
    "dynamic/filled": Metric("Prompts of equal scores trained on, since their places were drawn too often", "prompts"),
    "staleness/max": Metric("Oldest token trained on, maximum", "weight versions"),
    "staleness/mean": Metric("Oldest token trained on, mean", "weight versions"),
    "weights/publish_seconds": Metric("Weight publication", "seconds"),
    "weights/pause_seconds": Metric("Generation paused for new weights, longest of all generators", "seconds"),
    "weights/published_mb": Metric("Weights sent by the learner, once a node", "MiB"),
    "weights/version": Metric("Weight version"),
    "weights/canary_gap": Metric("Gap of a generator from the learner on fixed tokens, before the step", "nats"),
    "weights/canary_bound": Metric("Largest gap that is tolerated", "nats"),
    "weights/canary_moved": Metric("How far the update before moved the fixed tokens' log-probabilities", "nats"),
    "weights/canary_seconds": Metric("Learner's passes for this comparison", "seconds"),
    "buffer/samples": Metric("Samples in the replay buffer", "samples"),
    "buffer/mb": Metric("Experience in the object store", "MiB"),
    "coordinator/bytes_per_sample": Metric("Bytes that the coordinator handles per sample", "bytes"),
    "faults/lost_workers": Metric("Workers that died or hung"),
    "faults/seconds_down": Metric("Time in which workers that came back were missing", "worker seconds"),
    "faults/redispatched": Metric("Samples and calls that other workers made again"),
    "faults/missing_workers": Metric("Workers that could not be replaced, at the end of the step"),
    "faults/damaged_buckets": Metric("Buckets of weights that arrived damaged at a generator"),
    "throughput/samples_per_second": Metric("Samples trained on", "samples per second"),
    "throughput/tokens_per_second": Metric("Tokens trained on", "tokens per second"),
    "checkpoint/pause_seconds": Metric("Training stood still for the checkpoint before this step", "seconds"),
    "samples/bytes": Metric("The step's file in samples/", "bytes"),
    "samples/write_s": Metric("An assembler wrote the step's samples, beside the training", "seconds"),
    "time/step": Metric("Whole step", "seconds"),
    "time/generate": Metric("Generation", "seconds"),
    "time/episodes": Metric("Episodes", "seconds"),
    "time/reference": Metric("Reference log-probabilities", "seconds"),
    "time/reward": Metric("Reward scoring", "seconds"),
    "time/values": Metric("Critic's values", "seconds"),
    "time/logprobs": Metric("Policy's log-probabilities", "seconds"),
    "time/assemble": Metric("Assembly of experience", "seconds"),
    "time/policy_update": Metric("Policy update", "seconds"),
    "time/critic_update": Metric("Critic update", "seconds"),
    "time/publish": Metric("Weight publication", "seconds"),
    "sft/loss": Metric("Training loss", "nats per token"),
    "sft/learning_rate": Metric("Learning rate"),
    "reward/quarantined": Metric("Samples left out so far, for want of a score", "samples"),
    "reward_model/loss": Metric("Pairwise loss", "nats per pair"),
    "reward_model/accuracy": Metric("Training pairs ranked right", "share"),
    "reward_model/learning_rate": Metric("Learning rate"),
    "eval/loss": Metric("Held-out loss", "nats"),
    "process_reward/loss": Metric("Loss of step labels", "nats per step"),
    "process_reward/accuracy": Metric("Training steps judged right", "share"),
    "process_reward/probability": Metric("Probability of a good step, mean"),
    "process_reward/learning_rate": Metric("Learning rate"),
    "eval/accuracy": Metric("Held-out accuracy", "share"),
    "eval/unscored": Metric("Held-out prompts left out for want of a score", "prompts"),
    "eval/solved": Metric("Held-out episodes solved", "share"),
    "eval/failed": Metric("Held-out episodes that failed, which have no reward", "episodes"),
    "eval/turns": Metric("Turns of a held-out episode, mean", "turns"),
    "eval/probability": Metric("Probability of a good held-out step, mean"),
}

HEADLINES = {
    "reward/mean": "reward",
    "reward/gold": "gold",
    "eval/reward": "eval_reward",
    "kl/sequence": "kl",
    "response/length": "length",
    "policy/entropy": "entropy",
    "policy/clip_fraction": "clip_fraction",
    "policy/grad_norm": "grad_norm",
    "policy/learning_rate": "learning_rate",
    "critic/explained_variance": "explained_variance",
    "staleness/mean": "staleness",
    "throughput/samples_per_second": "samples_per_second",
    "throughput/tokens_per_second": "tokens_per_second",
    "sft/loss": "loss",
    "sft/learning_rate": "learning_rate",
    "sft/grad_norm": "grad_norm",
    "reward_model/loss": "loss",
    "reward_model/accuracy": "accuracy",
    "reward_model/learning_rate": "learning_rate",
    "reward_model/grad_norm": "grad_norm",
    "process_reward/loss": "loss",
    "process_reward/accuracy": "accuracy",
    "process_reward/learning_rate": "learning_rate",
    "process_reward/grad_norm": "grad_norm",
    "eval/loss": "eval_loss",
    "eval/accuracy": "eval_accuracy",
}
"""The metrics that are watched most, by the names that trackers show them under: those have no section, so their charts
come first. A row has at most one metric of a name."""


def describe(name: str) -> Metric:
    """A metric's description; one that is not listed is described by its name."""
    return METRICS.get(name) or Metric(readable(name))


def readable(name: str) -> str:
    """`policy_update` as `Policy update`."""
    words = name.replace("/", " ").replace("_", " ").split()
    text = " ".join("KL" if word == "kl" else word for word in words)
    return text[:1].upper() + text[1:]


def better(name: str) -> Literal["higher", "lower"] | None:
    """The direction in which this metric improves; None when neither is better (length, KL, entropy)."""
    if name.startswith(("reward/failures/", "reward/failed_tries/", "reward/quarantined")):
        return "lower"
    if "pass@" in name:
        return "higher"
    words = set(name.lower().replace("/", "_").split("_"))
    if words & {"loss", "perplexity", "error", "toxicity", "failed", "failures"}:
        return "lower"
    if words & {"reward", "gold", "score", "accuracy", "judge", "win", "finished", "positive", "sentiment",
                "solved", "completed"}:
        return "higher"
    return None


def shown(metrics: Mapping[str, Value]) -> dict[str, Value]:
    """Metrics of an evaluation or a step as people read them: a KL that is rounding is 0, and a reward's only component
    is not repeated."""
    reward = metrics.get("reward")
    components = [name for name in metrics if name.startswith("reward/")]
    found = dict(metrics)
    if len(components) == 1 and reward is not None:
        value = found[components[0]]
        if value is not None and math.isclose(value, reward, rel_tol=1e-6):
            del found[components[0]]
    kl = found.get("kl")
    if kl is not None and abs(kl) < KL_ROUNDING:
        found["kl"] = cast(Value, 0.0)
    return found
