"""Names on the Hugging Face Hub: asked about once, briefly, before anything expensive starts."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_ray.errors import ModelError

if TYPE_CHECKING:
    from rlhf_ray.config.model import ModelConfig

TIMEOUT_S = 10.0


def check_on_hub(name: str, revision: str | None, field: str) -> None:
    """Refuse a name that is neither in the local cache nor on the Hub.

    Loading by name retries for most of a minute when there is no such model or no network; one question tells earlier.

    Raises:
        ModelError: naming the configuration field, the name and what the Hub said.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision), timeout=TIMEOUT_S)
    except Exception as error:  # unknown, gated, offline, ...: the library raises its own kinds and its client's
        said = str(error).strip().splitlines() or [""]
        raise ModelError(
            f"{field}={name!r} is no directory here, not in the local cache, and could not be found on the Hub"
            f"{f' at revision {revision!r}' if revision else ''}: {type(error).__name__}: {said[0]}. Correct the path, "
            "or go online (and `hf auth login` for a gated model)."
        ) from error


def config_from_hub(model: "ModelConfig") -> dict[str, Any] | None:
    """config.json of a model on the Hub, or in its local cache; None where it cannot be had. No weight is loaded."""
    from huggingface_hub import hf_hub_download

    try:
        file = hf_hub_download(model.path, "config.json", revision=model.revision, etag_timeout=TIMEOUT_S)
        return dict(json.loads(Path(file).read_text(encoding="utf-8")))
    except Exception:  # no such name, gated, offline, no JSON: whoever asks says what to do about it
        return None
