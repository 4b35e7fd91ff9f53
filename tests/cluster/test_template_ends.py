"""Models whose files do not name the end of their chat template, or name two: through SFT, generation and a reward
model, on the real engines."""

import asyncio
import io
import json

import numpy as np
import pytest
import yaml

from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.config.load import load
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.rewards import ModelReward
from rlhf_ray.config.stages import RewardModelConfig, SFTConfig
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.records import SampleKey
from rlhf_ray.rewards.local_model import ModelSource
from rlhf_ray.rewards.protocol import RewardRequest
from rlhf_ray.stages.generate import GenerateOptions
from rlhf_ray.stages.generate import run as generate
from tests.layouts import make_layout

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
FILMS = [f"Was the film of {year} good?" for year in range(1980, 2044)]


def make_model(directory, name):
    """A tiny random Llama with the tokenizer of a layout."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    make_layout(directory, name)
    tokenizer = load_tokenizer(ModelConfig(path=str(directory)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.1,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=0))
    if name == "two_ends":
        model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(["<|end|>", "<|endoftext|>"])
    model.save_pretrained(directory)
    return directory


def trained(root, stage, config, model, rows, **data):
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "run": {"dir": str(root / "run"), "steps": 40},
        "cluster": {"dashboard": False, "object_store_mb": 128},
        "model": {"path": str(model)},
        "data": {"path": str(root / "rows.jsonl"), "max_tokens": 96, **data},
        "training": {"batch_size": 16},
        "learner": {"optimizer": {"learning_rate": 0.005}},
        "logging": {"ray_metrics": False, "tensorboard": False},
        "checkpoint": {"every": 0},
    }
    (root / "run.yaml").write_text(yaml.safe_dump(settings))
    stage.run(load(config, root / "run.yaml", []))
    return root / "run" / "model"


def test_a_base_model_that_was_trained_on_chats_ends_its_answers(tmp_path, capfd):
    from rlhf_ray.stages import sft

    rows = [{"messages": [{"role": "user", "content": film}, {"role": "assistant", "content": "It was good."}]}
            for film in FILMS]
    model = trained(tmp_path, sft, SFTConfig, make_model(tmp_path / "base", "base"), rows, messages="messages")
    told = " ".join(capfd.readouterr().out.split())
    assert "the chat template ends an answer with '<|im_end|>'" in told and "name only '<|endoftext|>'" in told
    answers = generate(GenerateOptions(model=str(model), prompts=FILMS[:4],
                                       sampling=SamplingConfig(temperature=0, max_tokens=32)), io.StringIO())
    assert [answer["finish_reason"] for answer in answers] == ["stop"] * 4
    assert {answer["response"] for answer in answers} == {"It was good."}


def test_a_reward_model_scores_at_the_token_that_it_was_trained_at(tmp_path):
    """The template writes two special tokens after an answer, and a response ends with the first."""
    from rlhf_ray.stages import reward_model

    start = make_model(tmp_path / "start", "two_ends")
    rows = [{"prompt": [{"role": "user", "content": film}], "chosen": "It was good.", "rejected": "It was bad."}
            for film in FILMS]
    model = trained(tmp_path, reward_model, RewardModelConfig, start, rows)
    tokenizer = load_tokenizer(ModelConfig(path=str(start)))

    def sampled(row, answer):
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": FILMS[row]}], add_generation_prompt=True,
                                               return_dict=True)["input_ids"]
        whole = np.array([*prompt, *tokenizer(answer + "<|end|>")["input_ids"]], np.int32)
        return RewardRequest(SampleKey(0, row, 0), "", answer, whole, np.arange(len(whole)) >= len(prompt), "stop", {})

    async def accuracy():
        source = ModelSource("r", ModelReward(type="model", path=str(model)), ModelConfig(path=str(start)), 4096)
        await source.start()
        good, bad = [(await source.score([sampled(row, answer) for row in range(20)])).scores
                     for answer in ("It was good.", "It was bad.")]
        return float((good > bad).mean()), float((good - bad).min())

    share, margin = asyncio.run(accuracy())
    assert share == 1.0 and margin > 1
