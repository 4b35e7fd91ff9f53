"""Pretraining text for the policy (section `ptx`): checked beforehand, read beside the tokenizer, given to ranks."""

import asyncio

from rlhf_ray.config.run import PlacementConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.role_groups import RoleGroups
from rlhf_ray.models.families import Use, check_family
from rlhf_ray.observability.progress import StageProgress
from rlhf_ray.roles.data_reader import DataReader
from rlhf_ray.stages.preflight import check_data_file, check_row_length
from rlhf_ray.stages.runtime import Runtime


def check_pretraining_text(config: PPOConfig) -> None:
    """Refuse text that is not there, or rows longer than the model can read, or than packed passes of it may be.

    Raises:
        DataError, ModelError: naming the field, the value and the fix.
    """
    if config.ptx is None:
        return
    check_data_file(config.ptx.path, "ptx.path")
    check_row_length(config.model, config.ptx.max_tokens, "ptx.max_tokens")
    check_family(config.model, "model", {Use.LANGUAGE}, (config.ptx.max_tokens, "ptx.max_tokens"))


async def hand_out_pretraining_text(
    config: PPOConfig, runtime: Runtime, roles: RoleGroups, progress: StageProgress
) -> None:
    """Let the policy's ranks have the text, which lies in the object store; they hold it without a copy."""
    if config.ptx is None:
        return
    reader = runtime.spawn("text_reader", DataReader, PlacementConfig(pool=config.policy.pool, cpus=0),
                         lambda _: {"model": config.model})
    await reader.start()
    call = reader.call(0, "pretraining_text", config.ptx, outputs=2)
    progress.note(await call.value(1))
    await asyncio.gather(*(c.done() for c in roles.policy.call_all("take_pretraining_text", config.ptx, call.ref)))
    reader.kill()
