"""Encodes prompt and response for a reward model that does not share the policy's tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_ray.data.encoding import encode
from rlhf_ray.errors import SampleError
from rlhf_ray.rewards.protocol import RewardRequest, sample_names

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_ray.models.classifier import Classifier, EncodedRow


def encode_for(model: Classifier, request: RewardRequest, tokenizer: PreTrainedTokenizerBase) -> EncodedRow:
    """The request as a classifier with this tokenizer reads it: an encoder that classifies texts reads prompt and
    response as one text, without an end-of-sequence token; others as `encode_request` says, which raises."""
    from rlhf_ray.models.classifier import EncodedRow

    if model.reads_texts:
        return EncodedRow(_ids(tokenizer(request.prompt + request.response, verbose=False)["input_ids"]))
    return encode_request(request, tokenizer, pair=model.reads_pairs)


def encode_request(request: RewardRequest, tokenizer: PreTrainedTokenizerBase, pair: bool) -> EncodedRow:
    """The request as a reward model of another tokenizer reads it.

    An encoder reads prompt and response as a pair of texts. A decoder reads a conversation through its own chat
    template, if the prompt is chat messages and there is a template; else prompt and response as one text, with an
    end-of-sequence token (if the tokenizer has one) where the response is finished, as in the training of reward models
    by this package.

    Raises:
        RewardError: the chat template refuses the conversation.
    """
    from rlhf_ray.models.classifier import EncodedRow

    if pair:
        both = tokenizer(request.prompt, request.response, verbose=False)
        types = both.get("token_type_ids")
        return EncodedRow(_ids(both["input_ids"]), None if types is None else _ids(types))
    if request.messages is not None and tokenizer.chat_template:
        return EncodedRow(_ids(encode(tokenizer, [_conversation(request, tokenizer)], leading=False)[0]))
    ids = encode(tokenizer, [request.prompt + request.response], leading=True)[0]
    if request.finish_reason == "stop" and tokenizer.eos_token_id is not None:
        ids = [*ids, tokenizer.eos_token_id]
    return EncodedRow(_ids(ids))


def _conversation(request: RewardRequest, tokenizer: PreTrainedTokenizerBase) -> str:
    messages: list[dict[str, Any]] = [*(request.messages or ()), {"role": "assistant", "content": request.response}]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # a template is a program and may raise anything
        raise SampleError(f"the chat template of the reward model's tokenizer {tokenizer.name_or_path!r} refuses the "
                          f"conversation of {sample_names([request.key])}, of roles {[m['role'] for m in messages]}: "
                          f"{error}") from error


def _ids(values: Any) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)
