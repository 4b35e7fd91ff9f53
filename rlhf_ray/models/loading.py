"""Models and tokenizers by path or Hub name: loading, creating new ones, and checks before anything expensive starts.

Torch is imported only to load models: a process that needs only a tokenizer starts a second sooner without it.
"""

from __future__ import annotations

import json
import re
from inspect import getsource, unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.errors import ModelError, first_line
from rlhf_ray.models.config_json import is_classifier, local_configuration, pretrained_config
from rlhf_ray.models.hub import check_on_hub, check_tokenizer_reachable
from rlhf_ray.models.model_families import why_padded
from rlhf_ray.models.scalar_head import classifier_class, new_classifier

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def check_model_directory(config: ModelConfig, field: str, *, argument: bool = False) -> None:
    """Reject a local path that is not a model directory, before anything expensive starts.

    A name with one slash that does not begin with a slash or dot is a Hub name and is looked up there.

    Args:
        argument: `field` is an argument or option of a command, not a section of a configuration.

    Raises:
        ModelError: names the configuration field, the path and what is missing.
    """
    path, named = Path(config.path), field if argument else f"{field}.path"
    if not path.exists():
        if path.is_absolute() or config.path.startswith(".") or config.path.count("/") != 1 or path.parent.is_dir():
            raise ModelError(f"{named}={config.path!r}: no such directory (relative paths start at {Path.cwd()}). "
                             "Use a model directory in Hugging Face format, which the stages `sft` and `reward-model` "
                             "write to model/, or the name of one on the Hub.")
        check_on_hub(config.path, config.revision, named)
        return
    if not (path / "config.json").is_file() and (path / "model/config.json").is_file():
        raise ModelError(f"{named}={config.path!r} is the directory of a run; its model is {path / 'model'}")
    if not (path / "config.json").is_file() and (checkpoints := _checkpoints_of(path)):
        raise ModelError(f"{named}={config.path!r} is {checkpoints}, and no model in Hugging Face format yet. Write "
                         f"one with `rlhf-ray export {config.path}`, and name the directory that it prints.")
    if not (path / "config.json").is_file():
        raise ModelError(f"{named}={config.path!r} has no config.json, so it is not a model in Hugging Face format. "
                         "Name the directory of one: that of a download, model/ of a finished run, or what `rlhf-ray "
                         "export RUN` writes from a checkpoint.")
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"{named}={config.path!r} has no *.safetensors file. Weights are read from safetensors "
                         "only (pickled weights run code); convert them with `save_pretrained`.")


def _checkpoints_of(path: Path) -> str | None:
    """What a directory is, in words, from which `rlhf-ray export` writes a model; None if it cannot."""
    if (path / "manifest.json").is_file() and path.resolve().parent.name == "checkpoints":
        return "a checkpoint of a run"
    return "the directory of a run with checkpoints" if any(path.glob("checkpoints/step_*")) else None


def load_tokenizer(config: ModelConfig | NewModelConfig, require_eos: bool = True) -> PreTrainedTokenizerBase:
    """The tokenizer of a model: its own, or the one that the configuration names.

    Args:
        require_eos: False for tokenizers of encoders, which generate nothing and may have no end-of-sequence token.

    Raises:
        ModelError: the tokenizer cannot be loaded, or has no end-of-sequence token.
    """
    source = config.tokenizer or str(getattr(config, "path", ""))
    trust = _tokenizer_trust(config)
    if not Path(source).is_dir():
        check_tokenizer_reachable(source, trust.get("revision"))
    try:
        tokenizer = _tokenizer_class(Path(source)).from_pretrained(source, **trust)
    except Exception as error:  # a damaged tokenizer.json raises the library's own kinds, or a plain Exception
        raise ModelError(f"no tokenizer could be loaded from {source!r}: {first_line(error)}") from error
    if require_eos and tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer at {source!r} has no end-of-sequence token; responses could never end. "
                         "Set `eos_token` in its tokenizer_config.json.")
    return tokenizer


def _tokenizer_trust(config: ModelConfig | NewModelConfig) -> dict[str, Any]:
    """Keyword arguments for loading: the model's trust applies to its own tokenizer only. For another tokenizer
    `trust_remote_code` is set to False explicitly, because transformers otherwise prompts at the terminal."""
    if isinstance(config, NewModelConfig):
        return {"trust_remote_code": False}
    return config.trust if config.tokenizer is None else {"revision": config.revision, "trust_remote_code": False}


def _tokenizer_class(directory: Path) -> Any:
    """The class that loads a tokenizer. A directory that names the generic class does not need AutoTokenizer, whose
    import takes four seconds in every process."""
    settings = directory / "tokenizer_config.json"
    if (directory / "tokenizer.json").is_file() and settings.is_file():
        named = json.loads(settings.read_text()).get("tokenizer_class")
        if named in ("PreTrainedTokenizerFast", "TokenizersBackend"):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def load_causal_lm(config: ModelConfig | NewModelConfig, mapped: bool = False) -> PreTrainedModel:
    """A causal language model for `packed_model.PackedLanguageModel`.

    Args:
        mapped: see `_mapped`.

    Raises:
        ModelError: the model cannot be loaded, or has no head that `ModelConfig.float32_head` can act on.
    """
    from transformers import AutoModelForCausalLM

    if isinstance(config, NewModelConfig):
        return new_causal_lm(config)
    model = (_mapped if mapped else _load)(AutoModelForCausalLM, config)
    if config.float32_head:
        from rlhf_ray.models.float32_head import use_float32_head

        use_float32_head(model)
    return model


def load_scalar_model(config: ModelConfig, new_head: bool, mapped: bool = False, labels: int = 1) -> PreTrainedModel:
    """A backbone with a scalar head per token: a reward model or a critic.

    Args:
        new_head: initialise the head with small zero-centred random weights instead of requiring one in the files.
        mapped: see `_mapped`; does not affect a new head.
        labels: outputs of the head in the files, if it has several.

    Raises:
        ModelError: the model cannot be loaded, or has no one-label head although `new_head` is False.
    """
    import torch

    if not new_head and labels == 1:
        check_scalar_head(config)
    load = _mapped if mapped else _load
    model = load(classifier_class(pretrained_config(config)), config, new_head=new_head, num_labels=labels)
    if new_head:
        model.score.to(getattr(torch, config.dtype))
        # Ouyang et al. 2022 and Huang et al. 2024 start scalar heads with std 1/sqrt(hidden + 1).
        torch.nn.init.normal_(model.score.weight, std=(model.score.in_features + 1) ** -0.5)
    return model


def check_scalar_head(config: ModelConfig, field: str = "", label: int | str | None = None,
                      label_field: str = "") -> int:
    """Reject a model that is not a sequence classifier with this label, from its configuration alone.

    Args:
        field: the section of the configuration that names the model, for the message.
        label: name or number of one of several labels; None for the only one.
        label_field: the field or option that chooses the label, for the message; `label` of the section if empty.

    Returns:
        the number of the label.

    Raises:
        ModelError: names the field, and says what the model is or why its configuration cannot be read.
    """
    named = f"{field}.path={config.path!r}" if field else repr(config.path)
    heads, names = _heads_and_labels(config, named)
    if not is_classifier(heads):
        raise ModelError(f"{named} is not a reward model: it has architectures {heads}, and a sequence classifier is "
                         "needed. Train one with `rlhf-ray reward-model`.")
    shown = ", ".join(f"{i} {name!r}" for i, name in enumerate(names))
    label_field = label_field or f"{field or 'rewards.NAME'}.label"
    if label is None and len(names) > 1:
        raise ModelError(f"{named} has {len(names)} labels ({shown}), and a reward is one number: set "
                         f"{label_field} to one of them, or use a classifier with one label")
    if label is None:
        return 0
    if label in names:
        return names.index(str(label))
    if str(label).isdecimal() and int(label) < len(names):
        return int(label)
    raise ModelError(f"{label_field}={label!r} is not a label of {config.path!r}, which has {shown}; "
                     "set it to one of these names or numbers")


def label_names(config: ModelConfig) -> list[str]:
    """Names of a classifier's labels, from its configuration."""
    return _heads_and_labels(config, repr(config.path))[1]


def has_scalar_head(config: ModelConfig, field: str = "", need: str = "a critic has one value for each state",
                    remedy: str = "") -> bool:
    """Whether a model has a head with one output (a sequence classifier with one label) rather than none (a language
    model), from its configuration alone.

    Args:
        field: the section of the configuration that names the model, for the message.
        need: why one output is needed, for the message.
        remedy: a further way out, for the message.

    Raises:
        ModelError: the configuration cannot be read, or the model is a classifier with several labels.
    """
    named = f"{field}.path={config.path!r}" if field else repr(config.path)
    heads, names = _heads_and_labels(config, named)
    if is_classifier(heads) and len(names) > 1:
        raise ModelError(f"{named} is a classifier with {len(names)} labels, and {need}: name a classifier with one "
                         f"label, or a language model, which gets a new head{remedy}")
    return is_classifier(heads)


def pads_with_end(config: ModelConfig) -> bool:
    """Whether a model pads with its end-of-sequence token. transformers scores a sequence classifier at a row's
    last token that is not padding, so at the token before the end; this package scores the end."""
    pad = pretrained_config(config).get_text_config().pad_token_id
    return pad is not None and pad == load_tokenizer(config, require_eos=False).eos_token_id


def meta_model(config: PretrainedConfig, trust_remote_code: bool = False, scalar: bool = False) -> PreTrainedModel:
    """The model that `config` describes, on the meta device, without values: a language model, or with `scalar` a
    sequence classifier."""
    import torch
    from transformers import AutoModelForCausalLM

    build = new_classifier if scalar else AutoModelForCausalLM.from_config
    with torch.device("meta"):
        return build(config, trust_remote_code=trust_remote_code)


def parameter_shapes(config: PretrainedConfig, trust_remote_code: bool = False) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of the causal language model that `config` describes, tied ones once, by name."""
    return {name: tuple(parameter.shape) for name, parameter in
            meta_model(config, trust_remote_code).named_parameters()}


def _heads_and_labels(config: ModelConfig, named: str) -> tuple[list[str], list[str]]:
    """Architectures and names of the labels in a model's configuration; `named` is the model in messages.

    A local file of a known `model_type` is read directly: its own class would import all of transformers' model code.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        values = local_configuration(config)
        if values.get("model_type") in CONFIG_MAPPING:
            names = {int(number): str(name) for number, name in (values.get("id2label") or {}).items()}
            return values.get("architectures") or [], [names.get(i, f"LABEL_{i}") for i in range(
                values.get("num_labels") or len(names) or 2)]
        shape = pretrained_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"no model could be loaded from {named}: {first_line(error)}") from error
    return shape.architectures or [], [str(shape.id2label.get(i)) for i in range(shape.num_labels)]


def new_config(config: NewModelConfig) -> PretrainedConfig:
    """transformers' configuration of a new model; its tokenizer fixes the vocabulary."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tokenizer, entries = load_tokenizer(config), config.architecture.config_entries()
    return CONFIG_MAPPING[entries.pop("model_type")](
        **entries, vocab_size=len(tokenizer), bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)


def new_causal_lm(config: NewModelConfig) -> PreTrainedModel:
    """A model of the given family and shape with random weights (from torch's current seed)."""
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    from rlhf_ray.models.attention import register
    from rlhf_ray.models.cpu.linear import use_onednn

    shape = new_config(config)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(shape)](shape)
    model.set_attn_implementation(register())
    return use_onednn(model.to(getattr(torch, config.dtype)))


def _mapped(auto: Any, config: ModelConfig, **more: Any) -> PreTrainedModel:
    """A model whose weights are memory-mapped files in their stored precision: all processes of a node share one copy,
    which the kernel may drop. The learner casts them layer by layer (see `engine.parameter_shards`).

    Files with several precisions are loaded in the configured precision instead, so that nothing is lost.
    """
    import torch

    model = _load(auto, config, dtype="auto", **more)
    if model.dtype is torch.float32 or stored_precisions(config) == {model.dtype}:
        return model
    return _load(auto, config, **more)


def stored_precisions(config: ModelConfig) -> set[torch.dtype]:
    """Precisions of the floating-point tensors in a model's files, which must be local or in the Hub's cache."""
    import torch
    from transformers.utils import cached_file

    kinds = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    stored = set()
    for path in Path(cached_file(config.path, "config.json", revision=config.revision)).parent.glob("*.safetensors"):
        with path.open("rb") as file:  # eight bytes: the length of the header, which is JSON
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        stored |= {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    return {kinds[name] for name in stored & kinds.keys()}


def _load(auto: Any, config: ModelConfig, dtype: Literal["auto"] | None = None, new_head: bool = False,
          **more: Any) -> PreTrainedModel:
    """Load the model, with attention over packed rows where its family can run on them.

    Args:
        dtype: "auto" keeps the files' precision, None uses the configured one.
        new_head: the files may lack the scalar head, or have one with another number of outputs.

    Raises:
        ModelError: the files cannot be read or lack weights, which transformers would make random.
    """
    import torch

    from rlhf_ray.models.attention import register
    from rlhf_ray.models.cpu.linear import use_onednn

    attention = {} if why_padded(pretrained_config(config)) else {"attn_implementation": register()}
    try:
        model, report = auto.from_pretrained(
            config.path, dtype=dtype or getattr(torch, config.dtype), use_safetensors=True, output_loading_info=True,
            ignore_mismatched_sizes=new_head, **config.trust, **attention, **more,
        )
    except Exception as error:  # a damaged file, pickled weights, weights of another shape
        raise ModelError(f"no model could be loaded from {config.path!r}: {first_line(error)}") from error
    for name, stored, expected in report["mismatched_keys"]:  # others than the head's raise an error without a new head
        if not name.startswith("score."):
            raise ModelError(f"no model could be loaded from {config.path!r}: its weight {name} has the shape "
                             f"{tuple(stored)}, and by its config.json {tuple(expected)}; download the model again")
    missing = sorted(name for name in report["missing_keys"] if not (new_head and name.startswith("score.")))
    if missing:
        raise ModelError(f"{config.path!r} has no weights for {', '.join(missing[:3])}"
                         f"{f' and {len(missing) - 3} more' if len(missing) > 3 else ''} of {type(model).__name__}, "
                         "which would be random; convert or download the model again, or name one that has them")
    return use_onednn(model)


def remove_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its own dropout, skipped layers and router noise, whatever its configuration says.

    PPO's ratio compares log-probabilities of the same weights: with dropout in the update alone it is not 1 before the
    first step, and clips tokens at random.

    Raises:
        ModelError: a layer reads one of them from the configuration at each pass (Falcon's); names the entry.
    """
    import torch

    entries = set(randomness(model.config.get_text_config()))
    for layer in model.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
        for name in randomness(layer):  # some layers apply them themselves
            setattr(layer, name, 0.0)
        if read := entries.intersection(_read_from_config(layer) if entries else ()):
            raise ModelError(f"{type(layer).__name__} of {model.config.name_or_path!r} drops parts at random in "
                             f"training, which PPO must not do: set {' and '.join(sorted(read))} to 0 in its "
                             "config.json")
    return model


def _read_from_config(layer: torch.nn.Module) -> set[str]:
    """Entries of the configuration that a layer's forward pass reads."""
    return set(re.findall(r"self\.config\.(\w+)", getsource(unwrap(type(layer).forward))))


def randomness(owner: Any) -> list[str]:
    """Names of the attributes by which something is dropped or disturbed at random, now."""
    return [name for name, value in vars(owner).items()
            if isinstance(value, float) and value and ("drop" in name or "jitter" in name)]
