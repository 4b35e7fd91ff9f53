"""The auxiliary loss of routers on few tokens."""

import pytest
import torch

from rlhf_ray.algorithms.losses.load_balancing import load_balancing_loss


def logits(*rows):
    return torch.tensor(rows).log()


def test_by_hand():
    """Three tokens, two experts, one choice: f = (2/3, 1/3), P = (0.6, 0.4)."""
    loss = load_balancing_loss([logits([0.9, 0.1], [0.7, 0.3], [0.2, 0.8])], 1)
    assert loss.item() == pytest.approx(2 * (2 / 3 * 0.6 + 1 / 3 * 0.4))


def test_even_routing_has_the_least_which_is_the_number_of_choices():
    even = torch.eye(4).mul(5).repeat(3, 1)
    assert load_balancing_loss([even], 1).item() == pytest.approx(1)
    assert load_balancing_loss([torch.randn(1000, 4, generator=torch.Generator().manual_seed(0)) * 1e-3], 2) == (
        pytest.approx(2, abs=1e-4))
    assert load_balancing_loss([torch.tensor([[9.0, 0, 0, 0]]).repeat(3, 1)], 1) > 3.9


def test_layers_are_averaged_together():
    one, other = logits([0.9, 0.1]), logits([0.3, 0.7])
    assert load_balancing_loss([one, other], 1).item() == pytest.approx(2 * (0.5 * 0.6 + 0.5 * 0.4))


def test_gradients_flow_through_the_probabilities_alone():
    given = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    share = given.softmax(-1).topk(2).indices.flatten().bincount(minlength=4) / 6
    (expected,) = torch.autograd.grad(4 * (share * given.softmax(-1).mean(0)).sum(), given)
    (found,) = torch.autograd.grad(load_balancing_loss([given], 2), given)
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-5)
