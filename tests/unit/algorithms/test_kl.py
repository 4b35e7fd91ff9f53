"""Estimators of the KL and the controllers of its coefficient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_ray.algorithms.kl import AdaptiveKL, FixedKL, approx_kl
from rlhf_ray.errors import ConfigError

LOGPROBS = torch.tensor([[-1.0, -2.0, -0.5]])
REFERENCE = torch.tensor([[-1.5, -1.0, -0.5]])  # d = 0.5, -1, 0


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [0.5, -1.0, 0.0]),
        ("k2", [0.125, 0.5, 0.0]),  # 0.5² / 2, 1² / 2
        ("k3", [math.exp(-0.5) - 1 + 0.5, math.exp(1.0) - 1 - 1.0, 0.0]),  # 0.1065, 0.7183
        ("abs", [0.5, 1.0, 0.0]),
    ],
)
def test_estimators_by_hand(estimator, expected):
    torch.testing.assert_close(approx_kl(LOGPROBS, REFERENCE, estimator), torch.tensor([expected]))


def test_k1_is_the_default_and_log_ratios_are_not_clamped():
    assert approx_kl(torch.tensor([0.0]), torch.tensor([-100.0])).item() == 100.0


def test_k1_and_k3_are_unbiased_and_k2_is_not():
    p, q = torch.tensor([[0.7, 0.2, 0.1], [0.3, 0.3, 0.4]], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()  # expectations over the policy p are sums over its three tokens
    for estimator, unbiased in [("k1", True), ("k3", True), ("k2", False)]:
        expected = (p * approx_kl(p.log(), q.log(), estimator)).sum()
        assert torch.isclose(expected, exact, rtol=1e-12) == unbiased


@settings(deadline=None, max_examples=200)
@given(d=st.floats(-30, 30, width=32), base=st.floats(-20, 0, width=32), estimator=st.sampled_from(["k2", "k3", "abs"]))
def test_k2_k3_and_abs_are_never_negative(d, base, estimator):
    estimate = approx_kl(torch.tensor([base + d]), torch.tensor([base]), estimator)
    assert estimate.item() >= 0


def test_k3_is_exact_and_never_negative_where_the_log_ratio_is_small():
    d = torch.logspace(-9, -2, 20_001)
    d = torch.cat([d, -d])
    estimate = approx_kl(d, torch.zeros_like(d), "k3")
    assert (estimate >= 0).all()
    torch.testing.assert_close(estimate, d.square() / 2 - d**3 / 6, rtol=1e-3, atol=1e-9)  # Taylor's first two terms


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_gradients_of_estimators(estimator):
    logprobs = LOGPROBS.double()[:, :2].requires_grad_()  # without d = 0, where |d| has a kink
    assert torch.autograd.gradcheck(lambda x: approx_kl(x, REFERENCE.double()[:, :2], estimator), logprobs)


def test_unknown_estimator_is_named():
    with pytest.raises(ConfigError, match="'k4'"):
        approx_kl(LOGPROBS, REFERENCE, "k4")


def test_fixed_controller_stays():
    controller = FixedKL(0.05)
    controller.update(1e9, 1000)
    assert controller.value == 0.05


def test_a_resumed_run_has_the_fixed_coefficient_of_its_configuration_and_the_adapted_one_of_its_checkpoint():
    saved = {"value": 0.2}
    fixed, adaptive = FixedKL(0.05), AdaptiveKL(0.05, target=6.0, horizon=1000)
    fixed.load_state_dict(saved)
    adaptive.load_state_dict(saved)
    assert (fixed.value, adaptive.value) == (0.05, 0.2)


def test_adaptive_controller_by_hand():
    controller = AdaptiveKL(0.1, target=6.0, horizon=1000)
    controller.update(6.6, 100)  # error +0.1: 0.1 * (1 + 0.1 * 100 / 1000)
    assert controller.value == pytest.approx(0.101)


@pytest.mark.parametrize(("observed", "factor"), [(600.0, 1.02), (0.0, 0.98), (-5.0, 0.98), (math.inf, 1.02)])
def test_adaptive_controller_clips_its_error_at_a_fifth(observed, factor):
    controller = AdaptiveKL(0.1, target=6.0, horizon=1000)
    controller.update(observed, 100)
    assert controller.value == pytest.approx(0.1 * factor)


def test_adaptive_controller_ignores_nan():
    controller = AdaptiveKL(0.1, target=6.0, horizon=1000)
    controller.update(math.nan, 100)
    assert controller.value == 0.1


def test_adaptive_controller_goes_on_from_its_state():
    first = AdaptiveKL(0.1, target=6.0, horizon=1000)
    first.update(12.0, 64)
    second = AdaptiveKL(0.1, target=6.0, horizon=1000)
    second.load_state_dict(first.state_dict())
    for controller in (first, second):
        controller.update(3.0, 64)
    assert first.value == second.value != 0.1


@settings(deadline=None, max_examples=100)
@given(observed=st.floats(), n=st.integers(1, 4999))
def test_adaptive_controller_stays_positive_and_finite(observed, n):
    controller = AdaptiveKL(0.1, target=6.0, horizon=1000)
    controller.update(observed, n)
    assert 0 < controller.value < math.inf


@pytest.mark.parametrize("observed", [0.0, 6.0, 100.0])
def test_updates_that_could_turn_the_coefficient_negative_are_refused(observed):
    with pytest.raises(ConfigError, match="horizon above 1000"):
        AdaptiveKL(0.1, target=6.0, horizon=1000).update(observed, 5000)


@pytest.mark.parametrize("arguments", [(-0.1, 6.0, 100), (0.1, 0.0, 100), (0.1, 6.0, 0), (math.nan, 6.0, 100)])
def test_arguments_out_of_bounds_are_refused(arguments):
    with pytest.raises(ConfigError):
        AdaptiveKL(*arguments)
