"""Rows of tokens are joined to whole episodes by their marks: a segment that is missing, there twice, or in the place
of another one is found. The rows are those of real environments and the real runner; only the policy is made up."""

import asyncio
import json
from collections import Counter

import numpy as np
import pytest
import yaml

from chaos.episode_runs import VOCAB, episode_sections, make_episode_files
from chaos.injection_log import INJECTION_LOG
from chaos.witness.episodes import EpisodeOrder
from chaos.witness.history import History, OptimizerStep, Update
from chaos.witness.journals import JOURNALS, read_environments
from chaos.witness.markers import Mark, first_mark, marks_in
from chaos.witness.testimony import POLICY, Plan, WitnessReport, _join_data
from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.records import Prompts, SampleKey
from rlhf_ray.roles.engines.interface import Completion
from rlhf_ray.roles.episode_runner import EpisodeRunner

SAMPLES = 2


class Policy:
    """Samples any token, by the seed of the turn; a turn ends with one of `stops`."""

    def __init__(self, stops):
        self.stops = set(stops)

    async def call(self, method, requests, *args, **named):
        (request,) = requests
        draw, tokens = np.random.default_rng(request.seed), []
        while len(tokens) < request.max_tokens and not self.stops & set(tokens):
            tokens.append(int(draw.integers(VOCAB)))
        column = np.zeros(len(tokens))
        reason = "stop" if self.stops & set(tokens) else "length"
        return [Completion(np.array(tokens, np.int32), column.astype(np.float32), column.astype(np.int32), reason)]


def play_twice(files, prompts, sections, journals):
    """The rollout of `SAMPLES` samples of each row of a file, whose environments write journals."""
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    texts = [row.pop("prompt") for row in rows]
    given = Prompts(np.arange(len(rows) + 1), np.zeros(len(rows), np.int32), texts, rows, np.arange(len(rows)))
    keys = [SampleKey(0, row, sample) for row in range(len(rows)) for sample in range(SAMPLES)]

    async def play():
        environments = {name: EnvironmentConfig(**fields) for name, fields in sections["environments"].items()}
        runner = EpisodeRunner(environments, ModelConfig(path=str(files.model)),
                               SamplingConfig(**sections["generator"]["sampling"]), Policy(files.stops), least_scored=0)
        await runner.start()
        try:
            return await runner.play(given, keys, 5)
        finally:
            await runner.stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(JOURNALS, str(journals))
        patch.delenv(INJECTION_LOG, raising=False)
        return asyncio.run(play())


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """(rollout of two samples of each row, files, directory of the environments' journals)."""
    root = tmp_path_factory.mktemp("episodes")
    files = make_episode_files(root)
    rollout = play_twice(files, files.prompts, episode_sections(files), root / "journals")
    return rollout, files, root / "journals"


@pytest.fixture(scope="module")
def order(played):
    _, files, journals = played
    return EpisodeOrder.of(files.prompts, 5, files.model, read_environments(journals),
                           episode_sections(files)["environments"])


@pytest.fixture(scope="module")
def rows(played):
    """The tokens of every row, and those of each sample."""
    rollout = played[0]
    tokens = [tuple(rollout.row(i, "tokens").tolist()) for i in range(len(rollout))]
    return tokens, [tokens[each.start : each.stop] for each in rollout.sample_rows]


def test_the_episodes_are_of_the_kinds_that_are_meant(played):
    rollout, *_ = played
    segments, turns = Counter(rollout.samples.tolist()), [len(episode.turns) for episode in rollout.episodes]
    assert {episode.cause for episode in rollout.episodes} <= {"completed", "truncated_turn", "truncated_turns"}
    assert max(segments.values()) == 4 and sum(number > 1 for number in segments.values()) >= 10
    tools = [episode for episode in rollout.episodes if episode.environment == "counter"]
    assert sum(len(episode.turns) > 1 for episode in tools) >= 3, "tools are called"
    assert Counter(turns)[1] < len(turns) / 2


def test_the_rows_of_a_rollout_are_its_samples(order, rows, played):
    tokens, _ = rows
    found = order.samples_in(Counter(tokens))
    assert found.whole == dict.fromkeys(range(len(played[0].keys) // SAMPLES), SAMPLES)
    assert not found.again and not found.partial


def test_a_sample_as_the_service_gets_it_is_taken_apart(order, rows):
    for segments in rows[1]:
        assert order.segments_of(sum(segments, ())) == segments


def of_several(rows):
    """The segments of the samples with three or more."""
    return [segments for segments in rows[1] if len(segments) > 2]


@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_segment_that_is_missing_is_found(order, rows, which):
    for segments in of_several(rows):
        found = order.samples_in(Counter(rows[0]) - Counter([segments[which]]))
        row = order.row_of(segments[0])
        assert found.whole[row] == SAMPLES - 1 and found.partial == {row: len(segments) - 1} and not found.again


@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_segment_that_is_there_twice_is_found(order, rows, which):
    for segments in of_several(rows):
        found = order.samples_in(Counter([*rows[0], segments[which]]))
        row = order.row_of(segments[0])
        assert found.whole[row] == SAMPLES and found.again == {row: 1} and not found.partial


def test_a_segment_in_the_place_of_another_one_is_found(order, rows):
    first, second = of_several(rows)[:2]
    assert order.row_of(first[0]) == order.row_of(second[0]), "two samples of a prompt"
    found = order.samples_in(Counter([*rows[0], second[1]]) - Counter([first[1]]))
    row = order.row_of(first[0])
    assert found.whole[row] == SAMPLES - 1 and found.again == {row: 1} and found.partial == {row: len(first) - 1}


def test_a_segment_that_ends_too_early_is_no_sample(order, rows, played):
    """Its environment has answered, and the next turn should be in the same row."""
    answered = played[0].episodes
    [number, *_] = [i for i, episode in enumerate(answered) if episode.environment == "talk" and len(rows[1][i]) == 1
                    and len(episode.turns) > 1]
    (whole,), turn = rows[1][number], answered[number].turns[0]
    found = order.samples_in(Counter([*rows[0], whole[: turn.stop]]) - Counter([whole]))
    row = order.row_of(whole)
    assert found.whole[row] == SAMPLES - 1 and found.partial == {row: 1}


def test_a_row_with_marks_of_two_episodes_is_none(order, rows):
    one, other = rows[1][0][0], rows[1][4][0]
    found = order.samples_in(Counter([one + other]))
    assert found.whole == {None: 1}


def plan_of(order):
    return Plan(order, 1, len(order.prompts), SAMPLES, 1, 1, 0, {POLICY: 1}, None, 1.0, False)


def said_of(order, fed, masked=()):
    """What the witness says of one update of a whole epoch."""
    said = WitnessReport()
    history = History({1: [Update(1, 0.0, [OptimizerStep(0, True, list(fed), list(masked))])]})
    _join_data(plan_of(order), {POLICY: [history]}, order.may_be_late, set(), said)
    return said


def test_an_update_with_a_segment_lost_and_another_one_twice_is_named(order, rows):
    assert said_of(order, rows[0]).problems == []
    first, second = of_several(rows)[0], of_several(rows)[-1]
    fed = Counter([*rows[0], second[0]]) - Counter([first[-1]])
    said = said_of(order, fed.elements())
    assert (said.lost, said.duplicated) == (1, 1)
    assert any("there are segments, and another one is not" in problem for problem in said.problems)


def test_masked_samples_are_consumed_where_their_environment_masks(played, order, rows):
    _, files, journals = played
    environments = {**episode_sections(files)["environments"], "brief": {}}
    masking = EpisodeOrder.of(files.prompts, 5, files.model, read_environments(journals), environments)
    late, other = rows[1][3 * SAMPLES], rows[1][0]
    assert masking.may_be_late == {3, 7, 11, 15, 19} and order.may_be_late == set()
    said = said_of(masking, Counter(rows[0]) - Counter(late), late[:1])
    assert (said.trained, said.lost, said.problems) == (len(rows[1]), 0, [])
    said = said_of(masking, Counter(rows[0]) - Counter(other), other[:1])
    assert said.lost == 0 and ["1 samples (row 0) were masked" in problem for problem in said.problems] == [True]


def test_a_mark_round_trips_and_depends_on_all_turns():
    begin = first_mark(17, 12345)
    one, other = begin.after("a b").after("c"), begin.after("a x").after("c")
    assert [mark for mark, _ in marks_in(f"x {begin} y {one}.")] == [begin, one]
    assert one.turn == 2 and one.digest != other.digest and begin.after("a\ufffdb") == begin.after("ab")
    assert marks_in("[17 12345 2 abcdef] [1 aaaaaa x abcdef]") == [] and isinstance(one, Mark)


def test_the_plan_of_a_run_with_episodes_has_their_order(played, tmp_path):
    _, files, journals = played
    sections = episode_sections(files)
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({
        "run": {"steps": 3, "seed": 5}, "coordinator": {"prompts_per_step": 4, "samples_per_prompt": 2},
        "algorithm": {"epochs": 1, "mini_batches": 2}, "policy": {"workers": 2}, "generator": {"sampling": {}},
        **{name: sections[name] for name in ("model", "prompts", "environments", "critic")}}))
    plan = Plan.read(config, journals)
    assert isinstance(plan.order, EpisodeOrder) and plan.ranks == {POLICY: 2}
