"""Conversations of several turns as token ids, without rendering a running conversation again.

A prompt is rendered and encoded once (`open`). What an environment answers is appended to the sampled ids (`delta`): it
is found by rendering a short dummy dialogue, whose question and answer are cut off. Where a template writes earlier
turns differently once others follow, such as Qwen3's, which leaves reasoning out, the ids of the history are no
beginning of the new prompt's: a new segment begins, for which `open` gives the ids.

Special tokens are the template's: in a content, the text of one is encoded as a text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rlhf_ray.data.answers import TurnEnds
from rlhf_ray.data.chat import ASSISTANT, NO_OPTIONS, Messages
from rlhf_ray.data.encoding import encode, encode_after_text
from rlhf_ray.errors import DataError, ModelError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[dict[str, Any]]
"""JSON schemas of functions, as `transformers.utils.get_json_schema` gives them."""
PLACE = "the episode"
QUESTION, ANSWER = "rlhf-ray-question", "rlhf-ray-answer"
RESULT, REASON, ARGUMENT = "rlhf-ray-result", "rlhf-ray-reason", "rlhf-ray-argument"
"""Stand for messages and their parts, to find what a template writes around them."""
TOOL_NAME = "rlhf_ray_tool"
EXAMPLE_TOOL: dict[str, Any] = {"type": "function", "function": {
    "name": TOOL_NAME, "description": "An example.",
    "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "A text."}},
                   "required": ["x"]}}}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of messages in which templates look for reasoning."""
THINK_TAGS = ("<think>", "</think>")
OPEN_THINK = re.compile(r"<think>\s*$")
CLOSED_THINK = re.compile(r"</think>\s*$")
CALL_ID = re.compile(r"[A-Za-z0-9]{9}")
"""Ids of tool calls that every template accepts; those of Mistral's kind accept no others."""


class TemplateKind(StrEnum):
    """What a template does with earlier turns when others follow."""

    APPEND_ONLY = "append_only"
    """It keeps them."""
    APPEND_ONLY_IN_CYCLE = "append_only_in_cycle"
    """It keeps them while tools answer, and rewrites them when a user speaks."""
    NEW_SEGMENT_EACH_TURN = "new_segment_each_turn"
    """It rewrites them whenever anything follows."""


def call_id(turn: int, index: int) -> str:
    """An id of a tool call that every template accepts: the call `index` of the turn `turn`, both counted from 0.

    Example:
        >>> call_id(12, 3)
        'c00012003'
    """
    return f"c{turn % 100_000:05d}{index % 1000:03d}"


class TurnTemplate:
    """The chat template of a tokenizer, for conversations of several turns.

    If it does not know the role "tool", results of tools are written as one message of the user: each as "Result of
    NAME:" (or "Result:") and the text in the next line, with an empty line between two of them. A message of the user
    next to them is joined to them in the same way, because such templates mostly want user and assistant to take turns.

    Example:
        >>> template = TurnTemplate(tokenizer)
        >>> ids = template.open([{"role": "user", "content": "6 * 7?"}], tools)
        >>> ids += sampled  # its last token, <|im_end|>, included
        >>> if template.continues([result], tools):
        ...     ids += template.delta([result], tools, stopped_by=sampled[-1])

    Args:
        named: tokens that the model's files name as ends of responses; None for those of the files beside the
            tokenizer.

    Raises:
        ModelError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, named: Sequence[int] | None = None) -> None:
        self.tokenizer = tokenizer
        self._name = tokenizer.name_or_path or "(unnamed)"
        if not tokenizer.chat_template:
            raise ModelError(f"the tokenizer {self._name} has no chat template, which episodes of several turns need; "
                             "use a tokenizer with one")
        self._source = str(tokenizer.chat_template)
        self._ends = TurnEnds(tokenizer, named)
        self._kept: dict[tuple[Any, ...], bool] = {}
        self._written_roles: set[tuple[Any, ...]] = set()
        added = tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        special |= {self._text(token) for token in self._ends.stops if token in self._ends.added}
        written = {token.content for token in added if token.content in self._source}
        self._special = _any_of(special)
        self._breaks = {
            "tool": _any_of(special | written),  # what is written around results is the template's alone
            ASSISTANT: _any_of(special - set(THINK_TAGS)),  # and a policy may write these
        }
        """What is a text in contents, by role; `_special` for the other roles."""

    # What the template knows

    @cached_property
    def knows_tools(self) -> bool:
        """Whether it writes the tools that it is given."""
        try:
            return TOOL_NAME in self._render([_user(QUESTION)], [EXAMPLE_TOOL], PLACE, ask=True)
        except ModelError:
            return False

    @cached_property
    def knows_tool_role(self) -> bool:
        """Whether it writes messages of the role "tool"."""
        messages = [{"role": "tool", "content": RESULT}]
        tools = [EXAMPLE_TOOL] if self.knows_tools else None
        return any(RESULT in text for text, _ in self._dummies(messages, tools, NO_OPTIONS, as_they_are=True))

    @cached_property
    def reasoning_key(self) -> str | None:
        """The key of a message whose value it writes as reasoning."""
        for key in REASONING_KEYS:
            answered = [_user(QUESTION), {"role": ASSISTANT, "content": ANSWER, key: REASON}]
            try:
                if REASON in self._render(answered, None, PLACE, ask=False):
                    return key
            except ModelError:
                continue
        return None

    def require(self, place: str, tools: Tools | None) -> None:
        """Check that the template writes the tools.

        Raises:
            ModelError: it does not.
        """
        if tools and not self.knows_tools:
            raise ModelError(
                f"{place}: there are tools, and the chat template of the tokenizer {self._name} does not write them: "
                "the policy would not know them. Describe them in the prompt's messages and give no schemas, or use a "
                "tokenizer whose template takes tools")

    def kind(self, tools: bool, options: Mapping[str, Any] = NO_OPTIONS) -> TemplateKind:
        """What it does with earlier turns.

        Args:
            tools: in conversations with tools.
            options: of the template, by name.

        Raises:
            ModelError: it refuses a conversation of user and assistant.
        """
        if not self._keeps(("tool",), tools, options):
            return TemplateKind.NEW_SEGMENT_EACH_TURN
        if not self._keeps(("user",), tools, options):
            return TemplateKind.APPEND_ONLY_IN_CYCLE
        return TemplateKind.APPEND_ONLY

    def continues(self, messages: Messages, tools: Tools | None = None, *, options: Mapping[str, Any] = NO_OPTIONS,
                  system: bool = True) -> bool:
        """Whether a turn that these messages answer is continued by `delta`; else a new segment begins, whose ids are
        those of `open` with the whole conversation.

        Args:
            system: the conversation may begin with a system message; some templates move it to later messages.

        Raises:
            ModelError: the template refuses messages of these roles.
        """
        return self._keeps(tuple(message["role"] for message in messages), bool(tools), options, system)

    def opens_reasoning(self, tools: Tools | None = None, options: Mapping[str, Any] = NO_OPTIONS) -> bool:
        """Whether prompts end within <think>, so that a sampled turn begins with reasoning."""
        return bool(OPEN_THINK.search(self._render([_user(QUESTION)], tools, PLACE, ask=True, options=options)))

    # Token ids

    def open(self, messages: Messages, tools: Tools | None = None, *, options: Mapping[str, Any] = NO_OPTIONS,
             place: str = PLACE) -> list[int]:
        """The ids of a prompt, which ends where the assistant's turn begins.

        Raises:
            ModelError: the template refuses the messages, or does not write the tools.
            DataError: a message has tool calls, which the template leaves out.
        """
        self.require(place, tools)
        if "tool_calls" not in self._source and any(message.get("tool_calls") for message in messages):
            raise DataError(f"{place}: a message has tool_calls, which the tokenizer's chat template leaves out; write "
                            "them into the content (`TurnTemplate.assistant`)")
        messages, tools, mark = self._marked(messages, tools)
        text = self._render(self._accepted(messages), tools, place, ask=True, options=options)
        return self._encode(text, mark, None)

    def delta(self, messages: Messages, tools: Tools | None = None, *, stopped_by: int | None,
              options: Mapping[str, Any] = NO_OPTIONS, place: str = PLACE) -> list[int]:
        """The ids that follow a sampled turn: what the template writes between the token that ended it and the
        beginning of the assistant's next turn.

        Args:
            messages: the environment's answer, of roles tool, user or system.
            stopped_by: the last sampled id, if it ended the turn. If it is none of those by which the template ends a
                turn (another end of sequence, or None for a turn that a stop string ended), the ids begin with the
                template's own end.

        Raises:
            ModelError: the template refuses or leaves out messages of these roles.
        """
        self._check_roles(messages, tools, options, place)
        messages, tools, mark = self._marked(messages, tools)
        text, begin = next(self._dummies(messages, tools, options, place=place))
        tail = text[begin:]
        ends = self._end_in(tail)
        if ends is None:  # the template writes no token that ends a turn
            return self._encode(tail, mark, None, after=True)
        start, stop = ends
        written = stopped_by is not None and (
            self._text(stopped_by) == tail[start:stop]
            or (stopped_by in self._ends.named and stopped_by in self._ends.added  # and no character of its source
                and self._text(stopped_by) in self._source))
        if not written:
            return self._encode(tail[start:], mark, None, after=True)
        return self._encode(tail[stop:], mark, stopped_by, after=True)

    def assistant(self, text: str, *, content: str = "", reasoning: str = "",
                  tool_calls: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """A sampled turn as a message for `open`, with what the template writes of it.

        Args:
            text: the whole turn, which becomes the content if the template does not know its reasoning or its calls.
            tool_calls: objects with name, arguments (an object) and id.
        """
        message: dict[str, Any] = {"role": ASSISTANT, "content": content}
        if reasoning:
            if self.reasoning_key:
                message[self.reasoning_key] = reasoning
            else:
                message["content"] = f"<think>\n{reasoning}\n</think>\n\n{content}"
        if tool_calls and "tool_calls" not in self._source:
            return {"role": ASSISTANT, "content": text}
        if tool_calls:
            message["tool_calls"] = [
                {"id": call["id"], "type": "function",
                 "function": {"name": call["name"], "arguments": call["arguments"]}} for call in tool_calls]
        return message

    # Rendering

    def _render(self, messages: Messages, tools: Tools | None, place: str, *, ask: bool,
                options: Mapping[str, Any] = NO_OPTIONS) -> str:
        """The messages as text. If the template refuses them, it is asked again with the other forms in which calls
        are common: ids of nine characters, and arguments as texts."""
        refusal: Exception | None = None
        for form in _forms(messages):
            try:
                return str(self.tokenizer.apply_chat_template(
                    form, tools=list(tools) if tools else None, add_generation_prompt=ask, tokenize=False, **options))
            except Exception as error:  # a template is a program and may raise anything
                refusal = refusal or error
        raise ModelError(f"{place}: the tokenizer's chat template refuses the messages, of roles "
                         f"{[m['role'] for m in messages]}: {first_line(refusal or ModelError())}") from refusal

    def _accepted(self, messages: Messages) -> Messages:
        """The messages in roles that the template knows."""
        if self.knows_tool_role or not any(message["role"] == "tool" for message in messages):
            return messages
        return results_as_user(messages)

    def _dummies(self, messages: Messages, tools: Tools | None, options: Mapping[str, Any], *,
                 place: str = PLACE, as_they_are: bool = False) -> Iterator[tuple[str, int]]:
        """(a dummy dialogue that these messages answer, as a prompt; where its answer ends in it), for each form of
        the dummy's answer that the template takes. Results of tools answer calls, if it writes them.

        Raises:
            ModelError: it takes none.
        """
        if not as_they_are:
            messages = self._accepted(messages)
        results = [message for message in messages if message["role"] == "tool"]
        answers: list[tuple[dict[str, Any], str]] = []
        if results:
            numbers = iter(range(len(results)))
            messages = [{"tool_call_id": f"{next(numbers):09d}", **m} if m["role"] == "tool" else m for m in messages]
            ids = [str(message["tool_call_id"]) for message in messages if message["role"] == "tool"]
            if self._ends.closing[0] is not None:  # else nothing says where calls end
                answers.append((_calls(ids), ARGUMENT))
        answers.append(({"role": ASSISTANT, "content": ANSWER}, ANSWER))
        refusal: ModelError | None = None
        taken = False
        for answer, sought in answers:
            try:
                text = self._render([_user(QUESTION), answer, *messages], tools, place, ask=True, options=options)
            except ModelError as error:
                refusal = refusal or error
                continue
            count = max(1, len(answer.get("tool_calls", [])))
            begin = 0
            for _ in range(count):
                found = text.find(sought, begin)
                if found < 0:
                    break
                begin = found + len(sought)
            else:
                taken = True
                yield text, begin
        if not taken and not as_they_are:
            raise refusal or ModelError(f"{place}: the chat template of the tokenizer {self._name} leaves out the "
                                        "assistant's answer; use another template")

    def _end_in(self, tail: str) -> tuple[int, int] | None:
        """Where the first token that ends a turn stands in what follows an answer."""
        if self._ends.closing[0] is None:
            return None
        texts = [self._text(token) for token in self._ends.stops if token in self._ends.added]
        found = [(tail.index(text), tail.index(text) + len(text)) for text in texts if text in tail]
        return min(found, default=None)

    def _text(self, token: int) -> str:
        added = self._ends.added.get(token)
        return str(self.tokenizer.convert_ids_to_tokens(token) if added is None else added.content)

    # Whether it keeps earlier turns

    def _check_roles(self, messages: Messages, tools: Tools | None, options: Mapping[str, Any], place: str) -> None:
        """Check that messages of these roles are written.

        Raises:
            ModelError: they are not.
        """
        roles = tuple(message["role"] for message in messages)
        key = (roles, bool(tools), _key(options))
        if key in self._written_roles:
            return
        text, begin = next(self._dummies(_examples(roles), [EXAMPLE_TOOL] if tools else None, options, place=place))
        if missing := [role for i, role in enumerate(roles) if f"{RESULT}-{i}" not in text[begin:]]:
            raise ModelError(f"{place}: the chat template of the tokenizer {self._name} leaves out a message of role "
                             f"{missing[0]!r} after the assistant's turn; answer with a message of another role")
        self._written_roles.add(key)

    def _keeps(self, roles: tuple[str, ...], tools: bool, options: Mapping[str, Any], system: bool = True) -> bool:
        key = (roles, tools, _key(options), system)
        if key not in self._kept:
            schemas = [EXAMPLE_TOOL] if tools and self.knows_tools else None
            self._kept[key] = self._find_out(roles, schemas, options, system)
        return self._kept[key]

    def _find_out(self, roles: tuple[str, ...], tools: Tools | None, options: Mapping[str, Any], system: bool) -> bool:
        """Whether two turns and what answers them are written the same when others follow, without and with a system
        message, in every form of reasoning that the template may know."""
        refusal: ModelError | None = None
        found: list[bool] = []
        begins: list[Messages] = [[], [{"role": "system", "content": QUESTION}]]
        for begin in begins if system else begins[:1]:
            base: Messages = [*begin, _user(QUESTION)]
            try:
                prompt = self._render(base, tools, PLACE, ask=True, options=options)
            except ModelError as error:
                refusal = refusal or error
                continue
            for answer in self._reasoned(prompt):
                try:
                    found.append(self._grows(base, prompt, answer, roles, tools, options))
                except ModelError as error:
                    refusal = refusal or error
        if not found and refusal:
            raise refusal
        return all(found)

    def _reasoned(self, prompt: str) -> list[dict[str, Any]]:
        """Answers with reasoning in the forms that a policy may write after this prompt."""
        plain = {"role": ASSISTANT, "content": ANSWER}
        inline = {"role": ASSISTANT, "content": f"<think>\n{REASON}\n</think>\n\n{ANSWER}"}
        keyed = [{**plain, self.reasoning_key: REASON}] if self.reasoning_key else []
        if CLOSED_THINK.search(prompt):
            return [plain]
        return [inline, *keyed] if OPEN_THINK.search(prompt) else [plain, inline, *keyed]

    def _grows(self, base: Messages, prompt: str, answer: dict[str, Any], roles: tuple[str, ...], tools: Tools | None,
               options: Mapping[str, Any]) -> bool:
        reasons = answer != {"role": ASSISTANT, "content": ANSWER}
        ids = [f"{i:09d}" for i, role in enumerate(roles) if role == "tool"]
        called = [{**answer, "tool_calls": _calls(ids)["tool_calls"]}] if ids and self.knows_tool_role else []
        refusal: ModelError | None = None
        for turn in [*called, answer]:  # some templates refuse several calls
            messages, before = list(base), prompt
            try:
                for number in (1, 2):
                    numbered = json.loads(json.dumps(turn).replace(ANSWER, f"{ANSWER}-{number}")
                                          .replace(REASON, f"{REASON}-{number}"))
                    messages += [numbered, *self._accepted(_examples(roles))]
                    text = self._render(messages, tools, PLACE, ask=True, options=options)
                    if not text.startswith(before):
                        return False
                    before = text
                    for earlier in range(1, number + 1) if reasons else ():
                        if f"{ANSWER}-{earlier}" in text and f"{REASON}-{earlier}" not in text:
                            return False
                return True
            except ModelError as error:
                refusal = refusal or error
        raise refusal or ModelError("no answer")

    # Encoding

    def _marked(self, messages: Messages, tools: Tools | None) -> tuple[Messages, Tools | None, str]:
        """(the messages and tools with a mark inside of each text of a special token in them, the mark): one of
        Unicode's noncharacters that they do not contain."""
        texts = json.dumps([messages, tools], ensure_ascii=False, default=str)
        mark = next(chr(code) for code in range(0xFDD0, 0xFDF0) if chr(code) not in texts)
        broken = [_with_breaks(message, self._breaks.get(message["role"], self._special), mark) for message in messages]
        return broken, _with_breaks(tools, self._special, mark), mark

    def _encode(self, text: str, mark: str, anchor: int | None, *, after: bool = False) -> list[int]:
        """The ids of a text, divided at the marks.

        Args:
            after: it follows another text, or the token `anchor`.
        """
        first, *others = text.split(mark)
        if not after:
            ids = encode(self.tokenizer, [first], leading=False)[0]
        elif anchor is not None and anchor in self._ends.added:
            whole = encode(self.tokenizer, [self._text(anchor) + first], leading=False)[0]
            ids = whole[1:] if whole[:1] == [anchor] else encode_after_text(self.tokenizer, [first])[0]
        else:
            ids = encode_after_text(self.tokenizer, [first])[0]
        for piece in encode_after_text(self.tokenizer, others):
            ids = [*ids, *piece]
        return ids


def results_as_user(messages: Messages) -> Messages:
    """The messages with results of tools, and messages of the user next to them, as one message of the user."""
    joined: Messages = []
    for speaks, run in groupby(messages, key=lambda message: message["role"] in ("tool", "user")):
        group = list(run)
        if speaks and any(message["role"] == "tool" for message in group):
            joined.append(_user("\n\n".join(_as_text(message) for message in group)))
        else:
            joined += group
    return joined


def _as_text(message: Mapping[str, Any]) -> str:
    if message["role"] != "tool":
        return str(message["content"])
    named = f"Result of {message['name']}" if message.get("name") else "Result"
    return f"{named}:\n{message['content']}"


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _calls(ids: Sequence[str]) -> dict[str, Any]:
    """An answer that is calls of the example tool."""
    return {"role": ASSISTANT, "content": "", "tool_calls": [
        {"id": each, "type": "function", "function": {"name": TOOL_NAME, "arguments": {"x": ARGUMENT}}}
        for each in ids]}


def _examples(roles: Sequence[str]) -> Messages:
    """Messages of these roles."""
    return [{"role": role, "content": f"{RESULT}-{i}", **({"tool_call_id": f"{i:09d}", "name": TOOL_NAME}
                                                          if role == "tool" else {})} for i, role in enumerate(roles)]


def _forms(messages: Messages) -> Iterator[Messages]:
    """The messages, then with ids of nine characters, then with arguments of calls as texts too."""
    yield messages
    if not any(message.get("tool_calls") or message.get("tool_call_id") for message in messages):
        return
    short = [_with_call(message, lambda call: {**call, "id": _nine(call["id"])} if "id" in call else call)
             for message in messages]
    short = [{**m, "tool_call_id": _nine(m["tool_call_id"])} if m.get("tool_call_id") else m for m in short]
    if short != messages:
        yield short
    yield [_with_call(message, _arguments_as_text) for message in short]


def _with_call(message: dict[str, Any], change: Any) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [change(call) for call in calls]} if calls else message


def _arguments_as_text(call: dict[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _arguments_as_text(call["function"])}
    arguments = call.get("arguments")
    return call if isinstance(arguments, str) else {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}


def _nine(identity: str) -> str:
    """An id of nine characters."""
    if CALL_ID.fullmatch(str(identity)):
        return str(identity)
    return hashlib.blake2b(str(identity).encode(), digest_size=5).hexdigest()[:9]


def _key(options: Mapping[str, Any]) -> str:
    return json.dumps(options, sort_keys=True, default=str)


def _any_of(texts: set[str]) -> re.Pattern[str] | None:
    """Finds one of these texts. One character cannot be divided, and is left as it is."""
    several = sorted(text for text in texts if len(text.strip()) > 1)
    return re.compile("|".join(map(re.escape, several))) if several else None


def _with_breaks(value: Any, pattern: re.Pattern[str] | None, mark: str) -> Any:
    """A value whose texts have the mark after the first character of each text that the pattern finds."""
    if pattern is None:
        return value
    if isinstance(value, str):
        begin = 0
        while found := pattern.search(value, begin):
            value = value[: found.start() + 1] + mark + value[found.start() + 1 :]
            begin = found.start() + 1
        return value
    if isinstance(value, Mapping):
        return {_with_breaks(key, pattern, mark): inner if key == "role" else _with_breaks(inner, pattern, mark)
                for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_breaks(inner, pattern, mark) for inner in value]
    return value
