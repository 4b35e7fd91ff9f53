"""What holds programs back that a policy wrote, and what they may use."""

from typing import Any, Literal

from pydantic import Field

from rlhf_ray.config.section import Section


class SandboxConfig(Section):
    """How programs of the policy are run."""

    memory_mib: int = Field(1024, ge=128)
    """Memory of a program, in MiB: address space of each of its processes, and where a cgroup can be made, what all use
    together. The default is that of verl's `sandbox_fusion.memory_limit_mb`."""
    disk_mib: int = Field(64, ge=1)
    """Files of a program, in MiB, each counted as 4 KiB at least."""
    output_kib: int = Field(1024, ge=1)
    """What a program may print to stdout, and to stderr, in KiB; beyond it, it is killed."""
    max_processes: int = Field(1, ge=1)
    """Processes of a program, with their threads. With 1 it can start no other process; more require that the worker
    runs as root."""
    allow_missing: list[Literal["landlock", "seccomp", "uid"]] = Field([])
    """What programs may run without where it is missing: "landlock" holds them back from files, "seccomp" from the
    network and other processes, "uid" from what belongs to root. Empty: a run does not start without it."""

    @property
    def limits(self) -> dict[str, Any]:
        """The fields, as `user_code.sandbox.Limits` takes them."""
        return self.model_dump(mode="json")
