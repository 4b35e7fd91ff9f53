"""What the generator costs over vLLM itself: the same samples by `Generator.generate` and by `LLM.generate`.

Both engines run in their side's own process on one thread, without compilation, and give token ids and the sampled
tokens' log-probabilities. Every sample has its seed, so the two sides draw the same responses.
"""

import asyncio
from pathlib import Path
from zlib import crc32

import numpy as np

from benchmarks.comparison import Benchmark
from benchmarks.workload import MAX_CONTEXT, SEED, model_config, prompts
from rlhf_ray.config.generation import GenerationConfig, SamplingConfig
from rlhf_ray.data.prompts import sample_seed
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.records import Rollout, SampleKey
from rlhf_ray.roles.generator import Generator

SAMPLES = 256
GENERATION = GenerationConfig(engine="in_process", chunk=16, max_sequences=64, sampling=SamplingConfig(max_tokens=32))
"""As in the quickstart."""
KEYS = [SampleKey(0, row, 0) for row in range(SAMPLES)]


class GeneratorSide:
    """Overlapping calls of one chunk each, as a coordinator makes them."""

    def __init__(self, directory: Path) -> None:
        self._prompts = prompts(directory, SAMPLES)
        self._loop = asyncio.new_event_loop()
        self._generator = Generator(model_config(directory), GENERATION, SEED, MAX_CONTEXT)
        self._loop.run_until_complete(self._generator.start())
        self._rollouts: list[Rollout] = []

    def run(self) -> float:
        """Draw all samples; returns their response tokens."""
        self._rollouts = self._loop.run_until_complete(self._generate())
        return float(sum(rollout.response_mask.sum() for rollout in self._rollouts))

    def proof(self) -> list[float]:
        """A digest of each response."""
        return [digest(rollout.row(i, "tokens")[rollout.row(i, "response_mask")])
                for rollout in self._rollouts for i in range(len(rollout))]

    async def _generate(self) -> list[Rollout]:
        chunks = [KEYS[start : start + GENERATION.chunk] for start in range(0, SAMPLES, GENERATION.chunk)]
        return await asyncio.gather(*(self._generator.generate(self._prompts, chunk, SEED) for chunk in chunks))


class RawVLLMSide:
    """vLLM's own offline interface, with the options that make it fast for this."""

    def __init__(self, directory: Path, samples: int = SAMPLES) -> None:
        from vllm import LLM, SamplingParams

        table = prompts(directory, samples)
        end = load_tokenizer(model_config(directory)).eos_token_id
        self._llm = LLM(
            model=str(directory), dtype="float32", skip_tokenizer_init=True, generation_config="vllm",
            max_model_len=MAX_CONTEXT, max_num_seqs=GENERATION.max_sequences, seed=SEED, enforce_eager=True,
            enable_prefix_caching=False, kv_cache_memory_bytes=(GENERATION.cache_mb or 0) << 20,
            logprobs_mode="processed_logprobs", disable_log_stats=True)
        self._prompts = [{"prompt_token_ids": table.row(i, "tokens").tolist()} for i in range(samples)]
        self._parameters = [
            SamplingParams(max_tokens=GENERATION.sampling.max_tokens, temperature=1.0, seed=sample_seed(SEED, key),
                           stop_token_ids=[end], logprobs=0, flat_logprobs=True, detokenize=False)
            for key in KEYS[:samples]]
        self._tokens: list[np.ndarray] = []

    def run(self) -> float:
        """Draw all samples; returns their response tokens."""
        outputs = self._llm.generate(self._prompts, self._parameters, use_tqdm=False)
        self._tokens = [np.asarray(output.outputs[0].token_ids, dtype=np.int32) for output in outputs]
        return float(sum(map(len, self._tokens)))

    def proof(self) -> list[float]:
        """A digest of each response."""
        return [digest(tokens) for tokens in self._tokens]


def digest(tokens: np.ndarray) -> float:
    """A number that other tokens hardly ever have."""
    return float(crc32(np.ascontiguousarray(tokens, dtype=np.int32).tobytes()))


BENCHMARK = Benchmark(
    ours=GeneratorSide, theirs=RawVLLMSide, ours_is="Generator", theirs_is="vLLM's LLM.generate", unit="tokens/s",
    goal=0.95, agreement=0.98,  # batches differ in the last bit of a logit, which may tip one draw in a million
)
