"""Export of a trained model in Hugging Face format, or of its adapters in peft's: weights, configuration, card."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlhf_ray.checkpoint.atomic_directory import clear_leftovers, replace_directory, temporary_for
from rlhf_ray.checkpoint.disk_space import disk_full_error, is_disk_full, require_space
from rlhf_ray.checkpoint.model_card import ModelCardInfo, model_card
from rlhf_ray.data.answers import stop_tokens
from rlhf_ray.data.tokenizer import ADDED_PAD
from rlhf_ray.errors import CheckpointError
from rlhf_ray.files.fsync import fsync_tree
from rlhf_ray.models.config_json import is_classifier
from rlhf_ray.observability.owner_record import Term

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

MAX_SHARD_SIZE = "5GB"
"""Weights beyond this size go into several files, with an index."""


def export_model(
    model: PreTrainedModel,
    state_dict: Mapping[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    card: ModelCardInfo,
    term: Term | None = None,
) -> None:
    """Write a model that `from_pretrained` loads, replacing an older export atomically.

    A sequence classifier gets a padding token that no row ends with, so that transformers, which scores the last token
    that is not padding, scores the last token as we do.

    Args:
        model: provides class and configuration; its own weights are not read and may be on the meta device.
        state_dict: the weights, by the model's parameter names, in CPU memory. Tied weights may occur once or twice
            and are stored once. Their dtype is the one saved and the one the configuration names.

    Raises:
        CheckpointError: a weight is missing, unknown or of another shape, tied weights differ, the disk is full, or
            `directory` holds something other than an export. `directory` is unchanged then.
    """
    weights = _checked_weights(model, dict(state_dict))
    entries: dict[str, Any] = {}
    if is_classifier([type(model).__name__]):
        tokenizer = _with_padding(tokenizer, model.config.get_text_config())
        entries = _make_room(model, weights, tokenizer.pad_token_id)
    with replacing_export(directory, sum(weight.nbytes for weight in weights.values()), "config.json", term) as new:
        _save(model, weights, tokenizer, new, entries)
        tokenizer.save_pretrained(new)
        model_card(card, Path(directory).name).save(new / "README.md")


@contextmanager
def replacing_export(directory: Path, size: int, mark: str, term: Term | None = None) -> Iterator[Path]:
    """A new directory that replaces `directory` when the block succeeds, and is removed when it fails.

    Args:
        size: about how many bytes will be written.
        mark: the file by which an export of this kind is recognised.

    Raises:
        CheckpointError: the disk is full, or `directory` holds something other than such an export.
    """
    directory = Path(directory).absolute()
    _refuse_foreign(directory, mark)
    directory.parent.mkdir(parents=True, exist_ok=True)
    clear_leftovers(directory.parent, re.escape(directory.name), term)
    new = temporary_for(directory, term)
    safe = "the older export is intact" if directory.exists() else "nothing was written"
    require_space(directory.parent, size, f"export to {directory}", safe)
    try:
        new.mkdir()
        yield new
        fsync_tree(new)
        replace_directory(new, directory, term)
    except BaseException as error:
        full = is_disk_full(error, directory.parent)
        shutil.rmtree(new, ignore_errors=True)
        if full:
            raise disk_full_error(directory.parent, f"export to {directory}", size, safe) from error
        raise


def _with_padding(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> PreTrainedTokenizerBase:
    """A copy of a classifier's tokenizer that pads on the right (positions may be counted from the first column), with
    a token that has no other use: its own, or an added one."""
    copied = deepcopy(tokenizer)
    copied.padding_side = copied.init_kwargs["padding_side"] = "right"  # written only if in both
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}
    for name in ("bos_token_id", "eos_token_id"):
        value = getattr(config, name, None)
        used.update(value if isinstance(value, list) else [value])
    pad = tokenizer.pad_token
    if pad is None or tokenizer.pad_token_id in used or pad in str(tokenizer.chat_template):
        copied.add_special_tokens({"pad_token": ADDED_PAD})
    return copied


def _make_room(model: PreTrainedModel, weights: dict[str, torch.Tensor], pad: int) -> dict[str, int]:
    """Extend the embedding in `weights` by rows of zeros up to the padding token, which no row of tokens contains.
    Returns the entries of the configuration that change."""
    embedding = model.get_input_embeddings().weight
    name = next(n for n, p in model.named_parameters(remove_duplicate=False) if p is embedding and n in weights)
    rows, width = weights[name].shape
    if pad < rows:
        return {"pad_token_id": pad}
    weights[name] = torch.cat([weights[name], weights[name].new_zeros(pad + 1 - rows, width)])
    return {"pad_token_id": pad, "vocab_size": pad + 1}


def _save(model: PreTrainedModel, weights: dict[str, torch.Tensor], tokenizer: PreTrainedTokenizerBase, new: Path,
          entries: Mapping[str, Any]) -> None:
    """Write weights and configuration with transformers; the configuration names the dtype that was written, and has
    these `entries` instead of the model's.

    generation_config.json is written as it was loaded, but for its end tokens. transformers would refuse to save the
    one of many published models, for example because of a temperature without do_sample.
    """
    dtype = next(w.dtype for w in weights.values() if w.is_floating_point())
    generation = getattr(model, "generation_config", None) if model.can_generate() else None
    try:
        if generation is not None:
            model.generation_config = type(generation)()
        model.save_pretrained(new, state_dict=weights, max_shard_size=MAX_SHARD_SIZE)  # removes the items of `weights`
    finally:
        if generation is not None:
            model.generation_config = generation
    if generation is not None:
        _with_ends(generation, tokenizer).to_json_file(new / "generation_config.json")
    if model.dtype != dtype or entries:
        config = type(model.config).from_pretrained(new)
        config.dtype = dtype
        for name, value in entries.items():
            setattr(config.get_text_config(), name, value)
        config.save_pretrained(new)


def _with_ends(generation: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """The configuration, with all tokens that ended responses in training: whoever loads the export ends them there."""
    if tokenizer.eos_token_id is None:
        return generation
    given = generation.eos_token_id
    named = given if isinstance(given, list) else [] if given is None else [given]
    ends = stop_tokens(tokenizer, named)
    if set(ends) == set(named):
        return generation
    changed = deepcopy(generation)
    changed.eos_token_id = ends if len(ends) > 1 else ends[0]
    return changed


def _checked_weights(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights with every tied one stored once, after comparing names and shapes with the model's."""
    kind = type(model).__name__
    for copy, source in model.all_tied_weights_keys.items():
        if copy in weights and source in weights and not torch.equal(weights[copy], weights[source]):
            raise CheckpointError(f"{copy} and {source} are tied in {kind} and differ; untie them or make them equal")
        if copy in weights:
            value = weights.pop(copy)
            weights.setdefault(source, value)
    expected = {name: w for name, w in model.state_dict().items() if name not in model.all_tied_weights_keys}
    missing, unknown = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or unknown:
        raise CheckpointError(
            f"the weights are not those of {kind}: missing {missing[:3]} ({len(missing)}), "
            f"unknown {unknown[:3]} ({len(unknown)}). This is a bug; report it"
        )
    for name, weight in weights.items():
        shape = expected[name].shape
        if weight.shape != shape:
            raise CheckpointError(f"{name} has shape {tuple(weight.shape)}, the model's is {tuple(shape)}")
    return weights


def _refuse_foreign(directory: Path, mark: str) -> None:
    """Raise unless `directory` is absent, empty or an export."""
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise CheckpointError(f"{directory} is not a plain directory; export elsewhere or move it away")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / mark).is_file():
        raise CheckpointError(f"{directory} is not an exported model (it has no {mark}); export elsewhere")


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def export_adapter(config: PeftConfig, state: Mapping[str, torch.Tensor], directory: Path, card: ModelCardInfo,
                   term: Term | None = None) -> None:
    """Write adapters that `peft.PeftModel.from_pretrained(base, directory)` loads, replacing an older export
    atomically.

    Args:
        config: of the adapters, naming their base model.
        state: trained tensors in CPU memory, by the names of peft's files ("base_model.model....lora_A.weight").

    Raises:
        CheckpointError: the disk is full, or `directory` holds something other than an export. `directory` is unchanged
            then.
    """
    from safetensors.torch import save_file

    size = sum(tensor.nbytes for tensor in state.values())
    with replacing_export(directory, size, CONFIG, term) as new:
        save_file({name: t.contiguous() for name, t in state.items()}, new / WEIGHTS, metadata={"format": "pt"})
        config.save_pretrained(str(new))
        model_card(card, Path(directory).name, adapters=True).save(new / "README.md")
