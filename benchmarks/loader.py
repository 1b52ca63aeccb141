"""How fast are batches from gz-jsonl shards, here and from a plain torch DataLoader? One JSON line a question.

`throughput`: samples a second over the same local shards, batches of 64 of a field of 128 tokens and a label. Eager side: an
IterableDataset that unzips and parses its share of the shards, two workers, default collation. Ours: cold (cache empty: every
shard is read, checked, parsed, and the batches taken) and warm, both with a shuffle over all records. Each side in a process
of its own, alternating; medians of the rounds, and the ratios ours / eager. Also the CPU seconds of a side with its workers, and
the ratio that follows from them (the eager side on two whole CPUs, ours on one): that holds on a machine that others use too.
`first batch`: seconds from the start of Python to the first shuffled batch of a 1,000-shard manifest, index cached, and the
part of it after imports.
`workers`: seconds to parse the shards with 0, 1, 2, 4 processes, and with 2 threads of one process: why workers are processes.
`s3`: with `--s3 s3://bucket/prefix` (values in SEXPGPU_DATA_AWS_*), where the built shards were uploaded: rate of a cold read
from there over a cold local one, both as in a run: the client is made on a thread while torch is imported.

    python benchmarks/loader.py [--records 100000] [--rounds 3] [--table] [--s3 s3://bucket/prefix --keep FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BATCH, CONTEXT = 64, 128
BARS = {"warm / eager": 1.5, "cold / eager": 1.5, "first batch seconds": 2.0, "s3 / local": 0.9}


def make(folder: Path, records: int, shards: int) -> Path:
    """A manifest over `shards` shards of random tokens below `folder`; left as it is where it is there."""
    from sexpgpu.run.data.manifest.build import Input, build

    if (folder / "m/data-manifest-v1.json").exists():
        return folder / "m/data-manifest-v1.json"
    rng = random.Random(1)
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "in.jsonl"
    with source.open("w") as file:
        for i in range(records):
            file.write(json.dumps({"id": f"r{i}", "tokens": [rng.randrange(50_000) for _ in range(CONTEXT)], "label": i % 10}) + "\n")
    return build([Input("train", None, source)], folder / "m", -(-records // shards), None)


def opened(manifest: str, workers: int | None = None) -> tuple[Any, Any]:
    """Our feed over a manifest."""
    from sexpgpu.experiment.model import Batches, DataSource, Field
    from sexpgpu.run.data.feed import train_feed
    from sexpgpu.run.data.manifest.reader import read

    fields = (Field("tokens", "i32", (CONTEXT,)), Field("label", "i32"))
    source = DataSource("d", "manifest", manifest, "", fields)
    data = read(source, Path("."), workers=workers)
    return data, train_feed(data, Batches(source, None, BATCH, shuffle=True), 7)


def ours(manifest: str, workers: int | None) -> dict[str, Any]:
    """Samples a second of one epoch, with the reading of the shards and without."""
    begin = time.perf_counter()
    data, feed = opened(manifest, workers)
    feed.ready(0)  # a shuffle: all of it
    ready = time.perf_counter()
    batches = data.count // BATCH
    for step in range(batches):
        feed.batch(step)
    end = time.perf_counter()
    return {"cold": batches * BATCH / (end - begin), "warm": batches * BATCH / (end - ready), "read": ready - begin, "cpu": cpu()}


def cpu() -> float:
    """CPU seconds of this process and of its workers."""
    time.sleep(0.5)  # they are waited for
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def eager(manifest: str, workers: int) -> dict[str, Any]:
    """The same of a plain DataLoader."""
    import gzip

    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    torch.set_num_threads(1)
    folder = Path(manifest).parent
    shards = [folder / s["uri"] for s in json.loads(Path(manifest).read_text())["splits"]["train"]["shards"]]

    class Shards(IterableDataset):
        def __iter__(self):
            info = get_worker_info()
            for path in shards if info is None else shards[info.id :: info.num_workers]:
                with gzip.open(path, "rt") as file:
                    for line in file:
                        record = json.loads(line)
                        yield torch.tensor(record["tokens"], dtype=torch.int32), record["label"]

    begin, seen = time.perf_counter(), 0
    for tokens, _ in DataLoader(Shards(), batch_size=BATCH, num_workers=workers):
        seen += len(tokens)
    end = time.perf_counter()
    return {"rate": seen / (end - begin), "cpu": cpu()}


def first(manifest: str, started: float) -> dict[str, Any]:
    """Seconds to the first batch."""
    import numpy  # noqa: F401 - the part that is ours begins after it

    from sexpgpu.run.data.manifest import reader  # noqa: F401

    ready = time.time()
    opened(manifest)[1].batch(0)
    end = time.time()
    return {"all": end - started, "after imports": end - ready}


def threads(manifest: str) -> dict[str, Any]:
    """Seconds to parse all shards on two threads of one process."""
    from concurrent.futures import ThreadPoolExecutor

    from sexpgpu.experiment.model import Field
    from sexpgpu.run.data.manifest.schema import parse
    from sexpgpu.run.data.manifest.shards import parse_shard

    fields = (Field("tokens", "i32", (CONTEXT,)), Field("label", "i32"))
    path = Path(manifest)
    shards = parse(path.read_bytes(), manifest).splits["train"].shards
    with tempfile.TemporaryDirectory() as out, ThreadPoolExecutor(2) as pool:
        begin = time.perf_counter()
        list(pool.map(lambda i: parse_shard(str(path.parent / shards[i].uri), shards[i], "jsonl.gz", fields, f"{out}/{i}"), range(len(shards))))
        return {"read": time.perf_counter() - begin}


def child(what: str, manifest: str, cache: Path | None, workers: int | None = None, torch: bool = False) -> dict[str, Any]:
    """A measurement in a process of its own; a cache of None is an empty one. `torch`: after an import of it, as in a run."""
    with tempfile.TemporaryDirectory() as empty:
        words = [sys.executable, __file__, "--child", what, "--manifest", manifest, "--started", repr(time.time())]
        words += ["--torch"] if torch else []
        words += [] if workers is None else ["--workers", str(workers)]
        env = os.environ | {"XDG_CACHE_HOME": str(cache or empty), "OMP_NUM_THREADS": "1"}
        return json.loads(subprocess.run(words, capture_output=True, text=True, check=True, env=env).stdout)


def throughput(manifest: str, rounds: int) -> dict[str, Any]:
    rows = []
    for _ in range(rounds):
        other = child("eager", manifest, None, 2)
        rows.append({"eager": other["rate"], "eager cpu": other["cpu"], **child("ours", manifest, None)})
    median = {side: round(statistics.median(row[side] for row in rows)) for side in ("eager", "cold", "warm")}
    ratios = {f"{side} / eager": round(statistics.median(row[side] / row["eager"] for row in rows), 2) for side in ("cold", "warm")}
    # at its best the other side has both CPUs all the time, and at its worst ours has one: whoever else uses the machine
    ratios["cold / eager by cpu"] = round(statistics.median(row["eager cpu"] / 2 / row["cpu"] for row in rows), 2)
    seconds = {side: round(statistics.median(row[key] for row in rows), 2) for side, key in (("eager", "eager cpu"), ("ours, cold", "cpu"))}
    return {"question": "throughput", "samples per second": median, "cpu": seconds} | ratios


def first_batch(folder: Path, rounds: int) -> dict[str, Any]:
    manifest = str(make(folder, 20_000, 1000))
    cache = folder / "cache"
    child("first", manifest, cache)  # the index
    rows = [child("first", manifest, cache) for _ in range(rounds)]
    return {"question": "first batch", "shards": 1000, "first batch seconds": round(statistics.median(r["all"] for r in rows), 2),
            "after imports": round(statistics.median(r["after imports"] for r in rows), 2)}


def worker_counts(manifest: str, rounds: int) -> dict[str, Any]:
    counts: dict[str, Any] = {}
    for count in (0, 1, 2, 4):
        rows = [child("ours", manifest, None, count) for _ in range(rounds)]
        counts[f"{count} processes"] = {key: round(statistics.median(row[key] for row in rows), 2) for key in ("read", "cpu")}
    counts["2 threads"] = round(statistics.median(child("threads", manifest, None)["read"] for _ in range(rounds)), 2)
    return {"question": "workers", "seconds to parse, cpu with the batches": counts}


def remote(local: str, there: str, rounds: int) -> dict[str, Any]:
    rows = [(child("ours", local, None, torch=True)["read"], child("ours", there, None, torch=True)["read"]) for _ in range(rounds)]
    return {"question": "s3", "seconds": {"local": round(statistics.median(r[0] for r in rows), 2), "s3": round(statistics.median(r[1] for r in rows), 2)},
            "s3 / local": round(statistics.median(a / b for a, b in rows), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="a line of text a question")
    parser.add_argument("--keep", help="a folder for the shards, used again the next time")
    parser.add_argument("--s3", help="where the shards of --keep/large/m lie in a bucket")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--manifest", help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--torch", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        if given.child != "eager":
            from sexpgpu.run.storage import grant, warm
            from sexpgpu.settings import load
            grant(load(os.environ))
            if given.manifest.startswith("s3://"):
                warm("data")
            if given.torch:
                import torch  # noqa: F401 - as a run does between the reading of its file and of its data
        call = {"ours": lambda: ours(given.manifest, given.workers), "eager": lambda: eager(given.manifest, given.workers),
                "first": lambda: first(given.manifest, given.started), "threads": lambda: threads(given.manifest)}[given.child]
        print(json.dumps(call()))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given.keep or temporary)
        manifest = str(make(folder / "large", given.records, 32))
        questions = [lambda: throughput(manifest, given.rounds), lambda: first_batch(folder / "many", given.rounds),
                     lambda: worker_counts(manifest, given.rounds)]
        if given.s3:
            questions = [lambda: remote(manifest, f"{given.s3.rstrip('/')}/data-manifest-v1.json", given.rounds)]
        for ask in questions:
            row = ask()
            row["holds"] = all(row[k] <= bar if "seconds" in k else row[k] >= bar for k, bar in BARS.items() if k in row)
            print(json.dumps(row) if not given.table else "  ".join(f"{k}: {v}" for k, v in row.items()), flush=True)


if __name__ == "__main__":
    main()
