"""The report's charts and their order, and what a healthy run looks like in each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhf_ray.config.environments import CAUSES
from rlhf_ray.observability.bottleneck import FACTS, PHASES, PUBLISH

ROLE_COLOURS = {facts.worker: facts.colour for facts in FACTS.values()}
"""Colours by the names of the workers."""


def _colour(phase: str, section: str) -> str:
    facts = FACTS[section]
    return f"{facts.colour}/55" if phase == facts.passes else facts.colour


PHASE_COLOURS = {**{phase: _colour(phase, section) for phase, section in PHASES.items()}, PUBLISH: "weights"}
"""Colours of the kinds of work in a step (`time/<phase>`): one hue per role, paler for its forward passes."""

CAUSE_METRICS = tuple(f"episodes/cause/{cause}" for cause in CAUSES)
CAUSE_NAMES = tuple(cause.replace("_", " ") for cause in CAUSES)
CAUSE_COLOURS = ("weights", "reference", "generator", "episode_runner", "reward", "critic", "policy",
                 "policy/55")
"""Of the causes of `config.environments`, in their order."""
COMPONENT_COLOURS = ("reward", "generator", "weights", "reference", "critic", "policy")
"""Colours of a reward's components, used in turn."""


@dataclass(frozen=True)
class ChartPlan:
    """A line chart of the metrics that the run has numbers for."""

    title: str
    metrics: tuple[str, ...]
    section: str
    healthy: str
    colours: tuple[str, ...] = ("generator", "critic")
    axis: str = field(kw_only=True)
    """Title of the y axis with its unit, short enough for a card."""
    ticks: str = ""
    """d3 format of the y axis: ".0%" for shares, which then start at zero."""
    only_if_changing: bool = False
    names: tuple[str, ...] = ()
    """Names of the lines in the legend."""
    smooth: bool = True
    """Long lines get a running mean; off for values that are set and not measured."""


CHARTS = (
    ChartPlan(
        "Reward", ("reward/mean",), "Learning",
        "Rises, then levels off. It is what the policy is trained on: a climb that the judge or the texts do not share "
        "is reward hacking.",
        axis="Mean score (reward units)",
    ),
    ChartPlan(
        "Independent judge", ("reward/gold",), "Learning",
        "Rises together with the reward. If it turns down while the reward still climbs, stop there or raise the KL "
        "coefficient.",
        ("weights",),
        axis="Mean score (judge units)",
    ),
    ChartPlan(
        "Distance from the reference", ("kl/sequence",), "Learning",
        "Starts near 0 and grows slowly, typically to a few nats. A jump, or steady growth without more reward, means "
        "the penalty is too weak; values well below 0 point to a mismatch of models.",
        ("reference",),
        axis="KL per response (nats)",
    ),
    ChartPlan(
        "KL coefficient", ("kl/coef",), "Learning",
        "An adaptive coefficient settles once the KL reaches its target.",
        ("reference",), only_if_changing=True, smooth=False, axis="β (reward units per nat)",
    ),
    ChartPlan(
        "Response length", ("response/length",), "Learning",
        "Moves slowly. A steady climb to the limit, or a collapse to a few tokens, is the reward model's taste for "
        "length rather than quality.",
        axis="Mean length (tokens)",
    ),
    ChartPlan(
        "Responses that ended by themselves", ("response/finished",), "Learning",
        "Steady or rising. A fall means responses run into the token limit.",
        ticks=".0%", axis="Share of responses",
    ),
    ChartPlan(
        "Held-out episodes solved", ("eval/solved",), "Learning",
        "Rises. A training reward that rises alone is learned from what only the training rows have.",
        ("generator",), axis="Share of episodes", ticks=".0%", smooth=False,
    ),
    ChartPlan(
        "Turns and tool calls", ("episodes/turns", "episodes/tool_calls"), "Learning",
        "Settle where the tasks need them. A fall to one turn means that the policy answers without its tools; a climb "
        "to max_turns means that it calls them without end.",
        ("episode_runner", "generator"), names=("Turns", "Tool calls"), axis="Mean of an episode",
    ),
    ChartPlan(
        "Tool calls that failed", ("episodes/parse_failures", "episodes/tool_failures"), "Learning",
        "Fall towards 0 as the policy learns to write calls and arguments. A rise after a change of template or tools "
        "means that calls are written in another format than tool_format reads.",
        ("critic", "reward"), names=("Could not be read", "Refused by the tool"), axis="Mean of an episode",
    ),
    ChartPlan(
        "How episodes end", CAUSE_METRICS, "Learning",
        "Most complete. Many that use up turns or tokens: raise max_turns or max_tokens, or look at the samples. "
        "Errors of environments and deadlines say nothing about the policy, and belong near 0.",
        CAUSE_COLOURS, names=CAUSE_NAMES, axis="Share of episodes", ticks=".0%",
    ),
    ChartPlan(
        "Episodes disturbed", ("episodes/masked", "episodes/retries", "episodes/interrupted"), "System",
        "Near 0. Masked episodes are trained on by nobody; the others cost time alone.",
        ("critic", "reference", "weights"), names=("Masked", "Begun again", "Lost with a neighbour"),
        axis="Mean of an episode",
    ),
    ChartPlan(
        "Dynamic sampling", ("dynamic/drawn_per_kept",), "Learning",
        "Near 1 while most prompts have right and wrong answers. Growth means that more and more prompts are too easy "
        "or too hard, and generation takes longer: take other prompts.",
        axis="Prompts drawn for one kept",
    ),
    ChartPlan(
        "Loss", ("sft/loss", "reward_model/loss", "process_reward/loss", "eval/loss"), "Learning",
        "Falls fast, then slowly. Held-out loss that rises while training loss falls is overfitting: stop earlier.",
        (*("generator",) * 3, "critic"), names=(*("Training",) * 3, "Held out"), axis="Loss (nats)",
    ),
    ChartPlan(
        "Accuracy", ("reward_model/accuracy", "process_reward/accuracy", "eval/accuracy"), "Learning",
        "Rises from about 50%, which is chance. Held-out accuracy of 65–80% is usual for human preferences; near 100% "
        "points to a shortcut in the data.",
        ("generator", "generator", "critic"), names=("Training", "Training", "Held out"),
        axis="Share of pairs or steps judged right", ticks=".0%",
    ),
    ChartPlan(
        "Entropy", ("policy/entropy",), "Optimisation",
        "Declines gently. A plunge towards 0 means the policy repeats itself; growth without end means it falls apart.",
        ("policy",),
        axis="Entropy (nats per token)",
    ),
    ChartPlan(
        "Clipped updates", ("policy/clip_fraction", "critic/clip_fraction"), "Optimisation",
        "The policy stays below about 20%. More means steps that are too large: lower its learning rate or take fewer "
        "epochs.",
        ("policy", "critic"), names=("Policy", "Critic"), axis="Share of tokens clipped", ticks=".0%",
    ),
    ChartPlan(
        "Size of the policy's update", ("policy/approx_kl",), "Optimisation",
        "Small and steady, around 0.001–0.05. Spikes go before instability.",
        ("policy",),
        axis="KL old to new (nats per token)",
    ),
    ChartPlan(
        "Policy loss", ("policy/loss",), "Optimisation",
        "Hovers around 0: advantages are centred, so its level says little. Watch for spikes.",
        ("policy",),
        axis="Loss (advantage units)",
    ),
    ChartPlan(
        "Value loss", ("critic/loss",), "Optimisation",
        "Falls at first, then follows the reward's scale. Growth means the critic lags behind the policy.",
        ("critic",),
        axis="Loss (squared reward units)",
    ),
    ChartPlan(
        "Explained variance", ("critic/explained_variance",), "Optimisation",
        "Climbs from about 0 towards 1. Below 0 the critic is worse than a constant, and advantages are noise.",
        ("critic",), axis="Share of variance of returns",
    ),
    ChartPlan(
        "Gradient norms", ("policy/grad_norm", "critic/grad_norm"), "Optimisation",
        "Steady (shown before clipping). Spikes now and then are clipped away; a lasting rise is not.",
        ("policy", "critic"), names=("Policy", "Critic"), axis="Global gradient norm",
    ),
    ChartPlan(
        "Learning rate", ("policy/learning_rate", "sft/learning_rate", "reward_model/learning_rate",
                          "process_reward/learning_rate"), "Optimisation",
        "Follows the schedule of the configuration.",
        ("policy",) * 4, axis="Learning rate", ticks="~e", only_if_changing=True, smooth=False,
    ),
    ChartPlan(
        "Samples trained on", ("throughput/samples_per_second",), "System",
        "Flat. A slow decline follows growing responses; a drop is a lost worker or a full buffer.",
        axis="Samples per second",
    ),
    ChartPlan(
        "Tokens trained on", ("throughput/tokens_per_second",), "System",
        "Flat. It should rise, or hold, when responses get longer.",
        axis="Tokens per second",
    ),
    ChartPlan(
        "Staleness", ("staleness/mean", "staleness/max"), "System",
        "Never above coordinator.max_staleness; 0 in synchronous PPO.",
        names=("Mean", "Maximum"), axis="Oldest token (weight versions)", smooth=False,
    ),
    ChartPlan(
        "Weight publication", ("weights/publish_seconds", "weights/pause_seconds"), "System",
        "Flat, far below the step's time. Generation continues while new weights are received; it pauses only while "
        "they replace the old ones.",
        ("weights", "generator"),
        names=("Whole publication", "Generation paused"), axis="Time per publication (seconds)",
    ),
    ChartPlan(
        "Generator against learner", ("rollout/logprob_gap", "rollout/logprob_gap_p99"), "System",
        "Small and flat: numerical noise (below about 0.01 in float32, 0.05 in bfloat16). A rise means that the two do "
        "not compute the same policy.",
        ("weights", "generator"), names=("Mean", "99 % of tokens are below"),
        axis="Gap of log-probabilities (nats per token)",
    ),
    ChartPlan(
        "Replay buffer", ("buffer/samples",), "System",
        "Returns to the same level every step. Growth means learners do not keep up.",
        axis="Samples held",
    ),
)


def reward_components(names: Sequence[str]) -> tuple[ChartPlan, ChartPlan]:
    """The components of a reward that has several, and how often each could not be judged normally."""
    colours = tuple(itertools.islice(itertools.cycle(COMPONENT_COLOURS), len(names)))
    return (
        ChartPlan(
            "Components of the reward", tuple(f"reward/component/{name}" for name in names), "Learning",
            "Each before its weight. One that climbs while another falls is being traded for it: weights say at which "
            "rate.",
            colours, axis="Mean score (reward units)", names=tuple(names),
        ),
        ChartPlan(
            "Not judged in the ordinary way", tuple(f"reward/failures/{name}" for name in names), "Learning",
            "Near 0, or falling towards it: responses without what a rule looks for, calls that had to be repeated.",
            colours, axis="Share of responses", ticks=".0%", names=tuple(names),
        ),
    )
