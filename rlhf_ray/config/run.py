"""The run itself and the cluster it runs on."""

from typing import Literal

from pydantic import Field, model_validator

from rlhf_ray.config.section import Section


class RunConfig(Section):
    """What this run is called, where it writes, how long it goes on."""

    dir: str = "runs/default"
    """Directory that receives everything the run writes; created if missing."""
    steps: int = Field(100, ge=1)
    """Updates to make in all, counted from the beginning also after a resume."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of new weights, data order and sampling; `evaluation.seed` alone is set apart, so that runs compare."""
    upload: str | None = None
    """Where to copy checkpoints (each read back and verified), numbers, report and model while the run goes on: a
    directory of this run's own that fsspec reaches, such as s3://bucket/runs/mine; --resume fetches from there what is
    missing here. Credentials are the environment's."""
    auto_resume: bool = False
    """Start the run again with --resume when its process died (killed, out of memory) or lost a worker, as long as each
    start makes a new checkpoint, and when it lost the cluster at `cluster.address`, once that answers again; Ctrl-C and
    SIGTERM end it."""


class PoolConfig(Section):
    """A named set of equal bundles of resources; roles that name the same pool share it."""

    bundles: int = Field(1, ge=1)
    """Bundles in the pool; each lies on one node."""
    cpus: float = Field(1.0, ge=0)
    """Logical CPUs in each bundle."""
    gpus: int = Field(0, ge=0)
    """GPUs in each bundle."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom resources in each bundle, by the names that nodes were started with (`ray start --resources`)."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """How Ray lays bundles over nodes (Ray's placement-group strategies)."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Node labels a bundle's node must carry, e.g. {"ray.io/accelerator-type": "H100"}; Ray's "!H100", "in(H100, H200)"
    and "!in(...)" are understood."""

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one bundle by Ray's names."""
        amounts = {"CPU": self.cpus, "GPU": float(self.gpus), **self.resources}
        return {kind: amount for kind, amount in amounts.items() if amount}

    @model_validator(mode="after")
    def _something_to_reserve(self) -> "PoolConfig":
        for kind, amount in self.resources.items():
            if kind in ("CPU", "GPU"):
                raise ValueError(f"resources.{kind}: use {kind.lower()}s, which roles take their share of")
            if amount <= 0:
                raise ValueError(f"resources.{kind}={amount:g} reserves nothing; give a positive amount or remove it")
        if not self.bundle:
            raise ValueError("cpus=0 and gpus=0 leave nothing to reserve; give its bundles some cpus (0.01 will do)")
        return self


class ClusterConfig(Section):
    """The Ray cluster: a private local one by default, or an existing one by address."""

    address: str | None = None
    """Ray address to join ("auto", "host:6379"); when empty, a private local cluster is started, whatever
    RAY_ADDRESS says."""
    allow_open: bool = False
    """Join a cluster that others can reach and that has no authentication; only where the network is closed."""
    object_store_mb: int = Field(512, ge=100)
    """Object-store memory of a local cluster, in MiB."""
    dashboard: bool = True
    """Start Ray's dashboard (on 127.0.0.1) with a local cluster."""
    metrics_port: int | None = Field(None, ge=1024, le=65535)
    """Port of a local cluster's Prometheus endpoint; picked by Ray when empty."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Longest wait for pools to be placed, and for workers to be ready; with `run.auto_resume` also for a cluster that
    was lost to answer again."""
    nodes_may_join: bool = False
    """Wait until `start_timeout_s` for pools that no present node could hold, since an autoscaler or a scheduler may
    add nodes; else such pools are refused at once."""
    call_timeout_s: float = Field(1800.0, gt=0)
    """Longest wait for any single call to a worker once it is ready, and of its ranks for each other."""
    heartbeat_timeout_s: float = Field(300.0, ge=5)
    """How long a worker that has work may give no sign of life (a generator: make no token) before it is taken for hung
    and replaced. vLLM gives one step of a model as long (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)."""
    disk_timeout_s: float = Field(600.0, gt=0)
    """How long the disk of `run.dir` may show no progress at all (no file, no 64 MiB of one, flushed) before it is
    taken for hung and the run ends, to be resumed; a disk that is slow and moves is waited for."""
    max_restarts: int = Field(3, ge=0)
    """Restarts in a row of a generator, scorer, assembler or prompt reader that completes no call in between; one loss
    more ends the run. The default is torchelastic's."""
    max_rebuilds: int = Field(1, ge=0)
    """Times in a row that lost learners are rebuilt from the last checkpoint although no new one was made in between;
    one loss more ends the run (0: the first)."""


class PlacementConfig(Section):
    """Where the workers of a role run and with how much of a machine."""

    pool: str = "default"
    """Name of the pool, one of `pools`."""
    workers: int = Field(1, ge=1)
    """Processes of this role."""
    cpus: float = Field(0.1, ge=0)
    """Logical CPUs each worker reserves in its pool."""
    gpus: float = Field(0.0, ge=0)
    """GPUs (or a fraction) each worker reserves in its pool."""
    threads: int = Field(1, ge=1)
    """Compute threads of each worker. On CPUs keep the sum near the number of cores: oversubscription halves speed."""
