"""Episodes that agents play: what becomes of the turns that they ask for."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.data.prompts import sample_seed
from rlhf_ray.errors import WorkerBroken, WorkerError
from rlhf_ray.gateway.chat import ChatRequest, Refused
from rlhf_ray.roles import episode_runner
from rlhf_ray.roles.engines.interface import Completion
from rlhf_ray.roles.episode import turn_seed
from rlhf_ray.roles.episode_journal import digest
from tests.unit.roles.agent_plays import (
    CALL,
    KEY,
    TOOLS,
    Agents,
    Generators,
    Template,
    episode,
    play,
    rows_of,
    runner_of,
    said,
    turns,
)


async def talks(client, row, session):
    """Two turns, the second after what a tool has said."""
    first = await client.ask(("system", "be"), ("user", "go"), tools=TOOLS)
    messages = [("system", "be"), ("user", "go"), said(first)]
    if first.tool_calls:
        messages.append({"role": "tool", "content": "seen", "tool_call_id": first.tool_calls[0].id})
    else:
        messages.append(("user", "on"))
    await client.ask(*messages, tools=TOOLS)
    return 0.5


def test_an_appended_conversation_is_one_row_with_the_reward_on_its_last_turn():
    rollout, found = episode(talks, Generators(turns(CALL, "done")))
    assert rows_of(rollout) == [f"Tbe!go?[{CALL}.]seen#[done.]"]
    assert (found.cause, found.use, [turn.reward for turn in found.turns]) == ("completed", "train", [0.0, 0.5])
    assert found.messages == [{"role": "system", "content": "be"}, {"role": "user", "content": "go"}]
    assert found.tools == TOOLS
    assert found.turns[0].tool_calls == [{"id": "c00000000", "name": "look", "arguments": {}}]
    assert found.turns[0].messages == [{"role": "tool", "content": "seen", "tool_call_id": "c00000000"}]
    assert [turn.opens for turn in found.turns] == [[], []] and found.events == {"tool_calls": 1}


def test_the_seed_of_a_turn_follows_from_its_context_and_how_often_it_was_asked_for():
    async def agent(client, row, session):
        for _ in range(2):
            await client.ask(("user", "go"))
        await client.ask(("user", "on"))

    generators = Generators(turns("a"))
    episode(agent, generators)
    seed = sample_seed(0, KEY)
    go, on = ([ord(c) for c in text] for text in ("go?", "on?"))
    expected = [turn_seed(seed, digest(go), 0), turn_seed(seed, digest(go), 1), turn_seed(seed, digest(on), 0)]
    assert [request.seed for request in generators.requests] == expected


def test_compaction_and_dropped_turns_begin_another_segment():
    async def agent(client, row, session):
        first = await client.ask(("user", "one"))
        second = await client.ask(("user", "one"), said(first), ("user", "two"))
        await client.ask(("user", "one"), said(second), ("user", "three"))  # the first turn is dropped
        await client.ask(("user", "in short"))
        return 1

    rollout, found = episode(agent, Generators(turns("a", "b", "c")))
    assert rows_of(rollout) == ["one?[a.]two?[b.]", "one?b.three?[b.]", "in short?[a.]"]
    assert [turn.reward for turn in found.turns] == [0, 0, 0, 1]
    assert found.turns[2].opens == [{"role": "user", "content": "one"}, {"role": "assistant", "content": "b"},
                                    {"role": "user", "content": "three"}]
    assert found.turns[3].opens == [{"role": "user", "content": "in short"}]
    assert rollout.sample_count == 1 and [turn.row for turn in found.turns] == [0, 0, 1, 2]


def test_an_agent_that_goes_back_has_the_exact_tokens_again_and_none_is_trained_on_twice():
    async def agent(client, row, session):
        first = await client.ask(("user", "one"))
        for text in ("left", "right"):
            await client.ask(("user", "one"), said(first), ("user", text))
        return 1

    odd = "a  "  # its content is stripped: a row that was encoded from text would differ
    rollout, found = episode(agent, Generators(turns(odd, "b")))
    assert rows_of(rollout) == [f"one?[{odd}.]left?[b.]", f"one?{odd}.right?[b.]"]
    assert found.turns[2].opens[-1]["content"] == "right" and found.turns[0].messages[0]["content"] == "left"


def test_other_tools_or_another_system_prompt_are_another_conversation():
    async def agent(client, row, session):
        first = await client.ask(("system", "be"), ("user", "one"))
        await client.ask(("system", "be"), ("user", "one"), said(first), ("user", "two"), tools=TOOLS)
        await client.ask(("system", "see"), ("user", "one"), said(first), ("user", "two"))

    rollout, _ = episode(agent, Generators(turns("a", "b")))
    assert rows_of(rollout) == ["be!one?[a.]", "Tbe!one?a.two?[b.]", "see!one?a.two?[b.]"]


def changed(message, **fields):
    return {**message, **fields}


@pytest.mark.parametrize("change, continues", [
    (lambda m: m, True),
    (lambda m: changed(m, content=None), True),
    (lambda m: changed(m, content="\n I see\n\n"), True),  # its calls say which turn it is
    (lambda m: changed(m, content="in other words"), False),
    (lambda m: changed(m, tool_calls=[{**m["tool_calls"][0], "function": {"name": "look", "arguments": {"a": 1}}}]),
     False),
    (lambda m: changed(m, tool_calls=[{**m["tool_calls"][0], "function": {"name": "lock", "arguments": {}}}]), False),
    (lambda m: changed(m, tool_calls=[{**m["tool_calls"][0], "function": {"name": "look", "arguments": " { } "}}]),
     True),
    (lambda m: changed(m, tool_calls=[{**m["tool_calls"][0], "id": ""}]), True),
    (lambda m: changed(m, tool_calls=[{**m["tool_calls"][0], "id": "mine"}]), True),
    (lambda m: changed(m, tool_calls=[{"id": "mine", "function": {"name": "look", "arguments": "{}"}}]), True),
    (lambda m: changed(m, content="in other words", tool_calls=[{**m["tool_calls"][0], "id": "mine"}]), False),
    (lambda m: changed(m, tool_calls=[{"id": "mine", "function": {"name": "lock", "arguments": {}}}]), False),
    (lambda m: {"role": "assistant", "content": m["content"]}, False),
])
def test_a_turn_with_calls_is_recognised_by_their_ids_or_by_what_it_says(change, continues):
    async def agent(client, row, session):
        first = await client.ask(("user", "go"), tools=TOOLS)
        assert first.finish_reason == "tool_calls" and first.tool_calls[0].arguments == {}
        await client.ask(("user", "go"), change(said(first)), ("tool", "seen"), tools=TOOLS)

    rollout, _ = episode(agent, Generators(turns(f"I see\n{CALL}", "done")))
    assert len(rollout) == (1 if continues else 2)


@pytest.mark.parametrize("reasoning, continues", [("", True), ("so", True), ("otherwise", False)])
def test_reasoning_may_be_left_out_but_not_changed(reasoning, continues):
    async def agent(client, row, session):
        first = await client.ask(("user", "go"))
        assert (first.content, first.reasoning) == ("done", "so")
        await client.ask(("user", "go"), changed(said(first), reasoning_content=reasoning), ("user", "on"))

    rollout, _ = episode(agent, Generators(turns("<think>so</think>done")))
    assert len(rollout) == (1 if continues else 2)


class Rewrites(Template):
    """Writes earlier turns in capitals once others follow."""

    def continues(self, messages, tools=None, **_):
        return False

    def assistant(self, text, **_):
        return {"role": "assistant", "content": text.upper()}


def test_a_template_that_rewrites_history_reads_the_turns_as_they_were_sampled():
    async def agent(client, row, session):
        first = await client.ask(("user", "go"))
        await client.ask(("user", "go"), said(first), ("user", "on"))

    rollout, _ = episode(agent, Generators(turns("<think>so</think>done")), template=Rewrites())
    assert rows_of(rollout) == ["go?[<think>so</think>done.]", "go?<THINK>SO</THINK>DONE.on?[<think>so</think>done.]"]


def sub_agents(order):
    """A turn, sub-agents whose requests are open at the same time and come in this order, and another turn."""
    async def agent(client, row, session):
        first = await client.ask(("user", "go"))
        asked = [asyncio.ensure_future(client.ask(("user", text))) for text in order]
        await asyncio.gather(*asked)
        await client.ask(("user", "go"), said(first), ("user", "so"))
        return 1

    return agent


def test_sub_agents_at_the_same_time_have_rows_of_their_own_in_an_order_without_time():
    names = ["left", "right", "middle"]
    rollouts = [episode(sub_agents(order), Generators(turns("a")))[0] for order in (names, names[::-1])]
    assert rows_of(rollouts[0]) == rows_of(rollouts[1]) and rollouts[0].seeds.tolist() == rollouts[1].seeds.tolist()
    assert rollouts[0].episodes == rollouts[1].episodes
    assert set(rows_of(rollouts[0])[:3]) == {f"{name}?[a.]" for name in names}
    assert rows_of(rollouts[0])[3] == "go?[a.]so?[a.]", "the last one has the reward"
    assert [turn.reward for turn in rollouts[0].episodes[0].turns] == [0, 0, 0, 0, 1]


def test_one_request_sent_twice_at_a_time_is_two_turns():
    async def agent(client, row, session):
        one, other = await asyncio.gather(client.ask(("user", "go")), client.ask(("user", "go")))
        assert one.turn != other.turn

    generators = Generators(lambda context, seed: str(seed))
    rollout, _ = episode(agent, generators)
    assert len({request.seed for request in generators.requests}) == 2 and len(rollout) == 2


def test_a_request_whose_client_has_left_is_answered_with_the_same_turn_when_it_comes_again():
    async def agent(client, row, session):
        gate = generators.gates["go?"] = asyncio.get_running_loop().create_future()
        left = asyncio.ensure_future(client.ask(("user", "go")))
        while not generators.requests:
            await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait([left])
        again = asyncio.ensure_future(client.ask(("user", "go")))
        await asyncio.sleep(0.01)
        gate.set_result(None)
        await again
        not_written = await client.ask(("user", "on"), deliver=False)
        assert (await client.ask(("user", "on"))) is not_written
        assert (await client.ask(("user", "on"))) is not not_written, "it had been delivered"

    generators = Generators(turns("a"))
    rollout, found = episode(agent, generators)
    assert len(generators.requests) == 3 and found.events == {}
    assert sorted(rows_of(rollout)) == ["go?[a.]", "on?[a.]", "on?[a.]"]


def test_a_retry_may_arrive_before_the_end_of_the_connection_that_it_replaces():
    async def agent(client, row, session):
        gate = generators.gates["go?"] = asyncio.get_running_loop().create_future()
        left = asyncio.ensure_future(client.ask(("user", "go")))
        while not generators.requests:
            await asyncio.sleep(0)
        again = asyncio.ensure_future(client.ask(("user", "go")))
        await asyncio.sleep(0.03)
        left.cancel()
        await asyncio.sleep(0.03)
        gate.set_result(None)
        await again

    generators = Generators(turns("a"))
    rollout, found = episode(agent, generators)
    assert len(generators.requests) == 1 and rows_of(rollout) == ["go?[a.]"] and found.events == {}


@pytest.mark.parametrize("ending", ["received", "slow", "left"])
def test_a_request_that_comes_while_an_equal_one_s_answer_is_written_is_a_turn_of_its_own(ending):
    async def agent(client, row, session):
        request = ChatRequest([{"role": "user", "content": "go"}])
        first = await client.policy.reply(request)
        again = asyncio.ensure_future(client.ask(("user", "go")))
        await asyncio.sleep(0.05)
        assert not again.done()
        if ending == "slow":
            assert (await again) is not first
        if ending == "left":
            client.policy.left(request)
            assert (await again) is first
        else:
            client.policy.delivered(first)
            assert (await again) is not first

    generators = Generators(turns("a"))
    rollout, _ = episode(agent, generators)
    assert len(generators.requests) == len(rollout) == (1 if ending == "left" else 2)


def test_a_turn_whose_answer_nobody_received_is_no_part_of_the_sample():
    async def agent(client, row, session):
        first = await client.ask(("user", "go"))
        await client.ask(("user", "lost"), deliver=False)
        second = await client.ask(("user", "go"), said(first), ("user", "on"), deliver=False)
        await client.ask(("user", "go"), said(first), ("user", "on"), said(second), ("user", "it was read"))
        return 1

    rollout, found = episode(agent, Generators(turns("a")))
    assert rows_of(rollout) == ["go?[a.]on?[a.]it was read?[a.]"]
    assert found.events == {"abandoned": 1} and len(found.turns) == 3


def test_an_agent_that_ends_while_requests_are_open_leaves_nothing_open():
    async def agent(client, row, session):
        await client.ask(("user", "go"))
        generators.gates["on?"] = asyncio.get_running_loop().create_future()
        running = asyncio.ensure_future(client.ask(("user", "on")))
        while len(generators.requests) < 2:
            await asyncio.sleep(0)
        lost.append(running)
        return 1

    lost, generators = [], Generators(turns("a"))
    agents = Agents(agent)

    async def live():
        rollout = await play(runner_of(agents, generators))
        assert generators.gates["on?"].cancelled(), "the generator's request was cancelled"
        with pytest.raises(Refused, match="is over") as refused:
            await lost[0]
        assert refused.value.status == 410 and agents.closed == 1
        with pytest.raises(Refused):
            await agents.policies[0].reply(ChatRequest([]))
        return rollout

    rollout = asyncio.run(live())
    assert rows_of(rollout) == ["go?[a.]"] and rollout.episodes[0].cause == "completed"


@pytest.mark.parametrize("stop", ["é", "。", "😀", "b。", "。x", "x"])
def test_a_stop_text_whose_characters_are_several_tokens_is_cut_off(stop):
    class Bytes(Generators):
        """A token is a byte."""

        async def call(self, method, requests, *args, **named):
            tokens = np.array(list(f"ab。😀{stop}".encode()), np.int32)
            return [Completion(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), "stop")]

    async def agent(client, row, session):
        reply = await client.ask(("user", "go"), stop=("never", stop))
        assert (reply.content, reply.stopped_by) == ("ab。😀", stop)

    runner = runner_of(agent, Bytes(turns("")))
    runner._texts["mine"] = replace(
        runner._texts["mine"], decode=lambda tokens: bytes(tokens).decode("utf-8", "replace"))
    [found] = asyncio.run(play(runner)).episodes
    assert found.cause == "completed", found.error


def test_max_tokens_and_stop_of_a_request_act_within_the_run_s():
    async def agent(client, row, session):
        assert (session.max_tokens, session.max_turns) == (100, 16)
        cut = await client.ask(("user", "go"), max_tokens=3)
        assert (cut.content, cut.finish_reason, cut.completion_tokens, cut.prompt_tokens) == ("abc", "length", 3, 3)
        stopped = await client.ask(("user", "on"), stop=("ef", "zz"))
        assert (stopped.content, stopped.finish_reason, stopped.stopped_by) == ("abcd", "stop", "ef")
        whole = await client.ask(("user", "go"), said(cut), ("user", "more"), max_tokens=500)
        assert (whole.content, whole.finish_reason) == ("abcdefghij", "length")

    rollout, found = episode(agent, Generators(turns("abcdefghijklm")), max_tokens=100,
                             sampling=SamplingConfig(max_tokens=10))
    assert rows_of(rollout) == ["on?[abcdef]", "go?[abc].more?[abcdefghij]"], "what was sampled stays as it is"
    assert [turn.finish_reason for turn in found.turns] == ["stop", "length", "length"]
    assert found.cause == "completed", "a turn that was cut off is the agent's to judge"


@pytest.mark.parametrize("goes_on, cause", [(False, "truncated_episode"), (True, "completed")])
def test_a_conversation_without_room_is_refused_and_the_cause_if_the_agent_ends_by_it(goes_on, cause):
    async def agent(client, row, session):
        await client.ask(("user", "go"))
        with pytest.raises(Refused, match="^This model's maximum context length is 20 tokens") as refused:
            await client.ask(("user", "x" * 30))
        assert refused.value.status == 400
        if not goes_on:
            raise RuntimeError("no room")
        await client.ask(("user", "in short"))
        return 1

    _, found = episode(agent, Generators(turns("a")), max_tokens=20)
    assert (found.cause, found.use) == (cause, "train")
    assert ("max_tokens" in found.error) == (not goes_on)


def test_more_turns_than_max_turns_are_refused_and_the_reward_counts():
    async def agent(client, row, session):
        for _ in range(2):
            await client.ask(("user", "go"))
        with pytest.raises(Refused, match="max_turns=2") as refused:
            await client.ask(("user", "go"))
        assert refused.value.status == 403, "clients do not try again"
        return 0.25

    _, found = episode(agent, Generators(turns("a")), max_turns=2, on_failure={"overflow": "train"})
    assert (found.cause, found.use, [turn.reward for turn in found.turns]) == ("truncated_turns", "train", [0, 0.25])


async def fails(client, row, session):
    await client.ask(("user", "go"))
    raise ValueError("no")


async def not_done(client, row, session):
    await client.ask(("user", "go"))
    return {"reward": 0.5, "truncated": True, "info": {"score": 3, "name": "x"}}


async def strange(client, row, session):
    await client.ask(("user", "go"))
    return "good"


async def asks_nothing(client, row, session):
    return 1.0


@pytest.mark.parametrize("agent, cause, use, says", [
    (fails, "error_agent", "zero", "ValueError: no"),
    (strange, "error_agent", "zero", "the agent returned str 'good'"),
    (not_done, "truncated_turns", "train", ""),
    (asks_nothing, "completed", "quarantine", ""),
])
def test_how_an_agent_ends_is_the_cause(agent, cause, use, says):
    _, found = episode(agent, Generators(turns("a")))
    assert (found.cause, found.use) == (cause, use) and says in found.error
    assert found.metrics == ({"score": 3.0} if agent is not_done else {})


@pytest.mark.parametrize("use", ["mask", "zero", "quarantine"])
def test_an_episode_whose_agent_failed_is_used_as_configured(use):
    _, found = episode(fails, Generators(turns("a")), on_failure={"agent": use})
    assert (found.cause, found.use) == ("error_agent", use)


def test_an_agent_that_failed_may_begin_again_with_a_session_of_its_own():
    async def agent(client, row, session):
        urls.append(session.base_url)
        await client.ask(("user", "go"))
        if len(urls) == 1:
            raise ValueError("no")

    urls = []
    agents = Agents(agent)
    _, found = episode(agents, Generators(turns("a")), on_failure={"agent": "retry"})
    assert (found.cause, found.events, len(found.turns)) == ("completed", {"retries": 1}, 1)
    assert len(set(urls)) == 2 and agents.closed == 2 and agents.policies[0] is not agents.policies[1]


BROKEN = '{"name": "look", "arguments": '


def test_a_call_that_cannot_be_read_is_text_for_the_agent():
    async def agent(client, row, session):
        first = await client.ask(("user", "go"), tools=TOOLS)
        assert (first.content, first.tool_calls, first.finish_reason) == (BROKEN.strip(), [], "stop")
        await client.ask(("user", "go"), said(first), ("user", "again"), tools=TOOLS)

    rollout, found = episode(agent, Generators(turns(BROKEN, "a")))
    assert rows_of(rollout) == [f"Tgo?[{BROKEN}.]again?[a.]"]
    assert found.events == {"parse_failures": 1} and "cannot be read" in found.turns[0].tool_calls[0]["error"]


@pytest.mark.parametrize("use", ["train", "mask", "zero"])
def test_a_call_that_cannot_be_read_may_end_the_episode_of_an_agent(use):
    async def agent(client, row, session):
        with pytest.raises(Refused) as refused:
            await client.ask(("user", "go"), tools=TOOLS)
        assert refused.value.status == 403
        await asyncio.sleep(600)

    _, found = episode(agent, Generators(turns(BROKEN)), on_failure={"parse": use})
    assert (found.cause, found.use, len(found.turns)) == ("error_parse", use, 1) and "cannot be read" in found.error


def test_an_agent_that_is_slower_than_its_episode_s_deadline_is_ended():
    async def agent(client, row, session):
        await client.ask(("user", "go"))
        await asyncio.sleep(600)

    _, found = episode(agent, Generators(turns("a")), timeout_s={"episode": 0.2})
    assert (found.cause, found.use, len(found.turns)) == ("error_timeout", "mask", 1)
    assert "in turn 1 it waited for the agent" in found.error


def test_an_error_of_the_generators_ends_the_call_and_is_not_the_agent_s():
    async def agent(client, row, session):
        with pytest.raises(Refused):
            await client.ask(("user", "go"))
        await asyncio.sleep(600)

    with pytest.raises(WorkerError, match="lost"):
        episode(agent, Generators(lambda context, seed: WorkerError("lost")))


def test_a_retry_of_an_answer_that_was_lost_on_its_way_gets_the_same_turn():
    async def agent(client, row, session):
        lost = await client.ask(("user", "go"))
        again = await client.ask(("user", "go"), is_retry=True)
        assert again is lost
        await client.ask(("user", "go"), said(again), ("user", "on"))
        assert await client.ask(("user", "go"), is_retry=True) is not lost, "its answer had arrived"

    rollout, found = episode(agent, Generators(turns("a", "b")))
    assert sorted(rows_of(rollout)) == ["go?[a.]", "go?[a.]on?[b.]"] and found.events == {}


def test_turns_for_which_other_sampling_was_asked_are_counted():
    async def agent(client, row, session):
        for text in "abc":
            await client.ask(("user", text), is_overridden=text != "b")

    assert episode(agent, Generators(turns("a")))[1].events == {"overridden": 2}


async def gives_up(client, row, session):
    await client.ask(("user", "go"))
    return 0.0


async def waits(client, row, session):
    await asyncio.sleep(600)


@pytest.mark.parametrize("agent", [gives_up, waits])
def test_an_agent_that_cannot_reach_the_policy_has_no_reward_and_its_runner_is_replaced(agent, monkeypatch):
    monkeypatch.setattr(episode_runner, "WATCH_S", 0.01)
    agents = Agents(agent)
    agents.why_out_of_reach = "it is closed"
    with pytest.raises(WorkerBroken, match="out of reach: it is closed"):
        asyncio.run(play(runner_of(agents, Generators(turns("a")))))


def test_messages_that_the_template_refuses_are_refused():
    class Narrow(Template):
        def open(self, messages, tools=None, **_):
            if messages[0]["role"] == "tool":
                raise ValueError("no tools here")
            return super().open(messages, tools)

    async def agent(client, row, session):
        with pytest.raises(Refused, match="the messages cannot be read: no tools here") as refused:
            await client.ask(("tool", "go"))
        assert refused.value.status == 400
        await client.ask(("user", "go"))

    assert episode(agent, Generators(turns("a")), template=Narrow())[1].cause == "completed"


def test_status_says_what_an_agent_s_episode_waits_for():
    async def agent(client, row, session):
        for name in ("go", "on", "so"):
            generators.gates[f"{name}?"] = asyncio.get_running_loop().create_future()
        seen.append(doing())
        first = asyncio.ensure_future(client.ask(("user", "go")))
        await asyncio.sleep(0.01)
        seen.append(doing())
        generators.gates["go?"].set_result(None)
        await first
        seen.append(doing())
        both = [asyncio.ensure_future(client.ask(("user", text))) for text in ("on", "so")]
        await asyncio.sleep(0.01)
        seen.append(doing())
        for name in ("on", "so"):
            generators.gates[f"{name}?"].set_result(None)
        await asyncio.gather(*both)

    def doing():
        [each] = runner.activity()
        return each["turn"], each["doing"]

    seen, generators = [], Generators(turns("a"))

    async def live():
        nonlocal runner
        runner = runner_of(agent, generators)
        await play(runner)

    runner = None
    asyncio.run(live())
    assert seen == [(1, "the agent"), (1, "a generator"), (1, "the agent"), (3, "2 open requests")]


def test_a_run_whose_process_was_lost_gets_the_same_turns_again():
    agents = Agents(talks)
    agents.restarts = 2
    generators = Generators(turns(CALL, "done"))
    rollout, found = episode(agents, generators)
    assert rows_of(rollout) == [f"Tbe!go?[{CALL}.]seen#[done.]"] and len(generators.requests) == 2
    assert found.events == {"tool_calls": 1, "interrupted": 2} and agents.closed == 3


def test_what_a_lost_run_was_told_and_the_next_one_does_not_ask_for_is_no_part_of_the_sample():
    async def agent(client, row, session):
        runs.append(session)
        await client.ask(("user", f"run {len(runs)}"))

    runs, agents = [], Agents(agent)
    agents.restarts = 1
    rollout, found = episode(agents, Generators(turns("a")))
    assert rows_of(rollout) == ["run 2?[a.]"] and found.events == {"interrupted": 1, "restarted": 1}
