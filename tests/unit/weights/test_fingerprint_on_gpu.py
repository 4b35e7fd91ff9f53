"""The Triton kernel of fingerprints, in Triton's interpreter, and compiled for a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

COMPILED = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlhf_ray.weights import fingerprint
from rlhf_ray.weights.fingerprint_on_gpu import BLOCK, WARPS, _weighted_sums

first_seed, second_seed = fingerprint.SEEDS
constants = {"first_seed": first_seed, "second_seed": second_seed, "golden": fingerprint.GOLDEN,
             "first": fingerprint.FIRST, "second": fingerprint.SECOND, "block": BLOCK}
for count in ("i32", "i64", "constexpr"):  # of up to 2^31 words, of more, of one
    signature = dict.fromkeys(_weighted_sums.arg_names, "constexpr")
    signature |= {"words": "*i64", "sums": "*i64", "count": count}
    given = constants | ({"count": 1} if count == "constexpr" else {})
    binary = compile(ASTSource(_weighted_sums, signature, given), target=GPUTarget("cuda", 90, 32),
                     options={"num_warps": WARPS})
    assert binary.asm["cubin"]
"""


def run(command, **variables):
    answer = subprocess.run([sys.executable, *command], cwd=ROOT, env={**os.environ, **variables}, capture_output=True,
                            text=True, timeout=120)
    assert answer.returncode == 0, answer.stdout[-6000:] + answer.stderr[-2000:]
    return answer.stdout


def test_the_kernel_gives_the_digests_of_the_plain_passes():
    checks = "tests/unit/weights/kernel_checks.py"
    said = run(["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", checks], TRITON_INTERPRET="1")
    assert int(re.search(r"(\d+) passed", said)[1]) > 40


def test_the_kernel_compiles_for_a_hopper_gpu(tmp_path):
    run(["-c", COMPILED], TRITON_CACHE_DIR=str(tmp_path))
