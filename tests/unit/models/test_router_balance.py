"""Router logits of packed passes, and the loss that transformers computes of padded rows of the same model."""

import pytest
import torch
import transformers

from rlhf_ray.config.model import ArchitectureConfig, ModelConfig, NewModelConfig
from rlhf_ray.errors import ModelError
from rlhf_ray.models.loading import load_causal_lm
from rlhf_ray.models.packed_model import PackedLanguageModel
from rlhf_ray.models.packing import Packing
from rlhf_ray.models.router_balance import BALANCED_FAMILIES, RouterBalance, check_router
from tests.tiny_families import DECODERS, MIXTURE, config_of, randomised

LENGTHS = (5, 1, 9, 32, 12)
TOKENS = torch.randint(2, 64, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=BALANCED_FAMILIES)
def plain(request, tmp_path):
    """Transformers' own model, saved in `directory`."""
    model = randomised(transformers.AutoModelForCausalLM.from_config(
        config_of(request.param, **DECODERS.get(request.param, MIXTURE)), attn_implementation="eager"))
    model.save_pretrained(tmp_path)
    model.directory = str(tmp_path)
    return model


def gates(model, loss):
    """Gradients of all routers."""
    parameters = [p for name, p in model.named_parameters() if name.endswith(("mlp.gate.weight", "router.weight"))]
    assert len(parameters) == 2
    return torch.autograd.grad(loss, parameters)


def padded(plain):
    rows = torch.nn.utils.rnn.pad_sequence(TOKENS.split(list(LENGTHS)), batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(n, dtype=torch.long) for n in LENGTHS], batch_first=True)
    return plain(input_ids=rows, attention_mask=mask, use_cache=False, output_router_logits=True).aux_loss


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_loss_and_its_gradients_are_those_of_padded_rows_without_the_padding(plain, checkpointing):
    packed = PackedLanguageModel(load_causal_lm(ModelConfig(path=plain.directory)).train())
    if checkpointing:
        packed.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    balance, packing = RouterBalance(packed.model), Packing.of(torch.tensor(LENGTHS).numpy())
    for _ in range(2):  # the second pass starts afresh
        logprobs, _ = packed(TOKENS, packing, packing.positions.nonzero()[:, 0])
    loss, expected = balance.loss(), padded(plain)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
    for found, wanted in zip(gates(packed.model, loss + 0 * logprobs.sum()), gates(plain, expected), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_passes_without_gradients_are_not_recorded(plain):
    packed = PackedLanguageModel(load_causal_lm(ModelConfig(path=plain.directory)))
    balance, packing = RouterBalance(packed.model), Packing.of(torch.tensor(LENGTHS).numpy())
    predicted = packing.positions.nonzero()[:, 0]
    packed(TOKENS, packing, predicted)
    with torch.no_grad():
        packed(TOKENS[:6], Packing.of(torch.tensor(LENGTHS[:2]).numpy()), torch.tensor([1]))
    torch.testing.assert_close(balance.loss(), padded(plain), atol=1e-5, rtol=0)


def test_a_model_without_routers_is_refused(tmp_path):
    config_of("llama", **DECODERS["llama"]).save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path))
    check_router(model, "policy", 0.0)
    with pytest.raises(ModelError, match=r"^policy\.router_aux_loss_coef=0\.01 .*'llama'.*set it to 0.*mixtral"):
        check_router(model, "policy", 0.01)
    with pytest.raises(ModelError, match=r"^learner\.router_aux_loss_coef"):
        check_router(NewModelConfig(architecture=ArchitectureConfig(), tokenizer="t"), "learner", 0.01)
    check_router(NewModelConfig(architecture=ArchitectureConfig(family="mixtral"), tokenizer="t"), "learner", 0.01)
    config_of("deepseek_v3").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="deepseek_v3"):
        check_router(model, "policy", 0.01)
