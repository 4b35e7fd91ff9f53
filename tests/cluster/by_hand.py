"""vLLM's own class for whole texts, in a process of its own: it changes how many threads a process computes with."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

ENGINE = []


def load(model, context):
    """Load a model, in the process that will sample from it."""
    from vllm import LLM

    ENGINE.append(LLM(model, dtype="float32", max_model_len=context, max_num_seqs=8, seed=3,
                      kv_cache_memory_bytes=16 << 20, enforce_eager=True, enable_prefix_caching=False,
                      max_num_batched_tokens=8 * context))


def sample(ids, seed, most, stops):
    """(sampled ids, their log-probabilities, finish reason) after the ids of a prompt."""
    from vllm import SamplingParams, TokensPrompt

    [found] = ENGINE[0].generate(
        [TokensPrompt(prompt_token_ids=ids)],
        SamplingParams(seed=seed, max_tokens=most, stop_token_ids=stops, logprobs=0, temperature=1.0,
                       detokenize=False), use_tqdm=False)
    [output] = found.outputs
    sampled = list(output.token_ids)
    return sampled, [step[token].logprob for step, token in zip(output.logprobs, sampled, strict=True)], (
        output.finish_reason)


def process(model, context):
    """A process that has loaded a model: submit `sample` to it."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), load, (str(model), context))
