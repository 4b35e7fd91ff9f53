"""What the sides work on: a hardly trained model of about a million parameters, its tokenizer, prompts and rows.

The shape is the quickstart's, the texts are its made-up reviews. Everything follows from one seed.
"""

from pathlib import Path

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from rlhf_ray.config.model import ArchitectureConfig, ModelConfig, NewModelConfig
from rlhf_ray.data.encoding import flat_tokens
from rlhf_ray.data.supervised_records import Sequences, sequences_of
from rlhf_ray.data.synthetic_reviews import make_openings, make_reviews
from rlhf_ray.data.tokenizer import train_tokenizer
from rlhf_ray.models.loading import load_tokenizer, new_causal_lm
from rlhf_ray.models.packed_model import PackedLanguageModel
from rlhf_ray.models.packing import Packing
from rlhf_ray.records import Prompts, offsets_of

SEED = 0
VOCABULARY = 1024
MAX_CONTEXT = 96
REVIEWS_FOR_TOKENIZER = 4000
LESSONS, ROWS_A_LESSON = 60, 32
"""Some seconds of training. A wholly new model ends one response in a thousand tokens; like this, responses end at all
lengths, as a trained model's do."""


def make_model(directory: Path) -> None:
    """Train the tokenizer and, briefly, the model; save both into `directory`."""
    torch.set_num_threads(1)
    texts = (review.text for review in make_reviews(REVIEWS_FOR_TOKENIZER, SEED))
    disable_progress_bar()
    train_tokenizer(texts, VOCABULARY, directory)
    torch.manual_seed(SEED)
    architecture = ArchitectureConfig(max_positions=MAX_CONTEXT)
    model = new_causal_lm(NewModelConfig(architecture=architecture, tokenizer=str(directory)))
    teach(PackedLanguageModel(model), rows(directory, LESSONS * ROWS_A_LESSON, SEED))
    model.save_pretrained(directory)


def teach(model: PackedLanguageModel, whole: Sequences) -> None:
    """Next-token prediction on the responses of all rows, once."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    for lesson in np.array_split(np.arange(len(whole)), LESSONS):
        part = whole.select(lesson)
        predicted = torch.as_tensor(np.flatnonzero(part.loss_mask))
        logprobs, _ = model(torch.as_tensor(part.tokens.astype(np.int64)), Packing.of(part.lengths), predicted)
        (-logprobs.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def model_config(directory: Path) -> ModelConfig:
    """The workload's model, in float32."""
    return ModelConfig(path=str(directory))


def prompts(directory: Path, count: int) -> Prompts:
    """`count` different openings of reviews."""
    texts = make_openings(count, SEED)
    tokens = load_tokenizer(model_config(directory))(texts, add_special_tokens=False)["input_ids"]
    return Prompts(offsets=offsets_of([len(t) for t in tokens]), tokens=flat_tokens(tokens), texts=texts,
                   metadata=[{} for _ in texts], rows=np.arange(count))


def rows(directory: Path, count: int, seed: int) -> Sequences:
    """`count` reviews: openings as prompts, continuations as responses."""
    tokenizer = load_tokenizer(model_config(directory))
    reviews = list(make_reviews(count, seed))
    before = tokenizer([r.opening for r in reviews], add_special_tokens=False)["input_ids"]
    after = tokenizer([r.continuation for r in reviews], add_special_tokens=False)["input_ids"]
    return sequences_of([([*prompt, *response, tokenizer.eos_token_id],
                          [*[False] * len(prompt), *[True] * (len(response) + 1)])
                         for prompt, response in zip(before, after, strict=True)])
