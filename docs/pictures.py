"""Makes the pictures of these pages that show a run: its curves, its report, and what commands print.

    make quickstart
    python docs/pictures.py runs/quickstart                                  # needs chromium
    python docs/pictures.py runs/quickstart --dashboard http://127.0.0.1:8265     # while a run is up
"""

import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.svg import Chart, Line, drawing

IMAGES = Path(__file__).with_name("images")
CURVES = (("independent judge's score (gold)", "reward/gold", "mean of the responses, -1 to 1"),
          ("KL to the reference", "kl/sequence", "nats a response"))
BLUE = "#2563eb"
WIDTH = 110
"""Of a terminal, in columns."""
PLAN = ("plan", "configs/recipes/eight_gpu_8b_ppo.yaml", "--nodes", "1x8xH100")


def curves(run: Path) -> str:
    """An independent judge's score, and the KL, over the steps of a PPO run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if all(metric in row for _, metric, _ in CURVES)]
    return drawing([Chart(title, "step", unit, [Line(f"PPO, {run.name}", BLUE, [
        (row["step"], max(0.0, row[metric])) for row in steps])]) for title, metric, unit in CURVES])


def terminal(*command: str) -> str:
    """What a command of ours prints in a terminal."""
    program = str(Path(sys.executable).with_name("rlhf-ray"))
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(WIDTH)}
    said = subprocess.run([program, *command], env=environment, check=True, capture_output=True, text=True).stdout
    console = Console(record=True, width=WIDTH, file=StringIO())
    console.print(Text.from_ansi(said))
    return console.export_svg(title=f"rlhf-ray {' '.join(command)}")


def photograph(page: str, file: Path, height: int) -> None:
    """A page in a browser."""
    subprocess.run(["chromium", "--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size=1200,{height}",
                    "--virtual-time-budget=5000", f"--screenshot={file}", page], check=True, capture_output=True)


def main() -> None:
    """Make them."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="directory of a finished PPO run")
    parser.add_argument("--dashboard", help="address of Ray's dashboard while a run is up")
    asked = parser.parse_args()
    if asked.dashboard:
        photograph(f"{asked.dashboard}/#/actors", IMAGES / "ray_actors.png", 700)
        return
    (IMAGES / "quickstart.svg").write_text(curves(asked.run), encoding="utf-8")
    (IMAGES / "status.svg").write_text(terminal("status", str(asked.run)), encoding="utf-8")
    (IMAGES / "plan.svg").write_text(terminal(*PLAN), encoding="utf-8")
    photograph(f"file://{(asked.run / 'report.html').resolve()}", IMAGES / "report.png", 1900)


if __name__ == "__main__":
    main()
