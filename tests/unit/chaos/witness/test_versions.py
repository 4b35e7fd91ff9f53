"""A generator that names another version than it sampled with is found by its log-probabilities."""

import numpy as np
import pytest


def relabel(journals, change):
    for line in journals.of("rollouts"):
        for sample in line["samples"]:
            sample["versions"] = [change(version) for version in sample["versions"]]


def test_a_stale_version_under_a_new_name_is_found(journals):
    _, second, _ = journals.of("rollouts")
    second["samples"] = [{**sample, "versions": [0] * 4} for sample in second["samples"]]
    (problem, *_) = journals.testify(max_staleness=1).problems
    assert problem.startswith("update 2: log-probabilities of its samples differ by up to ")


def test_an_older_version_than_allowed_is_found(journals):
    relabel(journals, lambda version: max(0, version - 1))
    said = journals.testify()
    assert "update 2 trained on tokens of version 0, and at most 0 versions are allowed" in said.problems


def test_a_version_that_was_never_made_is_found(journals):
    relabel(journals, lambda version: version + 5)
    assert "update 1: the weights of the versions that its samples name do not exist" in journals.testify().problems


def test_weights_that_were_changed_since_do_not_count(journals, model):
    _, weights = model
    for file in (journals.root / "journals/weights").iterdir():
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    assert len(journals.testify().problems) == len(weights) - 1


@pytest.mark.parametrize("field, value", [("logprobs", [0.5] * 4), ("tokens", [7, 8, 2, 2, 2, 2])])
def test_a_sample_that_no_generator_made_is_found(journals, field, value):
    journals.of("fed", update=2)[0]["batch"][0][field] = value
    assert "update 2: 1 of its samples came from no generator" in journals.testify().problems


def test_one_stale_tensor_is_found(journals, model):
    """The generator's weights are those of its version but for one tensor of the version before."""
    from chaos.witness.versions import Versions
    from chaos.witness.weights import digest_of, keep

    directory, weights = model
    mixed = {**weights[1], "model.layers.0.mlp.up_proj.weight": weights[0]["model.layers.0.mlp.up_proj.weight"]}
    keep(mixed, journals.root / "journals/weights")
    versions = Versions(directory, journals.root / "journals/weights", 1.0)
    (rollouts,), (fed, *_) = journals.of("rollouts")[1:2], journals.of("fed", update=2)
    rows = versions.logprobs(digest_of(mixed), [tuple(sample["tokens"]) for sample in fed["batch"]])
    for of in (rollouts["samples"], fed["batch"]):
        for sample, row in zip(of, rows, strict=True):
            sample["logprobs"] = row[-4:].tolist()
    (problem,) = journals.testify().problems
    assert problem.startswith("update 2: log-probabilities of its samples differ")


@pytest.mark.parametrize("noted", [True, False])
def test_log_probabilities_are_compared_where_tokens_were_sampled(journals, noted):
    """The second of four response tokens was read, as in a row of several turns; the others have their places noted."""
    for sample in [sample for line in (*journals.of("rollouts"), *journals.of("fed", index=0))
                   for sample in line.get("samples", []) + line.get("batch", [])]:
        begin = len(sample["tokens"]) - 4
        for column in {"logprobs", "versions"} & sample.keys():
            first, _, *others = sample[column]
            sample[column] = [first, *others]
        if noted:
            sample["places"] = [begin, begin + 2, begin + 3]
    problems = journals.testify().problems
    assert all("log-probabilities of its samples differ" in problem for problem in problems)
    assert len(problems) == (0 if noted else 3)


@pytest.mark.parametrize("sampled, expected", [
    ([0, 0, 1, 1], {}), ([0, 1, 0, 1], {"places": [1, 3]}), ([0, 1, 1, 0], {"places": [1, 2]}),
    ([0, 0, 0, 0], {"places": []})])
def test_places_are_noted_where_they_are_not_the_last_ones(sampled, expected):
    from chaos.witness.learners import places

    assert places(np.array(sampled, bool)) == expected
