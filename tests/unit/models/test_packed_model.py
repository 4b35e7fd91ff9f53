"""Token log-probabilities, entropies and scalar outputs of packed rows, against transformers' own."""

import pytest
import torch

from rlhf_ray.models.attention import register
from rlhf_ray.models.packed_model import (
    PackedLanguageModel,
    PackedScalarModel,
    last_token_scores,
    values_before_tokens,
)
from rlhf_ray.models.packing import Packing

PREDICTED = torch.tensor([1, 2, 4, 7, 9, 14, 16, 17])  # rows start at 0, 5, 6 and 15


def reference_logits(model, tokens, packing):
    """[T, V] logits of each row alone; entry t is the distribution of what comes after token t."""
    with torch.no_grad():
        return torch.cat([model(row[None]).logits[0] for row in tokens.split(packing.lengths.tolist())])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_transformers_log_softmax(causal_lm, tokens, packing, tied, temperature):
    logits = reference_logits(causal_lm(tied, attention="sdpa"), tokens, packing)[PREDICTED - 1]
    expected = (logits / temperature).log_softmax(-1).gather(-1, tokens[PREDICTED, None])[:, 0]
    got, entropy = PackedLanguageModel(causal_lm(tied), temperature)(tokens, packing, PREDICTED)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    assert entropy is None


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_entropy_is_exact_at_the_temperature(causal_lm, tokens, packing, temperature):
    logits = reference_logits(causal_lm(attention="sdpa"), tokens, packing)[PREDICTED - 1]
    expected = torch.distributions.Categorical(logits=logits / temperature).entropy()
    _, entropy = PackedLanguageModel(causal_lm(), temperature)(tokens, packing, PREDICTED, entropy=True)
    torch.testing.assert_close(entropy, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_the_chunk_changes_nothing(causal_lm, tokens, packing, chunk):
    whole = PackedLanguageModel(causal_lm())(tokens, packing, PREDICTED, True)
    pieces = PackedLanguageModel(causal_lm(), chunk=chunk)(tokens, packing, PREDICTED, True)
    for a, b in zip(whole, pieces, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_logits_exist_for_a_chunk_at_a_time(causal_lm, tokens, packing):
    model, rows = causal_lm(), []
    model.get_output_embeddings().register_forward_hook(lambda _, inputs, output: rows.append(len(inputs[0])))
    PackedLanguageModel(model, chunk=3)(tokens, packing, PREDICTED)
    assert rows == [3, 3, 2]


def test_nothing_asked_gives_nothing(causal_lm, tokens, packing):
    logprobs, entropy = PackedLanguageModel(causal_lm())(tokens, packing, PREDICTED[:0], True)
    assert logprobs.shape == entropy.shape == (0,)


def test_gradients_are_transformers(causal_lm, tokens, packing):
    ours, theirs = causal_lm(dtype=torch.float64), causal_lm(attention="sdpa", dtype=torch.float64)
    PackedLanguageModel(ours, 0.7)(tokens, packing, PREDICTED)[0].sum().backward()
    logits = torch.cat([theirs(row[None]).logits[0] for row in tokens.split(packing.lengths.tolist())])
    logprobs = (logits[PREDICTED - 1] / 0.7).log_softmax(-1).gather(-1, tokens[PREDICTED, None])
    logprobs.sum().backward()
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


@pytest.fixture
def classifier():
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(1)
    model = LlamaForSequenceClassification(LlamaConfig(
        vocab_size=48, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        initializer_range=0.3, num_labels=1, pad_token_id=0,
    )).eval()
    model.set_attn_implementation(register())
    return model


@torch.no_grad()
def test_scalar_outputs_are_transformers_scores_of_each_row(classifier, tokens, packing):
    outputs = PackedScalarModel(classifier)(tokens, packing)
    assert outputs.shape == tokens.shape
    classifier.set_attn_implementation("sdpa")
    filled = tokens.clamp(min=2)  # transformers looks for padding, which is 0, to find a row's end
    expected = [classifier(row[None]).logits.item() for row in filled.split(packing.lengths.tolist())]
    classifier.set_attn_implementation(register())
    scores = last_token_scores(PackedScalarModel(classifier)(filled, packing), packing)
    torch.testing.assert_close(scores, torch.tensor(expected), atol=1e-6, rtol=0)


def test_last_token_scores_by_hand():
    assert last_token_scores(torch.arange(6.0), Packing.of([2, 3, 1])).tolist() == [1, 4, 5]


def test_a_value_is_of_the_state_before_its_token():
    assert values_before_tokens(torch.tensor([10.0, 11.0, 12.0, 13.0]), torch.tensor([1, 3])).tolist() == [10, 12]


@torch.no_grad()
def test_a_value_does_not_know_its_token(classifier, tokens, packing):
    model, changed = PackedScalarModel(classifier), tokens.clone()
    changed[9] = (changed[9] + 1) % 48
    before, after = (values_before_tokens(model(t, packing), torch.tensor([9, 10])) for t in (tokens, changed))
    assert before[0] == after[0]
    assert before[1] != after[1]
