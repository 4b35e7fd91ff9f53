"""The run, the cluster, pools, the placement of roles, and what other packages than `roles` know about a role."""

from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import Field, model_validator

from rlhf_ray.config.paths import UserPath
from rlhf_ray.config.section import Section


class RunConfig(Section):
    """Output directory, number of steps and seed of the run."""

    dir: UserPath = "runs/default"
    """Directory for everything that the run writes; created if missing."""
    steps: int = Field(100, ge=1)
    """Total number of updates, counted from the beginning also after a resume."""
    epochs: float | None = Field(None, gt=0)
    """Passes over the training rows (of PPO: prompts) in place of `steps`, which becomes as many updates as these rows
    fill, rounded up. The rows of a mix add up. Their number is counted before the run starts."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of new weights, data order and sampling. `evaluation.seed` is separate, so that runs can be compared."""
    upload: UserPath | None = None
    """Directory to which checkpoints (each read back and verified), metrics, report and model are copied during the
    run: an fsspec path used by this run only, such as s3://bucket/runs/mine. --resume fetches missing files from it.
    Credentials are taken from the environment."""
    auto_resume: bool = False
    """Restart the run with --resume if its process died (killed, out of memory) or lost a worker, as long as each
    attempt saves a new checkpoint; and if it lost the cluster at `cluster.address`, once that responds again. Ctrl-C,
    SIGTERM and SIGHUP end it."""

    @property
    def length(self) -> str:
        """The number of steps, or of epochs, as text."""
        number, unit = (self.steps, "step") if self.epochs is None else (self.epochs, "epoch")
        return f"{number:g} {unit}{'' if number == 1 else 's'}"

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> "RunConfig":
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ValueError(f"epochs={self.epochs:g} and steps={self.steps} both set the number of updates; leave one "
                             "of them out")
        return self


class PoolConfig(Section):
    """A named set of equal bundles of resources; roles that name the same pool share it."""

    bundles: int = Field(1, ge=1)
    """Bundles in the pool; each is placed on one node."""
    cpus: float = Field(1.0, ge=0)
    """Logical CPUs in each bundle."""
    gpus: int = Field(0, ge=0)
    """GPUs in each bundle."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom resources in each bundle, by the names given to `ray start --resources`."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Ray's placement-group strategy for the bundles."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels that a bundle's node must have, such as {"ray.io/accelerator-type": "H100"}; Ray's "!H100", "in(H100,
    H200)" and "!in(...)" are supported."""

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one bundle by Ray's names."""
        amounts = {"CPU": self.cpus, "GPU": float(self.gpus), **self.resources}
        return {kind: amount for kind, amount in amounts.items() if amount}

    @model_validator(mode="after")
    def _something_to_reserve(self) -> "PoolConfig":
        for kind, amount in self.resources.items():
            if kind in ("CPU", "GPU"):
                raise ValueError(f"resources.{kind}: use {kind.lower()}s, from which roles reserve their share")
            if amount <= 0:
                raise ValueError(f"resources.{kind}={amount:g} reserves nothing; give a positive amount or remove it")
        if not self.bundle:
            raise ValueError("cpus=0 and gpus=0 leave nothing to reserve; set cpus above 0 (0.01 suffices)")
        return self


class ClusterConfig(Section):
    """The Ray cluster: a private local one by default, or an existing one by address."""

    address: str | None = None
    """Ray address to join ("auto", "host:6379"). If empty, a private local cluster is started, and RAY_ADDRESS is
    ignored."""
    allow_open: bool = False
    """Join a cluster that others can reach and that has no authentication; only where the network is closed."""
    object_store_mb: int = Field(512, ge=100)
    """Object-store memory of a local cluster, in MiB."""
    dashboard: bool = True
    """Start Ray's dashboard (on 127.0.0.1) with a local cluster."""
    metrics_port: int | None = Field(None, ge=1024, le=65535)
    """Port of a local cluster's Prometheus endpoint; chosen by Ray if empty."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Timeout for starting a local cluster, placing pools and for workers to become ready; with `run.auto_resume` also
    for a lost cluster to respond again."""
    nodes_may_join: bool = False
    """Wait up to `start_timeout_s` for pools that the present nodes cannot hold, because an autoscaler or a scheduler
    may add nodes. If false, such pools are refused at once."""
    call_timeout_s: float = Field(1800.0, gt=0)
    """Timeout of any single call to a ready worker, and of its ranks waiting for each other."""
    heartbeat_timeout_s: float = Field(300.0, ge=5)
    """How long a worker with work may send no heartbeat (a generator: or no token) before it counts as hung and is
    replaced. vLLM allows one model step the same time (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)."""
    disk_timeout_s: float = Field(600.0, gt=0)
    """How long the disk of `run.dir` may make no progress (no file and no 64 MiB flushed) before it counts as hung and
    the run ends, to be resumed. A slow disk that makes progress does not end the run."""
    max_restarts: int = Field(3, ge=0)
    """Consecutive immediate restarts of a generator, scorer, assembler, ranker or prompt reader without a completed
    call in between. Further restarts are delayed while others of its role work; without any, one more loss ends the
    run. The default is that of torchelastic."""
    max_learner_restarts: int = Field(1, ge=0)
    """Maximum consecutive restarts of all learners from the last checkpoint without a new one in between; one more
    loss ends the run (with 0, the first)."""
    derived: list[str] = Field(default_factory=list)
    """Fields of this configuration that nobody set: the run derived their values from the GPUs of its machines, and
    names them here in its config.yaml. A resume keeps the values if its machines can give them."""


class PlacementConfig(Section):
    """Pool, number and resources of the workers of a role."""

    pool: str = "default"
    """Name of the pool, one of `pools`."""
    workers: int = Field(1, ge=1)
    """Processes of this role."""
    cpus: float = Field(0.1, ge=0)
    """Logical CPUs each worker reserves in its pool."""
    gpus: float = Field(0.0, ge=0)
    """The GPU, or a fraction of one, that each worker reserves in its pool."""
    threads: int = Field(1, ge=1)
    """Compute threads of each worker. On CPUs keep the sum close to the number of cores: oversubscription halves
    speed."""

    @property
    def replica_size(self) -> int:
        """Workers that hold one copy of the role's models together, and make every call together."""
        return 1

    @property
    def is_sharded(self) -> bool:
        """Whether a worker holds shards of parameters and gathers them for each pass (ZeRO-3)."""
        return self.replica_size > 1


Station = Literal["generation", "scoring", "assembly", "learning"]
"""A part of the circle in which experience travels: from generators over scorers, assemblers and learners, and with new
weights back to the generators."""
STATIONS: tuple[Station, ...] = get_args(Station)
"""All stations, downstream."""


@dataclass(frozen=True, kw_only=True)
class RoleFacts:
    """What the planner, the metrics, the report and the checks of files know about a role. Written in the annotation of
    the section that has the role's placement; `config.stages.role_facts` reads it from there.

    Example:
        >>> PPOConfig.model_fields["reference"].metadata
        [RoleFacts(worker='reference_scorer', station='scoring', phase='reference', ...)]
    """

    worker: str
    """Name of the role's workers, in metrics, faults and the dashboard."""
    station: Station
    """Where the role works. An idle worker is said to wait for the nearest busy station upstream."""
    phase: str = ""
    """Name of its work in metrics: the seconds of a step are `time/<phase>`. Empty in stages that do not measure it."""
    passes: str = ""
    """Name of the forward passes that a learner makes for the assembler, likewise; empty for other roles."""
    advice: str = ""
    """What makes the role faster, as the report says it when the role limits the run."""
    colour: str = "assembler"
    """Its colour in charts, a variable of report.css."""
    writes: bool = False
    """Whether its workers write into the run's directory, so that their nodes must see it."""
