"""A user's function as a reward source, called in a process of its own that can be killed.

The function may raise, block, crash or fill memory without affecting the reward scorer. A blocked call cannot be
interrupted inside one process (nothing stops a C function), so deadlines are enforced by killing the process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from rlhf_ray.config.rewards import FunctionReward
from rlhf_ray.data.chat import ASSISTANT
from rlhf_ray.errors import RewardError, SampleError, with_lines
from rlhf_ray.rewards.function_subprocess import COMPLETIONS
from rlhf_ray.rewards.protocol import (
    NEVER_REPLACED,
    RewardAnswer,
    RewardRequest,
    finite_scores,
    shown_sample,
)
from rlhf_ray.user_code.process import AnswerTooLong, PrintedLines, UserProcess

ARGUMENTS = ("prompts", "responses", "labels", "finish_reasons", "prefills")
"""Keyword arguments that a function may take: lists with an entry per response. Labels are the prompts' other
columns, prefills what the prompts begin of the answers."""


class FunctionSource:
    """Calls `function(prompts=..., responses=..., labels=..., finish_reasons=..., prefills=...)` for each chunk, or
    `function(prompts=..., completions=..., completion_ids=..., **columns)` if it is written for TRL."""

    def __init__(self, name: str, config: FunctionReward) -> None:
        self._who = f"the reward function {config.function!r} (rewards.{name})"
        self._keep_special_tokens = config.keep_special_tokens
        self._function = KillableFunction(self._who, config.function, ARGUMENTS, config.timeout_s, f"rewards.{name}",
                                          takes_columns=True)

    async def start(self) -> None:
        """Import the function. Raises RewardError when that fails or its signature does not fit."""
        await self._function.start()

    @property
    def columns(self) -> list[str]:
        """Columns of the prompts' rows that the function requires as arguments; known after the start."""
        taken = self._function.taken
        return [name for name in taken["required"] if name not in COMPLETIONS] if taken["columns"] else []

    async def score(self, requests: Sequence[RewardRequest]) -> RewardAnswer:
        """One score per response.

        Raises:
            RewardError: the function raised, blocked past its deadline, ended its process, or did not give one finite
                number per response; shows the prompt and the response.
        """
        given = {
            "prompts": [r.prompt for r in requests],
            "responses": [r.text(self._keep_special_tokens) for r in requests],
            "labels": [r.metadata for r in requests], "finish_reasons": [r.finish_reason for r in requests],
            "prefills": [r.prefill for r in requests],
        }
        values = await self._function.call(given, [shown_sample(r) for r in requests], self._columns_of(requests))
        return RewardAnswer(finite_scores(values, requests, self._who, "fix the function", self._function.place))

    def _columns_of(self, requests: Sequence[RewardRequest]) -> dict[str, Any]:
        """The arguments of a function that is written for TRL. A column that some rows lack is None there."""
        names = [*dict.fromkeys(name for r in requests for name in r.metadata), *self.columns]
        return {
            **{name: [r.metadata.get(name) for r in requests] for name in names},
            "prompts": [r.prompt if r.messages is None else r.messages for r in requests],
            "completions": [self._completion(r) for r in requests],
            "completion_ids": [r.tokens[r.response_mask].tolist() for r in requests],
        }

    def _completion(self, request: RewardRequest) -> str | list[dict[str, str]]:
        """The response; as a message where the prompt is messages."""
        text = request.text(self._keep_special_tokens)
        return text if request.messages is None else [{"role": ASSISTANT, "content": text}]

    def printed(self) -> list[str]:
        """The lines that the function has printed since the last call, each with the reward's name."""
        return self._function.printed.take()

    async def stop(self) -> None:
        """End its process, within a few seconds even while a call hangs."""
        await self._function.stop()


IMPORT_S = 120.0
"""Longest time for the import of a function, which may import a whole framework."""
ANSWER_BYTES = 1 << 26
"""Longest valid answer."""


class KillableFunction:
    """A function in a process of its own, one call at a time. After the process was killed, the next call restarts
    it."""

    def __init__(self, who: str, function: str, offers: Sequence[str], timeout_s: float, name: str = "",
                 takes_columns: bool = False) -> None:
        """
        Args:
            who: the function as the subject of messages.
            function: `module:name` or `file.py:name`.
            offers: names of the arguments of calls.
            timeout_s: longest wait for each call.
            name: begins each line that it prints.
            takes_columns: calls also have arguments for functions that are written for TRL.
        """
        self._who, self._function, self._offers, self._timeout_s = who, function, list(offers), timeout_s
        self._takes_columns = takes_columns
        self.taken: dict[str, Any] = {}
        """What the function takes, as `function_subprocess.accepted` has it; empty before the start."""
        self.place = ""
        """File, line and code of the function's first line, where it has one; known after the start."""
        self.printed = PrintedLines(name, who)
        """What it prints, also after its process was killed and started again."""
        self._process: UserProcess | None = None
        self._calling = False
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Id of the process; None without one."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the process and import the function.

        Raises:
            RewardError: it cannot be imported in time, or does not take the arguments.
        """
        async with self._turn:
            await self._start()

    async def call(self, arguments: dict[str, Any], samples: Sequence[str],
                   columns: dict[str, Any] | None = None) -> list[float]:
        """Call the function.

        Args:
            arguments: all of `offers`; the function gets those it takes.
            samples: the rows in words, for messages.
            columns: the arguments of a function that is written for TRL, in place of `arguments`.

        Raises:
            RewardError: it raised, ended its process, or did not answer in time; shows a sample.
        """
        async with self._turn:
            if self._process is None:
                await self._start()
            given = columns if self.taken["columns"] and columns is not None else arguments
            if not self.taken["all"]:
                given = {name: value for name, value in given.items() if name in self.taken["named"]}
            reply = await self._exchange(given, self._timeout_s, "", _culprit(None, samples), SampleError)
        if "error" in reply:
            raise SampleError(with_lines(f"{self._who} failed: {reply['error']}",
                                         _culprit(reply.get("sample"), samples), f"{NEVER_REPLACED}: fix the function"))
        return list(reply["scores"])

    async def stop(self) -> None:
        """End the process: an idle one by closing its socket, a busy one by killing it."""
        if self._process is not None:
            await self._process.end(idle=not self._calling)
            self._process = None

    async def _start(self) -> None:
        self._process = UserProcess(self._who, self.printed)
        try:
            await self._process.start("rlhf_ray.rewards.function_subprocess", RewardError)
        except RewardError:
            self._process = None
            raise
        setup = {"function": self._function, "offers": self._offers, "columns": self._takes_columns}
        reply = await self._exchange(setup, IMPORT_S, " when it was imported")
        if "error" in reply:
            await self._kill()
            raise RewardError(with_lines(f"{self._who} cannot be used: {reply['error']}", "",
                                         "Correct the name (module:name or file.py:name), or fix the function"))
        self.place = reply.pop("place")
        self.taken = reply

    async def _exchange(
        self, message: dict[str, Any], timeout_s: float, about: str, sample: str = "",
        failure: type[RewardError] = RewardError
    ) -> dict[str, Any]:
        """Send a frame and wait for the answer. On failure, kill the process and raise `failure`.

        Args:
            about: end of the sentence that describes the failure.
            sample: lines below it.
        """
        process, self._calling = self._process, True
        assert process is not None
        try:
            async with asyncio.timeout(timeout_s):
                process.send(message)
                await process.drain()
                return dict(json.loads(await process.receive(ANSWER_BYTES)))
        except TimeoutError:
            await self._kill()
            raise failure(with_lines(f"{self._who} gave no answer within {timeout_s:g} s{about}; its process was "
                                     "killed", sample, "Make it faster, or raise timeout_s")) from None
        except AnswerTooLong as error:
            await self._kill()
            raise failure(f"{self._who} {error}; fix the function") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            ending = await process.ending()
            await self._kill()
            raise failure(with_lines(f"{self._who} {ending}{about}", sample,
                                     f"{NEVER_REPLACED}: fix the function")) from None
        except BaseException:  # such as cancellation: the answer to this call must not be read as that of the next
            await self._kill()
            raise
        finally:
            self._calling = False

    async def _kill(self) -> None:
        if self._process is not None:
            await self._process.kill()
            self._process = None


def _culprit(sample: Any, samples: Sequence[str]) -> str:
    """The sample that an error names by its number, else the first: the attribute `sample` of a user's exception may be
    anything."""
    if isinstance(sample, int) and 0 <= sample < len(samples):
        return samples[sample]
    return samples[0] if len(samples) == 1 else f"{samples[0]}\n  (the first of {len(samples)} responses)"
