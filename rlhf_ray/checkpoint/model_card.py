"""The model card (README.md) of an exported model: base model, training, metrics, how to load it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlhf_ray.config.algorithm import method_in_words
from rlhf_ray.config.derived import derive
from rlhf_ray.config.model import NewModelConfig
from rlhf_ray.config.rewards import rewards_in_words
from rlhf_ray.config.stages import PPOConfig, ProcessRewardConfig, RewardModelConfig, SFTConfig

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

_STAGES = {
    "sft": "supervised fine-tuning on demonstrations",
    "reward_model": "reward modelling on preferences",
    "process_reward": "process reward modelling on labelled steps",
    "ppo": "PPO",
}


@dataclass(frozen=True)
class ModelCardInfo:
    """The contents of a model card."""

    stage: Literal["sft", "reward_model", "process_reward", "ppo"]
    step: int
    """Updates made."""
    base_model: str
    """Path or Hub name of the model that training started from; "scratch" when there was none."""
    trained_on: str
    """Description of the data: a path or Hub name and how it was used."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Final numbers by name."""
    method: str | None = None
    """What the stage `ppo` did ("GRPO", "PPO from human feedback")."""
    rewards: str | None = None
    """Description of the reward, for the stage `ppo`."""
    other_models: Mapping[str, str] = field(default_factory=dict)
    """Other models that took part in the training, by their part."""
    weights: str | None = None
    """Description of the weights, if they are not simply the trained ones."""
    chat: bool = False
    """Whether the model was trained to answer conversations."""
    license: str | None = None
    """Hub licence id; none is assumed, since it depends on base model and data."""
    repository: str | None = None
    """Repository of the Hub that the model is going to be in; None for a directory."""
    subfolder: str | None = None
    """Of the repository."""

    @property
    def place(self) -> str:
        """The arguments of `from_pretrained` that name the model, as code."""
        subfolder = f', subfolder="{self.subfolder}"' if self.repository and self.subfolder else ""
        return f'"{self.repository or "path/to/this/directory"}"{subfolder}'


def card_of(config: SFTConfig | RewardModelConfig | ProcessRewardConfig | PPOConfig, step: int,
            metrics: Mapping[str, float]) -> ModelCardInfo:
    """The card of the model after `step` updates of a run; `metrics` are those of its latest evaluation."""
    if isinstance(config, PPOConfig):
        return _card_of_policy(config, step, metrics)
    base = "scratch" if isinstance(config.model, NewModelConfig) else config.model.path
    if isinstance(config, RewardModelConfig):
        return ModelCardInfo("reward_model", step, base, f"preference pairs in {config.data.title}", metrics)
    if isinstance(config, ProcessRewardConfig):
        return ModelCardInfo("process_reward", step, base, f"steps labelled in {config.data.title}", metrics)
    return ModelCardInfo("sft", step, base, f"demonstrations in {config.data.title}", metrics)


def _card_of_policy(config: PPOConfig, step: int, metrics: Mapping[str, float]) -> ModelCardInfo:
    text = f", and text in {config.ptx.title}" if config.ptx else ""
    derived = derive(config)
    others = {"Reference, from which the KL is measured": derived.reference_in_words}
    if derived.starts_critic:
        others["Critic, started from"] = derived.critic_model.path
    rewards = {name: reward.model_dump() for name, reward in config.rewards.items()}
    return ModelCardInfo(
        stage="ppo", method=method_in_words(config.model_dump()), step=step, base_model=config.model.path,
        trained_on=f"prompts in {config.prompts.title}{text}", rewards=rewards_in_words(rewards),
        other_models=others, metrics=metrics,
    )


def card_of_average(card: ModelCardInfo, decay: float) -> ModelCardInfo:
    """The card of the average of the weights, given that of the weights."""
    return replace(card, metrics={}, weights=f"exponential moving average, decay {decay:g} an optimizer step; not "
                   "evaluated separately")


def model_card(info: ModelCardInfo, name: str, adapters: bool = False) -> ModelCard:
    """The card of the model, or of the adapters, exported to a directory called `name`; made offline, without a
    template engine."""
    from huggingface_hub import ModelCard, ModelCardData

    task = "text-classification" if info.stage == "reward_model" else "text-generation"
    data = ModelCardData(
        base_model=info.base_model if _is_hub_name(info.base_model) else None,
        license=info.license,
        library_name="peft" if adapters else "transformers",
        pipeline_tag=None if adapters else task,
        tags=[*(["lora"] if adapters else []), "rlhf", "rlhf-ray", _tag(info)],
    )
    loading = _adapter_loading(info) if adapters else _loading(info)
    scoring = ""
    if info.stage == "reward_model":
        scoring = _SCORING + (_ONE_ROW if adapters else _PADDED)
    title = name
    if info.repository is not None:
        title = info.subfolder or info.repository
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{_text(info, title, loading, scoring)}")


def _tag(info: ModelCardInfo) -> str:
    """The stage, or what it did, as a tag of the Hub."""
    method = (info.method or info.stage).removesuffix(" from human feedback")
    return re.sub(r"[^a-z0-9+]+", "-", method.lower())


_SCORING = """
The score is that of a row's last token. The row of a finished response ends with its end token (the one that the chat
template writes after the assistant's text if the prompt was chat messages, else the end-of-sequence token) and nothing
after it, such as a template's line break. A response that was cut at a length limit has no end token.
"""
_PADDED = """
Rows of one batch are padded by this directory's tokenizer, on the right, with a token that no row ends with: only then
does transformers score the last token. Padding on the left gives the same scores, except for models that count
positions from the first column of a batch, padding included (GPT-2's kind).
"""
_ONE_ROW = """
Score one row at a time: transformers scores the last token that is not padding, and the base model's padding token may
be its end token. The merged model, which was exported beside these adapters, has a padding token of its own.
"""


def _text(info: ModelCardInfo, name: str, loading: str, scoring: str) -> str:
    reward = f"\n- Rewarded for: {info.rewards}" if info.rewards else ""
    others = "".join(f"\n- {part}: {model}" for part, model in info.other_models.items())
    weights = f"\n- Weights: {info.weights}" if info.weights else ""
    method = info.method or _STAGES[info.stage]
    today = datetime.now(UTC).date().isoformat()
    return f"""# {name}

Trained by {method} with `rlhf_ray` {version("rlhf-ray")}, {info.step} updates, on {today}.

- Base model: `{info.base_model}`{reward}{others}
- Trained on: {info.trained_on}{weights}

## Loading

```python
{loading}
```
{scoring}
## Numbers at the end of training

{_table(info.metrics)}
"""


def _loading(info: ModelCardInfo) -> str:
    head = "AutoModelForSequenceClassification" if info.stage == "reward_model" else "AutoModelForCausalLM"
    if info.stage == "reward_model":
        use = """row = "a prompt and its response" + tokenizer.eos_token
score = model(**tokenizer(row, return_tensors="pt")).logits[0, 0]"""
    elif info.stage == "process_reward":
        use = """# A step's judgement is the softmax over the good and the bad token, at the placeholder after the step;
# process_reward.json, beside the weights, names the three."""
    elif info.chat:
        use = """messages = [{"role": "user", "content": "a question"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
tokens = model.generate(**inputs)[0, inputs["input_ids"].shape[1]:]
text = tokenizer.decode(tokens, skip_special_tokens=True)"""
    else:
        use = 'text = tokenizer.decode(model.generate(**tokenizer("a prompt", return_tensors="pt"))[0])'
    return f"""from transformers import AutoTokenizer, {head}

tokenizer = AutoTokenizer.from_pretrained({info.place})
model = {head}.from_pretrained({info.place})
{use}"""


def _adapter_loading(info: ModelCardInfo) -> str:
    head = "AutoModelForCausalLM"
    options = ""
    setting = ""
    if info.stage == "reward_model":
        head = "AutoModelForSequenceClassification"
        options = ", num_labels=1"
        setting = "\nbase.config.get_text_config().pad_token_id = None  # the score is that of the last token"
    return f"""from peft import PeftModel
from transformers import {head}

base = {head}.from_pretrained("{info.base_model}"{options}){setting}
model = PeftModel.from_pretrained(base, {info.place})  # model.merge_and_unload() gives it as one model"""


def _table(metrics: Mapping[str, float]) -> str:
    if not metrics:
        return "None were recorded."
    rows = "\n".join(f"| {name} | {value:.6g} |" for name, value in sorted(metrics.items()))
    return f"| metric | value |\n|---|---|\n{rows}"


def _is_hub_name(name: str) -> bool:
    """Whether a base model can be linked on the Hub: "owner/name", and no path that exists here."""
    parts = name.split("/")
    return len(parts) == 2 and all(p and not p.startswith(".") for p in parts) and not Path(name).exists()
