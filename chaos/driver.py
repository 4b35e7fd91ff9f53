"""`python -m chaos.driver CONFIG FAULTS INJECTION_LOG [--resume]`: `rlhf-ray ppo`, with an injector in its process."""

import json
import sys
from pathlib import Path

import yaml

from chaos.faults import Fault
from chaos.injection_log import InjectionLog
from chaos.nodes import several_nodes


def main() -> None:
    """Install the injector, then run the command line.

    Arguments: the run's configuration, a JSON file of the faults to inject, and the injection log.
    """
    from rlhf_ray.cli.library_logging import quiet_libraries
    from rlhf_ray.cli.main import main as command_line

    quiet_libraries()
    from chaos.damaging_learners import install_damaging_learners
    from chaos.injector import Injector
    from chaos.message_loss import lose_messages_of_this_process_only

    config, faults, injections, *more = sys.argv[1:]
    lose_messages_of_this_process_only()
    planned = [Fault.from_dict(fault) for fault in json.loads(Path(faults).read_text())]
    with several_nodes(yaml.safe_load(Path(config).read_text())["pools"]) as nodes:
        Injector(planned, InjectionLog(Path(injections)), nodes).install()
        install_damaging_learners()
        sys.argv = ["rlhf-ray", "ppo", config, *([f"--cluster.address={nodes.address}"] if nodes else []), *more]
        command_line()


if __name__ == "__main__":
    main()
