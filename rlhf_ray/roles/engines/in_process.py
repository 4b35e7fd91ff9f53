"""vLLM inside the generator's own process, stepped on one dedicated thread.

All access to the engine happens on that thread: callers put jobs in a queue, which the thread runs between two steps.
So new weights take effect exactly between two tokens, without locks or pauses. This takes one process and about 0.6
GB; `AsyncLLM` takes three processes and 2.5 GB.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from rlhf_ray.errors import RLHFError, WorkerBroken, WorkerError
from rlhf_ray.internals.vllm import (
    abort_samples,
    engine_in_this_process,
    open_requests,
    restored_thread_setter,
    shut_down,
    unchanged_transformers_classes,
    unfinished_tokens,
)
from rlhf_ray.records import TensorEntry, WorkerProfile
from rlhf_ray.roles.engines.interface import Completion, EngineSettings, SampleRequest, SamplingEngine
from rlhf_ray.roles.engines.stop_strings import ResponseWatch, watch_for
from rlhf_ray.roles.engines.vllm_adapter import (
    adapter_request,
    adapters_of_zeros,
    completion_of,
    engine_arguments,
    inspect_architectures,
    prompt_of,
    sampling_parameters,
)
from rlhf_ray.roles.profiling import TorchProfile

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

    from rlhf_ray.weights.double_buffer import DoubleBuffer
    from rlhf_ray.weights.weight_loaders import Routes

T = TypeVar("T")
Watched = tuple[SampleRequest, ResponseWatch | None]
"""A request, and what looks for stop strings in its response."""


class StagedBuckets:
    """One publication's tensors, which stay in the object store."""

    def __init__(self) -> None:
        self.buckets: list[list[tuple[TensorEntry, NDArray[np.uint8]]]] = []

    def add(self, tensors: Iterable[tuple[TensorEntry, NDArray[np.uint8]]]) -> None:
        """Keep a bucket's tensors."""
        self.buckets.append(list(tensors))


@dataclass
class RequestBatch:
    """The requests of one call. The call is resumed once, when all its results are ready: waking it for every request
    would make the two threads contend for Python's lock, which costs more than the work itself."""

    results: dict[str, Completion | None]
    """Results by request id, in the call's order; None until it finishes."""
    done: Future[list[Any]]
    unfinished: int

    @classmethod
    def of(cls, request_ids: Sequence[str]) -> RequestBatch:
        """A batch of unfinished requests."""
        return cls(dict.fromkeys(request_ids), Future(), len(request_ids))

    def take(self, output: Any) -> None:
        """Store the output of a finished request."""
        try:
            self.results[output.request_id] = completion_of(output)
        except Exception as error:
            self.fail(error)
        self.unfinished -= 1
        if not self.unfinished and self._awaited():
            self.done.set_result(list(self.results.values()))

    def fail(self, error: Exception) -> None:
        """Fail the call; may be called more than once."""
        if self._awaited():
            self.done.set_exception(error)

    def _awaited(self) -> bool:
        return not self.done.done() and self.done.set_running_or_notify_cancel()


class InProcessEngine(SamplingEngine):
    """vLLM's `LLMEngine` on a thread of this process."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._engine: Any = None
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._waiting: dict[str, RequestBatch] = {}
        """Batches by the id of each unfinished request."""
        self._watches: dict[str, ResponseWatch] = {}
        """By the id of each unfinished request with stop strings."""
        self._numbers = count()
        self._finished_tokens = 0
        self._dead: RLHFError | None = None
        """Why the engine makes no more steps. The thread runs jobs, which raise this, until `stop`."""
        self._stopped = False
        self._model: Any = None
        self._adapter: LoRARequest | None = None
        """The adapter of every request."""
        self._routes: Routes | None = None
        self._profile = TorchProfile()
        self._thread = threading.Thread(target=self._run, name=f"{settings.name} vLLM", daemon=True)

    async def start(self) -> None:
        self._thread.start()
        await self._on_thread(self._build)

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        watched = [(request, watch_for(request, self._settings.decode)) for request in requests]
        return [completion if watch is None else watch.cut(completion)
                for completion, (_, watch) in zip(await self._finish(watched), watched, strict=True)]

    async def fused_layers(self) -> dict[str, list[str]]:
        return dict(getattr(self._model, "packed_modules_mapping", {}))

    def open_stage(self) -> DoubleBuffer | StagedBuckets:
        """See `SamplingEngine.open_stage`. On CPUs the buckets are loaded into a second set of weights; adapters are so
        small that they are loaded between two tokens."""
        if self._settings.generation.gpus > 0 or self._settings.adapters:
            return StagedBuckets()
        from rlhf_ray.weights.double_buffer import DoubleBuffer
        from rlhf_ray.weights.weight_loaders import Routes

        if self._routes is None:
            self._routes = Routes(self._model, self._engine.model_config.hf_config, self._settings.shapes)
        return DoubleBuffer(self._routes, self._settings.generation.threads)

    async def apply(self, stage: DoubleBuffer | StagedBuckets, version: int) -> float:
        return await self._on_thread(lambda: self._apply(stage, version))

    async def end_orphans(self) -> int:
        return await self._on_thread(self._end_orphans)

    async def abort_samples(self) -> None:
        await self._on_thread(lambda: self._end_samples(self._waiting))

    def tokens_made(self) -> int:
        return self._finished_tokens + unfinished_tokens(self._engine)

    async def begin_profile(self) -> None:
        """See `SamplingEngine.begin_profile`. The profiler records the thread that starts it."""
        await self._on_thread(self._profile.begin)

    async def end_profile(self, trace: Path) -> WorkerProfile | None:
        return await self._on_thread(lambda: self._profile.end(trace))

    async def drop_profile(self) -> None:
        await self._on_thread(self._profile.drop)

    async def stop(self) -> None:
        if self._thread.is_alive():
            done: Future[None] = Future()
            self._jobs.put((self._shut_down, done))
            await asyncio.wrap_future(done)
            await asyncio.to_thread(self._thread.join, 10)

    # On the caller's thread.

    async def _on_thread(self, work: Callable[[], T]) -> T:
        self._require_thread()
        done: Future[T] = Future()
        self._jobs.put((lambda: self._run_alive(work), done))
        return await asyncio.wrap_future(done)

    async def _finish(self, requests: list[Watched]) -> list[Completion]:
        if not requests:
            return []
        self._require_thread()
        batch = RequestBatch.of([str(next(self._numbers)) for _ in requests])
        self._jobs.put((lambda: self._add(batch, requests), Future()))
        try:
            return await asyncio.wrap_future(batch.done)
        except BaseException:
            await self._aborted(list(batch.results))
            raise

    async def _aborted(self, request_ids: list[str]) -> None:
        """Abort requests, and wait until the engine does not have them, even if this call is cancelled again."""
        if self._dead is not None:
            return
        aborted: Future[None] = Future()
        self._jobs.put((lambda: self._run_alive(lambda: self._abort(request_ids)), aborted))
        waiting = asyncio.wrap_future(aborted)
        while not waiting.done():
            with suppress(asyncio.CancelledError):  # the caller raises the first one
                await asyncio.wait([waiting])
        if not waiting.cancelled():
            waiting.exception()  # an engine that died meanwhile has no requests

    def _require_thread(self) -> None:
        if self._dead is not None or not self._thread.is_alive():
            raise self._dead or WorkerError(f"{self._settings.name}: vLLM's thread is not running; call start "
                                             "first")

    # On the engine's thread.

    def _run(self) -> None:
        with eager_mode(self._settings.generation.gpus == 0):
            while not self._stopped or not self._jobs.empty():
                if self._jobs.empty() and self._busy():
                    self._step()
                else:
                    self._run_job(*self._jobs.get())

    def _busy(self) -> bool:
        return self._dead is None and self._engine is not None and self._engine.has_unfinished_requests()

    def _run_alive(self, work: Callable[[], T]) -> T:
        if self._dead is not None:
            raise self._dead
        return work()

    def _run_job(self, work: Callable[[], Any], done: Future[Any]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            self._die(WorkerBroken(f"{self._settings.name}: vLLM failed in a step and must be restarted: "
                                   f"{type(error).__name__}: {error}"))
            return
        for output in outputs:
            if output.finished:
                self._hand_over(output)
            elif self._watches[output.request_id].ended(output.outputs[0].token_ids):
                self._end_samples([output.request_id])

    def _hand_over(self, output: Any) -> None:
        """Pass the output of a finished request to its batch."""
        if output.prompt_logprobs is None:
            self._finished_tokens += len(output.outputs[0].token_ids)
        self._watches.pop(output.request_id, None)
        waiting = self._waiting.pop(output.request_id, None)
        if waiting is not None:
            waiting.take(output)

    def _build(self) -> None:
        with quiet_start(), restored_thread_setter():
            # For this thread permanently; torch may have been imported before `OMP_NUM_THREADS` was set.
            torch.set_num_threads(self._settings.generation.threads)
            inspect_architectures(self._settings)
            self._adapter = adapter_request(self._settings)
            config = engine_arguments(self._settings).create_engine_config()
            gc.freeze()  # vLLM collects garbage five times as it starts; imported modules need no scan
            try:
                with unchanged_transformers_classes(self._settings.architectures):
                    self._engine = engine_in_this_process(config)
            except Exception:
                self._release()  # vLLM's state of this process, which would fail the next engine
                raise
            self._engine.set_weight_version("0")
            [self._model] = self._engine.apply_model(lambda model: model)
            if self._settings.adapters:
                stage = StagedBuckets()
                stage.add(adapters_of_zeros(self._settings.adapters))
                self._load(stage)

    def _add(self, batch: RequestBatch, requests: list[Watched]) -> None:
        if self._dead is not None:
            batch.fail(self._dead)
            return
        try:
            for request_id, (request, watch) in zip(batch.results, requests, strict=True):
                self._engine.add_request(request_id, prompt_of(request.prompt), sampling_parameters(request),
                                         lora_request=self._adapter, priority=request.priority)
                self._waiting[request_id] = batch
                if watch:
                    self._watches[request_id] = watch
        except Exception as error:
            batch.fail(error)

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
            self._watches.pop(request_id, None)
        self._engine.abort_request(request_ids)

    def _end_orphans(self) -> int:
        self._abort(list(open_requests(self._engine) - self._waiting.keys()))
        return len(open_requests(self._engine))

    def _end_samples(self, request_ids: Iterable[str]) -> None:
        """Return the requests' tokens so far to their callers, and abort them."""
        for output in abort_samples(self._engine, request_ids):
            self._hand_over(output)

    def _apply(self, stage: DoubleBuffer | StagedBuckets, version: int) -> float:
        began = time.perf_counter()
        if not isinstance(stage, StagedBuckets):
            stage.require_complete_layers()
        try:
            if isinstance(stage, StagedBuckets):
                self._load(stage)
            else:
                stage.swap()
            self._engine.reset_prefix_cache(reset_running_requests=True)
            self._engine.set_weight_version(str(version))
            return time.perf_counter() - began
        except Exception as error:
            broken = WorkerBroken(
                f"{self._settings.name}: vLLM failed while loading weights version {version} and must be restarted: "
                f"{type(error).__name__}: {error}"
            )
            self._die(broken)
            raise broken from error

    def _load(self, kept: StagedBuckets) -> None:
        from rlhf_ray.weights.object_store_backend import bucket_info

        buckets = [bucket_info([entry for entry, _ in tensors], [array for _, array in tensors])
                   for tensors in kept.buckets]
        if self._settings.adapters:
            self._engine.collective_rpc("load_adapter", args=(buckets, self._settings.adapters.rank))
            return
        self._engine.collective_rpc("start_weight_update")
        for info in buckets:
            self._engine.collective_rpc("update_weights", kwargs={"update_info": info})
        self._engine.collective_rpc("finish_weight_update")

    def _shut_down(self) -> None:
        self._die(WorkerError(f"{self._settings.name} was stopped"))
        try:
            if self._engine is not None:
                shut_down(self._engine)
                self._engine = self._model = self._routes = None
                self._release()
        finally:
            self._stopped = True

    def _release(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()

    def _die(self, error: RLHFError) -> None:
        self._dead = error
        for waiting in self._waiting.values():
            waiting.fail(error)
        self._waiting.clear()


def eager_mode(wanted: bool) -> AbstractContextManager[Any]:
    """Disables torch.compile, even if torch was imported before `TORCH_COMPILE_DISABLE` was set."""
    return torch.compiler.set_stance("force_eager") if wanted else nullcontext()


@contextmanager
def quiet_start() -> Iterator[None]:
    """Disable garbage collection during thousands of imports (a sixth of the time), and vLLM's own warnings."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)
            yield
    finally:
        if collecting:
            gc.enable()
