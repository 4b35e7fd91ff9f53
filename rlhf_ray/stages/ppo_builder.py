"""The coordinator of a PPO run, built from its parts."""

from dataclasses import dataclass

from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.cluster.session import write_timeline
from rlhf_ray.config.derived import Derived, episode_kind, experience_kind
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.best_checkpoint import BestKeeper
from rlhf_ray.coordinator.chunk_calls import ChunkCalls
from rlhf_ray.coordinator.early_stop import EarlyStop
from rlhf_ray.coordinator.episode_journals import EpisodeJournals
from rlhf_ray.coordinator.episode_watch import EpisodeWatch
from rlhf_ray.coordinator.evaluation import Evaluation, Evaluator
from rlhf_ray.coordinator.loop import Coordinator
from rlhf_ray.coordinator.pipeline import Pipeline
from rlhf_ray.coordinator.quarantine import Quarantine
from rlhf_ray.coordinator.recovery import LEDGER, Geometry, Recovery, SavePace
from rlhf_ray.coordinator.rollout_source import PromptSource
from rlhf_ray.coordinator.run_state import RunState, kl_controller
from rlhf_ray.coordinator.sample_saving import SampleSaving
from rlhf_ray.coordinator.step_profile import StepProfiler
from rlhf_ray.coordinator.stop import StopRequest
from rlhf_ray.coordinator.weight_sync import WeightSync
from rlhf_ray.data.contents import Contents
from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.observability.metric_catalogue import shown
from rlhf_ray.observability.metrics import NOTHING, MetricsWriter
from rlhf_ray.observability.progress import StageProgress
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.observability.sample_files import SampleWriter
from rlhf_ray.replay.buffer import ReplayBuffer
from rlhf_ray.replay.ledger import Ledger, discard
from rlhf_ray.replay.ledger_tables import LedgerFacts
from rlhf_ray.stages.evaluation_log import EvaluationLog
from rlhf_ray.stages.run_export import export_policy
from rlhf_ray.workers.role_groups import RoleGroups


@dataclass(frozen=True)
class CoordinatorBuilder:
    """Builds the coordinator of each attempt at a run whose workers are ready: all objects with state of the run are
    new for an attempt."""

    config: PPOConfig
    derived: Derived
    """What follows from `config`."""
    roles: RoleGroups
    weights: WeightSync
    prompts: PromptSource
    held_out: PromptSource | None
    """Prompts of the evaluation."""
    directory: RunDirectory
    store: CheckpointStore
    geometry: Geometry
    progress: StageProgress
    stop: StopRequest
    most_prompts: int | None = None
    """As in `RunState`."""
    episodes: EpisodeWatch | None = None
    """The open episodes; None without environments."""

    def build(self, metrics: MetricsWriter, evaluations: EvaluationLog, resume_at: int | None) -> Coordinator:
        """The coordinator, with everything it writes to.

        Args:
            resume_at: step of the checkpoint to continue from; NOTHING starts over, None starts a new run.
        """
        config = self.config
        derived = self.derived
        roles = self.roles
        files = self.directory.files
        progress = self.progress
        term = self.directory.term
        state = self._state()
        buffer = self._buffer()
        ledger = self._ledger(state.cursor, resume_at)
        calls = ChunkCalls(roles, derived)
        journals = self._journals(state)
        pipeline = Pipeline(config, roles, calls, state, buffer, self.prompts, ledger, self._quarantine(ledger),
                            journals)
        evaluator = None
        if config.evaluation and self.held_out:
            evaluator = Evaluator(config, derived, roles, calls, self.held_out, progress.warn_once, journals=journals)
        pace = SavePace(config.checkpoint.every_minutes)
        recovery = Recovery(self.store, roles, state, buffer, self.geometry, ledger,
                            experience_kind(config), files, pace)
        best = BestKeeper(config.checkpoint, self.directory, self.store, state.best,
                          lambda place: export_policy(coordinator, evaluations, place, term))
        profiler = StepProfiler(self.directory, roles, config.logging.profile_step, progress.note,
                                write_timeline if config.logging.task_events else None)
        if resume_at is not None:
            SampleWriter(self.directory.samples, term).cut(resume_at)
        sample_saving = SampleSaving(config.logging.samples, roles, self.prompts, self.directory.samples, term,
                                     derived.old_logprobs == "policy", progress.warn)

        def note_evaluation(step: int, evaluation: Evaluation) -> None:
            metrics.write(step, {f"eval/{name}": value for name, value in evaluation.metrics.items()})
            evaluations.add(step, evaluation)
            progress.note(f"held-out at step {step}: "
                          + ", ".join(f"{name} {value:.3g}" for name, value in shown(evaluation.metrics).items()))

        coordinator = Coordinator(
            config=config, derived=derived, roles=roles, state=state, buffer=buffer, calls=calls, pipeline=pipeline,
            weights=self.weights, recovery=recovery, evaluator=evaluator, best=best, metrics=metrics,
            sample_saving=sample_saving, progress=progress, stop=self.stop, on_evaluation=note_evaluation,
            profiler=profiler, files=files, pace=pace, episodes=self.episodes)
        return coordinator

    def _state(self) -> RunState:
        config = self.config
        cursor = PromptCursor(self.prompts.sizes, config.run.seed, config.prompts.shuffle, config.prompts.weights,
                              self.prompts.contents)
        return RunState(kl_controller(config.algorithm.kl), cursor, early_stop=EarlyStop(config.early_stop),
                        held_out=self._held_out_contents(), most_prompts=self.most_prompts)

    def _held_out_contents(self) -> Contents:
        """Digests of the evaluation's data sets; other rows of one are another data set, which a resume may name."""
        contents = self.held_out.contents if self.held_out else []
        section = self.derived.evaluation_prompts
        if section is None:
            return contents
        return [[part.selection, digest] for part, (_, digest) in zip(section.parts(), contents, strict=True)]

    def _buffer(self) -> ReplayBuffer:
        config = self.config.buffer
        coordinator = self.config.coordinator
        return ReplayBuffer(
            coordinator.samples_ahead, config.capacity_mb * 2**20 if config.capacity_mb else None,
            coordinator.max_staleness)

    def _ledger(self, cursor: PromptCursor, resume_at: int | None) -> Ledger:
        """A new ledger, or the one in the checkpoint of step `resume_at`."""
        directory = self.directory
        facts = LedgerFacts.of(self.config.coordinator, cursor, self.config.algorithm.dynamic_sampling is not None)
        if resume_at is None or resume_at == NOTHING:
            discard(directory.ledger)  # left by a run that failed before its first checkpoint
            return Ledger.create(directory.ledger, facts, directory.term, directory.files.records)
        copy = self.store.path(resume_at) / LEDGER
        return Ledger.resume(directory.ledger, copy, facts, directory.term, directory.files.records)

    def _journals(self, state: RunState) -> EpisodeJournals | None:
        """The journals of episodes; None without environments."""
        if self.roles.runners is None:
            return None
        config = self.config
        return EpisodeJournals(self.directory.episodes, self.roles.runners, state, config.coordinator.max_staleness,
                               episode_kind(config), self.directory.files.records, self.progress.note,
                               self.directory.term.number if self.directory.term else 0)

    def _quarantine(self, ledger: Ledger) -> Quarantine | None:
        """The record of prompts without a score; None when such a prompt ends the run."""
        config = self.config.reward
        directory = self.directory
        if config.on_failure == "fail" and not self.config.environments:
            return None
        return Quarantine(ledger, directory.quarantine, config.quarantine_limit, self.prompts.rows,
                          self.progress.warn_once, directory.term, directory.files.records)
