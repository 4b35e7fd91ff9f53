"""In the place of a run's driver: does what the file STUB.txt beside its configuration says, a line a start."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from chaos.faults import Fault
from chaos.injection_log import InjectionLog


def main() -> None:
    config, faults, injections, *more = sys.argv[1:]
    script = Path(config).with_name("STUB.txt")
    act, *rest = script.read_text().splitlines()
    script.write_text("\n".join(rest))
    print(act, *more, flush=True)
    planned = [Fault.from_dict(fault) for fault in json.loads(Path(faults).read_text())]
    if act != "crash":
        for fault in planned:
            InjectionLog(Path(injections)).add("injected", fault=fault.number, kind=fault.kind, state="as planned")
    if act == "hang":
        time.sleep(60)
    if act == "leave":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        print(child.pid)
    if act == "hangup":
        os.kill(os.getpid(), 1)
    if act == "die":
        os.kill(os.getpid(), 9)
    sys.exit(7 if act == "crash" else 0)


if __name__ == "__main__":
    main()
