"""`rlhf-ray serve-reward`: a reward model as an HTTP service."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf_ray.cli.paths import local_path, path_or_name
from rlhf_ray.errors import ConfigError

TOKEN_VARIABLE = "RLHF_RAY_REWARD_TOKEN"  # noqa: S105 - the name of one

LIMITS = "Limits"


def serve_reward(
    model: Annotated[str, typer.Argument(parser=path_or_name, metavar="MODEL",
        help="Reward model: a directory, or a name on the Hub.")],
    host: Annotated[str, typer.Option(help="Address to listen on. Any but a loopback address needs a token.")]
    = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one and prints it.")] = 8008,
    token_file: Annotated[Path | None, typer.Option(
        parser=local_path, metavar="PATH",
        help=f"File with the bearer token that requests must carry; else {TOKEN_VARIABLE}.")] = None,
    tls_cert: Annotated[str | None, typer.Option(
        metavar="PATH", help="Certificate chain (PEM), to serve https.")] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="PATH", help="Private key (PEM) of the certificate.")] = None,
    dtype: Annotated[str, typer.Option(help="Precision: float32 on CPUs, bfloat16 on GPUs.")] = "float32",
    revision: Annotated[str | None, typer.Option(help="Hub revision (branch, tag or commit).")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Directory or Hub name, if not the model's own.")] = None,
    label: Annotated[str | None, typer.Option(
        help="Label whose logit is the score, by name or number, of a classifier with several.")] = None,
    max_batch_tokens: Annotated[int, typer.Option(
        rich_help_panel=LIMITS, help="Tokens in one forward pass, and in one sample, at most.")] = 8192,
    linger_ms: Annotated[float, typer.Option(
        rich_help_panel=LIMITS, help="How long a first sample waits for company while the model is idle.")] = 5.0,
    max_queue: Annotated[int, typer.Option(
        rich_help_panel=LIMITS, help="Samples that may wait; beyond it callers get 429 and Retry-After.")] = 4096,
    max_request_mb: Annotated[float, typer.Option(rich_help_panel=LIMITS, help="Largest request body in MiB.")] = 16.0,
) -> None:
    """Serve a reward model over HTTP, for PPO runs on other machines or several at once.

    Requests that come at the same time share forward passes. Try it (/docs has the schema, /health the state):

    ```sh
    rlhf-ray serve-reward runs/quickstart/reward_model/model
    curl http://127.0.0.1:8008/score -H 'Content-Type: application/json' \\
         -d '{"samples": [{"prompt": "The food was", "response": " lovely."}]}'
    ```

    With a token, which every address but loopback needs, curl says it too: -H "Authorization: Bearer $TOKEN".
    A run asks the service by this configuration:

    ```yaml
    rewards: {quality: {type: http, urls: ["http://127.0.0.1:8008"]}}
    ```

    Ctrl-C or SIGTERM finishes what was accepted and answers 503 to the rest; a second one stops at once.
    """
    from pydantic import ValidationError

    from rlhf_ray.config.model import ModelConfig
    from rlhf_ray.config.serving import ServingConfig

    settings: dict[str, Any] = {
        "label": label, "host": host, "port": port, "token": _token(token_file), "tls_cert": tls_cert,
        "tls_key": tls_key, "max_batch_tokens": max_batch_tokens, "linger_ms": linger_ms, "max_queue": max_queue,
        "max_request_mb": max_request_mb,
    }
    try:
        named = ModelConfig.model_validate({"path": model, "dtype": dtype, "revision": revision,
                                            "tokenizer": tokenizer})
        config = ServingConfig.model_validate({"model": named, **settings})
    except ValidationError as error:
        raise ConfigError(_problems(error)) from None
    from rlhf_ray.serving.server import serve

    serve(config, lambda line: print(line, flush=True))


def _token(file: Path | None) -> str | None:
    """The token from a file or the environment. Never an argument: everybody on the machine may read those."""
    if file is None:
        return os.environ.get(TOKEN_VARIABLE)
    try:
        token = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {file} cannot be read: {error}") from None
    if not token:
        raise ConfigError(f"--token-file {file} is empty")
    return token


def _problems(error: Any) -> str:
    """What is wrong with the options, one by one, without the value of the token."""
    lines = []
    for problem in error.errors(include_url=False, include_input=False):
        option = "--" + str(problem["loc"][-1]).replace("_", "-") if problem["loc"] else ""
        lines.append(f"{option}: {problem['msg']}" if option else problem["msg"].removeprefix("Value error, "))
    return "; ".join(lines)
