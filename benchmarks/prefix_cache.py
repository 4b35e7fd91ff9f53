"""`python -m benchmarks.prefix_cache`: what vLLM's prefix cache changes in episodes, bit by bit and in seconds.

An episode's next turn begins with the tokens of all turns before it. With a warm cache the engine computes only what is
new; without one it computes the whole context again. Both are driven by vLLM's own class, in a process each, with the
same ids and seeds: episodes of several turns, alone and side by side.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.models import make_tiny_llama

EPISODES, TURNS, SAMPLED, READ = 16, 6, 24, 60
"""Tokens of a turn: sampled, and read after it. Blocks of the cache have 128 tokens on CPUs."""
VOCAB, LONGEST = 512, 1024
MARK = "turns: "
"""Begins the line of results; vLLM writes others."""


def main() -> None:
    """Print, for each precision, how many turns are equal and how long they took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns-of", nargs=3, metavar=("MODEL", "DTYPE", "CACHE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.turns_of:
        model, dtype, cache = given.turns_of
        print(MARK + json.dumps(turns_of(model, dtype, cache == "warm")))
        return
    with tempfile.TemporaryDirectory() as directory:
        model = make_tiny_llama(Path(directory) / "model", VOCAB, hidden=256, layers=6, heads=4, positions=LONGEST)
        for dtype in ("float32", "bfloat16"):
            cold, warm = (measured(model, dtype, cache) for cache in ("cold", "warm"))
            pairs = list(zip(cold["turns"], warm["turns"], strict=True))
            same = sum(one == two for one, two in pairs)
            tokens = sum(one[0] == two[0] for one, two in pairs)
            print(f"{dtype}: of {len(pairs)} turns {same} are equal bit by bit, {tokens} have the same tokens; "
                  f"{warm['cached']:.0%} of the context came from the cache; {cold['seconds']:.2f} s cold, "
                  f"{warm['seconds']:.2f} s warm ({cold['seconds'] / warm['seconds']:.2f} times)")


def measured(model: Path, dtype: str, cache: str) -> dict:
    """`turns_of` in a process of its own."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.prefix_cache", "--turns-of", str(model), dtype, cache],
                          capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    [line] = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    return json.loads(line.removeprefix(MARK))


def turns_of(model: str, dtype: str, warm: bool) -> dict:
    """Tokens and log-probabilities of all turns, the share of cached tokens, and seconds."""
    from vllm import LLM, SamplingParams, TokensPrompt

    engine = LLM(model, dtype=dtype, max_model_len=LONGEST, max_num_seqs=EPISODES, kv_cache_memory_bytes=256 << 20,
                 enforce_eager=True, enable_prefix_caching=warm, max_num_batched_tokens=EPISODES * LONGEST)
    rng = np.random.default_rng(1)
    contexts = [rng.integers(2, VOCAB, rng.integers(20, 200)).tolist() for _ in range(EPISODES)]
    turns, cached, read = [], 0, 0
    began = time.perf_counter()
    for turn in range(TURNS):
        parameters = [SamplingParams(seed=100 * i + turn, max_tokens=SAMPLED, min_tokens=SAMPLED, logprobs=0,
                                     detokenize=False) for i in range(EPISODES)]
        # Every other turn alone, the rest side by side.
        groups = [[i] for i in range(EPISODES)] if turn % 2 else [list(range(EPISODES))]
        for group in groups:
            found = engine.generate([TokensPrompt(prompt_token_ids=contexts[i]) for i in group],
                                    [parameters[i] for i in group], use_tqdm=False)
            for i, one in zip(group, found, strict=True):
                ids = list(one.outputs[0].token_ids)
                scores = [step[token].logprob for step, token in zip(one.outputs[0].logprobs, ids, strict=True)]
                turns.append((ids, scores))
                cached += one.num_cached_tokens or 0
                read += len(contexts[i])
                contexts[i] = contexts[i] + ids + rng.integers(2, VOCAB, READ).tolist()
    return {"turns": turns, "cached": cached / read, "seconds": time.perf_counter() - began}


if __name__ == "__main__":
    main()
