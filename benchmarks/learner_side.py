"""Updates by the project's policy learner, alone in its process (one rank, gloo, one thread, with DeepSpeed), and the
rows it trains on: responses of all lengths that the workload's model sampled.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.workload import SEED, model_config, prompts
from rlhf_ray.checkpoint.state_files import load_experience, save_experience
from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.learner import OptimizerConfig, PolicyConfig
from rlhf_ray.config.losses import ClipLoss
from rlhf_ray.data.supervised_records import Sequences, sequences_of
from rlhf_ray.engine.distributed import free_address
from rlhf_ray.models.loading import load_causal_lm, load_tokenizer
from rlhf_ray.models.packed_model import PackedLanguageModel
from rlhf_ray.models.packing import Packing
from rlhf_ray.records import Experience, SampleKey
from rlhf_ray.roles.policy_learner import PolicyLearner

ROWS = 128
RESPONSE_TOKENS = 32
"""As in the quickstart."""


def experience(directory: Path) -> Experience:
    """`ROWS` samples of the model in `directory`, made by the first who asks and kept there for the others."""
    path = directory / "learner_rows.npz"
    if not path.is_file():
        save_experience(path, make_experience(directory))
    return load_experience(path)


def padding_ratio(lengths: np.ndarray) -> float:
    """Tokens of rows padded to the longest of them, over the tokens they have."""
    return float(len(lengths) * lengths.max() / lengths.sum())


@torch.no_grad()
def make_experience(directory: Path) -> Experience:
    """Sampled rows with the model's own log-probabilities as the old ones. Advantages are random numbers."""
    whole = sample_rows(directory)
    mask, random = whole.loss_mask, np.random.default_rng(SEED)
    logprobs = np.zeros(len(mask), dtype=np.float32)
    model = PackedLanguageModel(load_causal_lm(model_config(directory)))
    logprobs[mask] = model(torch.as_tensor(whole.tokens.astype(np.int64)), Packing.of(whole.lengths),
                           torch.as_tensor(np.flatnonzero(mask)))[0].numpy()
    advantages = np.where(mask, random.standard_normal(len(mask)), 0).astype(np.float32)
    return Experience(
        offsets=whole.offsets, tokens=whole.tokens, response_mask=mask, behaviour_logprobs=logprobs,
        old_logprobs=logprobs, reference_logprobs=logprobs, values=np.zeros_like(logprobs),
        advantages=advantages, returns=advantages, keys=[SampleKey(0, row, 0) for row in range(ROWS)])


def sample_rows(directory: Path) -> Sequences:
    """Prompts and what the model says to them, up to its end token."""
    from transformers import AutoModelForCausalLM

    end, table = int(load_tokenizer(model_config(directory)).eos_token_id), prompts(directory, ROWS)
    openings = [torch.as_tensor(table.row(i, "tokens").astype(np.int64)) for i in range(ROWS)]
    asked = pad_sequence(openings, batch_first=True, padding_value=end, padding_side="left")
    seen = pad_sequence([torch.ones_like(row) for row in openings], batch_first=True, padding_side="left")
    torch.manual_seed(SEED)
    answered = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).generate(
        asked, attention_mask=seen, do_sample=True, top_k=0, max_new_tokens=RESPONSE_TOKENS, eos_token_id=end,
        pad_token_id=end)
    responses = [up_to(row, end) for row in answered[:, asked.shape[1] :]]
    return sequences_of([([*opening.tolist(), *response], [False] * len(opening) + [True] * len(response))
                         for opening, response in zip(openings, responses, strict=True)])


def up_to(row: Tensor, end: int) -> list[int]:
    """The tokens of a row with the first `end`, or all of them."""
    tokens: list[int] = row.tolist()
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


LEARNING_RATE = 1e-5
CLIP = ClipLoss()
ALGORITHM = AlgorithmConfig(loss=CLIP, epochs=1, mini_batches=4, estimator={"type": "gae", "whiten": False})
"""Four optimizer steps of 32 rows a turn. (Whitening happens once an update and is not what is compared.)"""
LEARNER = PolicyConfig(micro_batch_tokens=2048, optimizer=OptimizerConfig(learning_rate=LEARNING_RATE))
"""As in the quickstart: a mini-batch in one pass."""


class LearnerSide:
    """`PolicyLearner.update` on the workload's rows, which lie end to end without padding."""

    learner = PolicyLearner

    def __init__(self, directory: Path) -> None:
        torch.set_num_threads(1)
        whole = experience(directory)
        self._learner = self.learner(LEARNER, model_config(directory), rank=0, world=1, seed=SEED, total_steps=10**6,
                                     algorithm=ALGORITHM, temperature=1.0)
        self._learner.start(free_address("127.0.0.1"), timeout_s=600.0)
        self._tokens = float(len(whole.tokens))
        self._experience = self.rows(whole)
        self._step, self._grad_norm = 0, 0.0

    def rows(self, whole: Experience) -> Experience:
        """What the learner is given."""
        return whole

    def run(self) -> float:
        """One update; returns its tokens, padding not counted."""
        self._step += 1
        self._grad_norm = self._learner.update(self._step, 0.0, self._experience).metrics["grad_norm"]
        return self._tokens

    def proof(self) -> list[float]:
        """Mean norm of the update's gradients."""
        return [self._grad_norm]
