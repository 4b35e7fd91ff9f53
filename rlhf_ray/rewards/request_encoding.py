"""Encodes prompt and response for a reward model that does not share the policy's tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_ray.data.answers import AnswerFormat, Prefills, TurnEnds
from rlhf_ray.data.chat import ChatTemplate, Messages, PromptText, tools_of
from rlhf_ray.data.encoding import Piece, encode_pieces
from rlhf_ray.errors import DataError, ModelError, SampleError
from rlhf_ray.rewards.protocol import RewardRequest, sample_names

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_ray.models.classifier import Classifier, EncodedRow


def encode_for(model: Classifier, request: RewardRequest, tokenizer: PreTrainedTokenizerBase,
               ends: TurnEnds | None = None) -> EncodedRow:
    """The request as a classifier with this tokenizer reads it: an encoder that classifies texts reads prompt and
    response as one text, without an end-of-sequence token; others as `encode_request` says, which raises."""
    from rlhf_ray.models.classifier import EncodedRow

    if model.reads_texts:
        return EncodedRow(_ids(tokenizer(request.prompt + request.response, verbose=False)["input_ids"]))
    return encode_request(request, tokenizer, pair=model.reads_pairs, ends=ends)


def encode_request(request: RewardRequest, tokenizer: PreTrainedTokenizerBase, pair: bool,
                   ends: TurnEnds | None = None) -> EncodedRow:
    """The request as a reward model of another tokenizer reads it.

    An encoder reads prompt and response as a pair of texts. A decoder reads a conversation through its own chat
    template, if the prompt is chat messages and there is a template, up to the first token that ends a response; else
    prompt and response one after the other, with an end-of-sequence token (if the tokenizer has one). A response that
    is not finished has no such end. All this is as in the training of reward models by this package.

    Args:
        ends: of this tokenizer, if there are many requests.

    Raises:
        RewardError: the chat template refuses the conversation.
    """
    from rlhf_ray.models.classifier import EncodedRow

    if pair:
        both = tokenizer(request.prompt, request.response, verbose=False)
        types = both.get("token_type_ids")
        return EncodedRow(_ids(both["input_ids"]), None if types is None else _ids(types))
    if request.finish_reason == "stop" and tokenizer.eos_token_id is not None:
        ends = ends or TurnEnds(tokenizer)
    else:
        ends = None
    if request.messages is not None and tokenizer.chat_template:
        pieces = _conversation(request.messages, request, tokenizer, ends)
    else:
        pieces = [Piece(request.prompt, loss=False, leading=True), Piece(request.response, loss=True)]
    [row] = encode_pieces(tokenizer, [pieces])
    return EncodedRow(_ids(ends.close(row)[0] if ends else row[0]))


def _conversation(messages: Messages, request: RewardRequest, tokenizer: PreTrainedTokenizerBase,
                  ends: TurnEnds | None) -> list[Piece]:
    """Prompt and response as the model's own template writes them; without `ends` the response is not finished."""
    template = ChatTemplate(tokenizer)
    place = f"{sample_names([request.key])}, for the reward model of {tokenizer.name_or_path!r}"
    try:
        options = tools_of(request.metadata, place)
        prompt = PromptText(template.render(messages, place, ask=True, options=options), messages, options)
        # What both templates begin stays in the prompt; what the policy's alone begins belongs to the answer here.
        sampled = bool(request.prefill and Prefills(tokenizer).of(prompt))
        response = request.response if sampled else request.prefill + request.response
        if ends is not None:
            response = AnswerFormat(template, ends).of_text(prompt, response, place, sampled=sampled)
    except (ModelError, DataError) as error:
        raise SampleError(str(error)) from error
    return [Piece(prompt.text, loss=False), Piece(response, loss=True)]


def _ids(values: Any) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)
