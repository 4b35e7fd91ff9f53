"""The choice of CPU kernels: by devices, precision and shape, the same wherever and whenever it is made."""

import ast
import itertools
from pathlib import Path

import pytest
import torch

from rlhf_ray.models import cpu
from rlhf_ray.models.cpu.kernel_choice import takes_cpu_kernel, uses_onednn
from rlhf_ray.models.cpu.short_rows import LONGEST, takes_short_rows
from rlhf_ray.models.packing import Packing


@pytest.mark.parametrize(("gpu", "onednn", "instructions", "expected"), [
    (False, True, "AVX512", True), (True, True, "AVX512", False), (False, False, "AVX512", False),
    (False, True, "AVX2", False)])
def test_onednn_is_for_processors_with_avx_512_and_no_gpu(monkeypatch, gpu, onednn, instructions, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: onednn)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    assert uses_onednn() == expected


def of(*kinds, device="cpu"):
    return [torch.empty(2, dtype=kind, device=device) for kind in kinds]


def test_operands_are_on_a_cpu_in_one_precision_that_the_kernel_computes_in():
    single, double, half = torch.float32, torch.float64, torch.bfloat16
    assert takes_cpu_kernel(*of(single, single)) and takes_cpu_kernel(*of(double), precisions=(single, double))
    refused = [of(double), of(half), of(single, half), of(half, single), of(single, device="meta"),
               [*of(single), *of(single, device="meta")]]
    assert [operands for operands in refused if takes_cpu_kernel(*operands)] == []
    with torch.autocast("cpu", dtype=half):
        assert not takes_cpu_kernel(*of(single))


@pytest.mark.parametrize(("longest", "key_heads", "dropout", "expected"), [
    (LONGEST, 4, 0.0, True), (LONGEST + 1, 4, 0.0, False), (LONGEST, 2, 0.0, False), (LONGEST, 4, 0.1, False)])
def test_rows_are_short_with_a_key_for_each_query_and_no_dropout(longest, key_heads, dropout, expected):
    packing = Packing.of([1, longest])
    query, key = (torch.empty(packing.tokens, heads, 8) for heads in (4, key_heads))
    assert takes_short_rows(query, key, packing, dropout) == expected


def test_no_kernel_is_chosen_by_a_clock_or_by_chance():
    """Ranks and resumed runs would choose differently."""
    trees = [ast.parse(path.read_text()) for path in Path(cpu.__file__).parent.glob("*.py")]
    nodes = itertools.chain.from_iterable(map(ast.walk, trees))
    imported = {(getattr(node, "module", None) or alias.name).split(".")[0]
                for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
    assert imported <= {"dataclasses", "typing", "torch", "transformers", "rlhf_ray"}
