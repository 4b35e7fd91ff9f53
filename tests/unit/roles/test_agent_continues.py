"""Agents' episodes of runners that were lost: another runner has the agent begin again, answers from the journal what
was sampled before, and goes on as if nothing had happened."""

import asyncio
from dataclasses import replace

import pytest

from rlhf_ray.roles.episode_journal import JournalPlace
from tests.unit.roles.agent_plays import CALL, TOOLS, Agents, Generators, Template, play, runner_of, said, turns
from tests.unit.roles.test_agent_attempt import BROKEN, Rewrites, sub_agents, talks
from tests.unit.roles.test_episode_continues import assert_same, directory_of, frames_of, only_journal, recorded


async def long(client, row, session):
    """Tools, a compaction, a step back, a turn that is asked for twice, and bounds of its own."""
    messages = [("user", "go")]
    for text in ("one", "two"):
        reply = await client.ask(*messages, tools=TOOLS)
        messages += [said(reply), ("user", text)]
    await client.ask(("system", "in short"), ("user", "one"))
    await client.ask(*messages[:3], tools=TOOLS)
    await client.ask(*messages[:2], ("user", "back"), tools=TOOLS, max_tokens=2)
    await client.ask(("user", "again"), stop=("n",))
    return {"reward": 1 / 7, "info": {"number": 1 / 3}}


async def fails(client, row, session):
    await talks(client, row, session)
    raise ValueError("no")


async def abandons(client, row, session):
    first = await client.ask(("user", "go"))
    await client.ask(("user", "lost"), deliver=False)
    await client.ask(("user", "go"), said(first), ("user", "on"))
    return 1


async def overflows(client, row, session):
    await client.ask(("user", "go"))
    await client.ask(("user", "x" * 500))


CASES = {
    "tools": (talks, Template(), {}),
    "segments": (talks, Rewrites(), {}),
    "all of it": (long, Template(), {}),
    "fails": (fails, Template(), {}),
    "abandons": (abandons, Template(), {}),
    "out of turns": (long, Template(), {"max_turns": 4}),
    "out of tokens": (overflows, Template(), {"max_tokens": 300}),
}
SCRIPT = (CALL, BROKEN, "plain", "last one")


@pytest.mark.parametrize("agent, template, given", CASES.values(), ids=CASES)
def test_an_agent_s_episode_goes_on_after_any_record_as_if_nothing_had_happened(tmp_path, agent, template, given):
    async def live():
        generators = Generators(turns(*SCRIPT))
        expected = await play(runner_of(agent, generators, template, **given))
        asked = [request.seed for request in generators.requests]
        assert expected.mask_sizes is not None
        whole = directory_of(tmp_path, "whole")
        assert_same(await play(runner_of(agent, generators, template, **given), JournalPlace(whole, 0, 0)), expected)
        data = only_journal(whole).read_bytes()
        places = frames_of(data)
        assert len(places) - 1 == 2 + len(asked), "a beginning, the turns, and an outcome"
        for number, place in enumerate(places):
            for torn in (0, 7) if place < len(data) else (0,):
                cut = directory_of(tmp_path, f"cut{number}-{torn}", data[:place + torn])
                generators.requests.clear()
                agents = Agents(agent)
                found = await play(runner_of(agents, generators, template, **given),
                                   JournalPlace(cut, 0, 0, look=True))
                done = min(max(number - 1, 0), len(asked))
                ended = number == 2 + len(asked)
                assert [request.seed for request in generators.requests] == asked[done:], (number, torn)
                assert_same(found, expected, continued=int(done > 0 and not ended))
                assert len(agents.policies) == (0 if ended else 1), "an ended one is rebuilt without its agent"
                again = recorded(only_journal(cut))
                assert (len(again.turns), again.outcome is not None) == (len(asked), True)

    asyncio.run(live())


def test_turns_that_overlapped_are_taken_over_in_another_order(tmp_path):
    async def live():
        names = ["left", "right", "middle"]
        expected = await play(runner_of(sub_agents(names), Generators(turns("a", "b"))))
        whole = directory_of(tmp_path, "whole")
        await play(runner_of(sub_agents(names[::-1]), Generators(turns("a", "b"))), JournalPlace(whole, 0, 0))
        data = only_journal(whole).read_bytes()
        for place in frames_of(data)[2:]:
            generators = Generators(turns("a", "b"))
            cut = directory_of(tmp_path, f"cut{place}", data[:place])
            found = await play(runner_of(sub_agents(names), generators), JournalPlace(cut, 0, 0, look=True))
            assert_same(found, expected, continued=int(place < len(data)))

    asyncio.run(live())


def test_recorded_turns_that_are_not_asked_for_again_are_no_part_of_the_sample(tmp_path):
    async def live():
        def agent(name):
            async def asks(client, row, session):
                await client.ask(("user", "go"))
                await client.ask(("user", name))
                return 1
            return asks

        generators = Generators(turns("a"))
        whole = directory_of(tmp_path, "whole")
        await play(runner_of(agent("on"), generators), JournalPlace(whole, 0, 0))
        data = only_journal(whole).read_bytes()
        cut = directory_of(tmp_path, "cut", data[:frames_of(data)[-2]])
        generators.requests.clear()
        found = await play(runner_of(agent("off"), generators), JournalPlace(cut, 0, 0, look=True))
        assert len(generators.requests) == 1, "the first is taken over"
        assert_same(found, await play(runner_of(agent("off"), generators)), restarted=1)
        # And it is rebuilt as it was.
        ended = directory_of(tmp_path, "ended", only_journal(cut).read_bytes())
        generators.requests.clear()
        assert_same(await play(runner_of(agent("on"), generators), JournalPlace(ended, 0, 0, look=True)), found)
        assert not generators.requests

    asyncio.run(live())


def test_a_turn_is_recorded_before_it_is_answered(tmp_path):
    async def live():
        async def agent(client, row, session):
            await client.ask(("user", "go"))
            counts.append(len(recorded(only_journal(directory)).turns))

        counts = []
        directory = directory_of(tmp_path, "run")
        await play(runner_of(agent, Generators(turns("a"))), JournalPlace(directory, 0, 0))
        assert counts == [1]

    asyncio.run(live())


def test_turns_of_a_policy_that_is_too_new_are_not_taken_over(tmp_path):
    async def live():
        generators = Generators(turns("a"), version=5)
        directory = directory_of(tmp_path, "run")
        await play(runner_of(talks, generators), JournalPlace(directory, 5, 5))
        generators.requests.clear()
        found = await play(runner_of(talks, generators), JournalPlace(directory, 7, 6, look=True))
        assert len(generators.requests) == 2 and "continued" not in found.episodes[0].events

    asyncio.run(live())


def test_an_ended_episode_that_does_not_fit_its_record_begins_again(tmp_path):
    class Louder(Template):
        def open(self, messages, tools=None, **_):
            return [ord("!"), *super().open(messages, tools)]

    async def live():
        generators = Generators(turns("a", "b"))
        directory = directory_of(tmp_path, "run")
        await play(runner_of(talks, generators), JournalPlace(directory, 0, 0))
        generators.requests.clear()
        found = await play(runner_of(talks, generators, Louder()), JournalPlace(directory, 0, 0, look=True))
        assert len(generators.requests) == 2
        assert_same(found, await play(runner_of(talks, generators, Louder())), restarted=1)

    asyncio.run(live())


def test_bounds_that_a_request_has_otherwise_have_its_turn_sampled_again(tmp_path):
    async def live():
        def agent(most):
            async def asks(client, row, session):
                await client.ask(("user", "go"), max_tokens=most)
            return asks

        generators = Generators(turns("abcdef"))
        directory = directory_of(tmp_path, "whole")
        await play(runner_of(agent(3), generators), JournalPlace(directory, 0, 0))
        data = only_journal(directory).read_bytes()
        cut = directory_of(tmp_path, "cut", data[:frames_of(data)[-2]])
        found = await play(runner_of(agent(5), generators), JournalPlace(cut, 0, 0, look=True))
        [turn] = found.episodes[0].turns
        assert turn.stop - turn.start == 5 and found.episodes[0].events == {"restarted": 1}
        again = directory_of(tmp_path, "again", only_journal(cut).read_bytes())
        assert_same(await play(runner_of(agent(3), generators), JournalPlace(again, 0, 0, look=True)), found)

    asyncio.run(live())


def test_an_episode_that_was_lost_and_lost_again_has_all_that_was_sampled(tmp_path):
    async def live():
        generators = Generators(turns("a", "b", "c"))
        place = JournalPlace(directory_of(tmp_path, "run"), 0, 0, look=True)
        expected = await play(runner_of(long, generators))
        asked = len(generators.requests)
        for end in ("go?", "one?", "back?"):
            generators.gates = {end: asyncio.get_running_loop().create_future()}
            generators.requests.clear()
            playing = asyncio.ensure_future(play(runner_of(long, generators), place))
            while not generators.requests or not "".join(map(chr, generators.requests[-1].prompt)).endswith(end):
                await asyncio.sleep(0)
            playing.cancel()
            await asyncio.wait([playing])
        generators.gates = {}
        generators.requests.clear()
        found = await play(runner_of(long, generators), place)
        assert 0 < len(generators.requests) < asked
        assert found.episodes[0].events["continued"] == 2  # the first was lost before a turn was sampled
        assert_same(replace(found, episodes=expected.episodes), expected)

    asyncio.run(live())
