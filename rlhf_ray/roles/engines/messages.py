"""Between our requests and completions and vLLM's sampling parameters and outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.errors import WorkerError
from rlhf_ray.roles.engines.interface import Completion, SampleRequest

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.logprobs import FlatLogprobs


def sampling_parameters(request: SampleRequest) -> SamplingParams:
    """Parameters that draw one response and report the sampled tokens' log-probabilities, all at the end."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = request.sampling
    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=request.seed,
        stop_token_ids=list(request.stop_tokens),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_parameters() -> SamplingParams:
    """Parameters that report the prompt's own log-probabilities (vLLM must sample a token too; it is thrown away)."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=0, flat_logprobs=True, detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def prompt_of(tokens: list[int]) -> Any:
    """vLLM's rendered input for token ids."""
    from vllm.inputs.engine import tokens_input

    return tokens_input(tokens)


def completion_of(output: RequestOutput) -> Completion:
    """The finished response in `output`.

    Raises:
        WorkerError: vLLM left out log-probabilities or weight versions.
    """
    drawn: Any = output.outputs[0]
    tokens = np.asarray(drawn.token_ids, dtype=np.int32)
    logprobs = _only_values(drawn.logprobs, len(tokens), output.request_id)
    versions = np.full(len(tokens), -1, dtype=np.int32)
    for span in drawn.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    if (versions < 0).any():
        raise WorkerError(f"vLLM named no weight version for some of {len(tokens)} tokens of {output.request_id}")
    return Completion(tokens, logprobs, versions, str(drawn.finish_reason))


def prompt_logprobs_of(output: RequestOutput) -> NDArray[np.float32]:
    """`[L]` log-probabilities of the prompt's tokens, 0 for the first."""
    length = len(output.prompt_token_ids or ())
    flat: Any = output.prompt_logprobs
    return np.concatenate([[0.0], _only_values(flat, length - 1, output.request_id)]).astype(np.float32)


def _only_values(flat: FlatLogprobs | None, count: int, request_id: str) -> NDArray[np.float32]:
    if flat is None or len(flat.logprobs) != count:
        found = None if flat is None else len(flat.logprobs)
        raise WorkerError(f"vLLM gave {found} log-probabilities for {count} tokens of {request_id}")
    return np.asarray(flat.logprobs, dtype=np.float32)
