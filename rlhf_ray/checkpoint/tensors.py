"""torch's files read without running what is in them.

`torch.save` pickles, and a pickle may hold any call. Here only tensors, plain containers and the classes that the
caller names are rebuilt; a file that asks for more is refused before anything of it has run.
"""

import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_ray.errors import CheckpointError


def load_tensors(path: Path | str, classes: Sequence[type] = (), map_location: Any = None) -> Any:
    """What `torch.save` wrote to `path`.

    Args:
        classes: may be rebuilt beside tensors and plain types.

    Raises:
        CheckpointError: the file is missing or damaged, or asks for anything else to be built or called.
    """
    import torch

    with torch.serialization.safe_globals(list(classes)):
        try:
            return torch.load(path, map_location=map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            named = re.search(r"GLOBAL (\S+)", str(error))
            raise CheckpointError(f"{path} asks for {named[1] if named else 'objects'} to be run or built, which no "
                                  "checkpoint of ours does, and was not read. Use another checkpoint, and find out who "
                                  "wrote this one.") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        except Exception as error:  # bytes of no file that torch wrote: what rises depends on which of them
            raise CheckpointError(f"{path} is damaged and was not read: {type(error).__name__}: {error}") from error
