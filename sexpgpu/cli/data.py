"""`sexpgpu data`: token files and manifests, made and looked at."""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from sexpgpu.cli import output
from sexpgpu.diagnostics import fail, printable, problem
from sexpgpu.settings import load

#: what the subcommands call -> where it is
STAGES = {
    "tokenize": "sexpgpu.run.data.tokenize:tokenize",
    "verify tokens": "sexpgpu.run.data.tokenize:verify",
    "input": "sexpgpu.run.data.manifest.build:parse_input",
    "build": "sexpgpu.run.data.manifest.build:build",
    "open": "sexpgpu.run.data.manifest.look:open_manifest",
    "inspect": "sexpgpu.run.data.manifest.look:inspect",
    "verify": "sexpgpu.run.data.manifest.look:verify",
    "wrong": "sexpgpu.run.data.records:Wrong",
    "grant": "sexpgpu.run.storage:grant",
    "size": "sexpgpu.run.data.cache:size",
}


def stage(name: str) -> Any:
    """A stage by its name in the table."""
    module, _, attribute = STAGES[name].partition(":")
    return getattr(import_module(module), attribute)


@click.group()
def command() -> None:
    """Make token files and manifests, and look at them."""


@command.command()
@click.argument("texts", nargs=-1, required=True, metavar="TEXT...")
@click.option("--out", required=True, help="A folder for the token files, tokenizer.json and tokens.json.")
@click.option("--vocab", type=int, help="Train a byte-level BPE tokenizer of at most this many tokens.")
@click.option("--tokenizer", help="Take this tokenizer.json instead: for validation text, say.")
@output.json_messages
def tokenize(texts: tuple[str, ...], out: str, vocab: int | None, tokenizer: str | None) -> int:
    """Turn TEXTs, plain or .gz, into files of u16 or u32 tokens."""
    here = Path(os.getcwd())
    given = None if tokenizer is None else here / tokenizer
    done = stage("tokenize")([here / text for text in texts], here / out, vocab, given)
    record = done.record
    if vocab is not None and record["vocabulary"] < vocab:
        output.say(f"the text has pairs for {record['vocabulary']:,} tokens only, of {vocab:,} asked for")
    output.show(f"{printable(out)}/tokenizer.json: {record['vocabulary']:,} tokens, sha256 {record['tokenizer']['sha256']}")
    for file in record["files"]:
        name = f"{out}/{file['name']}"
        output.show(f'{printable(name)}: {file["tokens"]:,} tokens   (tokens "{printable(name)}" :dtype {record["dtype"]})')
    return 0


@command.command()
@click.argument("inputs", nargs=-1, required=True, metavar="[SPLIT[/STAGE]=]FILE...")
@click.option("--out", required=True, help="A folder for the shards and data-manifest-v1.json.")
@click.option("--records", type=int, default=65536, show_default=True, help="Records of one shard.")
@click.option("--base", help="What URIs begin with, such as s3://bucket/prefix; without it they are relative to the manifest.")
@output.json_messages
def build(inputs: tuple[str, ...], out: str, records: int, base: str | None) -> int:
    """Write FILEs of JSON lines, plain or .gz, as jsonl.gz shards under a manifest."""
    here = Path(os.getcwd())
    chosen = [stage("input")(word) for word in inputs]
    chosen = [type(one)(one.split, one.stage, here / one.path) for one in chosen]
    stage("build")(chosen, here / out, records, base, output.say)
    output.show(f"{printable(out)}/data-manifest-v1.json")
    return 0


def opened(location: str) -> Any:
    """The manifest at a location, reached as the environment says."""
    stage("grant")(load(os.environ))
    return stage("open")(location, Path(os.getcwd()))


@command.command()
@click.argument("manifest")
@click.option("--first", type=click.IntRange(0, 1000), default=2, show_default=True, help="Records of each split to show.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def inspect(manifest: str, first: int, as_json: bool) -> int:
    """Show what a MANIFEST's splits, stages and records are."""
    where, found = opened(manifest)
    try:
        told = stage("inspect")(where, found, first)
    except stage("wrong") as wrong:
        fail(wrong.code, printable(wrong.message), help=wrong.help)
    if as_json:
        output.show(json.dumps(told, indent=2, default=str))
        return 0
    for line in _lines(told):
        output.show(printable(line))
    return 0


def _lines(told: dict[str, Any]) -> list[str]:
    lines = [f"{told['location']}  {told['format']}, sha256 {told['digest']}", *(f"note: {note}" for note in told["notes"])]
    for name, split in told["splits"].items():
        lines += ["", f"{name}: {split['records']:,} records in {split['shards']:,} shards, {stage('size')(split['bytes'])}"]
        for label, part in split["stages"].items():
            metadata = f"  {json.dumps(part['metadata'])}" if part["metadata"] else ""
            lines.append(f"  stage {label}: {part['records']:,} records in {part['shards']:,} shards{metadata}")
        lines.append(f"  of its first {split['looked_at']:,} records:")
        for key, seen in split["keys"].items():
            kinds = ", ".join(f"{kind} ({count:,})" for kind, count in seen["kinds"].items())
            lines.append(f"    {key}: {kinds}")
            if "lengths" in seen:
                lines += _histogram(seen["lengths"])
        lines += [f"    {json.dumps(record, default=str)[:400]}" for record in split["first"]]
    return lines


def _histogram(lengths: dict[str, Any]) -> list[str]:
    most = max(lengths["histogram"].values())
    return [f"      lengths {lengths['least']:,} to {lengths['most']:,}"] + [
        f"      {int(begin):>7,}+ {count:>9,} {'#' * max(1, round(30 * count / most))}" for begin, count in lengths["histogram"].items()]


@command.command()
@click.argument("location", metavar="MANIFEST|FOLDER")
@click.option("--quiet", is_flag=True, help="Say nothing of shards that are whole.")
@output.json_messages
def verify(location: str, quiet: bool) -> int:
    """Read every shard of a MANIFEST, or what `tokenize` wrote to a FOLDER; exit code 1 where something is wrong."""
    folder = Path(os.getcwd()) / location
    if (folder / "tokens.json").is_file():
        wrong = stage("verify tokens")(folder)
        output.report([problem("E-DATA-025", f"{printable(location)}/{line}").diagnostic for line in wrong])
        output.show(f"{printable(location)}: {'whole' if not wrong else f'{len(wrong)} files are not whole'}")
        return 1 if wrong else 0
    where, found = opened(location)
    findings = stage("verify")(where, found, (lambda text: None) if quiet else output.say)
    output.report(findings)
    shards = sum(len(part.shards) for part in found.splits.values())
    output.show(f"{printable(location)}: {shards:,} shards, {'all whole' if not findings else f'{len(findings)} not whole'}")
    return 1 if findings else 0
