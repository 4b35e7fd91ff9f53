"""An ordinary PPO stage of ours that takes turns: `python -m benchmarks.trl.rlhf_ray_run CONFIG LINE`.

The end of an update is when its row of metrics is written, which the loop does last.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.trl.pacing import Pacing
from rlhf_ray.cli.library_logging import quiet_libraries
from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.observability.metrics import MetricsWriter
from rlhf_ray.stages import ppo


def main() -> None:
    """Train as `rlhf-ray ppo CONFIG` does."""
    quiet_libraries()
    pacing = Pacing(int(sys.argv[2]))

    write = MetricsWriter.write

    def write_and_wait(self: MetricsWriter, step: int, values: Mapping[str, float]) -> None:
        write(self, step, values)
        pacing.updated()

    MetricsWriter.write = write_and_wait  # type: ignore[method-assign]
    ppo.run(load(PPOConfig, Path(sys.argv[1]), []))


if __name__ == "__main__":
    main()
