"""Passes held against transformers' own: right ones pass, wrong ones are refused by both numbers."""

import random
import re

import numpy as np
import pytest
import torch
import transformers

from rlhf_ray.config.learner import LoRAConfig
from rlhf_ray.errors import ModelError
from rlhf_ray.models import attention, packed_model
from rlhf_ray.models.attention import _Gather, register
from rlhf_ray.models.cpu import linear
from rlhf_ray.models.cpu.linear import use_onednn
from rlhf_ray.models.cpu.short_rows import ShortRowAttention
from rlhf_ray.models.lora import Adapters
from rlhf_ray.models.model_families import why_padded
from rlhf_ray.models.packed_model import PackedActorCritic, PackedLanguageModel, PackedScalarModel, PackedStepModel
from rlhf_ray.models.parity import ParityProbe, RowLimits
from tests.tiny_families import DECODERS, config_of, randomised

pytestmark = pytest.mark.usefixtures("one_thread")
LIMITS = RowLimits(150, 256)
POSITIONS = 512
RIGHT = ("llama", "qwen2", "mistral", "gemma2", "gpt_oss", "cohere", "opt", "bloom", "mamba")
WRONG = ("gemma2", "cohere", "granite", "gpt_oss", "mistral")
"""Soft-caps, logit scales, sinks and a window, which `plain_passes` leave out."""


def language_model(family, **changes):
    """A tiny model with room for rows that take every way through attention."""
    shape = {**DECODERS[family]}
    shape |= {name: POSITIONS for name in ("max_position_embeddings", "n_positions") if name in shape}
    return randomised(transformers.AutoModelForCausalLM.from_config(config_of(family, **{**shape, **changes})))


@pytest.fixture
def plain_passes(monkeypatch):
    """Attention over whole packed rows with nothing else, and the output head without what comes after it."""
    own = attention.Kind
    monkeypatch.setattr(attention, "Kind", lambda dropout, scale, *_: own(dropout, scale))
    monkeypatch.setattr(packed_model, "logits_of", lambda model, states: model.get_output_embeddings()(states))


def packed(model):
    if not why_padded(model.config):
        model.set_attn_implementation(register())
    return use_onednn(model)


def check(module, gradients=True, limits=LIMITS, call=None):
    return ParityProbe(module, limits, "cpu", gradients=gradients, call=call).check("the learner of 'm'")


def refusal(module, **how):
    with pytest.raises(ModelError) as caught:
        check(module, **how)
    return str(caught.value)


def numbers(text):
    """The measured difference and what is tolerated."""
    found = re.search(r"differ by (\S+?)( nats| of their size)? .* explains (\S+);", text)
    return float(found[1]), float(found[3])


@pytest.mark.parametrize("family", RIGHT)
@pytest.mark.parametrize("gradients", [True, False])
def test_a_family_that_is_right_passes(family, gradients):
    told = check(PackedLanguageModel(packed(language_model(family)), 0.9), gradients)
    assert 0 < told["probe_difference"] < 2e-5 and told["probe_seconds"] > 0


@pytest.mark.parametrize("family", WRONG)
@pytest.mark.parametrize("gradients", [True, False])
def test_what_a_family_adds_is_missed_by_both_numbers(family, gradients, plain_passes):
    text = refusal(PackedLanguageModel(packed(language_model(family))), gradients=gradients)
    assert re.match(f"the learner of 'm' .{family}.: (log-probabilities|entropies) of packed rows differ by", text)
    measured, tolerated = numbers(text)
    assert measured > 50 * tolerated and "short rows" in text and "Use a model" in text


def in_bfloat16(module):
    def call(*given, **named):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(*given, **named)

    return call


@pytest.mark.parametrize("family", RIGHT)
def test_rounding_in_bfloat16_is_no_difference(family):
    weights = PackedLanguageModel(packed(language_model(family)).bfloat16())
    assert 0 < check(weights, False, RowLimits(40, 64))["probe_difference"] < 0.3
    module = PackedLanguageModel(packed(language_model(family)))
    assert 0 < check(module, True, RowLimits(40, 64), in_bfloat16(module))["probe_difference"] < 0.3


@pytest.mark.parametrize("family", ["cohere", "granite", "gemma2"])
def test_bfloat16_hides_no_wrong_family(family, plain_passes):
    module = PackedLanguageModel(packed(language_model(family)).bfloat16())
    assert "in bfloat16 explains" in refusal(module, gradients=False, limits=RowLimits(40, 64))


@pytest.mark.parametrize("window", [64, 140])
def test_a_window_that_only_the_longest_row_passes_is_seen(window, plain_passes):
    text = refusal(PackedLanguageModel(packed(language_model("mistral", sliding_window=window))), gradients=False)
    assert ("short rows" if window == 64 else "rows of up to 150 tokens") in text
    check(PackedLanguageModel(packed(language_model("mistral", sliding_window=window))), limits=RowLimits(60, 256))


def scalar_model():
    shape = {**DECODERS["llama"], "max_position_embeddings": POSITIONS, "num_hidden_layers": 3}
    return packed(randomised(transformers.AutoModelForSequenceClassification.from_config(config_of("llama", **shape))))


MODULES = {
    "actor and critic": lambda: PackedActorCritic(packed(language_model("qwen2")), 0.7),
    "actor and critic of OPT": lambda: PackedActorCritic(packed(language_model("opt"))),
    "actor and critic of Bloom": lambda: PackedActorCritic(packed(language_model("bloom"))),
    "scalar": lambda: PackedScalarModel(scalar_model()),
    "steps": lambda: PackedStepModel(packed(language_model("llama"))),
}


@pytest.mark.parametrize("kind", MODULES)
def test_every_kind_of_module_is_compared(kind):
    assert 0 < check(MODULES[kind]())["probe_difference"] < 2e-5


@pytest.mark.parametrize("kind", ["actor and critic", "scalar", "steps"])
def test_in_every_kind_attention_that_sees_other_rows_is_refused(kind, monkeypatch):
    module = MODULES[kind]()
    one_row = lambda tokens, packing: (tokens, type(packing)(torch.tensor([packing.tokens])))  # noqa: E731
    own = packed_model.hidden_states
    monkeypatch.setattr(packed_model, "hidden_states", own)
    for where in ("rlhf_ray.models.packed_model", "rlhf_ray.models.packed_model", "rlhf_ray.models.packed_model"):
        monkeypatch.setattr(f"{where}.hidden_states", lambda model, *given: own(model, *one_row(*given)))
    assert numbers(refusal(module, gradients=False))[0] > 0.01


def spoil_onednn(monkeypatch):
    monkeypatch.setattr(linear, "uses_onednn", lambda: True)
    right = linear._weight_gradient
    monkeypatch.setattr(linear, "_weight_gradient", lambda grad, x: right(grad, x) * 1.01)


def spoil_short_rows(monkeypatch):
    right = ShortRowAttention.backward
    monkeypatch.setattr(ShortRowAttention, "backward",
                        lambda ctx, grad: (lambda q, k, v, *rest: (q * 0.9, k, v, *rest))(*right(ctx, grad)))


def spoil_grids(monkeypatch):
    right = _Gather.backward
    monkeypatch.setattr(_Gather, "backward", lambda ctx, grad: (right(ctx, grad)[0].flip(0), None))


@pytest.mark.parametrize(("spoil", "family", "seen"), [
    (spoil_onednn, "llama", "short rows in one grid"), (spoil_short_rows, "opt", "short rows in one grid"),
    (spoil_grids, "qwen3", "short rows in one grid"), (spoil_grids, "opt", "rows of up to 150 tokens"),
])
def test_a_wrong_backward_pass_is_refused_where_the_forward_is_right(monkeypatch, spoil, family, seen):
    spoil(monkeypatch)
    module = PackedLanguageModel(packed(language_model(family)))
    check(module, gradients=False)
    text = refusal(module)
    assert "gradients of" in text and f"seen with {seen}" in text


def test_logits_in_pieces_are_compared(monkeypatch):
    own = packed_model.checkpoint
    monkeypatch.setattr(packed_model, "checkpoint",
                        lambda answers, *piece, **how: tuple(x + 0.01 for x in own(answers, *piece, **how)))
    text = refusal(PackedLanguageModel(packed(language_model("llama"))))
    assert "logits in several chunks" in text


@pytest.mark.parametrize("tied", [True, False])
def test_adapters_are_compared(tied):
    model = packed(language_model("llama", tie_word_embeddings=tied))
    Adapters(model, LoRAConfig(rank=2, dropout=0.3), "base")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    assert 0 < check(PackedLanguageModel(model))["probe_difference"] < 1e-4


@pytest.mark.parametrize("checkpointing", [True, False])
def test_nothing_is_touched(checkpointing):
    model = packed(language_model("opt", dropout=0.1, attention_dropout=0.1))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    module = PackedLanguageModel(model.train())

    def state():
        return {
            "torch": torch.get_rng_state().tolist(), "numpy": np.random.get_state()[1].tolist(),
            "python": random.getstate(), "modes": [layer.training for layer in module.modules()],
            "classes": [type(layer) for layer in module.modules()], "gradients": [p.grad for p in module.parameters()],
            "attention": model.config._attn_implementation, "chunks": module.chunks, "own": sorted(vars(module)),
            "dropout": [vars(layer).get("dropout") for layer in module.modules()],
            "hooks": [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in module.modules()],
            "weights": [p.sum().item() for p in module.parameters()],
        }

    before = state()
    check(module)
    assert state() == before
    linear_layer = model.model.decoder.layers[0].fc1
    linear_layer.weight.data.mul_(torch.nan)  # damage is told where it is met, by what meets it
    check(module)


def test_a_family_whose_pass_cannot_be_made_is_refused_by_name():
    model = packed(language_model("llama"))

    class Other(PackedLanguageModel):
        def forward(self, *_, **__):
            raise ValueError("no such argument: packing")

    text = refusal(Other(model))
    assert "(llama) could not be compared" in text and "no such argument: packing" in text
    assert model.config._attn_implementation == register()


def test_ranks_stop_together_whichever_sees_a_difference():
    module = PackedLanguageModel(packed(language_model("llama")))
    asked = []

    def another_rank_sees(numbers):
        asked.append(numbers)
        return [7.0, *numbers[1:]] if len(asked) == 1 else numbers

    with pytest.raises(ModelError, match="log-probabilities of packed rows differ by 7 nats"):
        ParityProbe(module, LIMITS, "cpu", largest=another_rank_sees).check("rank 0, which sees none,")
    assert asked[0][0] < 1e-4 and len(asked) == 2


def test_rows_are_no_longer_than_the_context():
    config = language_model("llama").config
    assert RowLimits.of(config, 4096, 8192) == RowLimits(512, 8192)
    assert RowLimits.of(config, 100, 8192) == RowLimits(100, 8192)
    for longest in (2, 3, 8, 129):
        check(PackedLanguageModel(packed(language_model("llama"))), limits=RowLimits(longest, 8))


def test_rows_as_long_as_learned_positions_are_compared():
    """The reference's padding needs none beyond them."""
    module = PackedLanguageModel(packed(language_model("gpt2")))
    context = module.model.config.n_positions
    assert RowLimits.of(module.model.config, 4096, 8192).longest == context
    assert check(module, limits=RowLimits(context, 256))["probe_difference"] < 5e-5

