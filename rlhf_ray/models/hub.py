"""Lookups on the Hugging Face Hub that fail within seconds, with what to do, on a machine that cannot reach it.

The Hub's own client tries a file five times more, for half a minute, and logs each attempt. It is called only after a
connection has opened.
"""

from __future__ import annotations

import json
import os
import re
import socket
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import ModelError, first_line

CONNECT_S = 2.0
"""Time for the Hub's name to be resolved and a connection to open. An answer may take longer (`HUB_TIMEOUT_S`), and a
download as long as it needs."""
HUB_TIMEOUT_S = 10.0
"""Time for an answer of the Hub about a file."""
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")
DEFAULT_PORTS = {"http": 80, "https": 443}


def why_unreachable() -> str | None:
    """The end of a sentence: that the Hub, or the proxy before it, cannot be reached, why, and what to do; None if a
    connection opens."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        reason: str | None = f"{next(filter(os.environ.get, OFFLINE_VARIABLES), OFFLINE_VARIABLES[0])} is set"
    else:
        reason = _connection_error(constants.ENDPOINT)
    if reason is None:
        return None
    return (f"the Hugging Face Hub at {_without_user(constants.ENDPOINT)} cannot be reached ({reason}). Name a local "
            f"directory, set HF_HOME to a cache that has it (now {constants.HF_HOME}), or HF_ENDPOINT to a mirror")


def _without_user(url: str) -> str:
    """A URL without the user and password that may be in it."""
    return re.sub(r"(?<=://)[^/]*@", "", url)


def _connection_error(endpoint: str) -> str | None:
    """Why no connection opens for requests to this URL; None if one does.

    `socket.create_connection` has a timeout for each address of a name and none for resolving it, so a thread of its
    own does it, which nobody waits for after `CONNECT_S`.
    """
    target = urlsplit(endpoint)
    proxies = getproxies()
    proxy = proxies.get(target.scheme) or proxies.get("all")
    through = ""
    if proxy and not proxy_bypass(target.hostname or ""):
        target = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        through = f"by the proxy {target.hostname}: "
    host = target.hostname or ""
    try:
        port = target.port or DEFAULT_PORTS.get(target.scheme, 1080)  # else a SOCKS proxy's
    except ValueError as error:
        return f"{through}{error}"
    outcome: list[str | None] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=CONNECT_S).close()
            outcome.append(None)
        except (OSError, UnicodeError) as error:  # the latter of a name that no host can have
            outcome.append(f"{through}{error}")

    thread = Thread(target=connect, name="hub-connection", daemon=True)
    thread.start()
    thread.join(CONNECT_S)
    return outcome[0] if outcome else f"{through}no connection to {host}:{port} within {CONNECT_S:g} s"


def check_on_hub(name: str, revision: str | None, field: str) -> None:
    """Reject the name of a model that is neither in the local cache nor on the Hub.

    Raises:
        ModelError: names the configuration field, the name and the Hub's message.
    """
    if _cached(name, "config.json", revision) is not None:
        return
    try:
        _require(name, "config.json", revision)
    except ModelError as error:
        missing = f"{field}={name!r} is not a local directory and not in the local cache"
        raise ModelError(f"{missing}, and {error}") from error


def check_tokenizer_reachable(name: str, revision: str | None) -> None:
    """Refuse the name of a tokenizer that is not in the local cache while the Hub cannot be reached.

    Raises:
        ModelError: with the name and what to do.
    """
    if not _is_name(name) or any(_cached(name, file, revision) for file in TOKENIZER_FILES):
        return
    if (reason := why_unreachable()) is not None:
        raise ModelError(f"the tokenizer {name!r} is not a local directory and not in the local cache, and {reason}")


def config_from_hub(model: ModelConfig) -> dict[str, Any]:
    """config.json of a model on the Hub or in its local cache, without any weights.

    Raises:
        ModelError: it is not available; the message is the end of a sentence.
    """
    return _from_hub(model.path, model.revision, "config.json")


def file_from_hub(model: ModelConfig, file: str) -> dict[str, Any] | None:
    """A JSON file of a model on the Hub or in its local cache; None if it is not available."""
    try:
        return _from_hub(model.path, model.revision, file)
    except ModelError:
        return None


@cache
def _from_hub(name: str, revision: str | None, file: str) -> dict[str, Any]:
    """A JSON file of a model, which a process asks for once: a plan needs a model's shape hundreds of times."""
    from huggingface_hub import hf_hub_download

    found = _cached(name, file, revision)
    if found is None:
        _require(name, file, revision)
    if found is None or why_unreachable() is None:  # a cached file may be older than the Hub's
        try:
            found = hf_hub_download(name, file, revision=revision, etag_timeout=HUB_TIMEOUT_S)
        except Exception as error:  # the library raises its own kinds and its client's
            raise ModelError(f"{file} could not be loaded from the Hub: {first_line(error)}") from error
    try:
        return dict(json.loads(Path(found).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{found} cannot be read: {first_line(error)}") from error


def _cached(name: str, file: str, revision: str | None) -> str | None:
    """The path of a file in the local cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, file, revision=revision) if _is_name(name) else None
    return found if isinstance(found, str) else None


def _is_name(name: str) -> bool:
    """Whether the Hub could have something of this name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _require(name: str, file: str, revision: str | None) -> None:
    """Ask the Hub, once, whether it has a file.

    Raises:
        ModelError: it does not, or cannot be reached; the message is the end of a sentence.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    if not _is_name(name):
        raise ModelError("it is no name of a model on the Hub. Correct the path")
    if (reason := why_unreachable()) is not None:
        raise ModelError(reason)
    try:
        get_hf_file_metadata(hf_hub_url(name, file, revision=revision), timeout=HUB_TIMEOUT_S)
    except Exception as error:  # unknown, gated, a broken proxy, ...: the library raises its own kinds and its client's
        at = f" at revision {revision!r}" if revision else ""
        raise ModelError(f"it could not be found on the Hub{at}: {type(error).__name__}: {first_line(error)}. Correct "
                         "the path, or go online (and `hf auth login` for a gated model)") from error
