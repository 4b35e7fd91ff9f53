"""Rewards from a service over HTTP: batches, tries, and an error where others would make up a score."""

import asyncio
import os
import random
import ssl
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import SecretStr

from rlhf_ray.config.rewards import HTTPReward
from rlhf_ray.errors import ConfigError, RewardError, SampleError
from rlhf_ray.rewards.http.client import Access, FailedTry, Server
from rlhf_ray.rewards.http.health import Health, ask_health, one_model
from rlhf_ray.rewards.http.load_balancer import Balancer
from rlhf_ray.rewards.http.wire import AnswerError, idempotency_key, request_body, scores_of
from rlhf_ray.rewards.protocol import RewardAnswer, RewardRequest, sample_names

IN_FLIGHT = 4
"""Concurrent requests to each server: enough that its next batch arrives while it computes one."""
FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 10.0
OF_SAMPLES = frozenset({"http_400", "http_413", "http_422", "schema", "not_finite"})
"""Failures of a working server that are caused by the samples."""
BYTES_PER_SCORE, BYTES_OF_ANSWER = 64, 65536
"""Longest answer: twenty times the length of the scores, and the rest of the JSON."""


class HTTPSource:
    """One component of the reward, served over HTTP.

    Scoring is pure, so a repeated request does no harm; it has the same idempotency key as the first.

    Args:
        name: the component's name in `rewards`.
    """

    def __init__(self, name: str, config: HTTPReward) -> None:
        self._name, self._config = name, config
        self._balancer: Balancer | None = None
        self._digest: str | None = None

    async def start(self) -> None:
        """Connect to the servers. One that answers is enough: others may recover later.

        Raises:
            ConfigError: the token or the certificates cannot be read.
            RewardError: no server answers, or they serve different models.
        """
        await self._start(needed=1)

    async def check(self, tokenizer: str | None = None) -> None:
        """Check that every server answers, and disconnect.

        Args:
            tokenizer: digest of the policy's tokenizer; a service that receives token ids must have the same one.

        Raises:
            ConfigError: the token or the certificates cannot be read.
            RewardError: a server does not answer, or they serve different models, or another vocabulary.
        """
        try:
            for health in await self._start(needed=len(self._config.urls)):
                if self._config.send == "tokens" and tokenizer and health.tokenizer not in (None, tokenizer):
                    raise RewardError(f"rewards.{self._name}.send=tokens, but the service at {health.url} has another "
                                      "tokenizer than the policy: the same ids would mean different texts. Set "
                                      "send: text")
        finally:
            await self.stop()

    async def score(self, requests: Sequence[RewardRequest]) -> RewardAnswer:
        """Scores of the requests, sent in batches to all servers concurrently.

        Raises:
            RewardError: a batch has no scores within `retries` and `timeout_s`; names the server, the samples and the
                last failure.
        """
        batches = [requests[i : i + self._config.batch_size] for i in range(0, len(requests), self._config.batch_size)]
        failures = [Counter[str]() for _ in batches]
        tasks = [asyncio.ensure_future(self._score_in_time(*batch)) for batch in zip(batches, failures, strict=True)]
        try:
            scores = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        repeated = sum(len(batch) for batch, failed in zip(batches, failures, strict=True) if failed)
        return RewardAnswer(np.concatenate(scores), failures=repeated,
                            failure_kinds=dict(sum(failures, Counter[str]())))

    async def stop(self) -> None:
        """Close all connections."""
        balancer, self._balancer = self._balancer, None
        for server in balancer.servers if balancer else ():
            await server.close()

    async def _start(self, needed: int) -> list[Health]:
        config = self._config
        access = Access(read_token(self._name, config), tuple(config.allow_hosts), config.request_timeout_s,
                        _certificates(self._name, config))
        slots = IN_FLIGHT * len(config.urls)
        self._slots = asyncio.Semaphore(slots)
        self._balancer = Balancer([Server(url, access, slots) for url in config.urls])
        healths = await ask_health(self._name, self._balancer.servers, needed)
        self._digest = one_model(self._name, healths)
        return healths

    async def _score_in_time(self, requests: Sequence[RewardRequest], failures: Counter[str]) -> NDArray[np.float32]:
        last: list[tuple[Server, FailedTry]] = []
        try:
            async with self._slots, asyncio.timeout(self._config.timeout_s):
                return await self._score(requests, failures, last)
        except TimeoutError:
            raise self._error(requests, last, f"no scores within timeout_s={self._config.timeout_s:g}") from None

    async def _score(self, requests: Sequence[RewardRequest], failures: Counter[str],
                     last: list[tuple[Server, FailedTry]]) -> NDArray[np.float32]:
        """Tries until one succeeds; `last` collects the failed ones, for the message after a timeout."""
        body = self._body(requests)
        headers = {"Idempotency-Key": idempotency_key(requests, body)}
        for attempt in range(self._config.retries + 1):
            if attempt:
                await asyncio.sleep(_delay(attempt))
            assert self._balancer is not None, "start() comes first"
            server = None
            try:
                async with self._balancer.server() as server:
                    return await self._try(server, body, dict(headers), len(requests))
            except FailedTry as failure:
                assert server is not None
                last.append((server, failure))
                if not failure.again:
                    raise self._error(requests, last, "a retry would not help") from None
                failures[failure.kind] += 1
        raise self._error(requests, last, f"{self._config.retries + 1} tries failed")

    def _body(self, requests: Sequence[RewardRequest]) -> bytes:
        try:
            return request_body(requests, self._config.send, self._config.columns)
        except (TypeError, ValueError) as error:
            raise SampleError(f"rewards.{self._name}.columns={self._config.columns} of samples "
                              f"{sample_names([r.key for r in requests])} cannot be sent as JSON: {error}. Remove the "
                              "column or change its values") from None

    async def _try(self, server: Server, body: bytes, headers: dict[str, str], count: int) -> NDArray[np.float32]:
        answer = await server.ask("POST", "/score", body, headers,
                                  most_bytes=BYTES_OF_ANSWER + BYTES_PER_SCORE * count)
        try:
            scores, digest = scores_of(answer, count)
        except AnswerError as error:
            raise FailedTry(error.kind, f"its answer {error}") from None
        if digest != self._digest and digest is not None and self._digest is not None:
            raise FailedTry("other_model", f"its scores are of model {digest}, and the run began with {self._digest}")
        return scores

    def _error(self, requests: Sequence[RewardRequest], last: list[tuple[Server, FailedTry]],
               outcome: str) -> RewardError:
        what = "; ".join(f"{server.url}: {failure}" for server, failure in _latest_by_server(last))
        of_samples = bool(last) and all(failure.kind in OF_SAMPLES for _, failure in _latest_by_server(last))
        return (SampleError if of_samples else RewardError)(
            f"the reward service {self._name!r} gave no scores for {len(requests)} samples "
            f"({sample_names([r.key for r in requests])}): {outcome}. "
            f"{'Last, ' + what if what else 'No server was available: all of them had failed before'}. A missing score "
            f"is never replaced by a default: fix the service, or raise rewards.{self._name}.timeout_s or retries.")


def _latest_by_server(tries: list[tuple[Server, FailedTry]]) -> list[tuple[Server, FailedTry]]:
    """The last failed try of each server, the very last first."""
    return list({server.url: (server, failure) for server, failure in tries}.values())[::-1]


def _delay(attempt: int) -> float:
    """Seconds before a try: exponential backoff up to a bound, half of it random, so that callers do not retry in
    step ("equal jitter", Brooker 2015)."""
    full = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2**attempt)
    return full * (0.5 + 0.5 * random.random())


def _certificates(name: str, config: HTTPReward) -> ssl.SSLContext:
    """A TLS context that verifies certificates and names, against the system's authorities and the configured one."""
    import certifi

    context = ssl.create_default_context(cafile=certifi.where())
    context.load_default_certs()
    if config.ca_file:
        if not Path(config.ca_file).is_file():
            raise ConfigError(f"rewards.{name}.ca_file={config.ca_file!r}: no such file; correct the path")
        try:
            context.load_verify_locations(config.ca_file)
        except ssl.SSLError as error:
            raise ConfigError(f"rewards.{name}.ca_file={config.ca_file!r} contains no certificates (PEM): "
                              f"{error.reason or error}. Give another file") from None
    return context


def read_token(name: str, config: HTTPReward) -> SecretStr | None:
    """The token from the file or environment variable that the configuration names; None when it names neither.

    Raises:
        ConfigError: there is no token, or it cannot be used in a header.
    """
    if config.token_file is not None:
        where = f"rewards.{name}.token_file={config.token_file!r}"
        try:
            token = Path(config.token_file).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
            raise ConfigError(f"{where} cannot be read: {reason}; correct the path or the file") from None
    elif config.token_variable is not None:
        where = f"rewards.{name}.token_variable={config.token_variable!r}"
        token = os.environ.get(config.token_variable, "").strip()
    else:
        return None
    if not token:
        raise ConfigError(f"{where} is empty; set it on every node where reward scorers run")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{where} is not a token: give one word of printable ASCII")
    return SecretStr(token)
