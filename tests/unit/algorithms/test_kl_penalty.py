"""The gradient of the KL penalty, in expectation: every outcome of a small policy is enumerated, in float64."""

import pytest
import torch

from rlhf_ray.algorithms.kl import approx_kl
from rlhf_ray.algorithms.losses import kl_penalty

NAN = float("nan")
LOGITS = torch.tensor([0.3, -0.8, 1.1, 0.0], dtype=torch.float64)
OLD = torch.tensor([-0.2, 0.9, 0.4, -1.0], dtype=torch.float64).log_softmax(-1)
REFERENCE = torch.tensor([0.7, 0.1, -0.5, 0.2], dtype=torch.float64).log_softmax(-1)


def exact_gradient(of_outcomes):
    """Of a function of the log-probabilities [4] of a policy, at LOGITS."""
    logits = LOGITS.clone().requires_grad_()
    return torch.autograd.grad(of_outcomes(logits.log_softmax(-1)), logits)[0]


def expected_gradient(estimator, sampled_from, ratio):
    """The mean gradient of a one-token penalty: each of the four outcomes, by the probability that it is sampled."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    total = torch.zeros_like(LOGITS)
    for outcome in range(4):
        logits = LOGITS.clone().requires_grad_()
        new = logits.log_softmax(-1)[outcome].reshape(1, 1)
        old = sampled_from[outcome].reshape(1, 1) if ratio else None
        penalty = kl_penalty(new, REFERENCE[outcome].reshape(1, 1), mask, estimator, old)
        total += sampled_from[outcome].exp() * torch.autograd.grad(penalty.sum(), logits)[0]
    return total


KL = exact_gradient(lambda new: (new.exp() * (new - REFERENCE)).sum())
"""Gradient of KL(policy || reference)."""
ON_POLICY = LOGITS.log_softmax(-1)


@pytest.mark.parametrize("sampled_from", [OLD, ON_POLICY], ids=["old policy", "on policy"])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_with_the_ratio_the_expected_gradient_is_that_of_the_kl(estimator, sampled_from):
    torch.testing.assert_close(expected_gradient(estimator, sampled_from, ratio=True), KL, rtol=0, atol=1e-14)


@pytest.mark.parametrize("sampled_from", [OLD, ON_POLICY], ids=["old policy", "on policy"])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_without_the_ratio_it_is_another_one(estimator, sampled_from):
    assert (expected_gradient(estimator, sampled_from, ratio=False) - KL).abs().max() > 0.05


def test_on_policy_the_gradient_of_k1_alone_is_zero_on_average():
    torch.testing.assert_close(expected_gradient("k1", ON_POLICY, ratio=False), torch.zeros_like(KL), rtol=0,
                               atol=1e-14)


@pytest.mark.parametrize("estimator", ["k2", "abs"])
def test_other_estimators_get_the_gradient_of_their_own_mean(estimator):
    exact = exact_gradient(lambda new: (new.exp() * approx_kl(new, REFERENCE, estimator)).sum())
    torch.testing.assert_close(expected_gradient(estimator, OLD, ratio=True), exact, rtol=0, atol=1e-14)


def test_values_by_hand_and_nothing_outside_the_mask():
    mask = torch.tensor([[True, True, False]])
    new = torch.tensor([[-1.0, -2.0, NAN]], requires_grad=True)
    reference, old = torch.tensor([[-1.5, -1.0, NAN]]), torch.tensor([[-1.0, -2.0 + 0.5, NAN]])
    assert kl_penalty(new, reference, mask, "k1").tolist() == [[0.5, -1.0, 0.0]]
    penalty = kl_penalty(new, reference, mask, "k1", old)
    assert penalty.tolist() == [[0.5, pytest.approx(-0.60653066), 0.0]]  # exp(-0.5) = 0.6065
    penalty.sum().backward()
    torch.testing.assert_close(new.grad, torch.tensor([[1.5, 0.0, 0.0]]))  # r (d + 1): 1 * 1.5, 0.6065 * (-1 + 1)
