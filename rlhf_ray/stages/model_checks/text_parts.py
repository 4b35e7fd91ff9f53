"""Parts of a model's check that read its text files alone: tokenizer, stop tokens, chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.answers import AnswerFormat, Prefills, TurnEnds
from rlhf_ray.data.chat import ChatTemplate, Messages, PromptText
from rlhf_ray.data.tokenizer import check_vocabulary
from rlhf_ray.data.turn_template import TemplateKind, TurnTemplate
from rlhf_ray.environments.tool_calls import format_of
from rlhf_ray.errors import DataError, ModelError, first_line
from rlhf_ray.models.config_json import pretrained_config
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.models.stop_tokens import named_stop_tokens
from rlhf_ray.stages.model_checks.outcome import Outcome, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER, STOP_TOKENS, CHAT_TEMPLATE, TURNS = "tokenizer", "stop tokens", "chat template", "several turns"
TEXTS = ("The food was good, and it wasn't expensive: 12.50 EUR!", "def f(x):\n\n    return x  # two  spaces\n",
         "naïve façade, Straße, Ελλάδα", "日本語と中文", "👍🏽 done", " leading and trailing ")
"""Punctuation and numbers, code with its white space, accents and other alphabets, characters of several bytes."""
SYSTEM, QUESTION, ANSWER = "sysword", "questionword", "answerword"
CONVERSATION: Messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
LONGER: Messages = [*CONVERSATION, *CONVERSATION]
PLACE = "the example"


def check_tokenizer(model: ModelConfig) -> list[Outcome]:
    """Whether texts survive encoding and decoding, and whether the model has an embedding for each id.

    Raises:
        ModelError: there is no tokenizer, it has no end-of-sequence token, or the model lacks some of its ids.
    """
    tokenizer, config = load_tokenizer(model), pretrained_config(model).get_text_config()
    check_vocabulary(tokenizer, config.vocab_size, model.path)
    pad = tokenizer.pad_token_id
    padding = "no padding token (none is needed)" if pad is None else f"padding {tokenizer.pad_token!r}"
    changed = [(text, back) for text in TEXTS if (back := _decoded(tokenizer, text)) != text]
    sizes = f"{len(tokenizer)} tokens, {config.vocab_size} embeddings, {padding}"
    numbers = {"tokens": len(tokenizer), "embeddings": config.vocab_size, "changed_texts": len(changed)}
    if changed:
        text, back = changed[0]
        return [Outcome(TOKENIZER, "warning", f"{sizes}; {len(changed)} of {len(TEXTS)} texts are changed by "
                        f"encoding and decoding, such as {text!r} to {back!r}",
                        "rewards and judges read decoded responses, so such texts reach them changed; check that your "
                        "data has none", numbers)]
    return [Outcome(TOKENIZER, "works", f"{sizes}; {len(TEXTS)} texts encoded and decoded unchanged", "", numbers)]


def _decoded(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    return str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)))


def check_stop_tokens(model: ModelConfig) -> list[Outcome]:
    """Which tokens end a response, and whether the model names the one that ends a turn of the chat template.

    Raises:
        ModelError: the model names something other than its tokens as ends.
    """
    tokenizer = load_tokenizer(model)
    ends = TurnEnds.of(tokenizer, model)
    shown = ", ".join(f"{tokenizer.convert_ids_to_tokens(i)!r} ({i})" for i in sorted(ends.stops))
    numbers = {"stop_tokens": len(ends.stops)}
    if not (note := ends.note(model.path)):
        return [Outcome(STOP_TOKENS, "works", shown, "", numbers)]
    return [Outcome(STOP_TOKENS, "warning", f"{shown}; {note}", "train on the template first: a base model may not "
                    "know the token", numbers)]


def check_chat_template(model: ModelConfig) -> list[Outcome]:
    """Whether the template writes turns as the stages need them.

    Raises:
        ModelError: the template refuses a question and an answer.
    """
    name, tokenizer = CHAT_TEMPLATE, load_tokenizer(model)
    if not tokenizer.chat_template:
        return [Outcome(name, "does not apply", "none: prompts are plain texts", "use texts, or a tokenizer with a "
                        "template")]
    template = ChatTemplate(tokenizer)
    question, asked = (template.render(CONVERSATION[:1], PLACE, ask=ask) for ask in (False, True))
    template.render(LONGER, PLACE, ask=False)
    if QUESTION not in asked:
        raise ModelError("the chat template leaves out the user's message")
    begins = asked.removeprefix(question)
    findings = [f"the assistant's turn begins with {begins!r}" if begins else "nothing marks the assistant's turn"]
    if prefill := Prefills(tokenizer).of(PromptText(asked, CONVERSATION[:1])):
        findings.append(f"a prompt begins the answer with {prefill!r}")
    advice = []
    system = _system(template)
    findings.append(f"system message {system}")
    if system != "taken":
        advice.append("leave prompts.system and data.system empty, and drop system messages from the data")
    try:
        if not template.marks_generation:
            answers = AnswerFormat(template, TurnEnds.of(tokenizer, model))
            answers.turns(LONGER, PLACE, "messages")
    except DataError as error:
        findings.append(first_line(error))
        advice.append("for SFT on chats, mark the assistant's text by {% generation %} in the template, or give "
                      "answers as they continue a prompt")
    return [Outcome(name, "warning" if advice else "works", "; ".join(findings), "; ".join(advice))]


def _system(template: ChatTemplate) -> str:
    """Whether the template writes a system message ("taken"), leaves it out, or refuses it."""
    try:
        text = template.render([{"role": "system", "content": SYSTEM}, CONVERSATION[0]], PLACE, ask=True)
    except ModelError:
        return "refused"
    return "taken" if SYSTEM in text else "left out"


KINDS = {
    TemplateKind.APPEND_ONLY: "append-only: an episode is one segment",
    TemplateKind.APPEND_ONLY_IN_CYCLE: "append-only while tools answer: each message of a user begins a new segment",
    TemplateKind.NEW_SEGMENT_EACH_TURN: "earlier turns are rewritten: each turn is a segment of its own",
}


def check_turns(model: ModelConfig) -> list[Outcome]:
    """How episodes of several turns and tools are written: whether turns follow each other as tokens, what the template
    knows of tools, and which format of calls is read.

    Raises:
        ModelError: the template refuses conversations of several turns.
    """
    tokenizer = load_tokenizer(model)
    if not tokenizer.chat_template:
        return [Outcome(TURNS, "does not apply", "no chat template", "for episodes, use a tokenizer with a template")]
    template = TurnTemplate(tokenizer, named_stop_tokens(tokenizer, model))
    kind, plain = template.kind(tools=template.knows_tools), template.kind(tools=False)
    findings = [KINDS[kind]]
    if plain != kind:
        findings.append(f"without tools {KINDS[plain]}")
    findings.append("tools are written" if template.knows_tools else "tools are left out")
    findings.append("the role tool is known" if template.knows_tool_role
                    else "results of tools become messages of the user")
    findings.append(f"calls are read as {format_of(str(tokenizer.chat_template))!r}")
    advice = []
    if kind is TemplateKind.NEW_SEGMENT_EACH_TURN:
        advice.append("each segment repeats the history before it; a template that keeps earlier turns is cheaper")
    if not template.knows_tools:
        advice.append("describe tools in the prompt's messages")
    numbers = {"knows_tools": float(template.knows_tools), "knows_tool_role": float(template.knows_tool_role)}
    verdict: Verdict = "warning" if kind is TemplateKind.NEW_SEGMENT_EACH_TURN else "works"
    return [Outcome(TURNS, verdict, "; ".join(findings), "; ".join(advice), numbers)]
