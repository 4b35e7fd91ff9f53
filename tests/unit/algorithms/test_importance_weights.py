"""Bands and masks of importance weights: by hand, and beside an oracle in plain numpy."""

import numpy as np
import pytest
import torch

from rlhf_ray.algorithms.losses import importance_weights, policy_loss
from rlhf_ray.errors import ConfigError

NAN = float("nan")
MASK = torch.tensor([[True, True, True, False], [True, True, False, False], [True, True, True, True]])
W = torch.tensor([[0.4, 0.5, 5.0, NAN], [1.005, 0.998, NAN, NAN], [5.1, 1.0, 0.2, 1.0]])
"""Weights of the tokens. Geometric means 1, 1.0015 and 1.005; products 1, 1.00299 and 1.02."""
OLD = torch.full((3, 4), -1.0).masked_fill(~MASK, NAN)
BEHAVIOUR = OLD - W.log()


def weigh(**options):
    weights, stats = importance_weights(OLD, BEHAVIOUR, MASK, **options)
    return weights.masked_fill(~MASK, 0.0), {name: round(value.item() * 9, 4) for name, value in stats.items()}


def rows(*numbers):
    return pytest.approx(np.array(numbers), rel=1e-4)


def test_a_band_leaves_out_weights_on_both_sides_and_keeps_its_ends():
    weights, stats = weigh(tokens="band", band=(0.45, 5.05))
    assert weights.numpy() == rows([0, 0.5, 5, 0], [1.005, 0.998, 0, 0], [0, 1, 0, 1])
    assert stats["is_capped_fraction"] == 3
    assert stats["is_weight_mean"] == pytest.approx(0.5 + 5 + 1.005 + 0.998 + 2, rel=1e-4)


def test_the_band_is_from_one_half_to_five_by_default():
    one = torch.tensor([[True] * 4])
    behaviour = -torch.tensor([[0.49, 0.51, 4.9, 5.1]]).log()
    weights, _ = importance_weights(torch.zeros(1, 4), behaviour, one, "band")
    assert weights.numpy() == rows([0, 0.51, 4.9, 0])


def test_a_band_of_products_leaves_out_whole_rows():
    weights, stats = weigh(tokens="band", level="sequence", band=(1.001, 1.01))
    assert weights.numpy() == rows([0, 0, 0, 0], [1.00299, 1.00299, 0, 0], [0, 0, 0, 0])
    assert stats["is_capped_fraction"] == 7


def test_the_geometric_mask_judges_the_mean_log_ratio_of_a_row():
    weights, stats = weigh(tokens="none", masks=["geometric"], geometric=(0.9, 1.002))
    assert weights.numpy() == rows([1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0])
    assert stats == {"is_capped_fraction": 0, "is_weight_mean": 5, "is_geometric_fraction": 4}


def test_the_outlier_mask_leaves_out_a_row_for_a_single_token():
    weights, stats = weigh(tokens="none", masks=["outlier"], outlier=(0.3, 100))
    assert weights.numpy() == rows([1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0])
    assert stats == {"is_capped_fraction": 0, "is_weight_mean": 5, "is_outlier_fraction": 4}
    assert weigh(tokens="none", masks=["outlier"], outlier=(0.3, 5.05))[1]["is_outlier_fraction"] == 4
    assert weigh(tokens="none", masks=["outlier"], outlier=(0.1, 4.9))[1]["is_outlier_fraction"] == 7


@pytest.mark.parametrize(("name", "inside", "outside"), [
    ("geometric", (0.9901, 1.0099), (0.9899, 1.0101)), ("outlier", (1.1e-4, 99), (0.9e-4, 101))])
def test_default_bounds_of_the_masks(name, inside, outside):
    for ratio, kept in [*((r, 1.0) for r in inside), *((r, 0.0) for r in outside)]:
        behaviour = -torch.full((1, 2), ratio, dtype=torch.float64).log()
        weights, _ = importance_weights(torch.zeros(1, 2), behaviour, torch.ones(1, 2, dtype=torch.bool), "none",
                                        masks=[name])
        assert weights.tolist() == [[kept, kept]], ratio


def test_masks_and_truncation_combine():
    weights, stats = weigh(tokens="truncate", cap=2.0, masks=["geometric", "outlier"], geometric=(0.9, 1.01),
                           outlier=(0.3, 100))
    assert weights.numpy() == rows([0.4, 0.5, 2, 0], [1.005, 0.998, 0, 0], [0, 0, 0, 0])
    assert (stats["is_capped_fraction"], stats["is_geometric_fraction"], stats["is_outlier_fraction"]) == (2, 0, 4)


def oracle(old, behaviour, mask, tokens, cap, level, band, masks, geometric, outlier):
    """Row by row in float64, without the package's code."""
    result = np.zeros(mask.shape)
    for i in range(len(mask)):
        own = np.exp(old[i][mask[i]] - behaviour[i][mask[i]])
        if not len(own):
            continue
        used = np.full(len(own), own.prod()) if level == "sequence" else own.copy()
        if tokens == "none":
            used[:] = 1
        elif tokens == "truncate":
            used = np.minimum(used, cap)
        elif tokens == "mask":
            used[used > cap] = 0
        else:
            used[(used < band[0]) | (used > band[1])] = 0
        if "geometric" in masks and not geometric[0] <= own.prod() ** (1 / len(own)) <= geometric[1]:
            used[:] = 0
        if "outlier" in masks and (own.min() < outlier[0] or own.max() > outlier[1]):
            used[:] = 0
        result[i][mask[i]] = used
    return result


@pytest.mark.parametrize("masks", [(), ("geometric",), ("outlier",), ("geometric", "outlier")])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("tokens", ["none", "truncate", "mask", "band"])
def test_every_combination_is_the_oracles_and_masked_tokens_stay_in_the_denominator(tokens, level, masks):
    g = torch.Generator().manual_seed(3)
    old, gap, advantages = torch.randn(3, 12, 5, generator=g, dtype=torch.float64)
    mask = torch.rand(12, 5, generator=g) < 0.8
    behaviour = old - 0.4 * gap
    options = {"level": level, "band": (0.7, 1.5), "masks": masks, "geometric": (0.8, 1.25), "outlier": (0.5, 2.0)}
    expected = oracle(*(x.numpy() for x in (old, behaviour, mask)), tokens, 1.2, **options)
    weights, stats = importance_weights(old, behaviour, mask, tokens, 1.2, **options)
    np.testing.assert_allclose(weights.numpy() * mask.numpy(), expected, rtol=1e-12)
    assert stats["is_weight_mean"].item() == pytest.approx(expected.sum() / mask.sum().item())
    assert not masks or 0 < (expected == 0)[mask.numpy()].mean() < 1
    options["importance_level"] = options.pop("level")
    loss, of_loss = policy_loss(old, old, advantages, mask, 0.2, 0.2, behaviour_logprobs=behaviour, is_cap=1.2,
                                importance=tokens, **options)
    assert loss.item() == pytest.approx(-(expected * advantages.numpy()).sum() / mask.sum().item())
    assert stats.items() <= of_loss.items()


def test_what_is_outside_the_mask_changes_nothing():
    mask = torch.tensor([[True, True, False]])
    old = torch.tensor([[0.0, 0.0, NAN]])
    for strange in (NAN, -500.0, 500.0):
        weights, stats = importance_weights(old, torch.tensor([[0.0, 0.0, strange]]), mask, "band",
                                            masks=["geometric", "outlier"])
        assert weights[0, :2].tolist() == [1.0, 1.0]
        assert [stats[name].item() for name in sorted(stats)] == [0, 0, 0, 1]


def test_a_gap_in_a_row_is_no_outlier():
    mask = torch.tensor([[True, False, True]])
    weights, _ = importance_weights(torch.zeros(1, 3), torch.full((1, 3), -0.5), mask, "none", masks=["outlier"],
                                    outlier=(1.5, 2.0))  # exp(0.5) = 1.65; 1, as at the gap, would be outside
    assert weights[mask].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("options", "message"), [
    ({"tokens": "bands"}, "importance='bands'"), ({"masks": ["sequence"]}, r"\['sequence'\]"),
    ({"band": (5.0, 0.5)}, r"band=\(5.0, 0.5\)"), ({"geometric": (0.0, 1.0)}, "geometric="),
    ({"outlier": (1.0, 1.0)}, "outlier="), ({"cap": 0.0}, "is_cap=0.0"), ({"level": "row"}, "level 'row'")])
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        importance_weights(OLD, BEHAVIOUR, MASK, **options)


def test_masks_need_the_generators_log_probabilities():
    with pytest.raises(ConfigError, match=r"masks=\['outlier'\] applies to weights that need behaviour_logprobs"):
        policy_loss(OLD, OLD, OLD, MASK, 0.2, 0.2, masks=["outlier"])
