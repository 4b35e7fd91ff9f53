"""Names on the Hugging Face Hub: asked about once, briefly, before anything expensive starts."""

from rlhf_ray.errors import ModelError

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
