"""Losses of demonstrations, preference pairs and step labels, by hand and by gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_ray.algorithms.losses import lm_loss, pairwise_loss, process_reward_loss
from rlhf_ray.errors import ConfigError, DataError

NAN = float("nan")
LOGITS = torch.log(torch.tensor([[[1.0, 3.0], [6.0, 2.0], [5.0, 5.0]]]))  # p = (1/4, 3/4), (3/4, 1/4), (1/2, 1/2)


def log(*probabilities):
    return sum(math.log(p) for p in probabilities)


def random_logits(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class TestLanguageModelLoss:
    def test_by_hand_labels_aligned_with_logits(self):
        loss = lm_loss(LOGITS, torch.tensor([[1, 1, 0]]))
        assert loss.item() == pytest.approx(-log(3 / 4, 1 / 4, 1 / 2) / 3)

    def test_ignored_labels_do_not_count_whatever_their_logits(self):
        logits = LOGITS.clone()
        logits[0, 1] = NAN
        logits.requires_grad_()
        loss = lm_loss(logits, torch.tensor([[1, -100, 0]]))
        loss.backward()
        assert loss.item() == pytest.approx(-log(3 / 4, 1 / 2) / 2)
        expected = torch.tensor([[[1 / 4, -1 / 4], [0.0, 0.0], [-1 / 2, 1 / 2]]]) / 2  # (softmax - onehot) / 2 labels
        torch.testing.assert_close(logits.grad, expected)

    def test_another_ignore_label(self):
        assert lm_loss(LOGITS, torch.tensor([[1, 0, 0]]), ignore=0).item() == pytest.approx(-log(3 / 4))

    @pytest.mark.parametrize("shape", [(1, 3, 2), (1, 0, 2)])
    def test_nothing_to_learn_gives_zero_and_zero_gradients(self, shape):
        logits = torch.full(shape, NAN, requires_grad=True)
        loss = lm_loss(logits, torch.full(shape[:2], -100))
        loss.backward()
        assert loss.item() == 0
        assert (logits.grad == 0).all()

    def test_gradient_check(self):
        labels = torch.tensor([[0, -100, 3], [-100, 2, 1]])
        assert torch.autograd.gradcheck(lambda z: lm_loss(z, labels), random_logits(2, 3, 4).requires_grad_())

    @settings(deadline=None, max_examples=30)
    @given(seed=st.integers(0, 2**32 - 1), pad=st.integers(0, 3))
    def test_equals_torch_cross_entropy_with_any_padding(self, seed, pad):
        g = torch.Generator().manual_seed(seed)
        logits, labels = torch.randn(2, 4, 5, generator=g).double(), torch.randint(0, 5, (2, 4), generator=g)
        labels[torch.rand(2, 4, generator=g) < 0.3] = -100
        labels[0, 0] = 2
        expected = torch.nn.functional.cross_entropy(logits.view(-1, 5), labels.view(-1))
        padded = torch.nn.functional.pad(logits, (0, 0, pad, pad), value=NAN)
        torch.testing.assert_close(lm_loss(padded, torch.nn.functional.pad(labels, (pad, pad), value=-100)), expected)


class TestPairwiseLoss:
    CHOSEN, REJECTED = torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0])

    @pytest.mark.parametrize("kind", ["sigmoid", "logexp"])
    def test_by_hand(self, kind):
        loss = pairwise_loss(self.CHOSEN, self.REJECTED, kind=kind)
        assert loss.item() == pytest.approx((math.log(1 + math.exp(-1)) + math.log(2)) / 2)  # 0.3133, 0.6931

    @pytest.mark.parametrize("kind", ["sigmoid", "logexp"])
    def test_margin_is_subtracted_from_the_distance(self, kind):
        loss = pairwise_loss(self.CHOSEN, self.REJECTED, torch.tensor([1.0, 2.0]), kind)
        assert loss.item() == pytest.approx((math.log(2) + math.log(1 + math.exp(2))) / 2)  # distances 0 and -2
        loss = pairwise_loss(self.CHOSEN, self.REJECTED, 1.0, kind)
        assert loss.item() == pytest.approx((math.log(2) + math.log(1 + math.e)) / 2)  # distances 0 and -1

    @pytest.mark.parametrize("kind", ["sigmoid", "logexp"])
    def test_far_apart_scores_stay_finite(self, kind):
        chosen = torch.tensor([-1000.0, 1000.0], requires_grad=True)
        loss = pairwise_loss(chosen, -chosen.detach(), kind=kind)
        loss.backward()
        assert loss.item() == 1000.0  # (2000 + 0) / 2
        assert chosen.grad.tolist() == [-0.5, 0.0]

    @pytest.mark.parametrize("kind", ["sigmoid", "logexp"])
    def test_gradient_check(self, kind):
        chosen, rejected = random_logits(2, 5)
        margin = torch.tensor([0.0, 1.0, 0.5, -1.0, 2.0]).double()
        function = lambda c, r: pairwise_loss(c, r, margin, kind)  # noqa: E731
        assert torch.autograd.gradcheck(function, (chosen.requires_grad_(), rejected.requires_grad_()))

    @pytest.mark.parametrize("kind", ["sigmoid", "logexp"])
    def test_no_pairs_give_zero_with_a_graph(self, kind):
        chosen = torch.zeros(0, requires_grad=True)
        loss = pairwise_loss(chosen, torch.zeros(0), kind=kind)
        loss.backward()
        assert loss.item() == 0

    def test_half_precision_is_computed_in_float32(self):
        chosen, rejected = torch.tensor([100.5]).bfloat16(), torch.tensor([100.0]).bfloat16()
        assert pairwise_loss(chosen, rejected).dtype == torch.float32

    def test_unknown_kind_is_named(self):
        with pytest.raises(ConfigError, match="'hinge'"):
            pairwise_loss(self.CHOSEN, self.REJECTED, kind="hinge")


class TestProcessRewardLoss:
    # vocabulary of 4; tokens 2 (good) and 3 (bad) are reward tokens; steps end at positions 1 and 3
    PROBABILITIES = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.1, 0.5, 0.3, 0.1], [0.25] * 4, [0.2, 0.2, 0.1, 0.5]])
    STEPS = torch.tensor([[False, True, False, True]])

    def logits(self):
        logits = self.PROBABILITIES.log()[None].clone()
        logits[0, [0, 2]] = NAN  # what stands between the steps is never looked at
        return logits.requires_grad_()

    def labels(self, first, second):
        return torch.tensor([[77, first, 77, second]])

    def test_hard_labels_over_the_whole_vocabulary(self):
        loss = process_reward_loss(self.logits(), self.labels(2, 3), self.STEPS)
        assert loss.item() == pytest.approx(-log(0.3, 0.5) / 2)

    @pytest.mark.parametrize("labels", [(2, 3), (0, 1)], ids=["token ids", "positions"])
    def test_hard_labels_among_reward_tokens(self, labels):
        loss = process_reward_loss(self.logits(), self.labels(*labels), self.STEPS, [2, 3])
        assert loss.item() == pytest.approx(-log(0.3 / 0.4, 0.5 / 0.6) / 2)

    def test_ids_that_look_like_positions_are_ids(self):
        swapped = self.logits().detach()[..., [3, 2, 0, 1]]  # good is now token 1, bad is token 0
        loss = process_reward_loss(swapped, self.labels(1, 0), self.STEPS, [1, 0])
        assert loss.item() == pytest.approx(-log(0.3 / 0.4, 0.5 / 0.6) / 2)

    def test_soft_labels_are_the_probability_of_the_first_token(self):
        loss = process_reward_loss(self.logits(), self.labels(0.9, 0.2), self.STEPS, [2, 3])
        first = 0.9 * log(0.3 / 0.4) + 0.1 * log(0.1 / 0.4)
        second = 0.2 * log(0.1 / 0.6) + 0.8 * log(0.5 / 0.6)
        assert loss.item() == pytest.approx(-(first + second) / 2)

    def test_soft_labels_of_one_and_zero_equal_hard_labels(self):
        soft = process_reward_loss(self.logits(), self.labels(1.0, 0.0), self.STEPS, [2, 3])
        hard = process_reward_loss(self.logits(), self.labels(2, 3), self.STEPS, [2, 3])
        torch.testing.assert_close(soft, hard)

    @pytest.mark.parametrize(("labels", "ids"), [((2, -100), None), ((2, -100), [2, 3]), ((1.0, -100.0), [2, 3])])
    def test_ignored_labels_do_not_count(self, labels, ids):
        logits = self.logits()
        loss = process_reward_loss(logits, self.labels(*labels), self.STEPS, ids)
        loss.backward()
        assert loss.item() == pytest.approx(-log(0.3 if ids is None else 0.3 / 0.4))
        assert logits.grad[0, 1].abs().sum() > 0
        assert logits.grad[0, [0, 2, 3]].abs().sum() == 0

    @pytest.mark.parametrize(("labels", "ids"), [((2, 3), None), ((2, 3), [2, 3]), ((1.0, 0.0), [2, 3])])
    def test_no_steps_give_zero_and_zero_gradients(self, labels, ids):
        logits = self.logits()
        loss = process_reward_loss(logits, self.labels(*labels), torch.zeros_like(self.STEPS), ids)
        loss.backward()
        assert loss.item() == 0
        assert (logits.grad == 0).all()

    @pytest.mark.parametrize(("labels", "ids"), [((2, 3), None), ((2, 3), [2, 3]), ((0.7, 0.1), [2, 3])])
    def test_gradient_check(self, labels, ids):
        def function(z):
            return process_reward_loss(z, self.labels(*labels), self.STEPS, ids)

        assert torch.autograd.gradcheck(function, random_logits(1, 4, 4).requires_grad_())

    @pytest.mark.parametrize("labels", [(-1, 1), (0, 2), (5, 4)])
    def test_class_indices_outside_the_list_are_named(self, labels):
        with pytest.raises(DataError, match=r"are not in reward_token_ids=\[5, 6\]"):
            process_reward_loss(random_logits(1, 4, 7), self.labels(*labels), self.STEPS, [5, 6])

    def test_bad_labels_are_named(self):
        with pytest.raises(DataError, match=r"\[1\] are not in reward_token_ids=\[3, 0\]"):
            process_reward_loss(self.logits(), self.labels(3, 1), self.STEPS, [3, 0])  # 0 is an id, so 1 is no position
        with pytest.raises(DataError, match=r"1\.5"):
            process_reward_loss(self.logits(), self.labels(0.5, 1.5), self.STEPS, [2, 3])
        with pytest.raises(ConfigError, match="exactly two"):
            process_reward_loss(self.logits(), self.labels(0.5, 0.5), self.STEPS)
