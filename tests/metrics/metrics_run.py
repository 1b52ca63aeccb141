"""One run of the tests' tiny program as a process, with the service: `metrics_run.py FOLDER URL key=value …`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "run"))

from fake_run import make_plan  # noqa: E402

from sexpgpu.diagnostics import SexpError, render  # noqa: E402
from sexpgpu.run.metrics.target import Service  # noqa: E402
from sexpgpu.run.options import RunOptions  # noqa: E402
from sexpgpu.run.session import execute  # noqa: E402
from sexpgpu.settings import Secret  # noqa: E402


def main(arguments: list[str]) -> int:
    folder, url = Path(arguments[0]), arguments[1]
    words = dict(word.split("=", 1) for word in arguments[2:])
    plan = make_plan(folder, steps=int(words.pop("steps", 60)), delay=float(words.pop("delay", 0)), log_every=1,
                     nan_at=int(n) if (n := words.pop("nan_at", "")) else None, lr=float(words.pop("lr", 0.05)))
    service = Service(Secret(words.pop("key", "ak_org_test")), None, url, folder / "state")
    more = {"strict_metrics": "strict_metrics" in words, "accept": "accept" in words}
    try:
        return execute(RunOptions(folder=str(folder), service=service, **{**words, **more}), plan)
    except SexpError as error:
        print(render(error.diagnostic), file=sys.stderr)
        return error.diagnostic.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
