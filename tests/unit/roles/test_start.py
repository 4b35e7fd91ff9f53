"""What a worker loads as it starts: each import is paid by every worker of every run."""

import subprocess
import sys

PROGRAM = """
import sys
from rlhf_ray.engine import distributed
from rlhf_ray.engine.distributed import free_address, join
join(free_address("127.0.0.1"), 0, 1, 60)
from deepspeed.runtime import compiler
assert "deepspeed.runtime.zero.muon.muon_optimizer" in sys.modules, "DeepSpeed will import it later, and compile"
assert "torch._inductor" not in sys.modules, "torch's compiler was loaded"
assert compiler.compile.__module__ == "deepspeed.runtime.compiler", "DeepSpeed's own function was not put back"
"""


def test_a_learner_starts_without_the_compiler():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_data_reader_starts_without_torch():
    program = ("import sys, rlhf_ray.roles.data_readers\n"
               "assert 'torch' not in sys.modules, 'torch was imported'")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
