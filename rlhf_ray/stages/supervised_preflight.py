"""What can be known to be wrong about a supervised stage before Ray starts."""

from rlhf_ray.config.steps import StepsConfig
from rlhf_ray.data.step_format import StepTokens
from rlhf_ray.errors import ConfigError
from rlhf_ray.models.families import Use, check_family
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.stages.fit_preflight import check_fit
from rlhf_ray.stages.preflight import check_adapters, check_data, check_first_rows, check_model, check_row_length
from rlhf_ray.stages.supervised import SupervisedConfig


def check_supervised(config: SupervisedConfig, *, pairs: bool = False, steps: StepsConfig | None = None) -> None:
    """Refuse data, a model and numbers that do not fit together.

    Args:
        pairs: rows come in pairs, which a scalar head compares.
        steps: how steps are written, for process-labelled rows.

    Raises:
        DataError, ModelError, ConfigError: naming the field, the value and the fix.
    """
    check_data(config.data, "data")
    check_model(config.model, "model")
    check_row_length(config.model, config.data.max_tokens, "data.max_tokens")
    check_family(config.model, "model", {Use.SCALAR if pairs else Use.LANGUAGE},
                 (config.data.max_tokens, "data.max_tokens"))
    check_adapters(config.learner, config.model, "learner", scalar=pairs)
    if steps is not None:
        StepTokens.of(steps, load_tokenizer(config.model))
    _check_budget(config, pairs)
    check_fit(config)
    check_first_rows(config.data, config.model, steps)


def _check_budget(config: SupervisedConfig, pairs: bool) -> None:
    """A micro-batch holds the longest row, or pair of rows."""
    budget, longest = config.learner.micro_batch_tokens, config.data.max_tokens
    if pairs and budget < 2 * longest:
        raise ConfigError(f"learner.micro_batch_tokens={budget} cannot hold a pair of two rows of "
                          f"data.max_tokens={longest}; raise it to at least twice that")
    if budget < longest:
        raise ConfigError(f"learner.micro_batch_tokens={budget} is less than data.max_tokens={longest}; raise it to at "
                          "least that")
