"""Random agents: whatever they do with their conversations, each sampled token is in one row, once, after the tokens
that it was sampled after."""

import asyncio

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.roles.agent_plays import Generators, episode, said

LETTERS = st.sampled_from("abc")
PLACE = st.integers(0, 5)
ACTION = st.one_of(
    st.tuples(st.just("append"), PLACE, LETTERS),
    st.tuples(st.just("back"), PLACE, PLACE, LETTERS),
    st.tuples(st.just("edit"), PLACE, PLACE, LETTERS),
    st.tuples(st.just("begin"), LETTERS),
    st.tuples(st.just("again"), PLACE),
    st.tuples(st.just("parallel"), st.lists(st.sampled_from(["ab", "bc", "cd", "de"]), unique=True, max_size=4)))


def agent_of(actions, order):
    """An agent with several conversations, each a list of messages that ends with the policy's.

    Args:
        order: of the sub-agents that are asked at a time.
    """
    async def agent(client, row, session):
        kept = []

        async def ask(messages):
            kept.append([*messages, said(await client.ask(*messages))])

        await ask([("user", "go")])
        for name, *values in actions:
            messages = kept[values[0] % len(kept)] if name not in ("begin", "parallel") else []
            if name == "append":
                await ask([*messages, ("user", values[1])])
            elif name == "back":  # ask otherwise where a user spoke
                users = [i for i, message in enumerate(messages) if isinstance(message, tuple)]
                await ask([*messages[:users[values[1] % len(users)]], ("user", values[2])])
            elif name == "edit":
                at = values[1] % len(messages)
                role = "user" if isinstance(messages[at], tuple) else "assistant"
                await ask([*messages[:at], (role, values[2]), *messages[at + 1:], ("user", "so")])
            elif name == "again":
                await ask(messages[:-1])
            else:
                texts = values[0] if name == "parallel" else [values[0]]
                asked = [asyncio.ensure_future(client.ask(("user", text))) for text in order(texts)]
                await asyncio.gather(*asked)
        return 1.0

    return agent


def written(context, seed):
    """One of few texts, so that turns of different conversations are alike."""
    return ["a", "b ", "<think>c</think>a"][seed % 3]


def played(actions, order):
    generators = Generators(written)
    rollout, found = episode(agent_of(actions, order), generators, max_turns=64)
    return rollout, found, generators.requests


@settings(max_examples=150, deadline=None)
@given(st.lists(ACTION, max_size=8), st.randoms(use_true_random=False))
def test_each_turn_is_in_one_row_once_after_the_tokens_that_it_was_sampled_after(actions, shuffle):
    rollout, found, requests = played(actions, lambda texts: texts)
    assert found.cause == "completed" and rollout.sample_count == 1 and not found.events
    by_seed = {request.seed: request for request in requests}
    assert len(by_seed) == len(requests) == len(found.turns)
    covered = [np.zeros(length, bool) for length in rollout.lengths]
    for turn in found.turns:
        tokens, request = rollout.row(turn.row, "tokens"), by_seed.pop(turn.seed)
        assert tokens[:turn.start].tolist() == request.prompt
        expected = [*map(ord, written("", turn.seed)), 0]
        assert tokens[turn.start:turn.stop].tolist() == expected
        assert not covered[turn.row][turn.start:turn.stop].any()
        covered[turn.row][turn.start:turn.stop] = True
    for row, mask in enumerate(covered):
        assert rollout.row(row, "response_mask").tolist() == mask.tolist() and mask[-1]
        assert (rollout.row(row, "versions") >= 0).tolist() == mask.tolist()
    assert [(turn.row, turn.start) for turn in found.turns] == sorted((turn.row, turn.start) for turn in found.turns)
    assert [turn.reward for turn in found.turns] == [0.0] * (len(found.turns) - 1) + [1.0]

    def mixed(texts):
        return shuffle.sample(texts, len(texts))

    other, again, _ = played(actions, mixed)
    assert other.tokens.tolist() == rollout.tokens.tolist() and other.offsets.tolist() == rollout.offsets.tolist()
    assert other.logprobs.tobytes() == rollout.logprobs.tobytes() and again == found
