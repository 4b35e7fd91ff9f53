"""What workers hold, as the driver or the kernel counts it, beside what the plan says that they would."""

import shutil
import subprocess

import psutil

from benchmarks.gpu_check.settings import ALGORITHM, PROMPT_TOKENS, Round, Scale
from rlhf_ray.cluster.group import WorkerGroup
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.planning.hardware import CORE, Hardware
from rlhf_ray.planning.model_lookup import shape_of
from rlhf_ray.planning.roles import roles_of

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
    """Bytes of each role where its model lies, as `rlhf-ray plan` has them for a run with these sections."""
    config = PPOConfig.model_validate({
        "model": model, "rewards": {"main": {"type": "model", "path": model.path}},
        "prompts": {"path": "prompts.jsonl", "max_tokens": PROMPT_TOKENS}, "algorithm": ALGORITHM,
        "generator": scale.generation(a_round.apart), "policy": scale.policy(a_round.zero_stage, a_round.apart),
        "coordinator": {"prompts_per_step": scale.rows},
        "pools": {"default": scale.pool(a_round.apart).model_copy(update={"cpus": 8.0})},
    })
    roles = {role.name: role for role in roles_of(config, lambda _, field: shape_of(model, field))}
    found = {}
    for section, name in (("generator", "generator"), ("policy", "policy_learner")):
        memory = roles[section].memory(device or CORE)
        found[name] = memory.device_bytes if scale.gpu else memory.host_bytes
    return found
