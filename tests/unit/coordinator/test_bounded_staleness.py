"""Whole runs with random delays everywhere: what is trained on, how old it is, and that nothing is lost or hangs.

Workers are stand-ins that answer after delays with a heavy tail; time is virtual. Loop, pipeline, buffer and admission
are the real ones.
"""


import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.coordinator.harnesses import DelayedRun


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), staleness=st.integers(0, 3), chunk=st.sampled_from([1, 2, 4]),
       pace=st.sampled_from([(0.2, 2.0), (1.0, 1.0), (3.0, 0.2)]), concurrency=st.sampled_from([None, 4, 9]))
def test_nothing_older_than_the_bound_is_trained_and_every_sample_made_and_trained_once(
        delayed_run, seed, staleness, chunk, pace, concurrency):
    run = delayed_run(seed, staleness, chunk, prompts=8, steps=8, concurrency=concurrency, generating=pace[0],
                      updating=pace[1])
    updates = run.go()
    for step, chunks in enumerate(updates):
        assert all(0 <= step - oldest <= staleness for _, oldest in chunks)
        assert sum(len(keys) for keys, _ in chunks) == 8
    trained = [key.row for chunks in updates for keys, _ in chunks for key in keys]
    assert sorted(trained) == list(range(8 * 8)), "each admitted sample once, none left behind"
    assert set(run.made.values()) == {1}, "what came too late would have been made again"
    if staleness == 0:
        assert trained == sorted(trained), "in the order of admission, whatever finished first"


@pytest.fixture(scope="module")
def delayed_run(ppo_config, summary):
    def build(seed, staleness, chunk, prompts, steps, concurrency=None, **delays):
        config = ppo_config(prompts=prompts, chunk=chunk, staleness=staleness, steps=steps)
        loop = config.coordinator.model_copy(update={"concurrency": concurrency})
        return DelayedRun(config.model_copy(update={"coordinator": loop}), summary, seed, **delays)

    return build


def test_a_bound_reached_is_a_bound_used(delayed_run):
    """With updates slower than generation the whole lead is used: the last updates train on samples η versions old."""
    for staleness in (1, 2, 3):
        updates = delayed_run(1, staleness, chunk=2, prompts=8, steps=9, generating=0.01, updating=50.0).go()
        oldest = [max(step - version for _, version in chunks) for step, chunks in enumerate(updates)]
        assert oldest[-3:] == [staleness] * 3 and max(oldest) == staleness


def test_a_batch_forms_without_a_slow_chunk_which_is_trained_in_a_later_one(delayed_run):
    slow = {2: 30.0}  # the chunk of rows 2 and 3, longer than an update and shorter than two
    updates = delayed_run(3, 1, chunk=2, prompts=4, steps=6, slow=slow, generating=0.1, updating=15.0).go()
    rows = [[keys[0].row for keys, _ in chunks] for chunks in updates]
    assert 2 not in rows[0] and len(rows[0]) == 2 and 2 in rows[1], rows
    assert sorted(row for step in rows for row in step) == list(range(0, 24, 2))


def test_what_could_not_be_trained_later_is_waited_for_and_never_made_twice(delayed_run):
    run = delayed_run(3, 1, chunk=2, prompts=4, steps=8, slow={2: 500.0}, generating=0.1, updating=5.0)
    rows = [[keys[0].row for keys, _ in chunks] for chunks in run.go()]
    assert 2 not in rows[0] and 2 in rows[1], "one version later is as late as it may be"
    assert set(run.made.values()) == {1}


def test_a_larger_bound_lets_a_slow_chunk_come_later(delayed_run):
    for staleness in (1, 2, 3):
        run = delayed_run(3, staleness, chunk=2, prompts=4, steps=8, slow={2: 500.0}, generating=0.1, updating=5.0)
        rows = [[keys[0].row for keys, _ in chunks] for chunks in run.go()]
        assert [step for step, chunks in enumerate(rows) if 2 in chunks] == [staleness], rows


def test_generators_get_no_more_than_they_take_and_the_next_as_soon_as_there_is_room(delayed_run):
    run = delayed_run(4, 2, chunk=2, prompts=8, steps=6, concurrency=6, generating=1.0, updating=1.0)
    run.go()
    assert run.most_generating == 6
    assert any(run.started_in_update), "an update does not keep the generators waiting"


def test_forward_passes_for_chunks_that_finish_during_an_update_come_after_the_publication(delayed_run):
    run = delayed_run(2, 1, chunk=2, prompts=8, steps=5, generating=0.1, updating=40.0)
    run.go()
    at_work = False
    for event in run.events:
        at_work = event in ("update", "publish") or (at_work and event != "published")
        assert not (at_work and event in ("logprobs", "values")), run.events
    assert run.events.count("logprobs") == run.events.count("values") == 20
