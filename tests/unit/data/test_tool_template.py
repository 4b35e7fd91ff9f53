"""The chat template with tools of models that are made here."""

from rlhf_ray.data.tokenizer import train_tokenizer
from rlhf_ray.data.tool_template import TOOL_TAGS, TURN_END, TURN_START, give_tool_template

CALL = {"id": "c00000000", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add"}}


def make(directory):
    train_tokenizer(["the price of tea"], 300, directory)
    return give_tool_template(directory)


def test_six_tokens_follow_the_vocabulary_and_a_turn_s_end_is_the_end_of_sequence(tmp_path):
    from transformers import AutoTokenizer

    before = len(train_tokenizer(["the price of tea"], 300, tmp_path))
    give_tool_template(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    added = tokenizer.convert_tokens_to_ids([TURN_START, TURN_END, *TOOL_TAGS])
    assert sorted(added) == list(range(before, before + 6))
    assert len(tokenizer) == before + 6 and tokenizer.eos_token == TURN_END and tokenizer.pad_token_id == 0
    ids = tokenizer.encode(f"{TURN_START}x<tool_call>{TURN_END}")
    assert len(ids) == 4 and tokenizer.decode(ids, skip_special_tokens=True) == "x<tool_call>"


def test_a_conversation_with_calls_and_results(tmp_path):
    calls = [CALL, {"name": "add", "arguments": '{"a": 2}'}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 0?"},
                {"role": "assistant", "content": "I add.", "tool_calls": calls},
                {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"},
                {"role": "assistant", "content": "1"}]
    text = make(tmp_path).apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    assert text == """<|im_start|>system
Be brief.

# Tools

The tools, as JSON schemas:
<tools>
{"type": "function", "function": {"name": "add"}}
</tools>

To call a tool, write:
<tool_call>
{"name": NAME, "arguments": OBJECT}
</tool_call><|im_end|>
<|im_start|>user
1 + 0?<|im_end|>
<|im_start|>assistant
I add.
<tool_call>
{"name": "add", "arguments": {"a": 1}}
</tool_call>
<tool_call>
{"name": "add", "arguments": {"a": 2}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
1
</tool_response>
<tool_response>
2
</tool_response><|im_end|>
<|im_start|>assistant
1<|im_end|>
<|im_start|>assistant
"""


def test_without_system_message_and_tools_there_is_one_and_none(tmp_path):
    text = make(tmp_path).apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == ("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n")
