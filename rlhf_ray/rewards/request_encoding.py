"""Encodes prompt and response for a reward model that does not share the policy's tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_ray.data.chat import ASSISTANT, ChatTemplate, Messages
from rlhf_ray.data.encoding import Piece, TurnEnds, encode_pieces
from rlhf_ray.errors import ModelError, SampleError
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
    template, if the prompt is chat messages and there is a template, up to the token that ends the assistant's turn;
    else prompt and response one after the other, with an end-of-sequence token (if the tokenizer has one). A response
    that is not finished has no such end. All this is as in the training of reward models by this package.

    Raises:
        RewardError: the chat template refuses the conversation.
    """
    from rlhf_ray.models.classifier import EncodedRow

    if pair:
        both = tokenizer(request.prompt, request.response, verbose=False)
        types = both.get("token_type_ids")
        return EncodedRow(_ids(both["input_ids"]), None if types is None else _ids(types))
    finished = request.finish_reason == "stop"
    if request.messages is not None and tokenizer.chat_template:
        return EncodedRow(_ids(_conversation(request.messages, request, finished, tokenizer)))
    [(ids, _)] = encode_pieces(tokenizer, [[Piece(request.prompt, loss=False, leading=True),
                                            Piece(request.response, loss=True)]])
    if finished and tokenizer.eos_token_id is not None:
        ids = [*ids, tokenizer.eos_token_id]
    return EncodedRow(_ids(ids))


def _conversation(
    messages: Messages, request: RewardRequest, finished: bool, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    template, answer = ChatTemplate(tokenizer), {"role": ASSISTANT, "content": request.response}
    place = f"{sample_names([request.key])}, for the reward model of {tokenizer.name_or_path!r}"
    try:
        prompt = template.render(messages, place, ask=True)
        text = template.render([*messages, answer], place, ask=False) if finished else prompt + request.response
    except ModelError as error:
        raise SampleError(str(error)) from error
    border = len(prompt) if text.startswith(prompt) else 0
    [row] = encode_pieces(tokenizer, [[Piece(text[:border], loss=False), Piece(text[border:], loss=True)]])
    return TurnEnds(tokenizer).close(row)[0] if finished and tokenizer.eos_token_id is not None else row[0]


def _ids(values: Any) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)
