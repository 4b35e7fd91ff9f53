"""Parts of a model's check that run learners' and scorers' passes: language model, scalar head, adapters."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from rlhf_ray.config.learner import LoRAConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import ModelError
from rlhf_ray.models.config_json import is_classifier, pretrained_config
from rlhf_ray.models.loading import label_names, load_causal_lm, load_scalar_model
from rlhf_ray.models.lora import BASE, A, Adapters, B
from rlhf_ray.models.model_families import Use, why_padded
from rlhf_ray.models.packed_model import PackedLanguageModel, PackedScalarModel
from rlhf_ray.models.packing import Packing
from rlhf_ray.models.parity import ParityProbe, RowLimits, root_mean_square
from rlhf_ray.stages.model_checks.outcome import Outcome, refusal

LANGUAGE_MODEL = "log-probabilities"
SCALAR_HEAD = "scalar head"
LORA = "LoRA"
SEED = 20260101
ROW = 32
"""Tokens of the row on which merged adapters are compared."""
MERGED = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Tolerated difference of log-probabilities between a model with adapters and one with merged weights, in nats, by the
precision of the merged weights: `GatheredModel` sends them in the generator's."""


def check_passes(model: ModelConfig, tokens: int) -> list[Outcome]:
    """Log-probabilities, entropies and gradients of a learner's passes against transformers' own.

    Args:
        tokens: longest row that is compared.

    Raises:
        ModelError: they differ, or cannot be computed.
    """
    name = LANGUAGE_MODEL
    if is_classifier(pretrained_config(model).architectures):
        return [Outcome(name, "does not apply", "a classifier predicts no tokens")]
    if refused := refusal(name, model, Use.LANGUAGE, tokens):
        return [refused]
    return [_compared(name, "log-probabilities and entropies differ by at most {} nats, gradients agree",
                      PackedLanguageModel(load_causal_lm(model)), tokens)]


def check_scalar_head(model: ModelConfig, tokens: int) -> list[Outcome]:
    """A new scalar head as critics and reward models in training have it; of a reward model its own.

    Args:
        tokens: longest row that is compared.

    Raises:
        ModelError: values differ from those of transformers' own passes, or cannot be computed.
    """
    name = SCALAR_HEAD
    sentence = "values differ by at most {}, gradients agree"
    if not is_classifier(pretrained_config(model).architectures):
        if refused := refusal(name, model, Use.SCALAR, tokens):
            return [refused]
        torch.manual_seed(SEED)
        return [_compared(name, sentence, PackedScalarModel(load_scalar_model(model, new_head=True)), tokens)]
    from rlhf_ray.models.classifier import Classifier

    names = label_names(model)
    own = "its own" if len(names) == 1 else f"its own, of {len(names)} labels ({', '.join(names)})"
    measured = Classifier(model, None if len(names) == 1 else 0).compare("the reward model", tokens, tokens)
    if not measured:
        return [Outcome(name, "works", f"{own}; runs on padded rows, with transformers' own forward pass")]
    difference = measured["probe_difference"]
    return [Outcome(name, "works", f"{own}; scores differ by at most {difference:.2g}", "",
                    {"difference": difference})]


def check_adapters(model: ModelConfig, tokens: int) -> list[Outcome]:
    """LoRA: passes with adapters that change the model, and the merged weights that generators get.

    Args:
        tokens: longest row that is compared.

    Raises:
        ModelError: passes differ from transformers' own, or merged weights from adapters.
    """
    name = LORA
    if is_classifier(pretrained_config(model).architectures):
        return [Outcome(name, "does not apply", "checked on language models")]
    if refused := refusal(name, model, Use.LANGUAGE, tokens):
        return [refused]
    module = PackedLanguageModel(load_causal_lm(model))
    adapters = Adapters(module.model, LoRAConfig(), model.path)
    _make_effective(module.model)
    compared = _compared(name, "", module, tokens)
    moved, gap = _merged_difference(module, adapters)
    tolerance = MERGED[next(module.model.parameters()).dtype]
    if not gap <= tolerance or not moved > 3 * gap:
        raise ModelError(f"merged weights give log-probabilities that differ by {gap:.3g} nats from those of the "
                         f"adapters ({tolerance:g} is tolerated), which change the model by {moved:.3g}")
    layers = sorted({layer.rpartition(".")[2] for layer in adapters.layers})
    return [Outcome(name, "works", f"adapters on {len(adapters.layers)} layers ({', '.join(layers)}); passes "
                    f"differ by at most {compared.numbers['difference']:.2g} nats, merged weights by {gap:.2g}", "",
                    {**compared.numbers, "merged_difference": gap, "layers": len(adapters.layers)})]


def _compared(name: str, sentence: str, module: nn.Module, tokens: int) -> Outcome:
    """The outcome of the comparison that each learner makes when it starts; {} in `sentence` is the difference."""
    module = module.to("cuda" if torch.cuda.is_available() else "cpu")
    limits = RowLimits.of(module.model.config, tokens, tokens)
    probe = ParityProbe(module, limits, next(module.parameters()).device, gradients=True)
    difference = probe.check(name)["probe_difference"]
    padded = why_padded(module.model.config)
    rows = f"rows of up to {limits.longest} tokens" + (f", padded because {padded}" if padded else "")
    return Outcome(name, "works", f"{sentence.format(format(difference, '.2g'))} ({rows})", "",
                   {"difference": difference, "longest": limits.longest, "padded": bool(padded)})


@torch.no_grad()
def _make_effective(model: nn.Module) -> None:
    """Give adapters, whose B is zero at first, an effect of a tenth of the layer's weights."""
    torch.manual_seed(SEED)
    weights = dict(model.named_parameters())
    for name, b in weights.items():
        if name.endswith(B):
            layer = name.removesuffix(B)
            base = weights[f"{layer}{BASE}weight"]
            a = weights[layer + A]
            b.normal_(std=float(0.1 * base.float().std() / (a.std() * a.shape[0] ** 0.5)))


@torch.no_grad()
def _merged_difference(module: PackedLanguageModel, adapters: Adapters) -> tuple[float, float]:
    """(How far the adapters move log-probabilities, how far merged weights are from the adapters), in nats, root mean
    square. Leaves the merged weights in the model."""
    logprobs = partial(_logprobs, module)
    with adapters.disabled():
        before = logprobs()
    with_adapters = logprobs()
    tensors = dict(module.model.named_parameters())
    names = [name for name, _ in adapters.base_shapes([(n, tuple(t.shape)) for n, t in tensors.items()])]
    for name in names:
        for whole in adapters.merged([name], {s: tensors[s] for s in adapters.sources([name])}).values():
            tensors[adapters.sources([name])[0]].copy_(whole)
    with adapters.disabled():
        merged = logprobs()
    return root_mean_square(before - with_adapters), root_mean_square(merged - with_adapters)


def _logprobs(module: PackedLanguageModel) -> Tensor:
    """[n] log-probabilities of a row of random tokens, always the same."""
    generator = torch.Generator().manual_seed(SEED)
    device = next(module.parameters()).device
    shape = module.model.config.get_text_config()
    row = torch.randint(shape.vocab_size, (ROW,), generator=generator).to(device)
    packing = Packing(torch.tensor([ROW]), device)
    values: Tensor = module(row, packing, torch.arange(1, ROW, device=device))[0]
    return values
