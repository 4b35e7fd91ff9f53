"""`python -m chaos.driver CONFIG FAULTS STRIKES [--resume]`: `rlhf-ray ppo`, with an injector in its process."""

import json
import sys
from pathlib import Path

import yaml

from chaos.nodes import several_nodes
from chaos.plan import Fault
from chaos.strikes import Strikes


def main() -> None:
    """Run the command line as ever, once the injector is in place.

    Arguments: the run's configuration, a file with the faults to inject, and the file to note them in.
    """
    from rlhf_ray.cli.library_logging import quiet_libraries
    from rlhf_ray.cli.main import main as command_line

    quiet_libraries()
    from chaos.injector import Injector
    from chaos.network import lossy_here_only
    from chaos.poison import install

    config, faults, strikes, *more = sys.argv[1:]
    lossy_here_only()
    planned = [Fault.of(told) for told in json.loads(Path(faults).read_text())]
    with several_nodes(yaml.safe_load(Path(config).read_text())["pools"]) as nodes:
        Injector(planned, Strikes(Path(strikes)), nodes).install()
        install()
        sys.argv = ["rlhf-ray", "ppo", config, *([f"--cluster.address={nodes.address}"] if nodes else []), *more]
        command_line()


if __name__ == "__main__":
    main()
