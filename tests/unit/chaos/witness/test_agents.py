"""Samples of agents are compared with what the agents received. The rows are those of real agents, the real gateway and
the real runner; only the policy is made up."""

from collections import Counter

import numpy as np
import pytest

from chaos.episode_runs import agent_sections, make_episode_files
from chaos.witness.agents import agent_problems
from chaos.witness.episodes import EpisodeOrder
from chaos.witness.journals import read_environments
from tests.unit.chaos.witness.test_episodes import SAMPLES, play_twice


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """(rollout of two samples of each row, order, lines of the agents)."""
    root = tmp_path_factory.mktemp("agents")
    files = make_episode_files(root)
    sections = agent_sections(files)
    rollout = play_twice(files, files.agent_prompts, sections, root / "journals")
    lines = read_environments(root / "journals")
    order = EpisodeOrder.of(files.agent_prompts, 5, files.model, lines, sections["environments"])
    return rollout, order, lines


def tokens_of(rollout):
    return [tuple(rollout.row(i, "tokens").tolist()) for i in range(len(rollout))]


def test_the_episodes_are_of_the_kinds_that_are_meant(played):
    rollout, _, lines = played
    assert {episode.cause for episode in rollout.episodes} == {"completed"}, [e.error for e in rollout.episodes]
    assert {episode.environment for episode in rollout.episodes} == {"asker", "client", "program"}
    assert max(Counter(rollout.samples.tolist()).values()) >= 3, "some begin several segments"
    assert any(turn.tool_calls for episode in rollout.episodes for turn in episode.turns[:-1]), "tools are called"
    assert len({line["session"] for line in lines if "session" in line}) == len(rollout.keys)


def test_the_rows_of_a_rollout_are_its_samples_and_what_agents_received(played):
    rollout, order, lines = played
    found = order.samples_in(Counter(tokens_of(rollout)))
    assert found.whole == dict.fromkeys(range(len(rollout.keys) // SAMPLES), SAMPLES)
    assert not found.again and not found.partial
    rows = set(range(len(rollout.keys) // SAMPLES))
    assert list(agent_problems(lines, rows, found.turns)) == []


@pytest.fixture
def samples(played):
    """The turns of each sample."""
    return played[1].samples_in(Counter(tokens_of(played[0]))).turns


ROWS = set(range(12))


def row_of(sample):
    return sample[0][0].row


def test_a_turn_that_no_agent_has_received_is_found(played, samples):
    for sample in samples:
        mark, _ = sample[-1]
        changed = [*sample[:-1], (mark, frozenset(["something else"]))]
        others = [each for each in samples if each is not sample]
        assert list(agent_problems(played[2], ROWS, [*others, changed])) == [
            f"1 samples of agents (row {row_of(sample)}) have a turn that no agent has received"]


def test_a_row_with_another_token_is_a_turn_that_no_agent_has_received(played):
    rollout, order, lines = played
    tokens = tokens_of(rollout)
    row = next(i for i in range(len(rollout)) if order.segment(tokens[i]) and len(rollout.row(i, "tokens")) > 3)
    ends = int(np.flatnonzero(rollout.row(row, "response_mask"))[0])
    other = next(token for token in range(150, 500) if order._decoded([token]).strip().isalnum()
                 and order._decoded([token]) != order._decoded([tokens[row][ends]]))
    changed = (*tokens[row][:ends], other, *tokens[row][ends + 1:])
    found = order.segment(changed)
    assert len(list(agent_problems(lines, ROWS, [list(found.turns)]))) == 1


def test_turns_of_two_attempts_are_found(played, samples):
    """The last turn of a session was received in another one."""
    lines = [dict(line) for line in played[2]]
    last = next(line for line in reversed(lines) if line["event"] == "received")
    last["session"] = "another"
    said = list(agent_problems(lines, ROWS, samples))
    assert said == [f"1 samples of agents (row {last['mark'][0]}) have other turns than any session that has returned"]


def test_a_turn_that_an_agent_received_and_no_sample_has_is_found(played, samples):
    sample = next(each for each in samples if len(each) > 2)
    others = [each for each in samples if each is not sample]
    said = list(agent_problems(played[2], ROWS, [*others, sample[:-1]]))
    assert said == [f"1 samples of agents (row {row_of(sample)}) have other turns than any session that has returned"]


def test_a_session_that_has_not_returned_is_no_sample(played, samples):
    gone = next(line["session"] for line in played[2] if line["event"] == "returned")
    lines = [line for line in played[2] if (line["event"], line.get("session")) != ("returned", gone)]
    assert len(list(agent_problems(lines, ROWS, samples))) == 1


def test_two_samples_of_one_session_are_found(played, samples):
    said = list(agent_problems(played[2], ROWS, [*samples, samples[3]]))
    assert said == [f"1 samples of agents (row {row_of(samples[3])}) are there more often than sessions in which "
                    "agents received their turns"]


def test_samples_of_others_than_agents_are_not_looked_at(played, samples):
    assert list(agent_problems([], set(), samples)) == []
    assert len(list(agent_problems([], ROWS, samples))) == 1


@pytest.mark.parametrize("which", [0, -1])
def test_a_segment_that_is_missing_is_found(played, which):
    rollout, order, _ = played
    tokens = tokens_of(rollout)
    several = [each for each in rollout.sample_rows if len(each) > 1]
    for rows in several:
        found = order.samples_in(Counter(tokens) - Counter([tokens[rows[which]]]))
        assert found.partial.total() == len(rows) - 1 and found.whole.total() == len(rollout.keys) - 1
