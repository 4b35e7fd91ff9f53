"""The stock `openai` and `anthropic` clients, and plain curl, against a real server on loopback."""

from __future__ import annotations

import asyncio
import json
import time

import anthropic
import openai
import pytest

from rlhf_ray.environments.protocol import ToolCall
from rlhf_ray.gateway.chat import Refused
from tests.unit.gateway.stand import calling, played, reply

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {}}}}
OPENAI_TOOL = {"type": "function", "function": TOOL}
ANTHROPIC_TOOL = {"name": "add", "description": "Adds.", "input_schema": TOOL["parameters"]}
CALLS = [calling(ToolCall("add", {"a": "1 2 3 " * 20}, "c1"), ToolCall("add", {}, "c2"), content="Let me. " * 10),
         reply("It is 2.", turn=1)]


def openai_client(stand, **settings):
    return openai.AsyncOpenAI(base_url=stand.address.base_url, api_key=stand.address.api_key,
                              **{"max_retries": 0, **settings})


def anthropic_client(stand, **settings):
    return anthropic.AsyncAnthropic(base_url=stand.address.anthropic_url, api_key=stand.address.api_key,
                                    **{"max_retries": 0, **settings})


async def settled(stand):
    """After what the gateway's thread scheduled in this loop."""
    await asyncio.sleep(0.05)
    return stand


class TestOpenAI:
    def test_a_tool_is_called_and_its_result_read(self):
        async def script(stand):
            client, messages = openai_client(stand), list(HELLO)
            first = await client.chat.completions.create(model="any", messages=messages, tools=[OPENAI_TOOL])
            message = first.choices[0].message
            messages.append(message)
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "2"} for call in message.tool_calls]
            second = await client.chat.completions.create(model="any", messages=messages, tools=[OPENAI_TOOL])
            await settled(stand)
            return first, second, stand

        first, second, stand = played(script, *CALLS)
        assert first.choices[0].finish_reason == "tool_calls" and second.choices[0].message.content == "It is 2."
        assert stand.policy.asked[0].tools == [OPENAI_TOOL]
        said, *results = stand.policy.asked[1].messages[1:]
        assert said["content"] == CALLS[0].content
        assert [(call["id"], call["function"]["arguments"]) for call in said["tool_calls"]] == [
            (call.id, call.arguments) for call in CALLS[0].tool_calls]
        assert results == [{"role": "tool", "tool_call_id": each, "content": "2"} for each in ("c1", "c2")]
        assert stand.policy.delivered_turns == [0, 1] and stand.warnings == []

    def test_reasoning_comes_back_with_the_message(self):
        async def script(stand):
            client = openai_client(stand)
            first = await client.chat.completions.create(model="any", messages=HELLO)
            await client.chat.completions.create(model="any", messages=[*HELLO, first.choices[0].message, *HELLO])
            return stand.policy.asked[1].messages[1]

        assert played(script, reply("2", reasoning="1 + 1")) == {
            "role": "assistant", "content": "2", "reasoning_content": "1 + 1"}

    def test_the_streaming_helper_builds_the_same_completion(self):
        async def script(stand):
            client = openai_client(stand)
            async with client.chat.completions.stream(
                model="any", messages=HELLO, tools=[OPENAI_TOOL], stream_options={"include_usage": True},
            ) as stream:
                kinds = {event.type async for event in stream}
                built = await stream.get_final_completion()
            await settled(stand)
            return kinds, built, stand.policy.delivered_turns

        kinds, built, delivered = played(script, CALLS[0])
        assert {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
        message = built.choices[0].message
        assert (message.content, built.choices[0].finish_reason) == (CALLS[0].content, "tool_calls")
        assert [(call.id, json.loads(call.function.arguments)) for call in message.tool_calls] == [
            (call.id, call.arguments) for call in CALLS[0].tool_calls]
        assert built.usage.total_tokens == 10 and delivered == [0]

    def test_models_are_listed(self):
        async def script(stand):
            client = openai_client(stand)
            return [each.id async for each in client.models.list()], (await client.models.retrieve("policy")).id

        assert played(script) == (["policy"], "policy")

    def test_a_closed_session_is_gone_at_the_first_try(self):
        async def script(stand):
            client = openai_client(stand, max_retries=2)
            await stand.gateway.close(stand.address)
            with pytest.raises(openai.APIStatusError) as caught:
                await client.chat.completions.create(model="any", messages=HELLO)
            return caught.value, stand.policy.asked

        error, asked = played(script)
        assert error.status_code == 410 and error.code == "session_closed" and "has ended" in error.message
        assert asked == [] and error.response.request.headers["x-stainless-retry-count"] == "0"

    def test_a_definite_refusal_is_not_retried(self):
        async def script(stand):
            client = openai_client(stand, max_retries=2)
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="any", messages=HELLO, n=2)
            with pytest.raises(openai.BadRequestError, match="used up"):
                await client.chat.completions.create(model="any", messages=HELLO)
            return caught.value, len(stand.policy.asked)

        error, asked = played(script, Refused(400, "the episode's tokens are used up"))
        assert error.body == {"message": "n=int 2 is refused: a request is one turn of the episode; send n requests",
                              "type": "invalid_request_error", "param": None, "code": None}
        assert asked == 1

    def test_a_refusal_with_a_wait_is_retried_after_it(self):
        async def script(stand):
            began = time.monotonic()
            answer = await openai_client(stand, max_retries=1).chat.completions.create(model="any", messages=HELLO)
            retries = [each.is_retry for each in stand.policy.asked]
            return answer.choices[0].message.content, time.monotonic() - began, retries

        content, took, retries = played(script, Refused(429, "too many", 0.7), reply("later"))
        assert content == "later" and 1 <= took < 3  # Retry-After has whole seconds
        assert retries == [False, True]

    def test_a_wrong_key_is_an_authentication_error(self):
        async def script(stand):
            for key in ("wrong", stand.address.api_key[:-1], stand.address.api_key + "0"):
                with pytest.raises(openai.AuthenticationError) as caught:
                    await openai.AsyncOpenAI(base_url=stand.address.base_url, api_key=key).models.list()
            other = stand.gateway.open(stand.policy, "other")
            with pytest.raises(openai.AuthenticationError):
                await openai.AsyncOpenAI(base_url=other.base_url, api_key=stand.address.api_key).models.list()
            return caught.value.code

        assert played(script) == "invalid_api_key"

    @pytest.mark.parametrize("ask, why", [
        (lambda client: client.completions.create(model="any", prompt="a"), "a raw prompt has no conversation"),
        (lambda client: client.responses.create(model="any", input="a"), "keeps the conversation on the server"),
        (lambda client: client.embeddings.create(model="any", input="a"), "generates text"),
    ])
    def test_other_routes_say_which_there_are(self, ask, why):
        async def script(stand):
            with pytest.raises(openai.NotFoundError, match=why) as caught:
                await ask(openai_client(stand))
            return caught.value.body["message"]

        assert "POST /v1/chat/completions" in played(script)

    def test_replaced_and_ignored_fields_are_warned_of_once_and_the_policy_knows(self):
        async def script(stand):
            client = openai_client(stand)
            for _ in range(3):
                await client.chat.completions.create(model="any", messages=HELLO, temperature=0, seed=1, user="ann")
            await client.chat.completions.create(model="any", messages=HELLO, extra_body={"top_k": 5, "new\n" * 50: 1})
            await client.chat.completions.create(model="any", messages=HELLO)
            await settled(stand)
            return [each.is_overridden for each in stand.policy.asked], stand.warnings

        overridden, warnings = played(script)
        assert overridden == [True, True, True, True, False]
        assert sorted(line.split(",")[0] for line in warnings) == sorted(
            f"gateway: agents send {name}" for name in ("seed", "temperature", "user", "top_k", "new\\n" * 16))
        assert not any("\n" in line for line in warnings)


class TestAnthropic:
    def test_a_tool_is_called_and_its_result_read(self):
        async def script(stand):
            client, messages = anthropic_client(stand), list(HELLO)
            common = {"model": "any", "max_tokens": 50, "system": "Be brief.", "tools": [ANTHROPIC_TOOL]}
            first = await client.messages.create(messages=messages, **common)
            messages.append({"role": "assistant", "content": first.content})
            messages.append({"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": block.id, "content": "2"}
                for block in first.content if block.type == "tool_use"]})
            second = await client.messages.create(messages=messages, **common)
            await settled(stand)
            return first, second, stand

        first, second, stand = played(script, *CALLS)
        assert first.stop_reason == "tool_use" and second.content[0].text == "It is 2."
        assert stand.policy.asked[0].tools == [OPENAI_TOOL] and stand.policy.asked[0].max_tokens == 50
        system, user, said, *results = stand.policy.asked[1].messages
        assert (system["content"], user["content"], said["content"]) == ("Be brief.", "hello", CALLS[0].content)
        assert [(call["id"], call["function"]["arguments"]) for call in said["tool_calls"]] == [
            (call.id, call.arguments) for call in CALLS[0].tool_calls]
        assert results == [{"role": "tool", "tool_call_id": each, "content": "2"} for each in ("c1", "c2")]
        assert stand.policy.delivered_turns == [0, 1] and stand.warnings == []

    def test_the_streaming_helper_builds_the_same_message(self):
        async def script(stand):
            client = anthropic_client(stand)
            common = {"model": "any", "max_tokens": 2000, "messages": HELLO, "tools": [ANTHROPIC_TOOL],
                      "thinking": {"type": "enabled", "budget_tokens": 1024}}
            whole = await client.messages.create(**common)
            async with client.messages.stream(**common) as stream:
                texts = [piece async for piece in stream.text_stream]
                built = await stream.get_final_message()
            return whole, texts, built

        said = calling(*CALLS[0].tool_calls, content=CALLS[0].content, reasoning="Hm. " * 30)
        whole, texts, built = played(script, said)
        assert [block.type for block in built.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert [block.input for block in built.content[2:]] == [call.arguments for call in said.tool_calls]
        assert "".join(texts) == said.content and len(texts) > 1
        assert built.model_dump(exclude={"content"}) == whole.model_dump(exclude={"content"})
        assert [block.to_dict() for block in whole.content[:2]] == [
            {"type": "thinking", "thinking": "Hm. " * 30, "signature": ""}, {"type": "text", "text": said.content}]

    def test_errors_have_the_types_of_the_client(self):
        async def script(stand):
            client, ask = anthropic_client(stand, max_retries=2), {"model": "any", "max_tokens": 5, "messages": HELLO}
            with pytest.raises(anthropic.BadRequestError) as caught:
                await client.messages.create(**ask, tool_choice={"type": "any"}, tools=[ANTHROPIC_TOOL])
            with pytest.raises(anthropic.NotFoundError, match="usage has the numbers of tokens"):
                await client.messages.count_tokens(model="any", messages=HELLO)
            with pytest.raises(anthropic.RateLimitError):
                await anthropic_client(stand).messages.create(**ask)
            wrong = anthropic.AsyncAnthropic(base_url=stand.address.anthropic_url, api_key="wrong")
            with pytest.raises(anthropic.AuthenticationError):
                await wrong.messages.create(**ask)
            both = {"x-api-key": "of another service"}
            bearer = anthropic.AsyncAnthropic(base_url=stand.address.anthropic_url, max_retries=0,
                                              auth_token=stand.address.api_key)
            with pytest.raises(anthropic.RateLimitError):
                await bearer.messages.create(**ask, extra_headers=both)
            await stand.gateway.close(stand.address)
            with pytest.raises(anthropic.APIStatusError) as gone:
                await client.messages.create(**ask)
            return caught.value.body, gone.value, len(stand.policy.asked)

        body, gone, asked = played(script, Refused(429, "too many", 1.0))
        assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
        assert "tool_choice" in body["error"]["message"]
        assert gone.status_code == 410 and asked == 2

    def test_models_are_listed(self):
        async def script(stand):
            client = anthropic_client(stand)
            return [each.id async for each in client.models.list()], (await client.models.retrieve("a/b")).id

        assert played(script) == (["policy"], "a/b")


class TestCurl:
    @staticmethod
    async def curl(*arguments):
        process = await asyncio.create_subprocess_exec(
            "curl", "-s", "-S", "-w", "\n%{http_code}", "--max-time", "20", *arguments,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL)
        shown, problem = await process.communicate()
        assert process.returncode == 0, problem
        body, _, status = shown.decode().rpartition("\n")
        return int(status), body

    def test_a_turn_without_more_than_a_key_and_messages(self):
        async def script(stand):
            return await self.curl(f"{stand.address.base_url}/chat/completions", "-H",
                                   f"Authorization: Bearer {stand.address.api_key}", "-d",
                                   json.dumps({"messages": HELLO}))

        status, body = played(script)
        assert status == 200 and json.loads(body)["choices"][0]["message"]["content"] == "Sunny."

    def test_a_stream_is_readable(self):
        async def script(stand):
            return await self.curl("-N", f"{stand.address.anthropic_url}/v1/messages", "-H",
                                   f"x-api-key: {stand.address.api_key}", "-d",
                                   json.dumps({"messages": HELLO, "stream": True, "max_tokens": 5}))

        status, body = played(script)
        assert status == 200 and body.startswith("event: message_start\n") and "event: message_stop\n" in body

    @pytest.mark.parametrize("size, with_key, expected", [
        (1_000_000, True, 200), (31 * 2**20, True, 200), (33 * 2**20, True, 413), (70 * 2**20, True, 413),
        (5 * 2**20, False, 401)])
    def test_large_bodies_are_read_or_answered(self, tmp_path, size, with_key, expected):
        path = tmp_path / "body"
        path.write_text(json.dumps({"messages": [{"role": "user", "content": "a" * size}]}))

        async def script(stand):
            key = stand.address.api_key if with_key else "wrong"
            answer = await self.curl(f"{stand.address.base_url}/chat/completions", "-H", f"Authorization: Bearer {key}",
                                     "--data-binary", f"@{path}")
            return answer, [len(request.messages[0]["content"]) for request in stand.policy.asked]

        (status, body), asked = played(script)
        assert status == expected and asked == ([size] if expected == 200 else [])
        assert expected == 200 or "error" in json.loads(body)

    @pytest.mark.parametrize("path, method, status", [
        ("/", "GET", 404), ("/v1/chat/completions", "POST", 404), ("/unknown/v1/models", "GET", 404),
        ("/%2e%2e/v1/models", "GET", 404), ("{id}", "GET", 404), ("{id}/v1/", "GET", 404),
        ("{id}/v1/chat/completions", "GET", 405), ("{id}/v1/models", "POST", 405), ("{id}/v1/models", "GET", 200)])
    def test_paths(self, path, method, status):
        async def script(stand):
            origin, _, session = stand.address.anthropic_url.rpartition("/")
            return await self.curl("-X", method, "--path-as-is", origin + path.replace("{id}", f"/{session}"), "-H",
                                   f"Authorization: Bearer {stand.address.api_key}", "-d", "{}")

        code, body = played(script)
        assert code == status and ("error" in json.loads(body)) == (status != 200)
