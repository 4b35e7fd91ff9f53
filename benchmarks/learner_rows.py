"""What learners train on: responses of all lengths that the workload's model sampled itself, as a policy makes them."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.workload import SEED, model_config, prompts
from rlhf_ray.checkpoint.state import load_records, save_records
from rlhf_ray.data.sequences import Sequences, sequences_of
from rlhf_ray.models.loading import load_causal_lm, load_tokenizer
from rlhf_ray.models.packed_model import PackedLanguageModel
from rlhf_ray.models.packing import Packing
from rlhf_ray.records import Experience, SampleKey

ROWS = 128
RESPONSE_TOKENS = 32
"""As in the quickstart."""


def experience(directory: Path) -> Experience:
    """`ROWS` samples of the model in `directory`, made by the first who asks and kept there for the others."""
    path = directory / "learner_rows.npz"
    if not path.is_file():
        save_records(path, make_experience(directory))
    return load_records(path, Experience)


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
