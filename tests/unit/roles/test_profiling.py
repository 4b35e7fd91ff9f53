"""Torch's profiler around real computation, and the sums over a trace that vLLM made."""

import gzip
import json
import time
from types import SimpleNamespace

import pytest
import torch

from rlhf_ray.records import OperatorTime
from rlhf_ray.roles.profiling import TorchProfile, busiest, busiest_in_trace, collect_vllm_trace


def test_a_profile_holds_what_was_computed_between_begin_and_end_and_nothing_else(tmp_path):
    profile, square = TorchProfile(), torch.ones(64, 64)
    torch.linalg.inv(square + torch.eye(64))
    outside = time.perf_counter()
    profile.begin()
    inside = time.perf_counter()
    for _ in range(5):
        square = square @ square / 64
    inside = time.perf_counter() - inside
    found = profile.end(tmp_path / "t.trace.json.gz")
    assert inside <= found.seconds <= time.perf_counter() - outside
    assert {o.name: o.calls for o in found.operators}["aten::mm"] == 5
    assert not any("inv" in o.name for o in found.operators)
    assert [o.own_ms for o in found.operators] == sorted((o.own_ms for o in found.operators), reverse=True)
    events = json.loads(gzip.decompress((tmp_path / found.trace).read_bytes()))["traceEvents"]
    assert sum(event["name"] == "aten::mm" for event in events) == 5


def test_a_second_profile_begins_afresh_and_one_that_was_not_begun_is_nothing(tmp_path):
    profile = TorchProfile()
    assert profile.end(tmp_path / "none.json") is None
    profile.begin()
    torch.ones(8, 8) @ torch.ones(8, 8)
    profile.begin()
    torch.ones(8, 8) + 1
    found = profile.end(tmp_path / "t.trace.json.gz")
    assert "aten::add" in {o.name for o in found.operators} and "aten::mm" not in {o.name for o in found.operators}
    assert profile.end(tmp_path / "again.json") is None


def averages(*rows):
    return [SimpleNamespace(key=key, count=count, self_device_time_total=gpu, self_cpu_time_total=cpu)
            for key, count, gpu, cpu in rows]


def test_operators_are_ranked_by_their_own_time_on_the_gpu_where_there_is_one():
    on_cpu = averages(("mm", 3, 0, 2500), ("add", 7, 0, 4000), ("view", 9, 0, 0))
    assert busiest(on_cpu) == [OperatorTime("add", 7, 4.0), OperatorTime("mm", 3, 2.5)]
    assert busiest(on_cpu, 1) == [OperatorTime("add", 7, 4.0)]
    assert busiest(averages(("mm", 3, 8000, 10), ("add", 7, 0, 4000))) == [OperatorTime("mm", 3, 8.0)]


def event(name, ts, dur, cat="cpu_op", tid=1):
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur}


def test_sums_over_a_trace_count_time_of_an_operators_own():
    events = [event("linear", 0, 100), event("addmm", 10, 70), event("copy", 20, 30), event("add", 200, 5),
              event("linear", 0, 40, tid=2), {"ph": "M", "name": "process_name"}]
    found = {o.name: (o.calls, o.own_ms) for o in busiest_in_trace(events)}
    assert found == {"linear": (2, pytest.approx(0.07)), "addmm": (1, pytest.approx(0.04)),
                     "copy": (1, pytest.approx(0.03)), "add": (1, pytest.approx(0.005))}


def test_of_a_gpu_the_kernels_count():
    events = [event("aten::mm", 0, 5000), event("gemm", 10, 70, "kernel"), event("gemm", 90, 30, "kernel")]
    assert [(o.name, o.calls, o.own_ms) for o in busiest_in_trace(events)] == [("gemm", 2, pytest.approx(0.1))]


def test_vllms_trace_is_moved_and_those_of_other_ranks_are_removed(tmp_path):
    (tmp_path / "vllm").mkdir()
    for rank in (0, 1):
        path = tmp_path / f"vllm/rank{rank}.1234.pt.trace.json.gz"
        path.write_bytes(gzip.compress(json.dumps({"traceEvents": [event(f"op{rank}", 0, 2e6)]}).encode()))
    found = collect_vllm_trace(tmp_path / "vllm", tmp_path / "generator_0.trace.json.gz")
    assert (found.trace, found.seconds, found.operators[0].name) == ("generator_0.trace.json.gz", 2.0, "op0")
    assert list((tmp_path / "vllm").iterdir()) == [] and (tmp_path / found.trace).exists()
    assert collect_vllm_trace(tmp_path / "vllm", tmp_path / "x.json.gz") is None
