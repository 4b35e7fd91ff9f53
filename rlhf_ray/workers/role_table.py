"""The role table: one row for each role of a PPO run.

A row binds the section of the configuration, beside which the role's `RoleFacts` are written, to the role's class and
to the methods that others call. The stage spawns the workers of each row whose section is used, and the coordinator
calls the frozen scorers from their rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol

from rlhf_ray.cluster.worker_environment import fixed_segments
from rlhf_ray.cluster.worker_templates import LIBRARIES, VLLM_LIBRARIES
from rlhf_ray.config.derived import Derived, placements_of
from rlhf_ray.config.run import RoleFacts
from rlhf_ray.config.stages import PPOConfig, PreferencesStageConfig, role_facts
from rlhf_ray.roles.actor_critic_learner import ActorCriticLearner
from rlhf_ray.roles.assembler import Assembler
from rlhf_ray.roles.critic_learner import CriticLearner
from rlhf_ray.roles.episode_runner import EpisodeRunner
from rlhf_ray.roles.generator import Generator, generator_environment
from rlhf_ray.roles.learner import Learner
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.roles.reference_scorer import ReferenceScorer
from rlhf_ray.roles.reward_scorer import RewardScorer
from rlhf_ray.workers.calls import Method, Role, Startable


class ConfiguredRole(Startable, Protocol):
    """A role of a PPO run: its class says which arguments it has there."""

    @staticmethod
    def arguments(config: PPOConfig, derived: Derived, rank: int) -> Mapping[str, Any]:
        """Arguments of the constructor for a rank."""


@dataclass(frozen=True)
class RoleRow(Generic[Role]):
    """A role: where it is configured, and what it is.

    Example:
        >>> RoleRow("critic", CriticLearner, shutdown=Learner.leave)
    """

    section: str
    """Section of the configuration with the role's placement, and its `RoleFacts` beside it."""
    cls: type[Role]
    """The class in `roles`."""
    shutdown: Method[Role, Any] | None = None
    """The method for a clean shutdown."""
    environment: Callable[[Any], Mapping[str, str]] | None = None
    """Computes further variables of the workers' environment from the configuration."""
    temporary_files: bool = False
    """Whether the stage removes the workers' temporary files, which they leave when they are killed."""
    peers: str | None = None
    """Section of the role whose workers it calls: its class takes their `PeerGroup` as the argument `generators`."""
    libraries: tuple[str, ...] = LIBRARIES
    """As in `WorkerGroup`."""
    wanted: Callable[[Derived], bool] | None = None
    """Chooses between rows of one section; None for the only one."""

    @cached_property
    def facts(self) -> RoleFacts:
        """What is written beside the role's section in a PPO run."""
        return role_facts(PPOConfig)[self.section]


@dataclass(frozen=True, kw_only=True)
class ScorerRow(RoleRow[Role]):
    """A role that is called as soon as chunks are generated, and whose result depends on the call alone.

    Example:
        >>> ScorerRow("reference", ReferenceScorer, method=ReferenceScorer.logprobs, column="reference")
    """

    method: Method[Role, Any]
    """Takes the columns that it reads, by name."""
    reads: tuple[str, ...] = ("rollouts",)
    """Names of the columns that it reads, of `rollouts` and `prompts`; each is a list with an item for each chunk."""
    column: str
    """Name of its result: a column of the chunks that are scored together."""
    held_out: bool = False
    """Whether an evaluation needs the column, too."""


def _vllm_settings(config: PPOConfig | PreferencesStageConfig) -> Mapping[str, str]:
    return generator_environment(config.generator)


def _segments_for_handles(config: PPOConfig) -> Mapping[str, str]:
    return fixed_segments() if config.weights.transport == "ipc" else {}


GENERATOR = RoleRow("generator", Generator, shutdown=Generator.stop, environment=_vllm_settings, temporary_files=True,
                    libraries=VLLM_LIBRARIES)
EPISODE_RUNNER = RoleRow("episode_runner", EpisodeRunner, shutdown=EpisodeRunner.stop, peers="generator")
_ROWS = (  # without a type, so that each row's methods are checked against its class
    GENERATOR,
    EPISODE_RUNNER,
    ScorerRow("reference", ReferenceScorer, method=ReferenceScorer.logprobs, column="reference", held_out=True),
    ScorerRow("reward", RewardScorer, method=RewardScorer.score_each, reads=("rollouts", "prompts"), column="rewards",
              held_out=True, shutdown=RewardScorer.stop),
    RoleRow("assembler", Assembler),
    RoleRow("policy", PolicyLearner, shutdown=Learner.leave, environment=_segments_for_handles,
            wanted=lambda derived: not derived.shares_backbone),
    RoleRow("policy", ActorCriticLearner, shutdown=Learner.leave, environment=_segments_for_handles,
            wanted=lambda derived: derived.shares_backbone),
    RoleRow("critic", CriticLearner, shutdown=Learner.leave),
)
ROLE_TABLE: tuple[RoleRow[ConfiguredRole], ...] = _ROWS
"""The roles of a PPO run, in the order in which a step calls them."""
ASSEMBLED = ("rewards", "reference", "old_logprobs", "values")
"""The columns that experience is made of, by which `Assembler.assemble` takes them. `old_logprobs` and `values` are the
learners'."""


def rows_of(config: PPOConfig, derived: Derived) -> list[RoleRow[ConfiguredRole]]:
    """The rows of the roles that a run starts."""
    sections = placements_of(config)
    return [row for row in ROLE_TABLE if row.section in sections and (row.wanted is None or row.wanted(derived))]


def scorer_rows() -> list[ScorerRow[Any]]:
    """The rows of all frozen scorers."""
    return [row for row in ROLE_TABLE if isinstance(row, ScorerRow)]
