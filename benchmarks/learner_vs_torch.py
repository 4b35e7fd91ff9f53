"""What the learner costs or gains: its update against the few lines of torch that make the same update.

The bare loop is what somebody in a hurry to be fast writes by hand: a mini-batch's rows end to end in one forward and
backward pass, padding inside attention alone, logits where a response token needs them, fused AdamW. It makes the same
steps: same rows, clipped loss, gradient clipping.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM

from benchmarks.comparison import Benchmark
from benchmarks.learner_side import ALGORITHM, CLIP, LEARNER, LEARNING_RATE, ROWS, LearnerSide, experience
from benchmarks.workload import SEED
from rlhf_ray.roles.ppo_update import mini_batches


class BareTorchSide:
    """A loop without DeepSpeed, records or statistics."""

    attention = "rows"
    """As `transformers` knows it."""

    def __init__(self, directory: Path) -> None:
        torch.set_num_threads(1)
        AttentionInterface.register("rows", attention_within_rows)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32,
                                                          attn_implementation=self.attention)
        self.model.train()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0,
                                            betas=LEARNER.optimizer.betas, eps=LEARNER.optimizer.eps, fused=True)
        whole = experience(directory)
        self._starts, self.lengths = torch.as_tensor(whole.offsets[:-1]), torch.as_tensor(whole.lengths)
        self.tokens, self.mask = torch.as_tensor(whole.tokens).long(), torch.as_tensor(whole.response_mask)
        self._old, self.advantages = torch.as_tensor(whole.old_logprobs), torch.as_tensor(whole.advantages)
        self._step, self._norms = 0, [0.0]

    def run(self) -> float:
        """One pass over all rows in mini-batches; returns their tokens."""
        self._step += 1
        plan = mini_batches(ROWS, ALGORITHM.epochs, ALGORITHM.mini_batches, SEED, self._step)
        self._norms = [self._optimizer_step(rows) for rows in plan]
        return float(self.lengths.sum())

    def proof(self) -> list[float]:
        """Mean norm of the gradients."""
        return [float(np.mean(self._norms))]

    def states(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """[n, hidden] states before the rows' response tokens, and those tokens' numbers in the whole batch."""
        real, chosen = self.grid(rows)
        positions = torch.arange(real.shape[1]).expand_as(real)[real]
        chosen = chosen[real]  # [T] the rows end to end
        hidden = self.model.model(input_ids=self.tokens[chosen][None], position_ids=positions[None], use_cache=False,
                                  real=real).last_hidden_state[0]
        predicted = self.mask[chosen].nonzero()[:, 0]
        return hidden[predicted - 1], chosen[predicted]

    def logprobs(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Of the rows' response tokens, and those tokens' numbers in the whole batch."""
        states, chosen = self.states(rows)
        return -cross_entropy(self.model.lm_head(states), self.tokens[chosen], reduction="none"), chosen

    def grid(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """[N, L] which places of the padded rows hold tokens, and the numbers of those in the whole batch."""
        lengths = self.lengths[rows]
        places = torch.arange(self.longest(lengths))
        real = places < lengths[:, None]
        return real, (self._starts[rows][:, None] + places).where(real, 0)

    def longest(self, lengths: Tensor) -> int:
        """Width of the grid of rows with these lengths."""
        return int(lengths.max())

    def loss(self, rows: np.ndarray) -> Tensor:
        """PPO's clipped loss of a mini-batch."""
        logprobs, chosen = self.logprobs(rows)
        ratio, gain = (logprobs - self._old[chosen]).exp(), self.advantages[chosen]
        clipped = ratio.clamp(1 - CLIP.clip_low, 1 + CLIP.clip_high)
        return -torch.minimum(ratio * gain, clipped * gain).mean()

    def _optimizer_step(self, rows: np.ndarray) -> float:
        self.loss(rows).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), LEARNER.optimizer.grad_clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm)


def attention_within_rows(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, real: Tensor,
    scaling: float | None = None, **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of packed rows, laid out as the grid [N, L] whose places `real` hold tokens."""
    places = real.flatten().nonzero()[:, 0]

    def grid(packed: Tensor) -> Tensor:
        flat = packed[0].transpose(0, 1)
        laid_out = flat.new_zeros(real.numel(), *flat.shape[1:]).index_copy(0, places, flat)
        return laid_out.view(*real.shape, *flat.shape[1:]).transpose(1, 2)

    out = scaled_dot_product_attention(grid(query), grid(key), grid(value), is_causal=True, scale=scaling)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, places)[None], None


BENCHMARK = Benchmark(
    ours=LearnerSide, theirs=BareTorchSide, ours_is="PolicyLearner", theirs_is="bare torch loop, packed rows",
    unit="tokens/s", goal=0.9, tolerance=1e-3,
)
