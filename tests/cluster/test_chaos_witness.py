"""The witness attests sound runs, with faults too, and finds seeded defects that the ledger does not."""

import json

import numpy as np
import pytest
import yaml

from chaos import contradictions
from chaos.campaign import Workspace
from chaos.episode_runs import episode_sections
from chaos.faults import Fault
from chaos.invariants import Books
from chaos.reward_service import OK, PARITY, reward_service
from chaos.supervisor import run
from tests.cluster.seeded_defects import sources_with
from tests.cluster.tiny import VOCAB

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
STEPS = 3
FAULTS = [Fault(1, "generator_kill", 1), Fault(2, "policy_kill", 2), Fault(3, "driver_kill", 4),
          Fault(4, "http_400", 5), Fault(5, "loss_nan", 6)]
FOUND = {
    "audit_disabled": "policy_learner, epoch 1 of its updates: 12 samples",
    "key_dropped": "policy_learner, epoch 1 of its updates: ",
    "batch_twice": "policy_learner, epoch 1 of its updates: ",
    "stale_version": "update 3: log-probabilities of its samples differ",
    "stale_bucket": "update 3: log-probabilities of its samples differ",
}
"""What the witness says of each defect, among other things."""
OF_SEGMENTS = {
    "segment_lost": ("there are segments, and another one is not", (STEPS, 0)),
    "segment_twice": ("0 samples lost, ", (0, STEPS)),
    "segment_replaced": ("there are segments, and another one is not", (STEPS, STEPS)),
}
"""The same of runs with episodes, and how many samples are lost and duplicated by it, one in each update; a surplus row
was also scored less often than it is there, which counts as one of each."""
EPISODE_FAULTS = [Fault(1, "runner_kill", 1), Fault(2, "environment_kill", 2), Fault(3, "policy_kill", 3),
                  Fault(4, "driver_kill_in_episodes", 4)]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """Models, prompts, and a reward service."""
    with reward_service() as service:
        yield Workspace.make(tmp_path_factory.mktemp("witness") / "runs", service)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_run_with_faults_is_attested(workspace, max_staleness):
    config, directory = workspace.configure(f"sound_{max_staleness}", 9, max_staleness)
    record = run(config, directory, FAULTS, workspace.service)
    said = contradictions.testimony_of(record)
    assert [start.code for start in record.starts] == [-9, 0] and record.injections.injected() == {1, 2, 3, 4, 5}
    assert list(contradictions.contradictions(record, Books.of(record), said)) == []
    assert (said.trained, said.lost, said.duplicated) == (144, 0, 0) and said.not_applied and said.quarantined


def test_a_run_with_episodes_and_faults_is_attested(workspace):
    config, directory = workspace.configure("sound_episodes", 7, 0, episodes=episode_sections)
    record = run(config, directory, EPISODE_FAULTS, workspace.service)
    said = contradictions.testimony_of(record)
    assert [start.code for start in record.starts] == [-9, 0] and record.injections.injected() == {1, 2, 3, 4}
    assert list(contradictions.contradictions(record, Books.of(record), said)) == []
    assert (said.trained, said.lost, said.duplicated) == (56, 0, 0)


@pytest.mark.parametrize("defect", OF_SEGMENTS)
def test_a_segment_that_is_lost_or_there_twice_is_found_by_the_witness_alone(workspace, tmp_path, defect):
    config, directory = workspace.configure(defect, STEPS, 0, episodes=episode_sections)
    record = run(config, directory, (), workspace.service, sources=sources_with(defect, tmp_path / "sources"))
    assert [start.code for start in record.starts] == [0], record.starts[-1].last_words()
    books, said = Books.of(record), contradictions.testimony_of(record)
    words, figures = OF_SEGMENTS[defect]
    assert (books.lost, books.duplicated) == (0, 0), "the ledger knows nothing of it"
    assert any(words in problem for problem in said.problems), said.problems
    assert said.lost >= figures[0] and said.duplicated >= figures[1]


def test_a_run_with_dynamic_sampling_and_faults_is_attested(workspace):
    """Scores are the parity of the tokens' sum, so that half of the prompts are filtered. There are enough prompts for
    one epoch: where an update draws a prompt twice, the witness cannot tell which time it was filtered."""
    config, directory = workspace.configure("dynamic", 9, 0, {
        "algorithm": {"estimator": "grpo", "kl": {"coef": 0.1}, "dynamic_sampling": {"max_batches": 30}}})
    given = yaml.safe_load(config.read_text())
    del given["critic"]
    given["rewards"] = {"service": given["rewards"]["service"]}
    random = np.random.default_rng(3)
    prompts = workspace.root / "many.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": " ".join(f"w{word}" for word in words)}) + "\n"
                               for words in random.integers(2, VOCAB, (240, 5))))
    given["prompts"]["path"] = str(prompts)
    config.write_text(yaml.safe_dump(given))
    workspace.service.good = PARITY
    try:
        record = run(config, directory, [fault for fault in FAULTS if fault.kind != "http_400"], workspace.service)
    finally:
        workspace.service.good = OK
    said, books = contradictions.testimony_of(record), Books.of(record)
    assert [start.code for start in record.starts] == [-9, 0] and record.injections.injected() == {1, 2, 3, 5}
    assert list(contradictions.contradictions(record, books, said)) == []
    assert (said.trained, said.lost, said.duplicated) == (144, 0, 0) and said.filtered == books.filtered > 40


@pytest.mark.parametrize("defect, max_staleness", [*((defect, 0) for defect in FOUND),
                                                   ("key_dropped", 1), ("batch_twice", 1)])
def test_a_defect_is_found_by_the_witness_alone(workspace, tmp_path, defect, max_staleness):
    config, directory = workspace.configure(f"{defect}_{max_staleness}", STEPS, max_staleness)
    record = run(config, directory, (), workspace.service, sources=sources_with(defect, tmp_path / "sources"))
    assert [start.code for start in record.starts] == [0], record.starts[-1].last_words()
    books, said = Books.of(record), contradictions.testimony_of(record)
    assert (books.lost, books.duplicated) == (0, 0), "the ledger knows nothing of it"
    assert any(problem.startswith(FOUND[defect]) for problem in said.problems), said.problems
    assert bool(said.lost) is ("stale" not in defect)
