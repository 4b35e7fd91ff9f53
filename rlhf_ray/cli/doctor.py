"""`rlhf-ray doctor`: checks whether this machine can run rlhf-ray, and says how to fix it. Changes nothing."""

import os
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from rlhf_ray.planning.local_machine import installed

if TYPE_CHECKING:
    from rlhf_ray.planning.local_machine import GPU

GIB = 2**30
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
SHM_ADVICE = "start the container with --shm-size=2g, or lower cluster.object_store_mb"
LEAST_MEMORY_GIB, LEAST_DISK_GIB, LEAST_SHM_GIB = 6.0, 2.0, 0.6
LEAST_DRIVER = 580
"""NVIDIA's driver branch for CUDA 13.0, which torch 2.13 is built for (CUDA 13.0 release notes, table 2)."""
LEAST_GIB = 16.0
"""A one-GPU run of a 0.5B model in bfloat16 with AdamW's state: 16 bytes a weight and some for the cache."""
NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
SLOW_WAYS = {"NCCL_P2P_DISABLE": "GPUs of a node communicate through main memory",
             "NCCL_IB_DISABLE": "nodes communicate over TCP", "NCCL_SHM_DISABLE": "GPUs of a node communicate over TCP"}
PORTS = {6379: "`ray start --head` (--port)", 8265: "Ray's dashboard and job API (--dashboard-port)",
         10001: "Ray's client server (--ray-client-server-port)"}
"""Default ports of a head node, and the option that changes each. A private local cluster uses free ports."""
OTHERS_MAY_READ = 0o044
OTHERS_MAY_WRITE = 0o022


def doctor() -> None:
    """Check Python, packages, CPU, GPUs, NCCL, memory, disk, ports and token, and say how to fix problems."""
    from rich.console import Console
    from rich.table import Table

    marks = {"ok": "[green]ok[/]", "warn": "[yellow]warning[/]", "fail": "[red]failed[/]"}
    findings = inspect_machine()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for finding in findings:
        table.add_row(marks[finding.status], finding.name, finding.found)
        if finding.advice:
            table.add_row("", "", f"[italic]{finding.advice}[/]")
    Console(highlight=False).print(table)
    wrong = sum(f.status == "fail" for f in findings)
    typer.echo("this machine can run rlhf-ray" if not wrong else f"{wrong} problems to fix before a run")
    raise typer.Exit(1 if wrong else 0)


@dataclass(frozen=True)
class Finding:
    """Outcome of one check. "warn" may matter; "fail" prevents runs."""

    status: Literal["ok", "warn", "fail"]
    name: str
    found: str
    advice: str = ""


def inspect_machine(directory: Path = Path()) -> list[Finding]:
    """All checks on this machine; `directory` is where runs would be written."""
    from rlhf_ray.planning.local_machine import gpus_here, installed_engines

    gpus = gpus_here()
    return [
        check_python(sys.version_info[:3]),
        *check_packages(),
        check_engine(installed_engines(), bool(gpus)),
        check_torch_companions(),
        check_cpu(),
        check_gpus(gpus),
        check_nccl(gpus),
        check_memory(),
        check_space("shared memory", Path("/dev/shm"), LEAST_SHM_GIB, SHM_ADVICE),
        check_space("disk", directory, LEAST_DISK_GIB, "free some space, or write runs elsewhere (--run.dir)"),
        check_ports(),
        check_token(),
        check_compiler(),
    ]


def check_python(version: tuple[int, ...]) -> Finding:
    """The dependencies are built for Python 3.11 and 3.12."""
    text = ".".join(map(str, version))
    if version[:2] in ((3, 11), (3, 12)):
        return Finding("ok", "Python", text)
    return Finding("fail", "Python", text, "install Python 3.11 or 3.12, then: make install PYTHON=python3.12")


def check_packages() -> list[Finding]:
    """Whether each dependency is installed, in the tested version range."""
    from importlib import metadata

    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(line) for line in metadata.requires("rlhf-ray") or []]
    except metadata.PackageNotFoundError:
        return [Finding("fail", "rlhf-ray", "not installed", "make install")]
    found, findings = [], []
    for requirement in (r for r in wanted if r.marker is None):
        version = installed(requirement.name)
        if version is None:
            findings.append(Finding("fail", requirement.name, "not installed", "make install"))
        elif not requirement.specifier.contains(version, prereleases=True):
            advice = f"tested with {requirement.specifier}; make install restores it"
            findings.append(Finding("warn", requirement.name, version, advice))
        else:
            found.append(f"{requirement.name} {version}")
    return [Finding("ok", "packages", ", ".join(found)), *findings]


def check_engine(engines: dict[str, str], gpu: bool) -> Finding:
    """Whether exactly one vLLM is installed, the one for this hardware."""
    text = ", ".join(f"{name} {version}" for name, version in engines.items()) or "not installed"
    if not engines:
        return Finding("fail", "vLLM", text, f"make install{' EXTRA=gpu' if gpu else ''}")
    if len(engines) > 1:
        return Finding("fail", "vLLM", text, "both use the same folder; remove .venv and run make install again")
    if gpu and "vllm" not in engines:
        return Finding("warn", "vLLM", text, "the CPU build leaves the GPU idle: make install EXTRA=gpu")
    if not gpu and "vllm" in engines:
        return Finding("fail", "vLLM", text, "this build needs a GPU: make install EXTRA=cpu")
    return Finding("ok", "vLLM", text)


def check_torch_companions() -> Finding:
    """CUDA builds of torchvision and similar packages break `import transformers` with a CPU torch."""
    torch, strays = installed("torch") or "not installed", [p for p in CUDA_ONLY if installed(p)]
    if strays and torch.endswith("+cpu") and not all((installed(p) or "").endswith("+cpu") for p in strays):
        advice = f"they are not needed and break transformers: uv pip uninstall {' '.join(strays)}"
        return Finding("fail", "torch", f"{torch} with {', '.join(strays)}", advice)
    return Finding("ok", "torch", torch)


def check_cpu() -> Finding:
    """Cores available to this process, and the vector instructions that vLLM's CPU build needs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    flags = _cpu_flags()
    vector = next((f for f in ("avx512f", "avx2") if f in flags), "no AVX2")
    found = f"{cores} cores, {vector}"
    if cores < 2:
        return Finding("warn", "CPU", found, "a run works on one core, but slowly")
    if flags and vector == "no AVX2":
        return Finding("fail", "CPU", found, "vLLM's CPU build needs AVX2; use another machine, or a GPU")
    return Finding("ok", "CPU", found)


def check_memory() -> Finding:
    """Available memory."""
    import psutil

    memory = psutil.virtual_memory()
    found = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    if memory.available < LEAST_MEMORY_GIB * GIB:
        return Finding("warn", "memory", found, f"the quickstart needs {LEAST_MEMORY_GIB:g} GiB; close other programs")
    return Finding("ok", "memory", found)


def check_space(name: str, path: Path, least_gib: float, advice: str) -> Finding:
    """Free space on the file system of `path`."""
    if not path.exists():
        return Finding("warn", name, f"there is no {path}", advice)
    free = shutil.disk_usage(path).free / GIB
    if free < least_gib:
        return Finding("fail", name, f"{free:.1f} GiB free at {path}, {least_gib:g} needed", advice)
    return Finding("ok", name, f"{free:.1f} GiB free at {path}")


def check_compiler() -> Finding:
    """A C++ compiler, for code that torch and DeepSpeed compile on first use."""
    compiler = next((p for c in ("c++", "g++", "clang++") if (p := shutil.which(c))), None)
    if compiler:
        return Finding("ok", "C++ compiler", compiler)
    advice = "install one (apt-get install g++); torch.compile and DeepSpeed's CPU kernels need it"
    return Finding("warn", "C++ compiler", "none found", advice)


def _cpu_flags() -> set[str]:
    """Instruction sets of the first processor; empty if the kernel does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return next((set(line.split(":")[1].split()) for line in lines if line.startswith("flags")), set())


def check_gpus(gpus: Sequence["GPU"]) -> Finding:
    """Whether the driver supports torch's CUDA, and the memory suffices for a small run."""
    if not gpus:
        broken = "nvidia-smi lists no GPU; run it to see its message" if shutil.which("nvidia-smi") else ""
        return Finding("warn" if broken else "ok", "GPU", "none: everything runs on the CPU", broken)
    found = ", ".join(f"{gpu.name} ({gpu.gib:.0f} GiB)" for gpu in gpus) + f", driver {gpus[0].driver}"
    branch = gpus[0].driver.partition(".")[0]
    if branch.isdecimal() and int(branch) < LEAST_DRIVER:
        return Finding("fail", "GPU", found, f"torch's CUDA 13.0 needs driver {LEAST_DRIVER} or newer; update it, or "
                                             "hide the GPU (CUDA_VISIBLE_DEVICES=) and run on the CPU")
    if min(gpu.gib for gpu in gpus) < LEAST_GIB:
        return Finding("warn", "GPU", found, f"under {LEAST_GIB:g} GiB a 0.5B model needs LoRA or offload_optimizer"
                                             "; `rlhf-ray plan CONFIG` says whether yours fits")
    return Finding("ok", "GPU", found)


def check_nccl(gpus: Sequence["GPU"], environment: Mapping[str, str] = os.environ) -> Finding:
    """NCCL, with which GPU learners reduce gradients and send weights to generators."""
    if not gpus:
        return Finding("ok", "NCCL", "not needed without a GPU")
    versions = [f"{name} {version}" for name in NCCL if (version := installed(name))]
    if not versions:
        return Finding("fail", "NCCL", "not installed", "torch's CUDA build includes it: make install EXTRA=gpu")
    slow = [f"{name}={environment[name]}: {why}" for name, why in SLOW_WAYS.items()
            if environment.get(name, "0") not in ("", "0")]
    if slow and len(gpus) > 1:
        return Finding("warn", "NCCL", ", ".join(versions), f"{'; '.join(slow)}. Unset them unless you need them")
    return Finding("ok", "NCCL", ", ".join(versions))


def taken(port: int) -> bool:
    """Whether a process listens on a port of this machine's loopback address."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def check_ports(is_taken: Callable[[int], bool] = taken) -> Finding:
    """Whether a head node could start here, and whether processes can listen at all."""
    try:
        with socket.socket() as any_port:
            any_port.bind(("127.0.0.1", 0))
    except OSError as error:
        return Finding("fail", "ports", f"no process can listen on 127.0.0.1: {error}",
                       "Ray's processes communicate over loopback; allow it in the sandbox or firewall")
    busy = [port for port in PORTS if is_taken(port)]
    if not busy:
        return Finding("ok", "ports", ", ".join(map(str, PORTS)) + " are free")
    advice = "; ".join(f"{port} is for {PORTS[port]}" for port in busy)
    return Finding("warn", "ports", f"{', '.join(map(str, busy))} in use, perhaps by a Ray cluster",
                   f"a local run uses free ports; to start another head node here, choose other ports: {advice}")


def check_token(environment: Mapping[str, str] = os.environ, home: Path | None = None) -> Finding:
    """Whether clusters started here require a token, and whether the token is secret."""
    mode = environment.get("RAY_AUTH_MODE", "")
    file = Path(environment.get("RAY_AUTH_TOKEN_PATH") or (home or Path.home()) / ".ray" / "auth_token")
    if mode == "disabled":
        return Finding("warn", "auth", "RAY_AUTH_MODE=disabled", "a cluster started here runs code for anyone who can "
                       "connect to it; unset the variable, or set it to token")
    if environment.get("RAY_AUTH_TOKEN"):
        return Finding("ok", "auth", "a token in RAY_AUTH_TOKEN")
    if not file.is_file():
        return Finding("ok", "auth", "no token yet: a local cluster creates one. To join or start others: "
                                     "ray get-auth-token --generate")
    permissions = file.stat().st_mode
    if permissions & OTHERS_MAY_WRITE:
        return Finding("warn", "auth", f"a token in {file}, which other users can change", f"chmod 600 {file}")
    if permissions & OTHERS_MAY_READ:  # as Ray creates it
        return Finding("ok", "auth", f"a token in {file}", f"if other people use this machine: chmod 600 {file}")
    return Finding("ok", "auth", f"a token in {file}")
