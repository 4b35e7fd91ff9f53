"""The shop, played by an agent: it has its own loop, runs the tools itself, and asks the policy by OpenAI's client."""

import json

from lookup_and_calculator import Shop
from openai import APIStatusError, AsyncOpenAI
from transformers.utils import get_json_schema

from rlhf_ray.environments.shapes import tool_answer

NAMES = ("lookup", "calculator", "submit")
SCHEMAS = [get_json_schema(getattr(Shop(), name)) for name in NAMES]


async def agent(row, session):
    """One episode, with the messages and the reward that it has where the class itself is the environment."""
    shop = Shop()
    shop.reset(row["prices"], row["answer"])
    tools = {name: getattr(shop, name) for name in NAMES}
    messages = list(row["prompt"])
    truncated = False
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        while True:
            try:
                answer = await client.chat.completions.create(model=session.model, messages=messages, tools=SCHEMAS)
            except APIStatusError:  # the episode's turns or tokens are used up; the run knows
                break
            choice = answer.choices[0]
            if choice.finish_reason != "tool_calls":  # the last word, or a turn that was cut off
                truncated = choice.finish_reason == "length"
                break
            messages.append(choice.message)
            for call in choice.message.tool_calls:
                arguments = json.loads(call.function.arguments)
                content, _ = tool_answer(tools, SCHEMAS, call.function.name, arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return {"reward": shop.get_reward(), "truncated": truncated}
