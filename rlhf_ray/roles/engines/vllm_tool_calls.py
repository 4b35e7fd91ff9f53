"""vLLM's parsers of tool calls, for model families whose format is none of our own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhf_ray.environments.tool_calls import READERS, ExternalParser, ToolCallParser
from rlhf_ray.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tool_call_parser(name: str, tokenizer: PreTrainedTokenizerBase) -> ToolCallParser:
    """The parser of a format: ours, or vLLM's own of this name.

    Raises:
        ConfigError: there is none of this name.
    """
    template = str(tokenizer.chat_template or "")
    return ToolCallParser.of(name, template, lambda other: vllm_parser(other, tokenizer))


def vllm_parser(name: str, tokenizer: PreTrainedTokenizerBase) -> ExternalParser:
    """vLLM's parser of this name. A new one reads each text, as they keep what they read.

    Raises:
        ConfigError: there is none of this name, or it cannot read whole texts of this tokenizer.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    try:
        kind = ToolParserManager.get_tool_parser(name)
    except KeyError:
        known = ", ".join(["auto", *READERS, *ToolParserManager.list_registered()])
        raise ConfigError(f"tool_format={name!r} is no format of tool calls; choose one of {known}") from None

    def read(text: str, tools: Sequence[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
        request = ChatCompletionRequest(
            model="policy", messages=[{"role": "user", "content": ""}], **({"tools": list(tools)} if tools else {}))
        found = kind(tokenizer, request.tools).extract_tool_calls(text, request)  # type: ignore[arg-type]
        return found.content or "", [(call.function.name, call.function.arguments) for call in found.tool_calls]

    try:
        read("", ())
    except Exception as error:  # a parser wants tokens that this tokenizer lacks, for example
        raise ConfigError(f"tool_format={name!r}: vLLM's parser of this name cannot be used with the tokenizer "
                          f"{tokenizer.name_or_path or '(unnamed)'} ({type(error).__name__}: {error}); choose another "
                          "format") from error
    return read
