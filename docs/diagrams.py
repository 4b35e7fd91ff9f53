"""Draws four pictures of these pages: `python docs/diagrams.py`. The others are drawn by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

IMAGES = Path(__file__).with_name("images")
STYLE = """
text{font:14px system-ui,"Segoe UI","Noto Sans",Helvetica,Arial,sans-serif;fill:#1f2328}
.small{font-size:12px;fill:#59636e}.bold{font-weight:600}
.box{fill:#f6f8fa;stroke:#c4ccd4;stroke-width:1.2}.lead{fill:#fff8e6;stroke:#d9a514;stroke-width:1.2}
.store{fill:#e9f3ff;stroke:#a8cdf5;stroke-width:1.2}.good{fill:#e7f6ec;stroke:#7cc796;stroke-width:1.2}
.flow{fill:none;stroke:#1f6feb;stroke-width:2}.back{fill:none;stroke:#8250df;stroke-width:2;stroke-dasharray:5 4}
.flowhead{fill:#1f6feb}.backhead{fill:#8250df}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#a3adb8}.box{fill:#171d25;stroke:#444c56}
.lead{fill:#272115;stroke:#bb8f1a}.store{fill:#0f2038;stroke:#2b5a94}.good{fill:#102a19;stroke:#2f7d4b}
.flow{stroke:#4c93f5}.flowhead{fill:#4c93f5}.back{stroke:#a97bf2}.backhead{fill:#a97bf2}}
"""
HEADS = "".join(
    f'<marker id="{kind}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="9" markerHeight="9" orient="auto" '
    f'markerUnits="userSpaceOnUse"><path class="{kind}head" d="M0 0L10 5L0 10z"/></marker>'
    for kind in ("flow", "back"))


@dataclass
class Drawing:
    """One picture, of a size in pixels."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, style: str = "", anchor: str = "middle") -> None:
        """One line of text."""
        self.parts.append(f'<text x="{x}" y="{y}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, lines: Sequence[str], style: str = "box") -> None:
        """A box with a name, and smaller lines below it."""
        self.parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" class="{style}"/>')
        first = y + height / 2 + 5 - 9 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.text(x + width / 2, first + 18 * number, line, "small" if number else "bold")

    def arrow(self, *points: tuple[float, float], kind: str = "flow") -> None:
        """A line through points, with a head at the last one."""
        path = "L".join(f"{x} {y}" for x, y in points)
        self.parts.append(f'<path class="{kind}" marker-end="url(#{kind})" d="M{path}"/>')

    def save(self, name: str) -> None:
        """Write the file."""
        (IMAGES / name).write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img">'
            f"<title>{escape(self.title)}</title><style>{STYLE}</style><defs>{HEADS}</defs>{''.join(self.parts)}</svg>\n",
            encoding="utf-8")


def life_of_a_sample() -> None:
    """The states of a sample in the ledger."""
    drawing = Drawing(1000, 290, "The life of a sample")
    states = ("admitted", "leased", "generated", "scored", "consumed", "committed")
    notes = ("the cursor handed it out", "an attempt is under way", "a generator answered", "experience is ready",
             "a step trained on it", "the step is in a checkpoint")
    for number, (state, note) in enumerate(zip(states, notes, strict=True)):
        x = 10 + 166 * number
        drawing.box(x, 70, 140, 54, [state], "good" if state == "committed" else "box")
        drawing.text(x + 70, 144, note, "small")
        if number:
            drawing.arrow((x - 26, 97), (x, 97))
    drawing.arrow((578, 68), (578, 34), (80, 34), (80, 68), kind="back")
    drawing.text(330, 24, "the attempt is given up (a lost worker, too stale, a resume): it is admitted again", "small")
    ends = (("not applied", "the step changed no weight"), ("filtered", "by dynamic sampling"),
            ("quarantined", "it cannot be scored"), ("unused", "the run ended before"))
    for number, (state, note) in enumerate(ends):
        x = 342 + 166 * number
        drawing.box(x, 200, 140, 44, [state])
        drawing.text(x + 70, 264, note, "small")
        drawing.arrow((578, 150), (578, 172), (x + 70, 172), (x + 70, 198))
    drawing.save("sample.svg")


def staleness() -> None:
    """What learners and generators do over time, with and without overlap."""
    drawing = Drawing(1000, 300, "Time of learners and generators at staleness 0 and 1")
    for top, bound in ((30, 0), (170, 1)):
        drawing.text(10, top + 4, f"max_staleness {bound}" + (": results do not depend on timing" if not bound else
                     ": generation is hidden behind training, or the other way round"), "bold", "start")
        drawing.text(10, top + 40, "generators", "small", "start")
        drawing.text(10, top + 86, "learners", "small", "start")
        width, gap = 150, 8
        for number in range(1, 6):
            if bound:
                generation = 100 + (number - 1) * (width + gap)
                update = generation + width + gap
                words = f"batch {number}, version {max(0, number - 2)}"
            else:
                generation = 100 + (number - 1) * 2 * (width + gap)
                update = generation + width + gap
                words = f"batch {number}, version {number - 1}"
            if generation + width < 990:
                drawing.box(generation, top + 20, width, 34, [words], "store")
            if update + width < 990:
                drawing.box(update, top + 66, width, 34, [f"update {number}"], "lead")
                drawing.arrow((update + width - 4, top + 66), (update + width + gap / 2, top + 54), kind="back")
    drawing.text(990, 292, "dashed: new weights", "small", "end")
    drawing.save("staleness.svg")


def publication() -> None:
    """How new weights reach the generators."""
    drawing = Drawing(1000, 330, "A publication of weights")
    for x, words, style in ((30, ["coordinator"], "lead"), (380, ["policy learner", "rank 0 of all ranks"], "box"),
                            (730, ["generators", "each for itself"], "store")):
        drawing.box(x, 10, 240, 48, words, style)
        drawing.parts.append(f'<path d="M{x + 120} 58V320" stroke="#8888" stroke-dasharray="3 4"/>')
    steps = ((90, 150, 850, "1  announces version and number of buckets"),
             (130, 150, 500, "2  asks for the next bucket"),
             (180, 500, 850, "3  a digest of each tensor, at most 64 MiB"),
             (282, 850, 150, "5  confirms the version, by what it holds"))
    for y, start, end, words in steps:
        drawing.arrow((start, y), (end, y))
        drawing.text((start + end) / 2, y - 8, words, "small")
    drawing.box(600, 200, 390, 46, ["4  verifies, prepares beside the old weights",
                                    "between two tokens they take effect"], "good")
    drawing.text(500, 222, "while one is loaded, the next is gathered", "small", "end")
    drawing.arrow((512, 196), (512, 150), kind="back")
    drawing.text(150, 312, "work of this version begins when all have confirmed", "small", "start")
    drawing.save("publication.svg")


def pools() -> None:
    """Roles, pools, bundles and nodes."""
    drawing = Drawing(1000, 300, "Roles ask for bundles of pools; bundles are on nodes")
    for x, role, workers in ((20, "generator", "2 workers"), (182, "reference", "1 worker"),
                             (344, "reward", "1 worker"), (506, "policy", "3 ranks"), (668, "critic", "3 ranks"),
                             (830, "assembler", "1 worker")):
        drawing.box(x, 10, 140, 46, [role, workers])
    places = ((20, 140, "pool rollouts", "2 bundles of 1 GPU"), (182, 302, "pool scorers", "1 bundle of 1 GPU"),
              (506, 302, "pool learners", "6 bundles of 1 GPU"))
    for x, width, name, bundles in places:
        drawing.box(x, 104, width, 50, [name, bundles], "lead")
    for start, end in ((90, 90), (252, 290), (414, 376), (576, 610), (738, 704)):
        drawing.arrow((start, 56), (end, 104))
    drawing.arrow((900, 56), (900, 84), (470, 84), (450, 102))
    drawing.box(20, 206, 464, 50, ["node 1", "3 GPUs: rollouts, scorers; the driver"], "store")
    drawing.box(506, 206, 464, 50, ["node 2", "6 GPUs: learners"], "store")
    for start, end in ((90, 90), (333, 333), (657, 657)):
        drawing.arrow((start, 154), (end, 206))
    drawing.text(500, 284, "only pools and numbers of workers change from a laptop to a cluster", "small")
    drawing.save("pools.svg")


if __name__ == "__main__":
    life_of_a_sample()
    staleness()
    publication()
    pools()
