"""One forward pass of two heads gives what two models of the same backbone would, and so does its gradient."""

import torch

from rlhf_ray.models.packed_model import PackedActorCritic, PackedLanguageModel, hidden_states

PREDICTED = torch.tensor([1, 2, 4, 7, 9, 14, 16, 17])  # rows start at 0, 5, 6 and 15


def test_log_probabilities_and_entropies_are_the_language_model_s(causal_lm, tokens, packing):
    found = PackedActorCritic(causal_lm(), 0.7)(tokens, packing, PREDICTED, True)
    expected = PackedLanguageModel(causal_lm(), 0.7)(tokens, packing, PREDICTED, True)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_values_are_the_head_s_of_the_state_before_each_token(causal_lm, tokens, packing):
    model = PackedActorCritic(causal_lm())
    _, entropy, values = model(tokens, packing, PREDICTED)
    hidden = hidden_states(causal_lm(), tokens, packing)
    torch.testing.assert_close(values, (hidden @ model.value_head.weight[0])[PREDICTED - 1], atol=1e-6, rtol=1e-6)
    assert entropy is None and values.shape == PREDICTED.shape


def test_a_value_does_not_know_its_token(causal_lm, tokens, packing):
    model, changed = PackedActorCritic(causal_lm()), tokens.clone()
    changed[9] = (changed[9] + 1) % 48
    before, after = (model(t, packing, torch.tensor([9, 10]))[2] for t in (tokens, changed))
    assert before[0] == after[0] and before[1] != after[1]


def test_another_temperature_may_be_asked_for(causal_lm, tokens, packing):
    for module in (PackedActorCritic, PackedLanguageModel):
        asked = module(causal_lm(), 0.7)(tokens, packing, PREDICTED, temperature=1.0)[0]
        assert torch.equal(asked, module(causal_lm(), 1.0)(tokens, packing, PREDICTED)[0])
        assert not torch.equal(asked, module(causal_lm(), 0.7)(tokens, packing, PREDICTED)[0])


def test_the_gradient_of_both_is_the_sum_of_both(causal_lm, tokens, packing):
    model = PackedActorCritic(causal_lm(dtype=torch.float64)).double()

    def gradient(of):
        model.zero_grad()
        logprobs, _, values = model(tokens, packing, PREDICTED)
        of(logprobs, values).backward()
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]

    both = gradient(lambda x, v: x.sum() + 0.3 * v.square().sum())
    policy, critic = gradient(lambda x, v: x.sum()), gradient(lambda x, v: v.square().sum())
    for whole, a, b in zip(both, policy, critic, strict=True):
        torch.testing.assert_close(whole, a + 0.3 * b, atol=1e-5, rtol=1e-5)  # norms compute in float32
    assert critic[0].abs().max() > 0, "the value's gradient reaches the backbone"


def test_the_value_head_is_no_part_of_the_language_model(causal_lm):
    model = PackedActorCritic(causal_lm())
    assert not [name for name, _ in model.model.named_parameters() if "value" in name]
    assert model.value_head.weight.std() < 1 / 32**0.5 * 1.5
