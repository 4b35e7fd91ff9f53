"""How good two tuned policies are: the same held-out prompts, one sampler and one judge for both."""

import json
from pathlib import Path

import numpy as np
import torch

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.models.loading import load_causal_lm, load_scalar_model, load_tokenizer
from rlhf_ray.models.packed_model import PackedLanguageModel, PackedScalarModel, last_token_scores
from rlhf_ray.models.packing import Packing
from rlhf_ray.rewards.sentiment import judge_scores
from rlhf_ray.roles.evaluation_metrics import bigram_codes

PROMPTS, RESPONSE_TOKENS = 512, 32


@torch.no_grad()
def quality(policy: Path, models: Path) -> dict[str, float]:
    """Means over one response to each held-out prompt: the judge's `gold`, the `reward` model's score, `kl` to the SFT
    model in nats a response, and `distinct_bigrams`.

    Args:
        policy: the model to measure.
        models: a quickstart's directory.
    """
    rows = (models / "data" / "eval_prompts.jsonl").read_text().splitlines()[:PROMPTS]
    tokenizer = load_tokenizer(ModelConfig(path=str(models / "sft" / "model")))
    prompts = tokenizer([json.loads(row)["prompt"] for row in rows], add_special_tokens=False)["input_ids"]
    responses = sample(policy, prompts, tokenizer.eos_token_id)
    whole = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    tokens, packing = torch.tensor([t for row in whole for t in row]), Packing.of(np.array([len(r) for r in whole]))
    response_places = np.concatenate([
        end - np.arange(len(r), 0, -1) for end, r in zip(np.cumsum([len(r) for r in whole]), responses, strict=True)])
    mine, reference = (logprobs(path, tokens, packing, torch.from_numpy(response_places))
                       for path in (policy, models / "sft" / "model"))
    judge = PackedScalarModel(load_scalar_model(
        ModelConfig(path=str(models / "reward_model" / "model")), new_head=False).eval())
    bigrams = np.concatenate([bigram_codes(np.array(r)) for r in responses])
    return {
        "gold": float(judge_scores(tokenizer.batch_decode(responses, skip_special_tokens=True)).mean()),
        "reward": float(last_token_scores(judge(tokens, packing), packing).mean()),
        "kl": float((mine - reference).sum()) / len(responses),
        "distinct_bigrams": len(np.unique(bigrams)) / len(bigrams),
        "length": float(np.mean([len(r) for r in responses])),
    }


def logprobs(path: Path, tokens: torch.Tensor, packing: Packing, places: torch.Tensor) -> torch.Tensor:
    """[n] log-probabilities of the tokens at `places` under a model."""
    return PackedLanguageModel(load_causal_lm(ModelConfig(path=str(path))).eval())(tokens, packing, places)[0]


def sample(path: Path, prompts: list[list[int]], end: int) -> list[list[int]]:
    """A response to each prompt at temperature 1, its end token included, from transformers' own sampler."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    longest = max(map(len, prompts))
    padded = torch.tensor([[end] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    torch.manual_seed(0)
    made = model.generate(padded, attention_mask=mask, do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
                          max_new_tokens=RESPONSE_TOKENS, eos_token_id=end, pad_token_id=end)
    return [row[: row.index(end) + 1] if end in row else row for row in made[:, longest:].tolist()]
