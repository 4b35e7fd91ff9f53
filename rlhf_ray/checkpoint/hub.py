"""Uploads an exported model to a repository of the Hugging Face Hub, with the token that `hf auth login` or HF_TOKEN
gives. The token is neither printed nor logged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlhf_ray.errors import ConfigError, UploadError, first_line

OPTION = "--push-to-hub"


def check_push(repository: str, private: bool) -> str:
    """Refuse, before anything is exported, a repository that could not be uploaded to.

    Args:
        repository: "owner/name", or "name" of the token's owner. It need not exist.
        private: whether it is to be private.

    Raises:
        ConfigError: it is no name of a repository, the Hub is not to be used or cannot be reached, there is no token,
            the token may not write, or the repository is public and a private one is wanted.

    Returns:
        "owner/name".
    """
    from huggingface_hub import HfApi, get_token, is_offline_mode
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils import validate_repo_id

    given = f"{OPTION} {repository}"
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(f"{given} is no name of a repository: {first_line(error)}; write owner/name") from None
    if is_offline_mode():
        raise ConfigError(f"{given} needs the Hub, and HF_HUB_OFFLINE is set; unset it, or leave {OPTION} out and "
                          f"upload later: hf upload {repository} DIR")
    if get_token() is None:
        raise ConfigError(f"{given} needs a token that may write, and there is none; run `hf auth login`, or set "
                          "HF_TOKEN")
    api = HfApi()
    try:
        owner = api.whoami()["name"]
        known = repository if "/" in repository else f"{owner}/{repository}"
        try:
            public = not api.model_info(known).private
        except RepositoryNotFoundError:  # it is made
            return known
        api.auth_check(known, write=True)
    except Exception as error:  # no connection, a token that is no longer valid, no right to write
        raise ConfigError(f"{given}: the Hub refused, or was not reached: {_said(error)}. "
                          "Check the connection and that the token may write there (`hf auth whoami`, `hf auth login`)"
                          ) from error
    if public and private:
        raise ConfigError(f"{given} --private: {known} is there already and public; name another one, make it private "
                          "in its settings on the Hub, or leave --private out")
    return known


def push(folder: Path, repository: str, private: bool, message: str, say: Callable[[str], None]) -> str:
    """Upload a folder in place of the files of these names in the repository, which is made if it is not there.

    Args:
        message: of the commit.
        say: receives a line before the upload begins.

    Raises:
        UploadError: the upload failed; the folder is kept.

    Returns:
        The URL of the repository.
    """
    from huggingface_hub import HfApi

    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    say(f"uploading {len(files)} files, {size / 1e6:,.1f} MB, to {repository}")
    api = HfApi()
    try:
        # Without --private the owner's default holds.
        made = api.create_repo(repository, private=private or None, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=message)
    except Exception as error:  # of the connection, the Hub and its storage: each raises its own kinds
        raise UploadError(f"the upload to {repository} failed: {_said(error)}. The model "
                          f"is in {folder}; upload it with: hf upload {repository} {folder}") from error
    return str(made)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error).rstrip('.')}"
