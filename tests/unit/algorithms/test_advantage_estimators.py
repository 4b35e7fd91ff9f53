"""Every estimator worked out by hand on two prompts of two samples each."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_ray.algorithms.advantage_estimators import ESTIMATORS, ScoredResponses, estimate
from rlhf_ray.algorithms.advantages import gae
from rlhf_ray.errors import ConfigError

NAN = math.nan
GAMMA = 0.5
MASK = torch.tensor([[True, True, False], [True, False, True], [True, True, True], [True, False, False]])
SCORES = torch.tensor([4.0, 1.0, 2.0, 6.0])
GROUPS = torch.tensor([7, 7, 3, 3])
PENALTIES = torch.tensor([[-1.0, -2.0, NAN], [0.5, NAN, -0.5], [-1.0, 0.0, 1.0], [-2.0, NAN, NAN]])
VALUES = torch.tensor([[1.0, 2.0, NAN], [0.0, NAN, 1.0], [1.0, 1.0, 1.0], [3.0, NAN, NAN]])


def responses(**changes):
    whole = ScoredResponses(scores=SCORES, penalties=PENALTIES, mask=MASK, groups=GROUPS, values=VALUES, gamma=GAMMA,
                            lam=0.8)
    return replace(whole, **changes)


# Token rewards: [-1, 2], [0.5, 0.5], [-1, 0, 3], [4]; discounted by 1/2 per True token:
RETURNS = [[0.0, 2.0, 0.0], [0.75, 0.0, 0.5], [-0.25, 1.5, 3.0], [4.0, 0.0, 0.0]]
# Totals: 1, 1, 2, 4.
TOTALS = [1.0, 1.0, 2.0, 4.0]


def spread(rows):
    """Numbers of rows on their True tokens."""
    return (torch.tensor(rows)[:, None] * MASK).tolist()


def test_gae_is_the_one_of_advantages():
    rewards = torch.tensor([[-1.0, 2.0, 0.0], [0.5, 0.0, 0.5], [-1.0, 0.0, 3.0], [4.0, 0.0, 0.0]])
    expected = gae(rewards, VALUES, MASK, GAMMA, 0.8)
    assert all(torch.equal(a, b) for a, b in zip(estimate("gae", responses()), expected, strict=True))


def test_the_critic_s_returns_may_have_their_own_lambda():
    advantages, returns = estimate("gae", responses(critic_lam=1.0))
    assert torch.equal(advantages, estimate("gae", responses())[0])
    torch.testing.assert_close(returns, torch.tensor(RETURNS))  # lambda 1: what the rewards really were


def test_lambda_may_differ_between_rows():
    lams = torch.tensor([0.8, 0.3, 0.0, 1.0])
    whole = estimate("gae", responses(lam=lams))[0]
    for row, lam in enumerate(lams.tolist()):
        assert torch.equal(whole[row], estimate("gae", responses(lam=lam))[0][row])


@pytest.mark.parametrize("name", ["reinforce", "reinforce_pp"])
def test_reinforce_is_the_discounted_return(name):
    advantages, returns = estimate(name, responses(values=None))
    assert advantages.tolist() == returns.tolist() == RETURNS


def test_reinforce_baseline_compares_scores_and_keeps_penalties_per_token():
    advantages, returns = estimate("reinforce_baseline", responses(values=None))
    # Scores less their groups' means 2.5 and 4: 1.5, -1.5, -2, 2; last rewards -0.5, -2, -1, 0.
    assert advantages.tolist() == [[-1.25, -0.5, 0], [-0.5, 0, -2.0], [-1.25, -0.5, -1.0], [0.0, 0, 0]]
    assert returns.tolist() == RETURNS


@pytest.mark.parametrize(("name", "rows"), [
    ("rloo", [0.0, 0.0, -2.0, 2.0]),  # 2 - 4 and 4 - 2
    ("dr_grpo", [0.0, 0.0, -1.0, 1.0]),  # of the mean 3
    ("grpo", [0.0, 0.0, -1 / (2**0.5 + 1e-6), 1 / (2**0.5 + 1e-6)]),
])
def test_group_estimators_compare_whole_rewards(name, rows):
    advantages, returns = estimate(name, responses(values=None))
    torch.testing.assert_close(advantages, torch.tensor(spread(rows)))
    assert returns.tolist() == RETURNS


@pytest.mark.parametrize("name", ["rloo", "dr_grpo"])
def test_without_penalties_the_scores_alone_are_compared(name):
    advantages, _ = estimate(name, responses(penalties=torch.zeros(4, 3)))
    factor = 2.0 if name == "rloo" else 1.0
    assert advantages.tolist() == spread([1.5 * factor, -1.5 * factor, -2.0 * factor, 2.0 * factor])


STEPS = torch.tensor([[1.0, 0.0, NAN], [2.0, NAN, -1.0], [0.0, 4.0, 0.0], [1.0, NAN, NAN]])
# With them token rewards are [0, 2], [2.5, -0.5], [-1, 4, 3], [5]; outcomes 5, 2, 6, 7; totals 2, 2, 6, 5.
STEP_RETURNS = [[1.0, 2.0, 0.0], [2.25, 0.0, -0.5], [1.75, 5.5, 3.0], [5.0, 0.0, 0.0]]


@pytest.mark.parametrize("name", ["reinforce", "reinforce_pp"])
def test_step_rewards_count_from_their_token_on_backwards(name):
    advantages, returns = estimate(name, responses(values=None, step_rewards=STEPS))
    assert advantages.tolist() == returns.tolist() == STEP_RETURNS


def test_gae_takes_step_rewards_where_they_fall():
    rewards = torch.tensor([[0.0, 2.0, 0.0], [2.5, 0.0, -0.5], [-1.0, 4.0, 3.0], [5.0, 0.0, 0.0]])
    expected = gae(rewards, VALUES, MASK, GAMMA, 0.8)
    found = estimate("gae", responses(step_rewards=STEPS))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("name", "rows"), [
    ("rloo", [0.0, 0.0, 1.0, -1.0]),
    ("dr_grpo", [0.0, 0.0, 0.5, -0.5]),
    ("grpo", [0.0, 0.0, 0.5 / (0.5**0.5 + 1e-6), -0.5 / (0.5**0.5 + 1e-6)]),
])
def test_group_estimators_compare_sums_of_step_rewards(name, rows):
    advantages, returns = estimate(name, responses(values=None, step_rewards=STEPS))
    torch.testing.assert_close(advantages, torch.tensor(spread(rows)))
    assert returns.tolist() == STEP_RETURNS


def test_reinforce_baseline_compares_sums_of_step_rewards_too():
    advantages, _ = estimate("reinforce_baseline", responses(values=None, step_rewards=STEPS))
    # Outcomes less their groups' means 3.5 and 6.5: 1.5, -1.5, -0.5, 0.5.
    assert advantages.tolist() == [[-1.25, -0.5, 0], [-0.5, 0, -2.0], [-0.875, 0.25, 0.5], [-1.5, 0, 0]]


OF_SCORES = [name for name in ESTIMATORS if name != "gdpo"]


@pytest.mark.parametrize("name", OF_SCORES)
def test_a_step_reward_on_the_last_token_is_a_score(name):
    last = torch.tensor([[0.0, 4.0, NAN], [0.0, NAN, 1.0], [0.0, 0.0, 2.0], [6.0, NAN, NAN]])
    found = estimate(name, responses(scores=torch.zeros(4), step_rewards=last))
    for one, other in zip(found, estimate(name, responses()), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_a_failed_reward_stays_visible(name):
    advantages, _ = estimate(name, responses(
        scores=torch.tensor([NAN, 1.0, 2.0, 6.0]), components=torch.tensor([[1.0, NAN], [1, 1], [2, 2], [6, 6]]),
        component_weights=torch.ones(2)))
    assert advantages[0][MASK[0]].isnan().all() and not advantages[2:].isnan().any()


def test_gdpo_compares_each_component_and_no_penalty():
    components = torch.tensor([[1.0, 3.0], [1.0, 1.0], [0.0, 2.0], [4.0, 2.0]])
    found, returns = estimate("gdpo", responses(values=None, components=components,
                                                component_weights=torch.tensor([1.0, 0.5])))
    # Groups of the first and the last two rows. Deviations (n-1) of two numbers d apart are d / sqrt(2).
    first, second = 0.5 * 1 / (2**0.5 + 1e-4), 2 / (8**0.5 + 1e-4)
    torch.testing.assert_close(found, torch.tensor(spread([first, -first, -second, second])))
    assert returns.tolist() == RETURNS
    with pytest.raises(ValueError, match="gdpo estimator needs the components"):
        estimate("gdpo", responses(values=None))


def test_gae_without_values_and_unknown_names_are_refused():
    with pytest.raises(ValueError, match="needs a critic"):
        estimate("gae", responses(values=None))
    with pytest.raises(ConfigError, match="'ppo' is unknown; use one of gae, reinforce"):
        estimate("ppo", responses())


def test_a_group_of_one_has_nobody_to_leave_out():
    with pytest.raises(ConfigError, match="samples_per_prompt"):
        estimate("rloo", responses(groups=torch.arange(4)))


@settings(deadline=None, max_examples=40)
@given(name=st.sampled_from(list(ESTIMATORS)), seed=st.integers(0, 2**32 - 1))
def test_padding_and_order_of_rows_change_nothing(name, seed):
    g = torch.Generator().manual_seed(seed)
    mask, groups = torch.rand(6, 4, generator=g) < 0.7, torch.tensor([0, 0, 1, 1, 1, 0])
    penalties, values = torch.randn(2, 6, 4, generator=g).unbind()
    steps = torch.randn(6, 4, generator=g)
    whole = ScoredResponses(torch.randn(6, generator=g), penalties, mask, groups, values, 0.9, 0.8, step_rewards=steps,
                            components=torch.randn(6, 2, generator=g), component_weights=torch.tensor([1.0, -0.3]))
    order = torch.randperm(6, generator=g)

    def changed(x, fill=NAN):
        return torch.nn.functional.pad(x[order].masked_fill(~mask[order], fill), (2, 1), value=fill)

    moved = ScoredResponses(whole.scores[order], changed(penalties), changed(mask, False), groups[order],
                            changed(values), 0.9, 0.8, step_rewards=changed(steps),
                            components=whole.components[order], component_weights=whole.component_weights)
    for plain, other in zip(estimate(name, whole), estimate(name, moved), strict=True):
        torch.testing.assert_close(other[:, 2:-1], plain[order])
        assert (other[:, :2] == 0).all() and (plain[~mask] == 0).all()
