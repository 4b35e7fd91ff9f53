"""A sample that is lost, trained on twice, unscored or mislabelled is named; a sound run has no problem."""

from collections import Counter

import pytest

PLAN = ("trained", "lost", "duplicated", "quarantined")


def figures(said):
    return tuple(getattr(said, name) for name in PLAN)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_sound_run_is_attested(journals, max_staleness):
    said = journals.testify(max_staleness)
    assert figures(said) == (12, 0, 0, 0) and said.problems == [] and said.not_applied == 0


@pytest.mark.parametrize("name, epoch", [("policy_learner_1", 0), ("policy_learner_0", 1), ("critic_learner_0", 1)])
def test_a_sample_that_one_learner_left_out_in_one_epoch_is_lost(journals, name, epoch):
    journals.of("fed", name, update=2, index=epoch)[0]["rows"].pop()
    said = journals.testify(max_staleness=1)
    assert (said.lost, said.duplicated) == (1, 0)
    assert any("update 2: the samples of" in problem for problem in said.problems)


def test_a_batch_that_replaces_another_one_is_trained_on_twice_and_the_other_one_lost(journals):
    for second, first in zip(journals.every("fed", update=2), journals.every("fed", update=1), strict=True):
        second["rows"] = first["rows"]
    said = journals.testify()
    assert (said.lost, said.duplicated) == (8, 8), "four by its prompts, four that were not scored for it"
    assert "update 2 is the first that trained on other prompts than its own" in said.problems
    assert "update 2 trained on 4 samples that the reward service did not score for it" in said.problems


def test_an_update_with_further_epochs_trains_on_samples_twice(journals):
    for name in ("policy_learner_0", "policy_learner_1"):
        again = [{**line, "index": line["index"] + 2} for line in journals.of("fed", name, update=2)]
        at = journals.lines[name].index(journals.of("update", name, update=2)[0])
        journals.lines[name][at:at] = again
    said = journals.testify()
    assert (said.lost, said.duplicated) == (0, 8)
    assert "policy_learner: 8 samples in more than 2 epochs of an update" in said.problems


def test_an_update_that_was_made_twice_trains_on_samples_twice(journals):
    for name in list(journals.lines)[1:]:
        made = [line for line in journals.lines[name] if line.get("update") == 2]
        at = journals.lines[name].index(made[-1]) + 1
        journals.lines[name][at:at] = made
    said = journals.testify()
    assert said.duplicated >= 4 and any("update 2 began from other weights" in problem for problem in said.problems)


def test_an_update_that_is_missing_loses_its_samples(journals):
    for lines in journals.lines.values():
        lines[:] = [line for line in lines if line.get("update") != 3]
    said = journals.testify()
    assert (said.trained, said.lost) == (8, 4)
    assert "the run's model does not have the weights after update 3" in said.problems


def test_two_updates_in_the_wrong_order_lose_nothing_and_are_named(journals):
    third = {name: [line["rows"] for line in journals.of("fed", name, update=3)] for name in list(journals.lines)[1:]}
    for name, rows in third.items():
        for second, last, moved in zip(journals.of("fed", name, update=2), journals.of("fed", name, update=3), rows,
                                       strict=True):
            second["rows"], last["rows"] = moved, second["rows"]
    journals.lines["reward_service"].clear()
    said = journals.testify()
    assert (said.lost, said.duplicated) == (0, 0)
    assert said.problems == ["update 2 is the first that trained on other prompts than its own"]
    assert journals.testify(max_staleness=1).problems == []


def test_a_sample_in_the_place_of_another_one_of_its_prompt_was_not_scored(journals):
    for name in list(journals.lines)[1:]:
        for line in journals.of("fed", name, update=1):
            rows = line["rows"]
            line["rows"] = [journals.of("fed", update=1)[0]["rows"][0] if row[:2] == rows[0][:2] else row
                            for row in rows]
    said = journals.testify()
    assert (said.lost, said.duplicated) == (1, 1)
    assert said.problems == ["update 1 trained on 1 samples that the reward service did not score for it"]


def test_a_sample_of_no_prompt_takes_the_place_of_one(journals):
    for line in journals.every("fed", update=3):
        line["rows"] = [[60, 61, 62] if row == journals.of("fed", update=3)[0]["rows"][0] else row
                        for row in line["rows"]]
    said = journals.testify()
    assert any("too many" in problem and "no prompt of the data" in problem for problem in said.problems)


def refuse(journals, visit):
    """Refuse the prompt of a visit; the last update then has the prompt of the next one."""
    visits = journals.order.visits()
    rows = [next(visits) for _ in range(7)]
    journals.lines["reward_service"].insert(0, {
        "event": "refused", "time": 0, "prompt": list(journals.order.prompts[rows[visit]])})
    return rows


def test_the_prompts_that_the_service_refused_are_skipped(journals):
    rows = refuse(journals, 4)
    old, new = (journals.order.prompts[rows[visit]] for visit in (4, 6))
    for lines in journals.lines.values():
        for line in lines:
            if line["event"] in ("fed", "scored") and line.get("update", 3) == 3:
                key = "rows" if "rows" in line else "samples"
                line[key] = [[*new, *row[len(old):]] if tuple(row[: len(old)]) == old else row for row in line[key]]
    said = journals.testify()
    assert figures(said) == (12, 0, 0, 2)
    assert not any("lost" in problem or "prompts" in problem for problem in said.problems)


def test_a_prompt_that_was_not_refused_may_not_be_skipped(journals):
    rows = refuse(journals, 4)
    journals.lines["reward_service"][0]["prompt"] = list(journals.order.prompts[rows[0]])
    old, new = (journals.order.prompts[rows[visit]] for visit in (4, 6))
    for line in journals.every("fed", update=3):
        line["rows"] = [[*new, *row[len(old):]] if tuple(row[: len(old)]) == old else row for row in line["rows"]]
    said = journals.testify()
    assert said.lost and said.duplicated


def test_steps_that_were_not_applied_are_counted(journals):
    journals.of("fed", "critic_learner_0", update=2)[0]["applied"] = False
    said = journals.testify()
    assert said.not_applied == 1 and said.problems == []


def test_a_learner_without_a_journal_trained_on_nothing(journals):
    del journals.lines["critic_learner_0"]
    said = journals.testify()
    assert said.lost == 12


def test_ranks_with_different_weights_are_named(journals):
    journals.of("update", "policy_learner_1", update=3)[0]["weights"] = "other"
    assert journals.testify().problems == ["update 3: the ranks of policy_learner have different weights"]


def test_rows_are_counted_by_their_prompts(journals):
    visits = journals.order.visits()
    expected = Counter(next(visits) for _ in range(6))
    seen = Counter(journals.order.row_of(tuple(row)) for line in journals.every("fed", index=0) for row in line["rows"])
    assert {row: times // 4 for row, times in seen.items()} == expected, "two samples, policy and critic"
