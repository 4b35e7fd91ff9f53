"""The coordinator's state that checkpoints contain: step, data cursor, KL coefficient, samples to admit again."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rlhf_ray.algorithms.kl import AdaptiveKL, FixedKL
from rlhf_ray.algorithms.score_shaping import RunningMoments
from rlhf_ray.checkpoint.state_files import check_complete
from rlhf_ray.config.algorithm import KLConfig
from rlhf_ray.config.training_loop import EarlyStopConfig
from rlhf_ray.coordinator.best_checkpoint import BestSoFar
from rlhf_ray.coordinator.early_stop import EarlyStop
from rlhf_ray.data.contents import Contents, check_contents
from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.records import RewardTerms, SampleKey
from rlhf_ray.replay.chunk import Chunk


def kl_controller(config: KLConfig) -> FixedKL:
    """The configured controller of the KL coefficient."""
    if config.kind == "adaptive":
        return AdaptiveKL(config.coef, config.target, config.horizon)
    return FixedKL(config.coef)


@dataclass
class RunState:
    """The run between two steps. Each update makes a version of the weights: version and `step` are the same number."""

    kl: FixedKL
    cursor: PromptCursor
    step: int = 0
    """Updates made so far."""
    published: int = 0
    """Version of the weights that all generators hold: equal to `step`, except between an update and the end of its
    publication."""
    samples: int = 0
    """Samples trained on so far."""
    scores: RunningMoments = field(default_factory=RunningMoments)
    """Of the scores trained on so far, before shaping."""
    unmeasured: bool = True
    """Whether an evaluation of the present step is due."""
    best: BestSoFar = field(default_factory=BestSoFar)
    """The best evaluation so far."""
    early_stop: EarlyStop = field(default_factory=lambda: EarlyStop(EarlyStopConfig()))
    """Metrics of the last steps, to stop a run that diverges."""
    held_out: Contents = field(default_factory=list)
    """Digest of each data set of the evaluation's prompts."""
    returned: list[SampleKey] = field(default_factory=list)
    """Samples that were admitted and lost their place; they are the next to be admitted."""
    most_prompts: int | None = None
    """How many prompts the run may draw: those of `run.epochs`, rounded up to whole batches, where dynamic sampling
    draws more of them than it trains on. None for any number."""

    def observe_scores(self, scores: np.ndarray) -> None:
        """Update the running moments with the scores `[N]` of a trained batch."""
        self.scores.update(torch.from_numpy(scores[~np.isnan(scores)]))

    def reward_terms(self, normalisation: str) -> RewardTerms:
        """Terms for the rewards of a chunk assembled now; `normalisation` as in `AlgorithmConfig`."""
        mean = self.scores.mean if normalisation == "standardise" and self.scores.count > 1 else 0.0
        return RewardTerms(self.kl.value, mean, 1.0 if normalisation == "none" else self.scores.deviation)

    def state_dict(self, under_way: Iterable[Chunk]) -> dict[str, Any]:
        """Plain types for the checkpoint, with the keys of the chunks under way."""
        return {
            "step": self.step,
            "samples": self.samples,
            "kl": self.kl.state_dict(),
            "scores": self.scores.state_dict(),
            "unmeasured": self.unmeasured,
            "best": self.best.state_dict(),
            "early_stop": self.early_stop.state_dict(),
            "cursor": self.cursor.state_dict(),
            "held_out": self.held_out,
            "in_flight": [[chunk.place.plain(), _plain(chunk.keys)] for chunk in under_way],
            "returned": _plain(self.returned),
            "most_prompts": self.most_prompts,
        }

    def load_state_dict(self, state: dict[str, Any], under_way: Iterable[Chunk] = ()) -> None:
        """Continue from a `state_dict`, whose weights the generators are about to hold.

        Args:
            under_way: the chunks that were under way, from the buffer; they get their keys.

        Raises:
            CheckpointError: the state is incomplete, or as `PromptCursor.load_state_dict`.
        """
        check_complete(state, self.state_dict(()), "the checkpoint's state of the run")
        # Of an evaluation that is kept; others may be configured as one likes. One file may be several parts of a mix.
        for source in {name for name, _ in self.held_out}:
            former, present = ([part for part in parts if part[0] == source]
                               for parts in (state["held_out"], self.held_out))
            if len(former) == len(present):
                check_contents(former, present)
        self.cursor.load_state_dict(state["cursor"])
        self.kl.load_state_dict(state["kl"])
        self.scores.load_state_dict(state["scores"])
        self.best.load_state_dict(state["best"])
        self.early_stop.load_state_dict(state["early_stop"])
        self.step = state["step"]
        self.samples = state["samples"]
        self.unmeasured = state["unmeasured"]
        self.published = self.step
        keys_by_place = dict(state["in_flight"])
        for chunk in under_way:
            chunk.keys = [SampleKey(*key) for key in keys_by_place[chunk.place.plain()]]
        self.returned = [SampleKey(*key) for key in state["returned"]]
        if self.most_prompts is None:  # as where the run's own config.yaml is given, which has steps in place of epochs
            self.most_prompts = state["most_prompts"]


def _plain(keys: list[SampleKey]) -> list[list[int]]:
    return [list(key.numbers) for key in keys]
