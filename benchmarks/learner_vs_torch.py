"""What the learner costs or gains: its update against the few lines of torch that make the same update.

The bare loop does what such loops do: whole mini-batches as padded rows, log-probabilities of every position, one
forward and backward pass, fused AdamW. It makes the same steps: same rows, clipped loss, gradient clipping.
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from benchmarks.comparison import Benchmark
from benchmarks.learner_side import ALGORITHM, LEARNER, LEARNING_RATE, ROWS, LearnerSide
from benchmarks.workload import SEED, experience
from rlhf_ray.records import Experience
from rlhf_ray.roles.updates import mini_batches


class BareTorchSide:
    """A loop without DeepSpeed, packing or records."""

    def __init__(self, directory: Path) -> None:
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
        self._model.train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, weight_decay=0.0,
                                            betas=LEARNER.optimizer.betas, eps=LEARNER.optimizer.eps, fused=True)
        whole = experience(directory, ROWS)
        self._lengths = torch.as_tensor(whole.lengths)
        self._tokens, self._mask = padded(whole, "tokens").long(), padded(whole, "response_mask").float()
        self._old, self._advantages = padded(whole, "old_logprobs"), padded(whole, "advantages")
        self._step, self._norms = 0, [0.0]

    def run(self) -> float:
        """One pass over all rows in mini-batches; returns their tokens, padding not counted."""
        self._step += 1
        plan = mini_batches(ROWS, ALGORITHM.epochs, ALGORITHM.mini_batches, SEED, self._step)
        self._norms = [self._optimizer_step(torch.as_tensor(rows)) for rows in plan]
        return float(self._lengths.sum())

    def proof(self) -> list[float]:
        """Mean norm of the gradients."""
        return [sum(self._norms) / len(self._norms)]

    def _optimizer_step(self, rows: Tensor) -> float:
        longest = int(self._lengths[rows].max())
        tokens, mask, old, advantages = (
            column[rows, :longest] for column in (self._tokens, self._mask, self._old, self._advantages))
        # Padding stands behind every real token, so causal attention needs no mask for it.
        logits = self._model(input_ids=tokens, use_cache=False).logits[:, :-1]
        targets = tokens[:, 1:]
        logprobs = -cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
        ratio, gain = (logprobs - old[:, 1:]).exp(), advantages[:, 1:]
        clipped = ratio.clamp(1 - ALGORITHM.clip_low, 1 + ALGORITHM.clip_high)
        loss = -(torch.minimum(ratio * gain, clipped * gain) * mask[:, 1:]).sum() / mask.sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), LEARNER.optimizer.grad_clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm)


def padded(whole: Experience, column: str) -> Tensor:
    """[N, L] a per-token column, zeros behind each row's end."""
    rows = [torch.as_tensor(whole.row(i, column).copy()) for i in range(len(whole))]
    return pad_sequence(rows, batch_first=True)


BENCHMARK = Benchmark(
    ours=LearnerSide, theirs=BareTorchSide, ours_is="PolicyLearner", theirs_is="bare torch loop, padded rows",
    unit="tokens/s", goal=0.9, tolerance=1e-3,
)
