"""What generators assume of vLLM holds with its model runner for GPUs (V2) as with the one that CPUs take (V1).

The runner computes on the CPU here: its kernels run in Triton's interpreter (`tests/triton_interpreter`). The checks
are those of V1, run by pytest with the settings that make vLLM take V2, or refuse to start. Triton 3.9's interpreter
cannot execute vLLM's kernel of top_k and top_p (a variable of a loop is a number of Python's there), so that these stay
unchecked.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}

CHECKS = {
    "log-probabilities are those of what was sampled from": (
        "test_generator.py", "logprobs_equal or logprobs_are or temperature_zero"),
    "a seed gives the same tokens alone and in a batch": ("test_generator.py", "a_key_gives"),
    "requests in flight go on with new weights, and every token has its version": (
        "test_generator.py", "published_in_flight or did_not_change"),
    "aborted requests return what they sampled": ("test_generator.py", "abort_are_continued or cancelled"),
    "steps that overlap draw no token with old weights after a publication": (
        "test_generator.py", "asynchronous_engine"),
    "penalties and lower bounds of length and probability act": (
        "test_sampling.py", "distribution_that and not top_k and not top_p"),
    "logits are float32 where they are asked to be": ("test_float32_head.py", "before_and_after"),
    "responses end at stop tokens and texts": ("test_sampling.py", "test_stop_tokens or stop_string or ends_responses"),
}


@pytest.mark.parametrize(("file", "names"), CHECKS.values(), ids=CHECKS)
def test_assumption(file, names):
    answer = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", "--timeout", "1500",
         f"tests/cluster/{file}", "-k", names],
        cwd=ROOT, env={**os.environ, **V2, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/triton_interpreter'}"},
        capture_output=True, text=True, timeout=1700)
    assert answer.returncode == 0, answer.stdout[-8000:] + answer.stderr[-2000:]
