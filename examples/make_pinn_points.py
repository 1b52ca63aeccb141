"""Write examples/data/pinn_points.csv: 320 times in [0, 1), one at random in each of 320 equal parts. The same file every time."""

import random
from pathlib import Path

COUNT = 320


def text() -> str:
    """The file: a header and one time a line, in a random order."""
    draw = random.Random(7)
    times = [(i + draw.random()) / COUNT for i in range(COUNT)]
    order = sorted(range(COUNT), key=[draw.random() for _ in range(COUNT)].__getitem__)
    return "time\n" + "".join(f"{times[i]:.9f}\n" for i in order)


if __name__ == "__main__":
    (Path(__file__).parent / "data" / "pinn_points.csv").write_text(text(), encoding="utf-8", newline="\n")
