"""What packing gives: the learner on rows laid end to end, beside rows padded to the longest of them, in the learner
itself and in a bare loop of torch.

The goal of both is the workload's padding ratio: computing on that many fewer tokens should be that much faster. Beside
itself the learner shows what packing alone gives; beside the loop, what somebody gains who trains on padded rows today.
"""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.comparison import Benchmark, compare
from benchmarks.figure import Figure
from benchmarks.learner_side import RESPONSE_TOKENS, LearnerSide, experience, padding_ratio
from benchmarks.learner_vs_torch import BareTorchSide
from rlhf_ray.records import Batch, Experience, offsets_of
from rlhf_ray.roles.micro_batch import MicroBatch, PartLoss
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.roles.ppo_update import Update


class PaddedPolicyLearner(PolicyLearner):
    """Works out log-probabilities at every place that has room for a response token, and uses the real ones."""

    def loss(self, part: Batch, update: Update) -> PartLoss:
        """As the policy learner's."""
        micro = MicroBatch(part, self.engine.device)
        room = torch.as_tensor(np.flatnonzero(response_room(part.response_mask.reshape(len(part), -1))))
        logprobs, _ = self.engine.forward(micro.tokens, micro.packing, room)
        return self.objective(micro, logprobs[torch.isin(room, micro.predicted)], None, update)


class PaddedLearnerSide(LearnerSide):
    """Every row is given its padding as tokens of its own, which carry no loss."""

    learner = PaddedPolicyLearner

    def rows(self, whole: Experience) -> Experience:
        """The same rows, all as long as the longest; padding follows the response, where no real token sees it."""
        longest, count = int(whole.lengths.max()), len(whole)
        places = np.concatenate([row * longest + np.arange(length) for row, length in enumerate(whole.lengths)])
        columns: dict[str, Any] = {}
        for column in (f.name for f in fields(Experience) if f.metadata.get("axis") == "token"):
            values = getattr(whole, column)
            if values is not None:
                columns[column] = np.zeros(count * longest, dtype=values.dtype)
                columns[column][places] = values
        return replace(whole, offsets=offsets_of(np.full(count, longest)), **columns)


def response_room(mask: np.ndarray) -> np.ndarray:
    """[N * L] True from each row's first response token on, for as many tokens as a response may have, to the row's
    end; from the response mask [N, L]."""
    since = np.arange(mask.shape[1]) - mask.argmax(axis=1)[:, None]
    return ((since >= 0) & (since < RESPONSE_TOKENS)).ravel()


class PaddedTorchSide(BareTorchSide):
    """The bare loop as most write it: rows side by side, padded on the right, where causal attention does not look."""

    attention = "sdpa"

    def logprobs(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """As the packed loop's; logits at every place that has room for a response token."""
        real, chosen = self.grid(rows)
        hidden = self.model.model(input_ids=self.tokens[chosen], use_cache=False).last_hidden_state.flatten(0, 1)
        mask = self.mask[chosen] & real
        room = torch.as_tensor(np.flatnonzero(response_room(mask.numpy())))
        logits, chosen, answered = self.model.lm_head(hidden[room - 1]), chosen.flatten()[room], mask.flatten()[room]
        logprobs = -cross_entropy(logits, self.tokens[chosen], reduction="none")
        return logprobs[answered], chosen[answered]

    def longest(self, lengths: Tensor) -> int:
        """That of the whole update, as for the learner."""
        return int(self.lengths.max())


ITSELF = Benchmark(
    ours=LearnerSide, theirs=PaddedLearnerSide, ours_is="PolicyLearner, packed rows",
    theirs_is="PolicyLearner, rows padded to the longest", unit="tokens/s", goal=1.0, tolerance=1e-3,
)
LOOP = replace(ITSELF, theirs=PaddedTorchSide, theirs_is="bare torch loop, rows padded to the longest")


def measure(directory: Path, repeats: int) -> dict[str, Figure]:
    """Both figures, held against the padding ratio of the rows that were used."""
    goal = round(padding_ratio(experience(directory).lengths), 3)
    return {name: replace(compare(name, sides, directory, repeats), goal=goal)
            for name, sides in (("learner_vs_padded", ITSELF), ("learner_vs_padded_torch", LOOP))}
