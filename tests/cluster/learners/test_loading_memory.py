"""A model on its way from files into the shards of two ranks: nobody holds it whole."""

import os
import subprocess
import sys

import pytest
import torch

from rlhf_ray.cluster.worker_environment import GIVE_BACK_LARGE, accelerator_environment
from rlhf_ray.engine.distributed import free_address
from tests.models import make_tiny_llama

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

RANKS = 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_ranks_of_a_node_take_one_copy_together_while_they_load(tmp_path, dtype):
    from transformers import AutoModelForCausalLM

    model = make_tiny_llama(tmp_path / "model", vocab=8000, hidden=768, heads=12, layers=10, tied=False)
    AutoModelForCausalLM.from_pretrained(model, dtype=dtype).save_pretrained(model)
    address, files = free_address("127.0.0.1"), [tmp_path / f"rank_{rank}" for rank in range(RANKS)]
    ranks = [subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.learners.loading_rank", str(model), address, str(rank), str(RANKS), file],
        env={**os.environ, **accelerator_environment(0), **GIVE_BACK_LARGE}) for rank, file in enumerate(files)]
    assert [process.wait(timeout=200) for process in ranks] == [0] * RANKS
    found = [file.read_text().split() for file in files]
    whole = float(found[0][1])
    assert whole > 250 and [kinds for _, _, *kinds in found] == [["torch.float32"]] * RANKS
    # Each its shard and the largest tensor, of which there are two copies for a moment. The first rank, which sends to
    # the others, had 64 MiB more than that. With a rank that holds all of it the sum would be 1.4 times as much.
    most = whole + RANKS * 2 * 8000 * 768 * 4 / 2**20
    assert sum(float(mib) for mib, *_ in found) < 1.25 * most, found
    assert all(float(mib) < whole for mib, *_ in found), found
