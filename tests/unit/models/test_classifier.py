"""Reward models of any family against transformers' own forward pass, a row at a time."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.models.classifier import Classifier, EncodedRow
from rlhf_ray.models.scalar_head import classifier_class, new_classifier
from tests.tiny_families import DECODERS, SHAPE, USUAL, config_of

FAMILIES = {
    **{name: (name, DECODERS[name]) for name in (
        "bloom", "gemma2", "gpt2", "granite", "llama", "mistral", "nemotron", "mixtral", "opt", "qwen2")},
    "bert": ("bert", USUAL), "distilbert": ("distilbert", {
        **SHAPE, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 32}),
    "roberta": ("roberta", {**USUAL, "pad_token_id": 1, "eos_token_id": 2}), "deberta-v2": ("deberta-v2", USUAL),
    "modernbert": ("modernbert", {**USUAL, "pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3}),
}
LENGTHS = (5, 9, 3, 9, 1, 12)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """saved(family) -> directory of a tiny random model, made once."""
    made: dict[str, Path] = {}

    def save(family: str) -> Path:
        if family not in made:
            kind, shape = FAMILIES[family]
            torch.manual_seed(0)
            model = new_classifier(config_of(kind, **shape))
            with torch.no_grad():  # biases and heads start at zero or nearly so; scores must differ to tell anything
                for name, p in model.named_parameters():
                    if name.split(".")[0] in ("score", "classifier", "pooler", "head", "pre_classifier"):
                        p.normal_(std=0.5)
            made[family] = tmp_path_factory.mktemp("families") / family.replace(" ", "_")
            model.save_pretrained(made[family])
        return made[family]

    return save


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_transformers_own_whatever_the_neighbours(saved, family):
    directory, random = saved(family), np.random.default_rng(0)
    rows = [EncodedRow(random.integers(4, 64, n).astype(np.int32)) for n in LENGTHS]
    classifier = Classifier(ModelConfig(path=str(directory)))
    eager = {"attn_implementation": "eager"} if family == "gemma2" else {}  # "sdpa" ignores its soft-caps
    shape = transformers.AutoConfig.from_pretrained(directory)
    plain = classifier_class(shape).from_pretrained(directory, **eager).eval()
    with torch.no_grad():
        expected = [plain(torch.from_numpy(row.ids.astype(np.int64))[None]).logits.item() for row in rows]
    assert np.std(expected) > 0.01
    for plan in ([[0, 1, 2, 3, 4, 5]], [[4, 2], [5, 0], [3], [1]]):
        scores = classifier.scores(rows, [np.array(part) for part in plan])
        assert scores.dtype == np.float32 and scores == pytest.approx(expected, abs=2e-5)


def test_rows_with_and_without_types_score_together_as_apart(saved):
    classifier = Classifier(ModelConfig(path=str(saved("bert"))))
    ids = np.arange(4, 10, dtype=np.int32)
    rows = [EncodedRow(ids, np.array([0, 0, 0, 1, 1, 1], dtype=np.int32)), EncodedRow(ids), EncodedRow(ids[:3])]
    apart = [classifier.scores([row], [np.arange(1)])[0] for row in rows]
    assert classifier.scores(rows, [np.arange(3)]) == pytest.approx(apart, abs=1e-5)
    assert abs(apart[0] - apart[1]) > 1e-4, "types tell"


def test_encoders_read_pairs(saved):
    pairs = {family for family in FAMILIES if Classifier(ModelConfig(path=str(saved(family)))).reads_pairs}
    assert pairs == {"bert", "distilbert", "roberta", "deberta-v2", "modernbert"}


def test_contexts(saved):
    def longest(family):
        return Classifier(ModelConfig(path=str(saved(family)))).longest

    assert (longest("llama"), longest("gpt2"), longest("bloom")) == (32, 32, None)
    assert longest("roberta") == 30, "its positions start behind the padding's"
    edge = [EncodedRow(np.full(30, 7, dtype=np.int32))]
    assert np.isfinite(Classifier(ModelConfig(path=str(saved("roberta")))).scores(edge, [np.array([0])])).all()


def test_an_end_token_that_is_also_the_padding_is_scored_all_the_same(saved, tmp_path):
    """transformers takes the last token that is not padding; the end of a response is where ours are scored."""
    directory = tmp_path / "same"
    directory.mkdir()
    for file in saved("bloom").iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    shape = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**shape, "pad_token_id": 1}))
    row = EncodedRow(np.array([5, 6, 1], dtype=np.int32))
    other = EncodedRow(np.array([5, 6], dtype=np.int32))
    scores = Classifier(ModelConfig(path=str(directory))).scores([row, other], [np.array([0, 1])])
    assert abs(scores[0] - scores[1]) > 1e-4


def test_second_texts_of_a_pair_are_told_apart(saved):
    ids, classifier = np.arange(4, 10, dtype=np.int32), Classifier(ModelConfig(path=str(saved("bert"))))
    pair = EncodedRow(ids, np.array([0, 0, 0, 1, 1, 1], dtype=np.int32))
    score = classifier.scores([pair], [np.array([0])])[0]
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(saved("bert")).eval()
    with torch.no_grad():
        expected = plain(torch.arange(4, 10)[None], token_type_ids=torch.tensor([[0, 0, 0, 1, 1, 1]])).logits.item()
    assert score == pytest.approx(expected, abs=1e-5)
