"""What adapters of Python libraries have in common: importing one that may be missing, and the first message."""

from __future__ import annotations

import importlib
from typing import Any

from rlhf_ray.environments.protocol import Message


def imported(module: str, extra: str) -> Any:
    """A library's module.

    Raises:
        ImportError: it is not installed; names the extra that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(f"the package of `{module}` cannot be imported ({error}). Install it: pip install "
                          f"'rlhf-ray[{extra}]'") from None


def opening(prompt: Any, own: str, slot: str, text: str) -> list[Message]:
    """What the policy reads first.

    Args:
        prompt: of the row: a text, messages, or "" of a numbered row.
        own: the text that takes its place if it is empty.
        slot: "{observation}", which `text` replaces in the text, or in the last of the messages that has it. If none
            has it, `text` follows after the last one.
    """
    messages = [dict(each) for each in prompt] if isinstance(prompt, list) else []
    if not messages:
        messages = [{"role": "user", "content": prompt or own}]
    with_slot = [each for each in messages if slot in str(each["content"])]
    if with_slot:
        with_slot[-1]["content"] = with_slot[-1]["content"].replace(slot, text)
    elif messages[-1]["role"] == "user":
        messages[-1]["content"] = f"{messages[-1]['content']}\n\n{text}".lstrip("\n")
    else:
        messages.append({"role": "user", "content": text})
    return messages
