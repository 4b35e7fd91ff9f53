"""How an answer continues a prompt of chat messages, and where it ends.

A row of training must be what sampling gives: the tokens of the prompt, then those of the response up to the first
token that ends one. What a template writes around an answer is therefore found by rendering conversations with and
without it: the text that opens an answer (an empty think block, the name of a channel) and the text that closes it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.data.chat import ASSISTANT, NO_OPTIONS, ChatTemplate, Messages, PromptText, carries_loss
from rlhf_ray.data.encoding import Encoded, encode, encode_after_text, end_token
from rlhf_ray.data.rows import brief
from rlhf_ray.data.tool_messages import TOOLS
from rlhf_ray.errors import DataError, ModelError
from rlhf_ray.models.stop_tokens import named_stop_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTION, ANSWER = "(rlhf_ray: a question)", "(rlhf_ray: an answer)"
"""Stand for messages, to find what a template writes around them."""
PLACE = "the example conversation"
OPEN_TAGS = re.compile(r"(?:<[A-Za-z][\w-]*>\s*)+$")
"""Tags such as <think> at the end of a text."""


class TurnEnds:
    """The tokens that end a response, and the ends of rows.

    Args:
        named: tokens that the model's files name as ends; None for those of the files beside the tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, named: Collection[int] | None = None) -> None:
        self._tokenizer = tokenizer
        self.end = end_token(tokenizer)
        """The token that ends rows whose text has no end of its own."""
        self.named = frozenset(named_stop_tokens(tokenizer) if named is None else named) | {self.end}
        self.added = tokenizer.added_tokens_decoder
        self._endings: dict[str, tuple[int | None, str]] = {}
        self.closing: tuple[int | None, str] = self.ending(_closing(tokenizer))
        self.stops = self.named | ({self.closing[0]} if self.closing[0] is not None else set())
        """All tokens that end a response: those named, and the one by which the chat template ends an answer."""
        self.already: Counter[str] = Counter()
        """How many texts ended with each end already."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, model: ModelConfig | NewModelConfig | None) -> TurnEnds:
        """Those of a model; `model` as in `named_stop_tokens`."""
        return cls(tokenizer, named_stop_tokens(tokenizer, model))

    def ending(self, closing: str) -> tuple[int | None, str]:
        """(the token that ends a response, `closing` up to its end) of the text that follows an answer.

        It is the first token that the model's files name as an end, or else the first added token other than blanks and
        line breaks, which some vocabularies add and answers contain; None if there is neither, and then `closing` is
        returned whole.
        """
        if closing not in self._endings:
            self._endings[closing] = self._ending(closing)
        return self._endings[closing]

    def _ending(self, closing: str) -> tuple[int | None, str]:
        ids = encode(self._tokenizer, [closing], leading=False)[0] if closing else []
        added = [token for token in ids if token in self.added and self._text(token).strip()]
        candidates = [token for token in ids if token in self.named] or added
        if not candidates:
            return None, closing
        text = self._text(candidates[0])
        return candidates[0], closing[: closing.index(text) + len(text)] if text in closing else closing

    def opens(self, opening: str, text: str) -> bool:
        """Whether a text begins with what a template writes before an answer, or with the special token that this
        begins with: there may be channels before the one that a template writes."""
        if not opening:
            return False
        token = encode(self._tokenizer, [opening], leading=False)[0][0]
        special = token in self.added and self.added[token].special
        return text.lstrip().startswith(self._text(token) if special else opening)

    def note(self, model: str) -> str | None:
        """What to know if the template ends answers by a token that the model's files do not name; else None."""
        ending = self.closing[0]
        if ending is None or ending in self.named:
            return None
        named = ", ".join(repr(self._text(token)) for token in sorted(self.named))
        return (f"the chat template ends an answer with {self._text(ending)!r} ({ending}), and the files of {model} "
                f"name only {named}: responses end at either, and an exported generation_config.json names both")

    def body(self, text: str, place: str, column: str) -> str:
        """An answer without the end that it may already have, which is added again.

        Raises:
            DataError: an end is inside the text; nothing after it could be sampled.
        """
        text, found = self._divided(text)
        self.already.update(found)
        if inside := [end for end in self._texts if end in text]:
            raise DataError(f"{place}: column {column!r} contains {inside[0]!r}, a token that ends a response, and "
                            "text after it; nothing after it could be sampled, so remove it or divide the row")
        return text

    def up_to_first(self, text: str) -> str:
        """A text up to its first end, whatever follows that; whole without one."""
        places = [text.index(end) + len(end) for end in self._texts if end in text]
        return text[: min(places, default=None)]

    def with_one_end(self, text: str) -> str:
        """A text up to its first end, if nothing but ends and line breaks follows that, as some templates write."""
        body, found = self._divided(text)
        self.already.update(found)
        return body + "".join(found)

    def _divided(self, text: str) -> tuple[str, list[str]]:
        """(a text without the ends that it ends with already, and line breaks after and between them; the first)."""
        found: list[str] = []
        while following := [end for end in self._texts if text.rstrip().endswith(end)]:
            found = following[:1]
            text = text.rstrip().removesuffix(found[0])
        return text, found

    def close(self, row: Encoded) -> Encoded:
        """A row that ends with an end of responses: the end-of-sequence token is added to one without."""
        tokens, mask = row
        if tokens and tokens[-1] in self.stops:
            return row
        return [*tokens, self.end], [*mask, True]

    def close_turns(self, row: Encoded) -> Encoded:
        """As `close`, for a conversation: where no end is written after a turn, the beginning of the next one may be a
        token that ends responses."""
        tokens, mask = list(row[0]), list(row[1])
        for _, stop in turns_with_loss(mask):
            if stop < len(tokens) and tokens[stop - 1] not in self.stops and tokens[stop] in self.stops:
                mask[stop] = True
        return self.close((tokens, mask))

    def close_marked(self, row: Encoded, header: str) -> Encoded:
        """A row of marked turns, in which loss begins after the header that prompts end with, and ends with the token
        that ends each turn, and the row with its last turn.

        A template may end a turn outside of its mark, and write more inside of it.
        """
        tokens, mask = list(row[0]), list(row[1])
        begun = encode_after_text(self._tokenizer, [header])[0] if header else []
        for start, stop in turns_with_loss(mask):
            within = _marked_part(begun, tokens, start)
            mask[start : start + within] = [False] * within
            last = next((i for i in range(start, stop) if tokens[i] in self.stops), stop)
            if last < stop:
                mask[last + 1 : stop] = [False] * (stop - last - 1)
            elif stop < len(tokens) and tokens[stop] in self.stops:
                mask[stop] = True
        length = len(mask) - mask[::-1].index(True) if True in mask else 0
        return self.close((tokens[:length], mask[:length])) if length else ([], [])

    @cached_property
    def _texts(self) -> list[str]:
        """The ends as texts, if they are added tokens: others do not stand out in a text."""
        return [self._text(token) for token in sorted(self.stops) if token in self.added]

    def _text(self, token: int) -> str:
        added = self.added.get(token)
        return str(self._tokenizer.convert_ids_to_tokens(token) if added is None else added.content)


def _marked_part(header: list[int], tokens: list[int], start: int) -> int:
    """How many tokens of a header a mark contains that begins at `start`, before or inside of it."""
    for marked in range(len(header), 0, -1):
        first = start - len(header) + marked
        if first >= 0 and tokens[first : first + len(header)] == header:
            return marked
    return 0


def turns_with_loss(mask: list[bool]) -> list[list[int]]:
    """[[first, last + 1]] of each run of tokens with loss."""
    edges: list[list[int]] = np.flatnonzero(np.diff([False, *mask, False])).reshape(-1, 2).tolist()
    return edges


def stop_tokens(tokenizer: PreTrainedTokenizerBase, named: Collection[int]) -> list[int]:
    """All tokens that end a response: those that the model's files name, and the one by which the tokenizer's chat
    template ends an answer, since a model that was trained on the template ends answers by it."""
    return sorted(TurnEnds(tokenizer, named).stops)


def _closing(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the chat template writes after an answer; "" without a template, or if it refuses the example."""
    if not tokenizer.chat_template:
        return ""
    try:
        return AnswerFormat.around(ChatTemplate(tokenizer), [_user(QUESTION)], PLACE)[1]
    except (ModelError, DataError):
        return ""


class AnswerFormat:
    """Answers to chat messages as a sampled response would have them.

    Example:
        >>> answers = AnswerFormat(ChatTemplate(tokenizer), TurnEnds(tokenizer))
        >>> answers.of_text(prompt, "It was good.", "row 1")
        'It was good.<|im_end|>'
    """

    def __init__(self, template: ChatTemplate, ends: TurnEnds) -> None:
        self._template, self._ends = template, ends

    def of_text(self, prompt: PromptText, text: str, place: str, *, sampled: bool = False) -> str:
        """The text by which a response that gives this answer continues the prompt, up to the end of its turn.

        Args:
            text: without an end. It is rendered by the template like the content of a message, unless it continues the
                prompt by itself: it begins with what the template opens an answer with, or with the first special token
                of that, or it closes the tag that the prompt opens, which it may repeat.
            sampled: it is a response as it was sampled, and continues the prompt in any case.

        Raises:
            ModelError: the template refuses the conversation.
            DataError: the answered conversation does not continue the prompt.
        """
        messages = prompt.messages or []
        head, closing = self.around(self._template, messages, place, prompt.options)
        opening = head.removeprefix(prompt.text).strip() if head.startswith(prompt.text) else ""
        opened = self._ends.opens(opening, text)
        if not sampled:
            text = _without_repeat(prompt.text, text)
        if sampled or opened or _closes(prompt.text, text):
            return text + self._ends.ending(closing)[1]
        return self.of_message(prompt.text, messages, {"role": ASSISTANT, "content": text}, place, prompt.options)

    def of_message(self, before: str, messages: Messages, message: Mapping[str, Any], place: str,
                   options: Mapping[str, Any] = NO_OPTIONS) -> str:
        """As `of_text`, for a message that answers `messages`, which the template renders as `before`."""
        content = str(message["content"])
        whole = self._template.render([*messages, dict(message)], place, ask=False, options=options)
        head, closing = self.around(self._template, messages, place, options)
        if whole.startswith(before) and whole.endswith(closing):
            answer = whole[len(before) : len(whole) - len(closing)]
        elif whole.startswith(before):  # the end depends on the answer
            answer, closing = self._ends.up_to_first(whole[len(before) :]), ""
        else:
            begun, answer = _beyond_common(before, whole), _without_repeat(before, content)
            asked = str(messages[-1]["content"]) if messages else ""
            rewritten = bool(asked) and asked in begun  # what changes with the answer stands before the question
            if not begun.strip() or rewritten or _closes(before, answer):
                return answer + self._ends.ending(closing)[1]
            raise DataError(f"{place}: with this tokenizer's chat template a prompt ends with {begun!r}, and the "
                            "answered conversation does not continue it: this answer could not be sampled. Write the "
                            "answer as the text after that, with what closes it, or use a template that writes it")
        if _squeezed(_without_repeat(before, content)) not in _squeezed(answer):  # some templates drop reasoning
            if head != before:
                raise DataError(f"{place}: the tokenizer's chat template leaves out a part of the answer "
                                f"{brief(content)}; remove that part, or use a template that writes it")
            answer, closing = content, closing or _closing(self._template.tokenizer)
        return answer + self._ends.ending(closing)[1]

    def turns(self, messages: Messages, place: str, column: str,
              options: Mapping[str, Any] = NO_OPTIONS) -> list[tuple[str, bool]]:
        """A conversation as pieces of text, up to its last turn with loss: True on the assistant's turns with loss.

        Raises:
            DataError: the template writes earlier turns differently once others follow, so no piece of the text is
                the turn; or an answer could not be sampled.
            ModelError: the template refuses the messages.
        """
        pieces: list[tuple[str, bool]] = []
        written = ""
        for i, message in enumerate(messages):
            if message["role"] != ASSISTANT or not carries_loss(message, place, column):
                continue
            before = self._before(messages[:i], place, options)
            if not before.startswith(written):
                raise DataError(
                    f"{place}: with this tokenizer's chat template the assistant's turn {i + 1} is not a part "
                    "of the text: the template renders earlier turns differently once others follow. Mark the "
                    "assistant's text by {% generation %} in the template, give the earlier messages the key weight "
                    "with 0, or give prompt and response columns")
            turn = self.of_message(before, messages[:i], message, place, options)
            pieces += [(before[len(written) :], False), (turn, True)]
            written = before + turn
        return pieces

    def cleaned(self, messages: Messages, place: str, column: str) -> Messages:
        """The messages, those of the assistant without an end of their own; raises as `TurnEnds.body`."""
        return [{**m, "content": self._ends.body(m["content"], place, column)} if m["role"] == ASSISTANT else m
                for m in messages]

    @staticmethod
    def around(template: ChatTemplate, messages: Messages, place: str,
               options: Mapping[str, Any] = NO_OPTIONS) -> tuple[str, str]:
        """The text that the template writes before and after an answer to these messages.

        Raises:
            ModelError: it refuses them, or leaves out the answer.
        """
        answered = template.render([*messages, {"role": ASSISTANT, "content": ANSWER}], place, ask=False,
                                   options=options)
        head, found, closing = answered.rpartition(ANSWER)
        if not found:
            raise ModelError(f"{place}: the tokenizer's chat template leaves out the assistant's answer; use another "
                             "template")
        return head, closing

    def header(self, options: Mapping[str, Any] = NO_OPTIONS) -> str:
        """What a prompt ends with after its last message: the beginning of the assistant's turn."""
        question, asked = (self._template.render([_user(QUESTION)], PLACE, ask=ask, options=options)
                           for ask in (False, True))
        return _beyond_common(asked, question)

    def _before(self, messages: Messages, place: str, options: Mapping[str, Any]) -> str:
        """The conversation up to the assistant's next turn, as a prompt has it."""
        if messages:
            return self._template.render(messages, place, ask=True, options=options)
        head, _ = self.around(self._template, messages, place, options)  # the assistant speaks first
        header = self.header(options)
        return head[: head.rindex(header) + len(header)] if header and header in head else head


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _beyond_common(text: str, other: str) -> str:
    """What is left of a text without the beginning that it shares with another one."""
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False)))
    return text[shared:]


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _without_repeat(before: str, text: str) -> str:
    """A text without the tag that a prompt ends with, which it may repeat."""
    found = OPEN_TAGS.search(before)
    for tag in (found[0], found[0].rstrip()) if found else ():
        if text.startswith(tag):
            return text.removeprefix(tag)
    return text


def _closes(before: str, text: str) -> bool:
    """Whether a text closes the tag that a prompt ends with, without opening it again."""
    found = OPEN_TAGS.search(before)
    if found is None:
        return False
    tag = found[0].split()[-1].rpartition("<")[2]
    return f"</{tag}" in text and not text.lstrip().startswith(f"<{tag}")


class Prefills:
    """What prompts begin of the answer: the <think> that a template or a text prompt ends with, for example.

    Rewards see it beside the response, which it is not a part of.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._of_templates: dict[str, str] = {}
        self._specials = {str(token) for token in tokenizer.special_tokens_map.values() if isinstance(token, str)}

    def of(self, prompt: PromptText) -> str:
        """What this prompt begins of the answer; "" in most cases."""
        if prompt.messages is not None:
            begun = self._of_template(prompt.options)
            return begun if prompt.text.endswith(begun) else ""
        found = OPEN_TAGS.search(prompt.text)
        return found[0] if found and not self._specials.intersection(found[0].split()) else ""

    def _of_template(self, options: Mapping[str, Any]) -> str:
        options = {name: value for name, value in options.items() if name != TOOLS}  # which differ from row to row
        key = json.dumps(options, sort_keys=True, default=str)
        if key not in self._of_templates:
            self._of_templates[key] = _template_prefill(self._tokenizer, options)
        return self._of_templates[key]


def _template_prefill(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> str:
    """What the chat template's prompt contains of the assistant's answer.

    That is what an answered conversation has not at this place; and a tag that the template itself closes before the
    answer that it is given.
    """
    if not tokenizer.chat_template:
        return ""
    template, messages = ChatTemplate(tokenizer), [_user(QUESTION)]
    try:
        asked = template.render(messages, PLACE, ask=True, options=options)
        head, _ = AnswerFormat.around(template, messages, PLACE, options)
    except (ModelError, DataError):
        return ""
    if not head.startswith(asked):
        begun = _beyond_common(asked, head + ANSWER)
        return begun if begun.strip() else ""
    found = OPEN_TAGS.search(asked)
    return found[0] if found and _closes(asked, head[len(asked) :]) else ""
