"""Conversations of several turns as token ids: what is appended equals what would be rendered, for templates of every
kind, and no content becomes a special token."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_ray.data.tool_template import TOOL_TEMPLATE
from rlhf_ray.data.turn_template import TemplateKind, TurnTemplate, call_id, results_as_user
from rlhf_ray.errors import DataError, ModelError
from tests.chat_templates import KINDS, make_chat_tokenizer, make_sentencepiece_like_tokenizer

APPEND, CYCLE, SEGMENTS = TemplateKind
LOOK_UP = {"type": "function", "function": {
    "name": "look_up", "description": "Look up a word.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}}}
QUESTION = {"role": "user", "content": "what is the price of tea?"}
TOOL_KINDS = [kind for kind in KINDS if "tool" in KINDS[kind].roles]


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    return {kind: TurnTemplate(make_chat_tokenizer(tmp_path_factory.mktemp("tokenizers") / kind, kind))
            for kind in KINDS}


@pytest.fixture(scope="module")
def custom(tmp_path_factory):
    """custom(jinja, kind) -> the tokenizer of a kind with another template."""
    def make(source, kind="qwen3"):
        tokenizer = make_chat_tokenizer(tmp_path_factory.mktemp("custom"), kind)
        tokenizer.chat_template = source
        return TurnTemplate(tokenizer)

    return make


def rendered(template, messages, tools=None, **options):
    """The ids of a conversation that is rendered and encoded as a whole."""
    text = template.tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=False, **options)
    return template.tokenizer(text, add_special_tokens=False)["input_ids"]


def ids_of(template, text):
    return template.tokenizer(text, add_special_tokens=False)["input_ids"]


def result(content, number=0, turn=0):
    return {"role": "tool", "name": "look_up", "tool_call_id": call_id(turn, number), "content": content}


def user(content):
    return {"role": "user", "content": content}


def asks(calls, turn):
    return [{"id": call_id(turn, i), "type": "function", "function": {"name": "look_up", "arguments": {"word": word}}}
            for i, word in enumerate(calls)]


def as_written(kind, content, calls, turn):
    """What a policy samples for an answer: as each family's models write it, up to the token that ends the turn."""
    arguments = [json.dumps({"word": word}, ensure_ascii=False) for word in calls]
    if kind == "llama3.1":
        return f'{{"name": "look_up", "parameters": {arguments[0]}}}' if calls else content
    if kind == "mistral":
        inner = ", ".join(f'{{"name": "look_up", "arguments": {each}, "id": "{call_id(turn, i)}"}}'
                          for i, each in enumerate(arguments))
        return f"[TOOL_CALLS] [{inner}]" if calls else f" {content}"
    blocks = [f'<tool_call>\n{{"name": "look_up", "arguments": {each}}}\n</tool_call>' for each in arguments]
    return "\n".join([*([content] if content else []), *blocks])


# What is appended equals what is rendered

WORDS = st.text(st.sampled_from("aeimprst 12.,{}\"'\n\\é木🙂"), max_size=20).map(lambda text: f"w{text}w")


@st.composite
def turns(draw, kind, answers):
    """[(content, words that are looked up, what is answered)]; `answers` are roles that may follow a turn."""
    one_call = kind == "llama3.1"
    found = []
    for turn in range(draw(st.integers(1, 4))):
        role = draw(st.sampled_from(answers))
        calls = draw(st.lists(WORDS, min_size=1, max_size=1 if one_call else 3)) if role == "tool" else []
        content = draw(WORDS)
        if calls and (kind in ("llama3.1", "mistral") or draw(st.booleans())):
            content = ""
        replies = ([result(draw(WORDS), i, turn) for i in range(len(calls))] if role == "tool"
                   else [{"role": role, "content": draw(WORDS)}])
        found.append((content, calls, replies))
    return found


def check_appended_is_rendered(template, kind, conversation, begin, tools):
    end = template.tokenizer.eos_token_id
    messages = list(begin)
    ids = template.open(messages, tools)
    assert ids == rendered(template, messages, tools)
    for turn, (content, calls, replies) in enumerate(conversation):
        assert template.continues(replies, tools, system=begin[0]["role"] == "system")
        ids = [*ids, *ids_of(template, as_written(kind, content, calls, turn)), end]
        ids += template.delta(replies, tools, stopped_by=end)
        called = {"tool_calls": asks(calls, turn)} if calls else {}
        messages.append({"role": "assistant", "content": content, **called})
        messages += replies if template.knows_tool_role else results_as_user(replies)
        assert ids == rendered(template, messages, tools)


@pytest.mark.parametrize(("kind", "answers"), [
    ("qwen2.5", ["tool", "user", "system"]), ("qwen3", ["tool"]), ("llama3.1", ["tool", "user", "system"]),
    ("mistral", ["tool"])])
@given(data=st.data())
def test_an_episode_with_tools_has_the_ids_of_its_rendering(templates, kind, answers, data):
    begin = [user(data.draw(WORDS))]
    if kind != "mistral" and data.draw(st.booleans()):
        begin = [{"role": "system", "content": data.draw(WORDS)}, *begin]
    check_appended_is_rendered(templates[kind], kind, data.draw(turns(kind, answers)), begin, [LOOK_UP])


@pytest.mark.parametrize("kind", ["qwen2.5", "llama3.1", "gemma", "mistral"])
@given(data=st.data())
def test_a_conversation_with_a_user_has_the_ids_of_its_rendering(templates, kind, data):
    check_appended_is_rendered(templates[kind], kind, data.draw(turns(kind, ["user"])), [user(data.draw(WORDS))], None)


@pytest.mark.parametrize("scheme", ["always", "first"])
@pytest.mark.parametrize("kind", ["gemma", "llama3.1"])
def test_a_tokenizer_that_puts_a_blank_first_puts_none_into_the_conversation(tmp_path, kind, scheme):
    template = TurnTemplate(make_sentencepiece_like_tokenizer(tmp_path, kind, scheme))
    end = template.tokenizer.eos_token_id
    messages = [QUESTION]
    ids = template.open(messages)
    for answer, reply in (("it is 12", "and milk?"), ("3", "so add 1 and 2.")):
        sampled = rendered(template, [*messages, {"role": "assistant", "content": answer}])
        assert sampled[: len(ids)] == ids
        ids = sampled[: sampled.index(end, len(ids)) + 1] + template.delta([user(reply)], stopped_by=end)
        messages += [{"role": "assistant", "content": answer}, user(reply)]
        assert ids == rendered(template, messages)


def test_the_line_break_after_the_token_that_ends_a_turn_begins_what_follows(templates):
    """Others lose it at each border of turns (verl's issues 6719 and 6921)."""
    template = templates["qwen2.5"]
    line_break = ids_of(template, "\n")
    for reply in (user("and milk?"), result("12")):
        ids = template.delta([reply], stopped_by=template.tokenizer.eos_token_id)
        assert ids[: len(line_break)] == line_break
        assert template.tokenizer.convert_ids_to_tokens(ids[len(line_break)]) == "<|im_start|>"
    assert template.tokenizer.decode(template.delta([result("12")], stopped_by=template.tokenizer.eos_token_id)) == (
        "\n<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_sampled_ids_are_neither_decoded_nor_encoded_again(templates, monkeypatch):
    """Others decode a turn and encode it again (TRL's issues 5144 and 5224), which changes ids such as these."""
    template = templates["qwen2.5"]
    canonical = ids_of(template, "the price of tea is 12")
    sampled = [token for letter in "the price of tea is 12" for token in ids_of(template, letter)]
    assert sampled != canonical
    opened, end = template.open([QUESTION], [LOOK_UP]), template.tokenizer.eos_token_id
    monkeypatch.setattr(type(template.tokenizer), "decode", None)
    ids = [*opened, *sampled, end, *template.delta([user("and milk?")], [LOOK_UP], stopped_by=end)]
    assert ids[len(opened) : len(opened) + len(sampled)] == sampled
    whole = rendered(template, [QUESTION, {"role": "assistant", "content": "the price of tea is 12"},
                                user("and milk?")], [LOOK_UP])
    assert ids == [*whole[: len(opened)], *sampled, *whole[len(opened) + len(canonical) :]]


# Which token ended the turn

def test_a_turn_that_the_template_s_own_end_did_not_end_gets_it(templates):
    for kind, reply in (("qwen2.5", result("12")), ("gemma", user("and milk?")), ("llama3.1", result("12")),
                        ("mistral", result("12"))):
        template = templates[kind]
        end = template.tokenizer.eos_token_id
        after = template.delta([reply], stopped_by=end)
        assert template.delta([reply], stopped_by=None) == [end, *after], kind
        letter = ids_of(template, "a")[0]
        assert template.delta([reply], stopped_by=letter) == [end, *after], kind
    template = templates["qwen2.5"]
    other = template.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert template.delta([QUESTION], stopped_by=other)[0] == template.tokenizer.eos_token_id


def test_an_end_that_the_template_writes_elsewhere_is_an_end_if_the_model_s_files_name_it(templates):
    tokenizer = templates["llama3.1"].tokenizer
    end, other = tokenizer.convert_tokens_to_ids(["<|eot_id|>", "<|eom_id|>"])
    after = templates["llama3.1"].delta([result("12")], stopped_by=end)
    assert TurnTemplate(tokenizer, [end, other]).delta([result("12")], stopped_by=other) == after
    assert TurnTemplate(tokenizer, [end]).delta([result("12")], stopped_by=other) == [end, *after]


def test_a_template_without_a_token_that_ends_turns(custom):
    template = custom("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
                      "{% if add_generation_prompt %}assistant: {% endif %}")
    for stopped_by in (None, template.tokenizer.eos_token_id):
        assert template.tokenizer.decode(template.delta([QUESTION], stopped_by=stopped_by)) == (
            "\nuser: what is the price of tea?\nassistant: ")


def test_a_template_without_a_token_that_ends_turns_may_write_calls(custom):
    template = custom("{% for m in messages %}{{ m.role }}: {{ m.content }}"
                      "{{ m.tool_calls | tojson if m.tool_calls }}\n{% endfor %}"
                      "{% if add_generation_prompt %}assistant: {% endif %}")
    assert template.tokenizer.decode(template.delta([result("12")], stopped_by=None)) == "\ntool: 12\nassistant: "


def test_a_template_that_ends_the_user_s_turns_alone(custom):
    template = custom("{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '<|im_end|>' if m.role != 'assistant' }}"
                      "\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}")
    for reply in (QUESTION, {**QUESTION, "role": "tool"}):
        assert template.tokenizer.decode(template.delta([reply], stopped_by=None)) == (
            f"\n{reply['role']}: what is the price of tea?<|im_end|>\nassistant: ")


def test_a_template_that_ends_turns_of_others_with_another_end(custom):
    template = custom("{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '<|endoftext|>' if m.role == 'assistant' "
                      "else '<|im_end|>' }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}")
    own = template.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    after = "\nuser: what is the price of tea?<|im_end|>\nassistant: "
    template = TurnTemplate(template.tokenizer, [own, template.tokenizer.eos_token_id])
    assert template.tokenizer.decode(template.delta([QUESTION], stopped_by=own)) == after
    assert template.tokenizer.decode(template.delta([QUESTION], stopped_by=None)) == f"<|endoftext|>{after}"


def test_a_template_that_writes_each_call_as_a_turn(custom):
    template = custom("{% for m in messages %}{% for call in m.tool_calls or [] %}assistant: "
                      "{{ call.function.arguments | tojson }}<|im_end|>\n{% else %}"
                      "{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
                      "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}")
    ids = template.delta([result("12"), result("3", 1)], stopped_by=template.tokenizer.eos_token_id)
    assert template.tokenizer.decode(ids) == "\ntool: 12<|im_end|>\ntool: 3<|im_end|>\nassistant: "


# Special tokens are the template's

def specials(template, ids):
    """How often each special token occurs."""
    named = [token for token, added in template.tokenizer.added_tokens_decoder.items() if added.special]
    return {token: ids.count(token) for token in named}


PARTS = ["<|im_", "end|>", "[IN", "ST]", "</", "s>", "x", " ", "<"]
FRAGMENTS = {kind: [*traits.special, *traits.tags, traits.end, *PARTS]
             for kind, traits in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_no_content_becomes_a_special_token(templates, kind, data):
    template = templates[kind]
    tools = [LOOK_UP] if template.knows_tools else None
    text = "x" + "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS[kind]), max_size=8))) + "x"
    end = template.tokenizer.eos_token_id

    def all_ids(content):
        yield template.open([user(content)], tools)
        yield template.delta([user(content)], tools, stopped_by=end)
        yield template.delta([{**result(content), "name": content}], tools, stopped_by=end)
        if tools:
            described = {**LOOK_UP, "function": {**LOOK_UP["function"], "description": content}}
            yield template.open([user("x")], [described])
        yield template.open([user("x"), {"role": "assistant", "content": content}, user("x")], tools)

    for with_text, without in zip(all_ids(text), all_ids("x"), strict=True):
        assert specials(template, with_text) == specials(template, without)
        left_out = kind == "qwen3" and "</think>" in text  # of an earlier answer
        assert left_out or text in template.tokenizer.decode(with_text)


def test_texts_of_special_tokens_that_overlap_are_texts(custom):
    from transformers import AddedToken

    tokenizer = custom(TOOL_TEMPLATE).tokenizer
    added = [AddedToken(text, special=True, normalized=False) for text in ("@@", "@@x")]
    tokenizer.add_tokens(added, special_tokens=True)
    template = TurnTemplate(tokenizer)
    ids = template.delta([user("x@@@@@x@@x")], stopped_by=tokenizer.eos_token_id)
    assert not {*tokenizer.convert_tokens_to_ids(["@@", "@@x"])} & {*ids}
    assert "x@@@@@x@@x" in tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["qwen2.5", "qwen3"])
def test_a_result_cannot_end_the_tags_around_it(templates, kind):
    template = templates[kind]
    tag = template.tokenizer.convert_tokens_to_ids("</tool_response>")
    ids = template.delta([result("12</tool_response>34")], stopped_by=template.tokenizer.eos_token_id)
    assert ids.count(tag) == 1 and "12</tool_response>34" in template.tokenizer.decode(ids)


def test_a_policy_s_own_tags_stay_tokens_in_its_history(templates):
    template = templates["qwen3"]
    think = template.tokenizer.convert_tokens_to_ids("<think>")
    answer = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nlook <|im_end|>"}
    ids = template.open([QUESTION, answer, result("12")], [LOOK_UP])
    assert ids.count(think) == 1
    assert specials(template, ids) == specials(template, template.open([QUESTION, {**answer, "content": "x"},
                                                                        result("12")], [LOOK_UP]))


# Kinds

@pytest.mark.parametrize(("kind", "tools", "expected"), [
    ("qwen2.5", True, APPEND), ("qwen2.5", False, APPEND), ("qwen3", True, CYCLE), ("qwen3", False, CYCLE),
    ("llama3.1", True, APPEND), ("llama3.1", False, APPEND), ("gemma", True, APPEND), ("gemma", False, APPEND),
    ("mistral", True, CYCLE)])
def test_kinds(templates, kind, tools, expected):
    assert templates[kind].kind(tools) is expected


def test_reasoning_is_left_out_when_a_user_speaks_and_a_new_segment_begins(templates):
    template = templates["qwen3"]
    assert template.continues([result("12"), result("3", 1)], [LOOK_UP])
    assert not template.continues([user("and milk?")], [LOOK_UP])
    assert not template.continues([result("12"), user("and milk?")], [LOOK_UP])
    answer = template.assistant("<think>\nhm\n</think>\n\n12", content="12", reasoning="hm")
    assert answer == {"role": "assistant", "content": "12", "reasoning_content": "hm"}
    ids = template.open([QUESTION, answer, user("and milk?")], [LOOK_UP])
    assert "hm" not in template.tokenizer.decode(ids)
    assert "hm" in template.tokenizer.decode(template.open([QUESTION, answer, result("12")], [LOOK_UP]))


def test_an_empty_reasoning_in_the_prompt_alone_makes_each_turn_a_segment(templates):
    """Qwen3's template writes it with enable_thinking: false, and not before earlier turns."""
    template = templates["qwen3"]
    options = {"enable_thinking": False}
    assert template.kind(True, options) is SEGMENTS
    assert not template.continues([result("12")], [LOOK_UP], options=options)
    ids = template.delta([result("12")], [LOOK_UP], stopped_by=template.tokenizer.eos_token_id, options=options)
    assert template.tokenizer.decode(ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_a_system_message_that_moves_makes_a_segment_of_each_user_s_turn(templates):
    """Mistral's kind writes it into the last message of the user."""
    template = templates["mistral"]
    assert template.kind(False) is CYCLE
    assert template.continues([user("and milk?")], system=False) and not template.continues([user("and milk?")])
    assert not template.continues([user("and milk?")], [LOOK_UP], system=False), "the tools move"


STRIPS = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}")


def test_a_template_that_always_leaves_out_reasoning_makes_a_segment_of_each_turn(custom):
    template = custom(STRIPS)
    assert template.kind(True) is SEGMENTS and template.kind(False) is SEGMENTS
    assert template.opens_reasoning()
    assert custom(STRIPS.replace("<think>\n", "")).kind(False) is SEGMENTS


def test_a_template_that_keeps_reasoning_is_append_only(custom):
    template = custom("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n"
                      "{{ m.content.split('</think>')[0].split('<think>\n')[-1] }}</think>"
                      "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
                      "{% endfor %}"
                      "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}")
    assert template.kind(False) is APPEND and template.opens_reasoning()


@pytest.mark.parametrize("prompt", ["<think>\n", "<think>\n\n</think>\n\n"])
def test_answers_are_judged_as_a_policy_may_write_them_after_the_prompt(custom, prompt):
    """With reasoning where the prompt opens it, without where the prompt closes it."""
    template = custom("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
                      "{% if '</think>' in m.content or prompt != '<think>\n' %}<think>\n"
                      "{{ m.content.split('</think>')[0].split('<think>\n')[-1].strip() if '</think>' in m.content }}"
                      "\n</think>\n\n{% endif %}{{ m.content.split('</think>')[-1].strip() }}{% else %}{{ m.content }}"
                      "{% endif %}<|im_end|>\n{% endfor %}"
                      "{% if add_generation_prompt %}<|im_start|>assistant\n{{ prompt }}{% endif %}")
    assert template.kind(False, {"prompt": prompt}) is APPEND
    assert template.opens_reasoning(options={"prompt": prompt}) is (prompt == "<think>\n")


def test_a_template_that_drops_the_last_turns_rewrites(custom):
    template = custom("{% for m in messages[-1:] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
                      "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    with pytest.raises(ModelError, match="leaves out the assistant's answer"):
        template.delta([QUESTION], stopped_by=None)
    assert template.kind(False) is SEGMENTS


# What templates know and refuse

def test_what_templates_know(templates):
    assert {kind: (t.knows_tools, t.knows_tool_role) for kind, t in templates.items()} == {
        kind: ("tool" in KINDS[kind].roles,) * 2 for kind in KINDS}
    assert not any(template.opens_reasoning() for template in templates.values())


def test_without_the_role_tool_results_are_a_message_of_the_user(templates):
    template = templates["gemma"]
    ids = template.delta([result("12"), {"role": "tool", "content": "3"}, user("so?")],
                         stopped_by=template.tokenizer.eos_token_id)
    assert template.tokenizer.decode(ids) == ("\n<start_of_turn>user\nResult of look_up:\n12\n\nResult:\n3\n\nso?"
                                              "<end_of_turn>\n<start_of_turn>model\n")


def test_without_the_role_tool_a_turn_with_calls_is_its_text(templates):
    call = {"name": "look_up", "arguments": {"word": "tea"}, "id": "c00000000"}
    text = '{"name": "look_up", "arguments": {"word": "tea"}}'
    assert templates["gemma"].assistant(text, tool_calls=[call]) == {"role": "assistant", "content": text}
    message = templates["qwen2.5"].assistant(text, content="hm", reasoning="why", tool_calls=[call])
    assert message["content"] == "<think>\nwhy\n</think>\n\nhm"
    assert message["tool_calls"][0]["function"] == {"name": "look_up", "arguments": {"word": "tea"}}
    with pytest.raises(DataError, match=r"row 3: a message has tool_calls, which .* leaves out"):
        templates["gemma"].open([QUESTION, message, user("so?")], place="row 3")


def test_tools_that_the_template_does_not_write_are_refused(templates):
    with pytest.raises(ModelError, match=r"row 3: there are tools, and the chat template .* does not write them"):
        templates["gemma"].open([QUESTION], [LOOK_UP], place="row 3")


def test_no_template_is_refused(tmp_path):
    tokenizer = make_chat_tokenizer(tmp_path, "gemma")
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match=r"has no chat template, which episodes of several turns need"):
        TurnTemplate(tokenizer)


def test_messages_that_the_template_refuses_or_leaves_out_are_refused(templates, custom):
    with pytest.raises(ModelError, match=r"row 3: .* refuses the messages, of roles .*'system'\]: no role system"):
        templates["gemma"].delta([{"role": "system", "content": "be brief"}], stopped_by=None, place="row 3")
    with pytest.raises(ModelError, match=r"row 3: .* leaves out a message of role 'system'"):
        custom(TOOL_TEMPLATE.replace("in talk %}", "in talk if message.role != 'system' %}")).delta(
            [{"role": "system", "content": "be brief"}], stopped_by=None, place="row 3")


def test_any_id_of_a_call_is_written_as_nine_characters_where_the_template_wants_them(templates):
    template = templates["mistral"]
    calls = [{"id": "chatcmpl-tool-77", "type": "function", "function": {"name": "look_up", "arguments": {}}}]
    reply = {"role": "tool", "tool_call_id": "chatcmpl-tool-77", "content": "12"}
    text = template.tokenizer.decode(template.open(
        [QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}, reply], [LOOK_UP]))
    given, answered = (text.partition(before)[2][:9] for before in ('"id": "', '"call_id": "'))
    assert given == answered and given.isalnum() and "chatcmpl" not in text
    assert '"arguments": {}' in text
    assert template.delta([{"role": "tool", "content": "12"}], [LOOK_UP], stopped_by=None)


def test_ids_of_calls_have_nine_characters_and_differ():
    ids = {call_id(turn, index) for turn in range(200) for index in range(50)}
    assert len(ids) == 10_000 and all(len(each) == 9 and each.isalnum() for each in ids)


def test_arguments_are_given_as_text_to_a_template_that_wants_them_so(custom):
    template = custom(TOOL_TEMPLATE.replace("call.arguments if call.arguments is string else (call.arguments | tojson)",
                                            "'' + call.arguments"))
    messages = [QUESTION, {"role": "assistant", "content": "", "tool_calls": asks(["tea"], 0)}, result("12")]
    assert '"arguments": {"word": "tea"}}' in template.tokenizer.decode(template.open(messages, [LOOK_UP]))
    assert template.continues([result("12")], [LOOK_UP])
