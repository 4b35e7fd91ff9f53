"""What workers hold, as the driver or the kernel counts it, beside what the plan says that they would."""

import shutil
import subprocess

import psutil

from benchmarks.gpu_check.settings import Round, Scale
from rlhf_ray.cluster.group import WorkerGroup
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.planning.hardware import CORE, Hardware
from rlhf_ray.planning.learner_memory import Training, learner_memory
from rlhf_ray.planning.serving_memory import generator_memory
from rlhf_ray.planning.shapes import shape_of

MIB = 2**20


def held(group: WorkerGroup, gpu: bool) -> float | None:
    """Bytes of a group's first worker with all its processes: on GPUs, or in main memory that nobody else has. None
    where the driver does not tell, as in containers with process numbers of their own."""
    processes = group.processes(0)
    pids = {pid for pid, _ in processes.members} if processes else set()
    if not gpu:
        return float(sum(psutil.Process(pid).memory_full_info().uss for pid in pids if psutil.pid_exists(pid)))
    program = shutil.which("nvidia-smi") or "nvidia-smi"
    answer = subprocess.run([program, "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"],
                            capture_output=True, text=True, timeout=30, check=True)
    rows = [line.split(", ") for line in answer.stdout.splitlines() if line.strip()]
    found = [float(mib) * MIB for pid, mib in rows if int(pid) in pids and mib.isdecimal()]
    return sum(found) if found else None


def planned(scale: Scale, a_round: Round, model: ModelConfig, device: Hardware | None) -> dict[str, float]:
    """Bytes of each role where its model lies, as `rlhf-ray plan` has them."""
    shape, bucket = shape_of(model, "model"), 64.0 * MIB
    generation, policy = scale.generation(a_round.apart), scale.policy(a_round.zero_stage, a_round.apart)
    roles = {"generator": generator_memory(generation, shape, scale.context, device or CORE, bucket),
             "policy_learner": learner_memory(policy, Training(
                 shape, scale.context, scale.response / scale.context, bucket_bytes=bucket))}
    return {name: memory.device_bytes if scale.gpu else memory.host_bytes for name, memory in roles.items()}
