"""The episode runner: plays the episodes of chunks, with generators that sample and environments that answer.

Its coroutines only wait: generators are workers of their own, and environments live in processes of their own.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol, cast

from rlhf_ray.config.derived import Derived
from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.data.answers import stop_tokens
from rlhf_ray.data.chat import template_options
from rlhf_ray.data.prompts import prompt_of, sample_seed
from rlhf_ray.data.turn_template import TurnTemplate
from rlhf_ray.environments.pool import EnvironmentPool
from rlhf_ray.errors import DataError, ReplayDiverged, WorkerBroken
from rlhf_ray.gateway.server import Gateway
from rlhf_ray.models.config_json import pretrained_config
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.models.stop_tokens import named_stop_tokens
from rlhf_ray.records import Episode, Prompts, Rollout, SampleKey
from rlhf_ray.roles.agent_attempt import AgentAttempt
from rlhf_ray.roles.engines.interface import Completion, SampleRequest
from rlhf_ray.roles.engines.vllm_tool_calls import tool_call_parser
from rlhf_ray.roles.episode import Activity, Attempt, Ended, SampleTurn, TextTools, environment_seed
from rlhf_ray.roles.episode_journal import SUFFIX, Journal, JournalPlace, Needed, RecordedOutcome
from rlhf_ray.roles.episode_record import EpisodeRecord, RecordMisfit
from rlhf_ray.roles.generator import Generator
from rlhf_ray.roles.rollout_rows import Segment, rollout_of

OVERFLOWS = ("truncated_turn", "truncated_episode", "truncated_turns")
FINISHES = {"completed": "stop", **dict.fromkeys(OVERFLOWS, "length")}
"""Finish reason of an episode's last row by its cause; that of others is "abort"."""
POLICY_OF_CAUSE = {"error_parse": "parse", "error_timeout": "timeout", "error_environment": "environment",
                   "error_agent": "agent",
                   **dict.fromkeys(OVERFLOWS, "overflow")}
"""Field of `on_failure` by cause."""
WATCH_S = 10.0
"""How often a runner asks its own gateway, while episodes are open."""
MOST_DIVERGED = 5
"""An episode is begun again so many times because its environment was lost with a neighbour and cannot be replayed;
then it has failed."""


class Generators(Protocol):
    """The generators, as a worker of another role calls them (`workers.peers.PeerGroup`)."""

    async def call(self, method: Any, *args: Any, work: int = 1, sticky: Hashable = None, **named: Any) -> Any:
        """The result of a method of `Generator` at one of them."""


class EpisodeRunner:
    """Plays episodes. An episode follows from its key, the run's seed, the weights and its environment alone, whichever
    generator and process it meets.

    Example:
        runner = EpisodeRunner({"tools": EnvironmentConfig(path="my_env.py:Calculator")}, model, sampling, generators)
        await runner.start()
        rollout = await runner.play(prompts, keys, run_seed=0)
        rollout.episodes[0].cause  # "completed"
    """

    def __init__(
        self, environments: Mapping[str, EnvironmentConfig], model: ModelConfig, sampling: SamplingConfig,
        generators: Generators, column: str = "environment", name: str = "episode_runner/0", least_scored: int = 1,
        gateway_host: str = "127.0.0.1",
    ) -> None:
        """
        Args:
            model: whose tokenizer and chat template are used.
            sampling: of a turn.
            column: of the prompts' rows that names the environment, if there are several.
            least_scored: a prompt of which fewer samples have a reward is quarantined: 2 where they are compared.
            gateway_host: address at which agents reach the policy, if there are agents.
        """
        self._environments = dict(environments)
        self._model = model
        self._sampling = sampling
        self._generators = generators
        self._column = column
        self._name = f"{name}/{secrets.token_hex(4)}"  # generators may still have requests of the process before
        self._least_scored = least_scored
        self._numbers = count()
        self._pools = {key: EnvironmentPool(key, config) for key, config in environments.items()}
        self._slots = {key: asyncio.Semaphore(config.concurrency) for key, config in environments.items()}
        self._open: dict[int, Activity] = {}
        """By number: a sample of an evaluation may have the key of one of training."""
        self._journal: Journal | None = None
        self._warnings: list[str] = []
        self._agents: set[str] = set()
        """Names of the environments that are agents; known after the start."""
        self._gateway = Gateway(gateway_host, self._warnings.append)

    @staticmethod
    def arguments(config: PPOConfig, derived: Derived, rank: int) -> Mapping[str, Any]:
        """Arguments of a rank in a run, but for `generators`."""
        return {
            "environments": config.environments,
            "model": config.model,
            "sampling": config.generator.sampling,
            "column": config.episode_runner.column,
            "gateway_host": config.episode_runner.gateway_host,
            "name": f"episode_runner/{rank}",
            "least_scored": 2 if config.algorithm.compares_groups else 0,
        }

    async def start(self) -> dict[str, Any]:
        """Load the tokenizer and the environments, and let agents reach the policy; returns facts about each, by name.

        Raises:
            ModelError: the tokenizer has no chat template.
            ConfigError: an environment's `tool_format` is none, or the gateway cannot listen at its address.
            EnvironmentFailed: an environment cannot be loaded, or the gateway did not start.
        """
        tokenizer = load_tokenizer(self._model)
        named = named_stop_tokens(tokenizer, self._model)
        template = TurnTemplate(tokenizer, named)
        stops = stop_tokens(tokenizer, named)
        vocabulary = pretrained_config(self._model).vocab_size

        def decode(tokens: Any) -> str:
            return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

        facts = dict(zip(self._pools, await asyncio.gather(*(pool.start() for pool in self._pools.values())),
                         strict=True))
        self._texts = {
            name: TextTools(template, tool_call_parser(config.tool_format, tokenizer), decode, stops, vocabulary)
            for name, config in self._environments.items()}
        self._agents = {name for name, each in facts.items() if each.shape == "agent"}
        if self._agents:
            await self._gateway.start()
        return facts

    async def play(
        self, prompts: Prompts, keys: list[SampleKey], run_seed: int, sampling: SamplingConfig | None = None,
        held_out: bool = False, journal: JournalPlace | None = None,
    ) -> Rollout:
        """One episode per key, in the order of `keys`.

        Args:
            prompts: the rows of the data set that the keys refer to (each once), matched by `prompts.rows`.
            sampling: overrides the configured sampling, as for evaluation.
            held_out: for an evaluation, which has no quarantine: an episode that failed is masked.
            journal: where the episodes are recorded; None: nowhere.

        Raises:
            DataError: a row does not say which environment, or its prompt cannot be read.
            WorkerBroken: agents cannot reach the policy any more.
            RLHFError: a generator's own error, or that none is available.
        """
        places = {row: i for i, row in enumerate(prompts.rows.tolist())}
        record_of = partial(EpisodeRecord, self._journal_of(journal), journal)
        tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._episode(
            prompts, places[key.row], key, run_seed, sampling, held_out, record_of)) for key in keys]
        all_played: asyncio.Future[list[Any]] = asyncio.gather(*tasks)
        watch: asyncio.Future[Any] = asyncio.ensure_future(self._gateway_lost())
        try:
            both: list[asyncio.Future[Any]] = [all_played, watch]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            played = all_played.result() if all_played.done() else watch.result()
        finally:  # when one raises an error, the others end before it is raised
            for task in (*tasks, watch):
                task.cancel()
            await asyncio.gather(all_played, watch, return_exceptions=True)
        rows = [row for segments, _ in played for row in segments]
        samples = [number for number, (segments, _) in enumerate(played) for _ in segments]
        masks = (sampling or self._sampling).same_distribution(self._sampling)
        episodes = [episode for _, episode in played]
        if not held_out:
            episodes = self._without_lonely(keys, episodes)
        return rollout_of(rows, keys, samples, masks, episodes)

    async def _gateway_lost(self) -> NoReturn:
        """Raise WorkerBroken when agents cannot reach the policy any more: they would wait until their deadlines."""
        while True:
            await asyncio.sleep(WATCH_S)
            if self._agents and (why := await self._gateway.out_of_reach()):
                raise WorkerBroken(f"{self._name}: the gateway for agents is out of reach: {why}")

    def _without_lonely(self, keys: list[SampleKey], episodes: list[Episode]) -> list[Episode]:
        """The episodes; those of prompts of which too few have a reward to be compared are to be quarantined."""
        causes: dict[tuple[int, int], list[str]] = {}
        scored: Counter[tuple[int, int]] = Counter()
        for key, episode in zip(keys, episodes, strict=True):
            prompt = (key.epoch, key.row)
            causes.setdefault(prompt, []).append(episode.cause)
            scored[prompt] += episode.use in ("train", "zero")
        found = []
        for key, episode in zip(keys, episodes, strict=True):
            of_prompt = causes[key.epoch, key.row]
            number = scored[key.epoch, key.row]
            if number < self._least_scored:
                failed = ", ".join(f"{each} x {many}" for each, many in Counter(of_prompt).items())
                error = episode.error or f"only {number} of {len(of_prompt)} episodes have a reward ({failed})"
                episode = replace(episode, use="quarantine", error=error)
            found.append(episode)
        return found

    def activity(self) -> list[dict[str, Any]]:
        """The open episodes: key (three numbers), environment, turn (from 1), doing (what it waits for), since_s and
        age_s in seconds."""
        now = time.monotonic()
        return [{"key": list(each.key.numbers), "environment": each.environment, "turn": each.turn + 1,
                 "doing": each.doing, "since_s": round(now - each.since, 3), "age_s": round(now - each.began, 3)}
                for each in self._open.values()]

    def printed(self) -> list[str]:
        """The lines that environments have printed since the last call, and warnings."""
        warnings = list(self._warnings)
        self._warnings.clear()
        return [*warnings, *(line for pool in self._pools.values() for line in pool.printed())]

    async def forget(self, directory: str, needed: Needed) -> str:
        """Forget the records of episodes in a directory that are not needed any more. Returns the name of the file
        there that this runner writes, or would write."""
        file = self._journal_file(directory)
        if self._journal is not None and self._journal.path == file:
            await self._journal.forget(needed.of)
        return file.name

    async def stop(self) -> None:
        """End all environments."""
        if self._journal is not None:
            self._journal.close()
        await asyncio.gather(*(pool.stop() for pool in self._pools.values()))
        if self._agents:
            await self._gateway.stop()

    def _journal_of(self, place: JournalPlace | None) -> Journal | None:
        """The journal in a directory. That in another one is closed: the run that kept it is over."""
        if place is None:
            return None
        file = self._journal_file(place.directory)
        if self._journal is None or self._journal.path != file:
            if self._journal is not None:
                self._journal.close()
            self._journal = Journal(file, self._warnings.append)
        return self._journal

    def _journal_file(self, directory: str) -> Path:
        return Path(directory) / f"{self._name.replace('/', '-')}{SUFFIX}"

    async def _episode(
        self, prompts: Prompts, place: int, key: SampleKey, run_seed: int, sampling: SamplingConfig | None,
        held_out: bool, record_of: Callable[[SampleKey], EpisodeRecord],
    ) -> tuple[list[Segment], Episode]:
        metadata = prompts.metadata[place]
        name = self._chosen(metadata, key)
        config = self._environments[name]
        messages = None if prompts.messages is None else prompts.messages[place]
        options = template_options(metadata, f"row {key.row}")
        prompt = messages or [{"role": "user", "content": prompts.texts[place]}]
        row = {"prompt": prompt_of(prompts.texts[place], messages), **metadata}
        chosen = sampling or self._sampling
        texts = self._texts[name]
        if not chosen.same_distribution(self._sampling):
            texts = replace(texts, vocabulary=0)
        seed = sample_seed(run_seed, key)
        async with self._slots[name]:
            record = record_of(key)
            recorded = await record.find()
            number = next(self._numbers)
            activity = self._open[number] = Activity(key, name, time.monotonic() - record.age_s)
            diverged = 0
            # Of all attempts together, in all processes: a step waits no longer for a sample.
            deadline = record.began + config.timeout_s.episode
            try:
                while True:
                    await record.begin(recorded)
                    begun = (key, config, chosen, texts, self._sampler(), seed, activity, dict(options), record,
                             recorded)
                    attempt: Attempt | AgentAttempt
                    attempt = AgentAttempt(*begun, self._gateway) if name in self._agents else Attempt(*begun)
                    try:
                        ended = await attempt.play(
                            self._pools[name], row, environment_seed(run_seed, key), prompt, deadline)
                    except RecordMisfit:  # so it did not continue
                        recorded = record.again(recorded, restarted=1, continued=0 if recorded.outcome else -1)
                        continue
                    except ReplayDiverged as error:
                        diverged += 1
                        if diverged <= MOST_DIVERGED:
                            recorded = record.again(recorded, interrupted=1)
                            continue
                        attempt.events["interrupted"] += 1
                        ended = attempt.ended("error_environment", str(error), prompt)
                    outcome = recorded.outcome or self._outcome(
                        config, attempt, ended, recorded.start.events, held_out,
                        may_retry=asyncio.get_running_loop().time() < deadline)
                    if outcome is not None:
                        break
                    recorded = record.again(recorded, retries=1, interrupted=attempt.events["interrupted"])
                if recorded.outcome is None:
                    await record.ended(outcome)
            finally:
                del self._open[number]
        episode = Episode(name, outcome.cause, outcome.use, attempt.messages, attempt.tools, ended.turns,
                          attempt.metrics, outcome.events, outcome.error)
        return ended.tokens.segments(seed, FINISHES.get(outcome.cause, "abort")), episode

    def _outcome(self, config: EnvironmentConfig, attempt: Attempt | AgentAttempt, ended: Ended,
                 events: Mapping[str, int], held_out: bool, may_retry: bool) -> RecordedOutcome | None:
        """How an episode has ended; None if it begins again.

        Args:
            events: of the attempts before.
        """
        retries = events.get("retries", 0) if may_retry else config.on_failure.retries
        use = self._use(config, ended, retries, held_out)
        if use == "retry":
            return None
        counted = {event: number for event, number in (attempt.events + Counter(events)).items() if number}
        return RecordedOutcome(ended.cause, use, ended.error, counted, ended.reward, dict(attempt.metrics),
                               list(ended.left_out))

    def _chosen(self, metadata: Mapping[str, Any], key: SampleKey) -> str:
        """The name of a row's environment."""
        names = list(self._environments)
        if len(names) == 1:
            return names[0]
        chosen = metadata.get(self._column)
        if chosen not in self._environments:
            raise DataError(f"row {key.row}: column {self._column!r} is {chosen!r}, and names one of the environments "
                            f"{', '.join(names)} (episode_runner.column); correct the row")
        return str(chosen)

    def _use(self, config: EnvironmentConfig, ended: Ended, retries: int, held_out: bool
             ) -> Literal["train", "mask", "zero", "quarantine", "retry"]:
        """What is done with an episode."""
        use = "train"
        if ended.cause != "completed":
            use = getattr(config.on_failure, POLICY_OF_CAUSE[ended.cause])
        if use == "retry" and retries >= config.on_failure.retries:
            use = "quarantine"
        if use != "retry" and not ended.tokens.sampled:
            use = "quarantine"
        if use == "quarantine" and held_out:
            use = "mask"
        return cast(Literal["train", "mask", "zero", "quarantine", "retry"], use)

    def _sampler(self) -> SampleTurn:
        """A function that has turns of one attempt sampled, at the generator that has the earlier ones if possible."""
        attempt = next(self._numbers)
        sticky = (self._name, attempt)

        async def sample(request: SampleRequest) -> Completion:
            work = len(request.prompt) + request.max_tokens
            # A request that is cancelled is open until the generator has confirmed that it ended.
            [completion] = await self._generators.call(Generator.sample, [request], sticky=sticky, work=work)
            return cast(Completion, completion)

        return sample
