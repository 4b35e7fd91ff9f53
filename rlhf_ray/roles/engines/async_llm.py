"""vLLM in its own processes (`AsyncLLM`): the engine for GPUs and tensor parallelism."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rlhf_ray.errors import RLHFError, WeightsError, WorkerBroken, WorkerError
from rlhf_ray.internals.vllm import open_requests, unfinished_tokens
from rlhf_ray.records import WeightOffer, WorkerProfile
from rlhf_ray.roles.engines.in_process import quiet_start
from rlhf_ray.roles.engines.interface import (
    AdapterSettings,
    Completion,
    EngineSettings,
    SampleRequest,
    SamplingEngine,
)
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
from rlhf_ray.roles.profiling import collect_vllm_trace, profiler_config
from rlhf_ray.weights.shared_files import SharedFile, StagedFiles

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest


class AsynchronousEngine(SamplingEngine):
    """vLLM's `AsyncLLM`, in processes of its own."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._engine: Any = None
        self._adapter: LoRARequest | None = None
        """The adapter of every request."""
        self._numbers = count()
        self._sampling: set[str] = set()
        """Requests in flight."""
        self._finished_tokens = 0
        self._dead: RLHFError | None = None
        self._traces = TemporaryDirectory(prefix="rlhf_ray-traces-")
        self._kept: list[SharedFile] = []
        """Files for the next publication's buckets."""
        self._loading_since: float | None = None
        """When the present direct publication began; None between publications."""

    async def start(self) -> None:
        with quiet_start():
            from vllm.v1.engine.async_llm import AsyncLLM

            inspect_architectures(self._settings)
            arguments = engine_arguments(self._settings)
            arguments.profiler_config = profiler_config(self._traces.name)
            self._engine = AsyncLLM.from_engine_args(arguments)
            self._adapter = adapter_request(self._settings)
        await self._engine.update_weight_version("0")
        if self._settings.adapters:
            stage = StagedFiles()
            stage.add(adapters_of_zeros(self._settings.adapters))
            await self._load_adapter(stage, self._settings.adapters)

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        return await asyncio.gather(*(self._sample(request) for request in requests))

    async def fused_layers(self) -> dict[str, list[str]]:
        """See `SamplingEngine.fused_layers`. Each process has part of the layers."""
        parts = await self._living().collective_rpc("fused_layers")
        return {layer: names for part in parts for layer, names in part.items()}

    def open_stage(self) -> StagedFiles:
        """See `SamplingEngine.open_stage`. vLLM's processes load the buckets during the pause, because GPUs seldom have
        memory for two sets of weights. The stage stays empty if weights come from GPU to GPU (`receive`).

        Raises:
            WorkerBroken: the previous publication was interrupted while the model was partly loaded.
        """
        if self._loading_since is not None:
            self._dead = WorkerBroken(f"{self._settings.name}: a publication was interrupted while the model was "
                                      "partly loaded; restart this generator")
            raise self._dead
        kept, self._kept = self._kept, []
        return StagedFiles(kept)

    async def connect(self, transfer: dict[str, Any]) -> None:
        """Prepare to receive from GPU to GPU; waits for the other members of a broadcast.

        Args:
            transfer: initialisation of vLLM's back-end, see `generator.transfer_info`.

        Raises:
            WorkerBroken: the connection failed.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        with self._fatal_errors("connecting for weights"):
            await self._living().init_weight_transfer_engine(WeightTransferInitRequest(init_info=transfer))

    async def receive(self, offer: WeightOffer) -> None:
        """Receive one bucket from GPU to GPU into the model; sampling pauses from the first bucket until `apply`.

        Raises:
            WorkerBroken: the bucket did not arrive intact. The model is no longer usable.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        from rlhf_ray.weights.nccl_ipc_backend import offer_info

        engine = self._living()
        with self._fatal_errors(f"loading weights version {offer.version}"):
            if self._loading_since is None:
                self._loading_since = time.perf_counter()
                await engine.pause_generation(mode="keep", clear_cache=True)
                await engine.start_weight_update()
            await engine.update_weights(WeightTransferUpdateRequest(update_info=offer_info(offer)))

    async def apply(self, stage: StagedFiles, version: int) -> float:
        engine, began = self._living(), time.perf_counter()
        staged = self._settings.transport == "object_store"
        if stage.buckets and not staged:
            raise WeightsError("a bucket of bytes arrived, but this generator receives weights from GPU to GPU; send "
                               "it offers")
        with self._fatal_errors(f"loading weights version {version}"):
            if staged and self._settings.adapters:
                await engine.pause_generation(mode="keep", clear_cache=True)
                await self._load_adapter(stage, self._settings.adapters)
                await engine.update_weight_version(str(version))
            else:
                if staged:
                    await self._load(stage)
                elif self._loading_since is not None:
                    began = self._loading_since
                await engine.finish_weight_update(weight_version=str(version))
            if stage.buckets:
                mapped = await engine.collective_rpc("mapped_files")
                self._kept = stage.unmapped({inode for of_process in mapped for inode in of_process})
            await engine.resume_generation()
        self._loading_since = None
        return time.perf_counter() - began

    async def sleep(self, level: int) -> None:
        """Free GPU memory until `wake`: the cache and the weights, which level 1 keeps in main memory.

        Raises:
            WorkerBroken: vLLM failed.
        """
        with self._fatal_errors("going to sleep"):
            await self._living().sleep(level, mode="keep")

    async def wake(self, parts: list[str]) -> None:
        """Allocate "weights" or "kv_cache" again, or both. After level 2 the weights are undefined until the next
        publication.

        Raises:
            WorkerBroken: vLLM failed, possibly out of memory.
        """
        with self._fatal_errors(f"waking up its {' and '.join(parts)}"):
            await self._living().wake_up(parts)

    async def _load(self, stage: StagedFiles) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        from rlhf_ray.weights.object_store_backend import bucket_info

        engine = self._living()
        await engine.pause_generation(mode="keep", clear_cache=True)
        await engine.start_weight_update()
        for bucket in stage.buckets:
            info = bucket_info(bucket.entries, path=bucket.file.path)
            await engine.update_weights(WeightTransferUpdateRequest(update_info=info))

    async def _load_adapter(self, stage: StagedFiles, adapters: AdapterSettings) -> None:
        from rlhf_ray.weights.object_store_backend import bucket_info

        buckets = [bucket_info(bucket.entries, path=bucket.file.path) for bucket in stage.buckets]
        await self._living().collective_rpc("load_adapter", args=(buckets, adapters.rank))

    @contextmanager
    def _fatal_errors(self, action: str) -> Iterator[None]:
        """Inside, any error makes the engine unusable.

        Raises:
            WorkerBroken: an error occurred.
        """
        try:
            yield
        except Exception as error:
            self._dead = WorkerBroken(f"{self._settings.name}: vLLM failed while {action} and must be restarted: "
                                      f"{type(error).__name__}: {error}")
            self._end()
            raise self._dead from error

    async def end_orphans(self) -> int:
        """See `SamplingEngine.end_orphans`. vLLM's engine process takes messages in their order, so it aborts a request
        before it does what it is asked afterwards."""
        engine = self._living()
        if orphans := open_requests(engine) - self._sampling:
            await engine.abort(list(orphans))
        return len(open_requests(engine))

    async def abort_samples(self) -> None:
        await self._living().abort(list(self._sampling))

    def tokens_made(self) -> int:
        return self._finished_tokens + unfinished_tokens(self._engine)

    async def begin_profile(self) -> None:
        """See `SamplingEngine.begin_profile`: vLLM profiles its worker processes, for up to `PROFILED_STEPS` steps."""
        await self._living().start_profile()

    async def end_profile(self, trace: Path) -> WorkerProfile | None:
        """See `SamplingEngine.end_profile`. With several tensor-parallel processes, that of the first."""
        await self._living().stop_profile()
        return await asyncio.to_thread(collect_vllm_trace, Path(self._traces.name), trace)

    async def drop_profile(self) -> None:
        await self._living().stop_profile()
        for trace in Path(self._traces.name).iterdir():
            trace.unlink()

    async def stop(self) -> None:
        self._end()

    def _end(self) -> None:
        engine, self._engine = self._engine, None
        self._kept = []
        self._dead = self._dead or WorkerError(f"{self._settings.name} was stopped")
        self._traces.cleanup()
        if engine is not None:
            engine.shutdown()  # not on another thread: vLLM's output task would treat the end as a crash

    def _living(self) -> Any:
        if self._engine is None:
            raise self._dead or WorkerError(f"{self._settings.name} was not started")
        return self._engine

    async def _sample(self, request: SampleRequest) -> Completion:
        watch = watch_for(request, self._settings.decode)
        completion = completion_of(await self._finish(request, watch))
        return watch.cut(completion) if watch else completion

    async def _finish(self, request: SampleRequest, watch: ResponseWatch | None = None) -> Any:
        """The last output of a request, which is aborted where `watch` sees its end."""
        from vllm.v1.engine.exceptions import EngineDeadError

        engine, last, request_id = self._living(), None, str(next(self._numbers))
        self._sampling.add(request_id)
        try:
            async for output in engine.generate(
                    prompt_of(request.prompt), sampling_parameters(request), request_id, lora_request=self._adapter,
                    priority=request.priority):
                last = output
                if watch and not output.finished and watch.ended(output.outputs[0].token_ids):
                    await engine.abort(request_id)
        except EngineDeadError as error:
            self._dead = self._dead or WorkerBroken(f"{self._settings.name}: vLLM's engine process died; restart this "
                                                    "generator")
            raise self._dead from error
        except asyncio.CancelledError:
            # vLLM aborts a request only if it is cancelled while it waits for a token.
            with suppress(EngineDeadError):
                await asyncio.shield(engine.abort(request_id))
            raise
        finally:
            self._sampling.discard(request_id)
        if last is None:
            raise WorkerError(f"{self._settings.name}: vLLM ended a request without an output")
        if not request.scores_prompt:
            self._finished_tokens += len(last.outputs[0].token_ids)
        return last
