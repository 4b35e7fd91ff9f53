"""Gaps of log-probabilities are measured on a model whose logits are spread as said."""

import numpy as np
import pytest
import torch

from benchmarks.float32_head import KINDS, SPREAD, Gap, learned, make_model, row
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.models.generator_parity import TransformersReference, given_rows


def test_a_gap_has_three_figures():
    gap = Gap.of(np.zeros(4, np.float32), np.array([0, 1, -1, 4], np.float32))
    assert (gap.root_mean_square, gap.median) == (pytest.approx(4.5**0.5), 1.0) and 3.9 < gap.quantile < 4
    cells = ["0.020", "frozen", "float32", "bfloat16", "2.1213", "1.0000", "3.9100"]
    assert row(0.02, ("frozen", True, False), gap).strip("| ").split(" | ") == cells


def test_a_learner_s_log_probabilities_are_the_model_s_but_for_rounding(tmp_path):
    make_model(str(tmp_path), 0.02, vocabulary=512)
    exact = TransformersReference(ModelConfig(path=str(tmp_path)))
    rows = given_rows(exact.model.config, 80)
    with torch.no_grad():
        assert exact.model(torch.arange(64)[None]).logits.std() == pytest.approx(SPREAD, rel=0.1)
    for kind in KINDS:
        gaps = [Gap.of(learned(str(tmp_path), kind, head, rows), exact.logprobs(rows)) for head in (True, False)]
        assert 0 < gaps[0].root_mean_square < gaps[1].root_mean_square < 0.1
