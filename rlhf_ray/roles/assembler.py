"""Builds experience from rollouts and their scores: KL, token rewards, advantages, returns."""

import errno
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_ray.algorithms.advantage_estimators import ScoredResponses, estimate_counted
from rlhf_ray.algorithms.dynamic_sampling import scores_differ
from rlhf_ray.algorithms.kl import approx_kl
from rlhf_ray.algorithms.logprob_gap import gap_histogram
from rlhf_ray.algorithms.score_shaping import length_adaptive_lambda, overlong_penalty
from rlhf_ray.checkpoint.disk_space import is_disk_full
from rlhf_ray.checkpoint.state_files import load_experience, save_experience
from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.derived import Derived
from rlhf_ray.config.estimators import GAEEstimator
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.data.encoding import decode_after
from rlhf_ray.errors import CheckpointError
from rlhf_ray.files.writer_thread import FileThread
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.models.packing import Packing
from rlhf_ray.observability.owner_record import Term
from rlhf_ray.observability.sample_files import SampleTexts, SampleWriter, sample_table
from rlhf_ray.records import (
    EvaluationPart,
    Experience,
    ExperienceSummary,
    Prompts,
    RewardScores,
    RewardTerms,
    Rollout,
    SampleKey,
    Scores,
    Sifted,
    TokenScores,
    Turn,
    row_indices,
)
from rlhf_ray.rewards.protocol import finished, rollout_texts
from rlhf_ray.roles.episode_numbers import episode_numbers
from rlhf_ray.roles.evaluation_metrics import bigram_codes, pass_rates, stable_hash, summarise
from rlhf_ray.roles.micro_batch import split_scores

OF_LEARNERS = ("old_logprobs", "advantages")
"""Columns of samples/ that no sample of an evaluation has."""


class Assembler:
    """The last stage before the replay buffer, and the writer of the samples that were trained on. No result of a call
    depends on earlier ones."""

    def __init__(self, algorithm: AlgorithmConfig, model: ModelConfig, longest: int,
                 disk_timeout_s: float = float("inf"), reward_weights: Mapping[str, float] | None = None) -> None:
        """
        Args:
            longest: the maximum number of tokens of a response, at which the overlong penalty is full.
            reward_weights: of the components of the scores, by name; read by the estimator gdpo.
            disk_timeout_s: longest time without progress of writing samples.
        """
        self.algorithm = algorithm
        self._model = model
        self._longest = longest
        self._reward_weights = dict(reward_weights or {})
        self._thread = FileThread("samples", disk_timeout_s)
        self._token_texts: dict[int, str] = {}
        """Tokens that were decoded, by id."""

    @staticmethod
    def arguments(config: PPOConfig, derived: Derived, rank: int) -> Mapping[str, Any]:
        """Arguments of a rank in a run."""
        return {
            "algorithm": config.algorithm,
            "model": config.model,
            "longest": derived.longest_response if config.environments else config.generator.sampling.max_tokens,
            "disk_timeout_s": config.cluster.disk_timeout_s,
            "reward_weights": {name: source.weight for name, source in config.rewards.items()},
        }

    def start(self) -> None:
        """Load the tokenizer, which decodes the texts of samples."""
        self._tokenizer = load_tokenizer(self._model)

    def assemble(
        self, terms: RewardTerms, rollouts: Sequence[Rollout], rewards: Sequence[RewardScores],
        reference: TokenScores | None, old_logprobs: Sequence[TokenScores], values: Sequence[TokenScores],
    ) -> tuple[Experience | list[ExperienceSummary], ...]:
        """Experience of rollouts that were scored together.

        Args:
            terms: numbers of the run so far that enter the rewards.
            rewards: those of each rollout.
            reference: the reference's log-probabilities of the concatenated rows of all rollouts; None where nothing
                needs them: no KL is then measured or penalised.
            old_logprobs: the policy's log-probabilities, each rank's contiguous share of the concatenated rows; if
                empty, the generator's are the old ones.
            values: the critic's values, likewise; empty without a critic.

        Returns:
            each rollout's experience, followed by a list of the summaries.
        """
        def of_each(shares: Sequence[TokenScores]) -> Sequence[TokenScores | None]:
            """A column that ranks share, for each rollout."""
            return split_scores(TokenScores.concat(shares), rollouts) if shares else [None] * len(rollouts)

        columns = zip(rollouts, rewards, of_each([] if reference is None else [reference]), of_each(old_logprobs),
                      of_each(values), strict=True)
        experiences = []
        summaries = []
        for rollout, its_rewards, its_reference, its_policy, its_values in columns:
            if its_policy is None:
                its_policy = TokenScores(offsets=np.asarray(rollout.offsets), values=rollout.logprobs)
            scores = Scores(rewards=its_rewards, reference=its_reference, policy=its_policy, values=its_values)
            experiences.append(self._experience(rollout, scores, terms))
            summaries.append(self._summary(rollout, scores, experiences[-1]))
        return (*experiences, summaries)

    async def save_samples(
        self, directory: str, term: Term | None, step: int, prompts_saved: int | None, old_known: bool,
        summaries: Sequence[ExperienceSummary], prompts: Prompts, experiences: Sequence[Experience],
    ) -> tuple[int, float]:
        """Write the samples of a step to the samples/ folder `directory`, in a thread: other calls run meanwhile.

        Args:
            prompts_saved: save the samples of the first prompts only; None for all.
            old_known: whether a learner computed the old log-probabilities.
            summaries: of each experience.
            prompts: the samples' prompts, in any order.

        Returns:
            the size of the file in bytes, and the seconds that it took.

        Raises:
            DiskStalled: the disk made no progress for too long.
            CheckpointError: it is full.
            SupersededError: another driver owns the run now.
        """
        return await self._thread.run(self._save_samples, Path(directory), term, step, prompts_saved, old_known,
                                      summaries, prompts, experiences)

    def _save_samples(
        self, directory: Path, term: Term | None, step: int, prompts_saved: int | None, old_known: bool,
        summaries: Sequence[ExperienceSummary], prompts: Prompts, experiences: Sequence[Experience],
    ) -> tuple[int, float]:
        numbers = _numbers_of(summaries)
        return self._write_samples(directory, term, step, prompts_saved, () if old_known else ("old_logprobs",),
                                   Experience.concat(experiences), numbers, prompts)

    async def save_evaluated(
        self, directory: str, term: Term | None, prompts_saved: int | None, on_policy: bool, prompts: Prompts,
        rollouts: Sequence[Rollout], rewards: Sequence[Sequence[RewardScores]],
        references: Sequence[TokenScores | None],
    ) -> tuple[int, float]:
        """Write the samples of an evaluation, as step 0; they have no advantages. The rest is as in `save_samples`.

        Args:
            on_policy: as of `evaluation_metrics.summarise`: only then their KL is known.
            rollouts: of each chunk.
            rewards: of each chunk, as `RewardScorer.score_each` returns them.
            references: of each chunk; None without a reference.
        """
        return await self._thread.run(self._save_evaluated, Path(directory), term, prompts_saved, on_policy, prompts,
                                      rollouts, [scores for (scores,) in rewards], references)

    def evaluated_samples(
        self, prompts: Prompts, rollouts: Sequence[Rollout], rewards: Sequence[RewardScores]
    ) -> list[dict[str, Any]]:
        """What `save_evaluated` would write, as rows; without a reference."""
        experience, numbers = _evaluated(rollouts, rewards, [None] * len(rollouts), False)
        texts = self._sample_texts(experience, prompts)
        return sample_table(0, experience, texts, numbers, OF_LEARNERS).to_pylist()

    def _save_evaluated(
        self, directory: Path, term: Term | None, prompts_saved: int | None, on_policy: bool, prompts: Prompts,
        rollouts: Sequence[Rollout], rewards: Sequence[RewardScores], references: Sequence[TokenScores | None],
    ) -> tuple[int, float]:
        experience, numbers = _evaluated(rollouts, rewards, references, on_policy)
        return self._write_samples(directory, term, 0, prompts_saved, OF_LEARNERS, experience, numbers, prompts)

    def _write_samples(
        self, directory: Path, term: Term | None, step: int, prompts_saved: int | None, unknown: Sequence[str],
        experience: Experience, numbers_of_all: Mapping[str, np.ndarray | None], prompts: Prompts,
    ) -> tuple[int, float]:
        began = time.perf_counter()
        groups = prompt_groups(experience.keys).numpy()
        kept = np.flatnonzero(groups < (groups.max() + 1 if prompts_saved is None else prompts_saved))
        experience = experience.select(experience.rows_of(kept))
        texts = self._sample_texts(experience, prompts)
        numbers = {name: None if values is None else values[kept] for name, values in numbers_of_all.items()}
        table = sample_table(step, experience, texts, numbers, unknown)
        try:
            size = SampleWriter(directory, term).write(step, table)
        except OSError as error:
            if is_disk_full(error, directory):
                raise CheckpointError(
                    f"the disk is full: the samples of step {step} cannot be written to {directory} "
                    f"({os.strerror(errno.ENOSPC)}). Free some space, or save fewer of them (logging.samples), then "
                    "resume with --resume") from error
            raise
        return size, time.perf_counter() - began

    def _sample_texts(self, experience: Experience, prompts: Prompts) -> SampleTexts:
        places = {row: i for i, row in enumerate(prompts.rows.tolist())}
        messages = [None if prompts.messages is None else prompts.messages[places[key.row]] for key in experience.keys]
        for token in np.unique(experience.tokens).tolist():
            if token not in self._token_texts:
                self._token_texts[token] = self._tokenizer.decode([token])
        own_prompts, responses = rollout_texts(self._tokenizer, experience, len(experience.keys))
        return SampleTexts(own_prompts, [None if each is None else json.dumps(each) for each in messages], responses,
                           self._token_texts, self._turn_texts(experience))

    def _turn_texts(self, experience: Experience) -> list[list[str]]:
        """[S] what was sampled in each turn of an episode, without special tokens; empty for single responses."""
        def text(row: int, turn: Turn) -> str:
            tokens = experience.row(row, "tokens").tolist()
            return decode_after(self._tokenizer, tokens[:turn.start], tokens[turn.start:turn.stop],
                                skip_special_tokens=True)

        if experience.episodes is None:
            return []
        return [[text(rows[turn.row], turn) for turn in episode.turns]
                for rows, episode in zip(experience.sample_rows, experience.episodes, strict=True)]

    def select_samples(self, rollout: Rollout, numbers: Sequence[int]) -> Rollout:
        """The rollout of some of the samples, by their numbers in it."""
        return rollout.select(rollout.rows_of(np.asarray(numbers, dtype=np.int64)))

    def sift(self, keys_of_each: Sequence[Sequence[SampleKey]], each_rewards: Sequence[RewardScores]) -> list[Sifted]:
        """Which samples of each rollout dynamic sampling keeps, by their rewards.

        Args:
            keys_of_each: keys of each rollout's samples.
        """
        sifted = []
        for keys, rewards in zip(keys_of_each, each_rewards, strict=True):
            parts = self._components(rewards)  # with gdpo each component tells something by itself
            scores = parts["components"][:, parts["component_weights"] != 0] if parts else torch.tensor(
                rewards.scores)[:, None]
            differ = scores_differ(scores, prompt_groups(keys)).numpy()
            others = {name: column[~differ].tolist() for name, column in rewards.numbers().items()}
            sifted.append(Sifted(np.flatnonzero(differ).tolist(), others))
        return sifted

    def keep_samples(
        self, numbers_of_each: Sequence[Sequence[int]], rollouts: Sequence[Rollout], rewards: Sequence[RewardScores],
        reference: TokenScores | None,
    ) -> tuple[Any, ...]:
        """Some samples of each of several rollouts that were scored together, and their scores.

        Args:
            numbers_of_each: numbers of each rollout's samples; a rollout without any is left out.
            rewards, reference: as in `assemble`.

        Returns:
            the other rollouts, followed by their `rewards` and `reference`.
        """
        references = [None] * len(rollouts) if reference is None else split_scores(reference, rollouts)
        kept: list[tuple[Rollout, RewardScores, TokenScores | None]] = []
        for numbers, rollout, its_rewards, its_reference in zip(
                numbers_of_each, rollouts, rewards, references, strict=True):
            if numbers:
                rows = rollout.rows_of(np.asarray(numbers, dtype=np.int64))
                tokens = row_indices(rollout.offsets, rows)
                kept.append((rollout.select(rows), its_rewards.select(np.asarray(numbers), tokens),
                             None if its_reference is None else its_reference.select(rows)))
        parts = [part for _, _, part in kept if part is not None]
        return (*(rollout for rollout, _, _ in kept), [scores for _, scores, _ in kept],
                TokenScores.concat(parts) if parts else None)

    def join(self, *shares: TokenScores) -> TokenScores:
        """Concatenate the ranks' contiguous shares of a rollout's rows."""
        return TokenScores.concat(shares)

    def save(self, path: str, experience: Experience) -> None:
        """Write buffered experience to a checkpoint."""
        save_experience(Path(path), experience)

    def load(self, path: str) -> Experience:
        """Read experience from a checkpoint; the caller has verified the file."""
        return load_experience(Path(path))

    def measure(
        self, keep_texts: int, rollout: Rollout, each_rewards: Sequence[RewardScores], reference: TokenScores | None,
        asked: Prompts | None = None,
    ) -> EvaluationPart:
        """One chunk's part of an evaluation; the policy's log-probabilities are the generator's own.

        Args:
            keep_texts: how many samples to return as text.
            asked: the samples' prompts, for the conversations among them.
            each_rewards: the rewards of this one rollout, as `RewardScorer.score_each` returns them.
        """
        (rewards,) = each_rewards
        mask = rollout.response_mask
        starts = rollout.sample_starts
        prompts, responses = rollout_texts(self._tokenizer, rollout, len(rollout.keys))

        def sums(column: np.ndarray) -> np.ndarray:
            return np.add.reduceat(np.where(mask, column, 0), starts)

        return EvaluationPart(
            episodes=episode_numbers(rollout.episodes),
            rows=np.array([key.row for key in rollout.keys]), scores=rewards.scores, components=rewards.components,
            gold=rewards.gold,
            kl=None if reference is None else sums(rollout.logprobs - reference.values),
            reference_logprobs=None if reference is None else sums(reference.values),
            lengths=np.add.reduceat(mask.astype(np.int64), starts), finished=finished(rollout),
            digests=np.array([stable_hash(text) for text in responses]),
            bigrams=np.concatenate([bigram_codes(rollout.row(i, "tokens")[rollout.row(i, "response_mask")])
                                    for i in range(len(rollout))]),
            texts=[{"prompt": prompts[i], "response": responses[i], **_conversation(rollout.keys[i], asked)}
                   for i in range(min(keep_texts, len(prompts)))],
        )

    def sum_up(
        self, on_policy: bool, solved_at: Mapping[str, float], solved_by: str | None, *parts: EvaluationPart
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Metrics over all chunks of an evaluation, and the kept texts; see `evaluation_metrics`."""
        metrics = summarise(list(parts), on_policy) | pass_rates(list(parts), solved_at, solved_by)
        return metrics, [text for part in parts for text in part.texts]

    def _experience(self, rollout: Rollout, scores: Scores, terms: RewardTerms) -> Experience:
        """Advantages are estimated in grids with a row per sample: the response tokens of all its rows, in order."""
        a = self.algorithm
        mask = rollout.response_mask
        values = scores.values
        rewards = scores.rewards
        responses = Packing.of(np.add.reduceat(mask.astype(np.int64), rollout.sample_starts))
        lengths = responses.lengths

        def grid(column: np.ndarray) -> torch.Tensor:
            return responses.to_grid(torch.from_numpy(column[mask]))

        def flat(cells: torch.Tensor) -> np.ndarray:
            column = np.zeros(len(rollout.tokens), dtype=np.float32)
            column[mask] = responses.from_grid(cells).numpy()
            return column

        steps = None if rewards.token_rewards is None else grid(rewards.token_rewards)
        penalties = torch.zeros(responses.rows, responses.longest)
        if scores.reference is not None and not a.kl_in_loss:
            penalties = -terms.kl_coef * approx_kl(
                grid(scores.policy.values), grid(scores.reference.values), a.kl.estimator)
        lam: float | torch.Tensor = 1.0
        critic_lam = None
        if isinstance(a.estimator, GAEEstimator):
            alpha = a.estimator.lam_alpha
            lam = a.estimator.lam if alpha is None else length_adaptive_lambda(lengths, alpha)
            critic_lam = a.estimator.lam_critic
        scored = ScoredResponses(
            scores=self._sample_scores(rollout, _rest(rewards.scores, steps), terms, lengths),
            penalties=penalties, mask=grid(mask), groups=prompt_groups(rollout.keys),
            values=None if values is None else grid(values.values), gamma=a.gamma, lam=lam, critic_lam=critic_lam,
            step_rewards=None if steps is None else self._clipped(steps / terms.score_deviation),
            **self._components(rewards),
        )
        counted = ~np.isnan(rewards.scores)
        advantages, returns = estimate_counted(a.estimator.type, scored, torch.from_numpy(counted))
        return Experience(
            offsets=np.asarray(rollout.offsets), tokens=rollout.tokens, response_mask=mask,
            samples=rollout.samples, row_weights=rollout.row_weights, mask_sizes=rollout.mask_sizes,
            mask_tokens=rollout.mask_tokens,
            behaviour_logprobs=rollout.logprobs, old_logprobs=scores.policy.values,
            reference_logprobs=None if scores.reference is None else scores.reference.values,
            values=None if values is None else values.values,
            advantages=flat(advantages), returns=flat(returns), keys=rollout.keys, versions=rollout.versions,
            finish_reasons=rollout.finish_reasons, episodes=rollout.episodes,
            counted=None if rollout.episodes is None else counted[rollout.samples],
        )

    def _components(self, rewards: RewardScores) -> dict[str, torch.Tensor]:
        """The [S, K] components of the scores and their [K] weights, if the estimator reads them."""
        if self.algorithm.estimator.type != "gdpo":
            return {}
        columns = [torch.tensor(rewards.components[name]) for name in self._reward_weights]
        return {"components": torch.stack(columns, dim=-1),
                "component_weights": torch.tensor(list(self._reward_weights.values()), dtype=torch.float64)}

    def _sample_scores(
        self, rollout: Rollout, scores: torch.Tensor, terms: RewardTerms, lengths: torch.Tensor
    ) -> torch.Tensor:
        """[S] rewards on the last tokens: normalised scores less penalties for a response's end and length, clipped. An
        episode whose failure is given no reward ("zero") has no penalty either."""
        a = self.algorithm
        scores = (scores - terms.score_mean) / terms.score_deviation
        penalised = torch.ones_like(scores)
        if rollout.episodes is not None:
            penalised[[i for i, episode in enumerate(rollout.episodes) if episode.use == "zero"]] = 0.0
        if a.missing_eos_penalty:
            scores -= penalised * a.missing_eos_penalty * torch.from_numpy(~finished(rollout)).float()
        if a.overlong_buffer:
            scores += penalised * a.overlong_penalty * overlong_penalty(lengths, self._longest, a.overlong_buffer)
        return self._clipped(scores)

    def _clipped(self, rewards: torch.Tensor) -> torch.Tensor:
        """Each reward clipped to ± reward_clip."""
        bound = self.algorithm.reward_clip
        return rewards if bound is None else rewards.clamp(-bound, bound)

    def _summary(self, rollout: Rollout, scores: Scores, experience: Experience) -> ExperienceSummary:
        mask = rollout.response_mask
        starts = rollout.sample_starts
        reference = experience.reference_logprobs
        kl = None
        if reference is not None:
            kl = np.add.reduceat(np.where(mask, experience.old_logprobs - reference, 0), starts).astype(np.float32)
            kl[np.isnan(scores.rewards.scores)] = np.nan
        return ExperienceSummary(
            scores=scores.rewards.scores, components=scores.rewards.components,
            failures=scores.rewards.failures, kl=kl,
            response_lengths=np.add.reduceat(mask.astype(np.int32), starts), finished=finished(rollout),
            min_version=int(rollout.versions[mask].min()), nbytes=experience.nbytes, tokens=len(rollout.tokens),
            behaviour_gap=float(np.abs(experience.behaviour_logprobs - experience.old_logprobs)[mask].mean()),
            gap_histogram=gap_histogram(*(torch.from_numpy(column[mask]) for column in (
                experience.behaviour_logprobs, experience.old_logprobs, mask))).numpy(),
            gold=scores.rewards.gold, episodes=episode_numbers(rollout.episodes),
        )


def _evaluated(
    rollouts: Sequence[Rollout], rewards: Sequence[RewardScores], references: Sequence[TokenScores | None],
    on_policy: bool,
) -> tuple[Experience, dict[str, np.ndarray | None]]:
    """Samples of an evaluation in the form of those that were learned from, and their [S] numbers by column."""
    def joined(columns: Sequence[np.ndarray | None]) -> np.ndarray | None:
        known = [column for column in columns if column is not None]
        return np.concatenate(known) if known else None

    whole = Rollout.concat(rollouts)
    reference = joined([None if each is None else each.values for each in references])
    none = np.full(len(whole.tokens), np.nan, np.float32)
    experience = Experience(
        offsets=whole.offsets, samples=whole.samples, tokens=whole.tokens, response_mask=whole.response_mask,
        behaviour_logprobs=whole.logprobs, old_logprobs=none, reference_logprobs=reference, values=None,
        advantages=none, returns=none, finish_reasons=whole.finish_reasons, keys=whole.keys,
        versions=whole.versions, episodes=whole.episodes)
    kl = None
    if reference is not None and on_policy:
        gaps = np.where(whole.response_mask, whole.logprobs - reference, 0)
        kl = np.add.reduceat(gaps, whole.sample_starts)
    numbers = {"score": joined([each.scores for each in rewards]),
               **{f"reward/{name}": joined([each.components[name] for each in rewards])
                  for name in rewards[0].components},
               "kl": kl, "gold": joined([each.gold for each in rewards])}
    return experience, numbers


def _numbers_of(summaries: Sequence[ExperienceSummary]) -> dict[str, np.ndarray | None]:
    """[S] numbers of all samples by their column in samples/; NaN where some of them lack one, None where all do."""
    def joined(columns: Sequence[np.ndarray | None]) -> np.ndarray | None:
        if all(column is None for column in columns):
            return None
        return np.concatenate([np.full(len(summary.scores), np.nan, np.float32) if column is None else column
                               for summary, column in zip(summaries, columns, strict=True)])

    names = dict.fromkeys(name for summary in summaries for name in summary.components)
    return {"score": joined([summary.scores for summary in summaries]),
            **{f"reward/{name}": joined([summary.components.get(name) for summary in summaries]) for name in names},
            "kl": joined([summary.kl for summary in summaries]),
            "gold": joined([summary.gold for summary in summaries])}


def _conversation(key: SampleKey, prompts: Prompts | None) -> dict[str, Any]:
    """The messages of a sample's prompt, if it is a conversation."""
    if prompts is None or prompts.messages is None:
        return {}
    messages = prompts.messages[prompts.rows.tolist().index(key.row)]
    return {} if messages is None else {"messages": messages}


def _rest(scores: np.ndarray, steps: torch.Tensor | None) -> torch.Tensor:
    """[S] scores minus the sum of their `[S, L]` token rewards; the rest falls on the last token."""
    whole = torch.tensor(scores)
    return whole if steps is None else whole - steps.sum(-1)


def prompt_groups(keys: Sequence[SampleKey]) -> torch.Tensor:
    """[S] group numbers, equal for samples of one prompt and epoch. A chunk holds all samples of its prompts."""
    numbers: dict[tuple[int, int], int] = {}
    return torch.tensor([numbers.setdefault((key.epoch, key.row), len(numbers)) for key in keys])
