"""A restart makes the work after its checkpoint void; late lines of a replaced process are void too."""

from chaos.witness.history import surviving


def start(life, weights="w0"):
    return {"event": "start", "time": 0, "life": life, "weights": weights}


def load(life, step, weights):
    return {"event": "load", "time": 0, "life": life, "step": step, "weights": weights}


def update(life, number, before, after, row=0, over=True):
    fed = {"event": "fed", "time": number, "life": life, "update": number, "index": 0, "applied": True, "rows": [[row]]}
    end = {"event": "update", "time": number, "life": life, "update": number, "before": before, "weights": after}
    return [fed, end] if over else [fed]


def rows(history):
    return [(entry.number, step.rows[0][0]) for entry in history.in_order() for step in entry.steps]


def test_work_after_the_checkpoint_is_void_and_done_again():
    history = surviving([
        start("a"), *update("a", 1, "w0", "w1", 1), *update("a", 2, "w1", "w2", 2), *update("a", 3, "w2", "w3", 3),
        start("b"), load("b", 1, "w1"), *update("b", 2, "w1", "w2", 4), *update("b", 3, "w2", "w3", 5)])
    assert rows(history) == [(1, 1), (2, 4), (3, 5)] and history.problems == []
    assert (history.weights_after(0), history.weights_after(3), history.weights_after(4)) == ("w0", "w3", "")


def test_without_a_checkpoint_everything_is_void():
    history = surviving([start("a"), *update("a", 1, "w0", "w1", 1), start("b"), *update("b", 1, "w0", "w1", 2)])
    assert rows(history) == [(1, 2)] and history.problems == []


def test_a_process_that_died_before_it_did_anything_makes_nothing_void():
    history = surviving([start("a"), *update("a", 1, "w0", "w1", 1), start("b"), start("c"), load("c", 1, "w1")])
    assert rows(history) == [(1, 1)] and history.problems == []


def test_late_lines_of_a_replaced_process_are_void():
    history = surviving([start("a"), *update("a", 1, "w0", "w1", 1), start("b"), load("b", 1, "w1"),
                         *update("a", 2, "w1", "x", 7), *update("b", 2, "w1", "w2", 2)])
    assert rows(history) == [(1, 1), (2, 2)] and history.problems == []


def test_an_update_that_was_cut_short_is_void_when_it_is_done_again():
    history = surviving([start("a"), *update("a", 1, "w0", "w1", 1), *update("a", 2, "w1", "w2", 2, over=False),
                         start("b"), load("b", 1, "w1"), *update("b", 2, "w1", "w2", 3)])
    assert rows(history) == [(1, 1), (2, 3)] and history.problems == []


def test_a_checkpoint_with_other_weights_than_its_step_is_found():
    history = surviving([start("a"), *update("a", 1, "w0", "w1"), *update("a", 2, "w1", "w2"),
                         start("b"), load("b", 2, "w1"), *update("b", 3, "w1", "w3")])
    assert history.problems == ["the checkpoint of step 2 had other weights than those after update 2",
                                "update 3 began from other weights than those before it"]


def test_weights_that_changed_between_two_updates_are_found():
    history = surviving([start("a"), *update("a", 1, "w0", "w1"), *update("a", 2, "x", "w2")])
    assert history.problems == ["update 2 began from other weights than those before it"]


def test_an_update_that_did_not_end_and_other_initial_weights_are_found():
    history = surviving([start("a"), start("b", "x"), *update("b", 1, "w0", "w1", over=False)])
    assert history.problems == ["a restarted process began with other initial weights", "update 1 did not end"]


def test_an_update_that_is_made_again_without_a_restart_has_two_entries():
    history = surviving([start("a"), *update("a", 1, "w0", "w1", 1), *update("a", 1, "w1", "w2", 1)])
    assert rows(history) == [(1, 1), (1, 1)]
