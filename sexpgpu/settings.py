"""Every setting of the machine: one table of variables, read once into a frozen record with each value's origin.

`read` is a pure function of the environment and the flags. It never raises: malformed values stand in
`problems`, names we do not know in `warnings`, so that `doctor` can show both. `load` is `read` that raises.
`require` refuses what needs other settings that are missing. A flag wins over its variable, a variable over the default.

The module is long because the table is: one row a variable, in the order of the docs page generated from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from types import MappingProxyType
from typing import Any, NoReturn
from urllib.parse import urlsplit

from sexpgpu.diagnostics import Diagnostic, SexpErrors, note_warning, problem, suggestion

EVAL_LIMIT = 10_000_000
ROLES = ("data", "checkpoint")
TARGETS = ("jsonl", "stdout", "syvain")
SYVAIN_HOST = "https://metrics.041.io"


class Secret:
    """A value that is used and never shown: masked in `str`, `repr` and formats; no hash, equality or pickle."""

    __slots__ = ("__value",)

    def __init__(self, value: str):
        self.__value = value

    def reveal(self) -> str:
        """The value itself, for the one call that needs it."""
        return self.__value

    def __repr__(self) -> str:
        return "***"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format("***", spec)

    def __eq__(self, other: object) -> NoReturn:
        raise TypeError("a secret is not compared")

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not pickled or copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a secret is not pickled or copied")


@dataclass(frozen=True)
class Variable:
    """A row of the table. `key` is the attribute of `Settings`; `flag` the option of `run` that wins over it."""

    name: str
    kind: str
    doc: str
    default: Any = None
    flag: str = ""
    default_text: str = ""

    @property
    def key(self) -> str:
        return self.name.removeprefix("SEXPGPU_").lower()

    @property
    def shown_default(self) -> str:
        """The default as docs and doctor print it."""
        if self.default_text:
            return self.default_text
        return "unset" if self.default is None else str(self.default).lower()


def _aws(prefix: str, whose: str) -> tuple[Variable, ...]:
    return (
        Variable(f"{prefix}AWS_ACCESS_KEY_ID", "secret", f"S3 key id {whose}"),
        Variable(f"{prefix}AWS_SECRET_ACCESS_KEY", "secret", f"S3 secret key {whose}"),
        Variable(
            f"{prefix}AWS_SESSION_TOKEN",
            "secret",
            f"S3 session token {whose}; used only with the key id of this row's family",
        ),
        Variable(f"{prefix}AWS_ENDPOINT_URL", "url", f"S3 endpoint {whose}"),
        Variable(f"{prefix}AWS_REGION", "text", f"S3 region {whose}"),
    )


VARIABLES: tuple[Variable, ...] = (
    Variable("SEXPGPU_DEVICE", "device", "`cpu` (the interpreter) or `cuda`", "cpu", "--device"),
    Variable("SEXPGPU_DEVICES", "ordinals", "devices in rank order, `0` or `0,1`", None, default_text="all visible"),
    Variable("SEXPGPU_NODES", "positive", "machines that train one run", 1),
    Variable("SEXPGPU_NODE_RANK", "natural", "which of them this one is", 0),
    Variable("SEXPGPU_RENDEZVOUS", "address", "`host:port` of node 0, where the machines meet; required when there are several"),
    Variable("SEXPGPU_NODE_GRADIENTS", "wire", "how gradients travel between machines: `f32`, or `bf16`, rounded for the way", "f32"),
    Variable(
        "SEXPGPU_METRICS",
        "targets",
        "where numbers go: `jsonl:<path>`, `stdout`, `syvain`, several by comma",
        None,
        "--metrics",
    ),
    Variable("SEXPGPU_STATUS", "path", "the status file", None, "--status"),
    Variable(
        "SEXPGPU_DIAGNOSTICS", "globs", "taps to record, as globs; replaces `:diagnostics`", None, "--diagnostics"
    ),
    Variable("SEXPGPU_RUN_SLUG", "slug", "the base of the run's slug", None, default_text="the file's stem"),
    Variable(
        "SEXPGPU_CHECKPOINT_DIR",
        "location",
        "where checkpoints go; `{slug}` stands for the run's slug",
        None,
        "--checkpoint-dir",
    ),
    Variable("SEXPGPU_RESUME", "resume", "a checkpoint to go on from, or `latest`", None, "--resume"),
    Variable("SEXPGPU_EVAL_LIMIT", "positive", "units of work that evaluating a file may cost", EVAL_LIMIT),
    Variable("SYVAIN_METRICS_API_KEY", "secret", "key of the `syvain` target"),
    Variable("SYVAIN_METRICS_FOLDER_ID", "text", "folder of the `syvain` target; `syvain:<id>` wins over it"),
    Variable(
        "SYVAIN_METRICS_HOST",
        "origin",
        "origin of the `syvain` service; our own variable, the others are the service's",
        SYVAIN_HOST,
    ),
    Variable(
        "SEXPGPU_MEMORY",
        "gib",
        "GiB of free device memory that the memory plan assumes",
        None,
        default_text="the device's own; on the CPU none",
    ),
    Variable("SEXPGPU_EXPLAIN", "explain", "`kernels` lists every launch of each graph, or on the CPU every call"),
    *_aws("SEXPGPU_DATA_", "of the data role"),
    *_aws("SEXPGPU_CHECKPOINT_", "of the checkpoint role"),
    *_aws("SEXPGPU_", "shared by both roles"),
    *_aws("", "that other tools read too; the last resort of both roles"),
    Variable(
        "SEXPGPU_PLAIN_HTTP",
        "globs",
        "hosts, by comma, to which S3 may go over `http://`; this machine needs no row",
        None,
        default_text="none",
    ),
    Variable("FLASHCART_KERNEL_L_MAX", "natural", "highest tensor rank of the generated kernels", 3),
    Variable(
        "FLASHCART_CACHE_DIR",
        "path",
        "folder of the generated kernels",
        None,
        default_text="the user's cache folder, `flashcart`",
    ),
    Variable(
        "FLASHCART_TP_SCATTER_KERNEL", "scatter", "`csr` sums edges by receiver, `edge` adds them atomically", "csr"
    ),
    Variable("FLASHCART_TP_CSR_GROUP_BUDGET", "natural", "output components of one forward launch of `csr`", 100),
    Variable(
        "FLASHCART_TP_BWD_GROUP_BUDGET", "natural", "output components of one launch of the first derivative", 100
    ),
    Variable(
        "FLASHCART_TP_DBWD_GROUP_BUDGET",
        "natural",
        "output components of one fused launch of the second derivative",
        None,
        default_text="half the smaller of the two above",
    ),
    Variable(
        "FLASHCART_TP_BWD_CSR_MIN_DEG", "positive", "mean edges a receiver at which the backward pass splits them", 64
    ),
    Variable(
        "FLASHCART_TP_BWD_CSR_SLOTS",
        "positive",
        "groups of edges in that split",
        None,
        default_text="from the mean edge count",
    ),
    Variable(
        "FLASHCART_TP_BWD_SPLIT",
        "split",
        "`fused` or `full` launches of the first derivative",
        None,
        default_text="chosen",
    ),
    Variable(
        "FLASHCART_TP_DBWD_SPLIT",
        "split",
        "`fused` or `full` launches of the second derivative",
        None,
        default_text="chosen",
    ),
    Variable("FLASHCART_TP_PEAK_AWARE_GROUPS", "boolean", "lets budgets grow to the largest active rank", True),
    Variable("FLASHCART_LAMMPS_VALIDATE", "boolean", "in LAMMPS: checks every call, not the first alone", False),
    Variable("FLASHCART_LAMMPS_DEBUG", "boolean", "in LAMMPS: logs counts and ranges, and checks every call", False),
    Variable("FLASHCART_LAMMPS_MEMORY_DEBUG", "boolean", "in LAMMPS: prints device memory at each stage", False),
    Variable("FLASHCART_LAMMPS_EMPTY_CACHE", "boolean", "in LAMMPS: gives cached device memory back after calls", False),
    Variable("FLASHCART_LAMMPS_EMPTY_CACHE_EVERY", "count", "after every how many calls; what is no count is 1", 1),
    Variable("FLASHCART_LAMMPS_CPU", "boolean", "in LAMMPS: refuses arrays of a device that was not asked for", False),
    Variable(
        "PYTORCH_CUDA_ALLOC_CONF", "text", "torch's allocator", None, default_text="expandable_segments:True, set by us"
    ),
    Variable("PYTORCH_ALLOC_CONF", "text", "the allocator's newer name; set, it keeps us from setting the older one"),
    Variable(
        "OMP_NUM_THREADS", "threads", "CPU threads", None, default_text="by a rule, or as the resumed checkpoint says"
    ),
    Variable("OMP_WAIT_POLICY", "text", "what idle CPU threads do", None, default_text="passive, set by us"),
    Variable("XDG_CACHE_HOME", "path", "the user's cache folder", None, default_text="~/.cache"),
    Variable(
        "XDG_STATE_HOME",
        "path",
        "the user's folder for spools and reports of bugs",
        None,
        default_text="~/.local/state",
    ),
)

BY_NAME: Mapping[str, Variable] = MappingProxyType({v.name: v for v in VARIABLES})


@dataclass(frozen=True)
class Value:
    """A setting with its source: `flag`, `variable` or `default`; `via` is the flag or variable that gave it."""

    value: Any
    source: str
    via: str = ""


@dataclass(frozen=True)
class Credentials:
    """What one role needs to reach S3. `via`: name of the value -> the variable that gave it."""

    role: str
    access_key_id: Secret | None
    secret_access_key: Secret | None
    session_token: Secret | None
    endpoint_url: str | None
    region: str | None
    via: Mapping[str, str]
    plain_http: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """Names that no level gives, as the most specific variable that would."""
        return tuple(f"SEXPGPU_{self.role.upper()}_AWS_{n}" for n in FOUR if n not in self.via)


@dataclass(frozen=True)
class Settings:
    """The record: `settings.device` is a value, `settings.of("device")` says where it came from."""

    values: Mapping[str, Value]
    warnings: tuple[Diagnostic, ...] = ()
    problems: tuple[Diagnostic, ...] = ()

    def of(self, key: str) -> Value:
        return self.values[key]

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_") or key == "values":
            raise AttributeError(key)
        try:
            return self.values[key].value
        except KeyError:
            raise AttributeError(f"no setting `{key}`") from None

    def credentials(self, role: str) -> Credentials:
        """The S3 values of `data` or `checkpoint`, each resolved on its own."""
        return _credentials(self, role)


# --- kinds: text -> value; a ValueError's text says what was expected ------------

DIGITS = re.compile(r"[0-9]{1,18}\Z")


def natural(text: str) -> int:
    """Decimal digits, as an integer."""
    if not DIGITS.match(text):
        raise ValueError("a whole number in decimal digits")
    return int(text)


def positive(text: str) -> int:
    """Decimal digits, at least 1."""
    if not DIGITS.match(text) or int(text) < 1:
        raise ValueError("a positive whole number in decimal digits")
    return int(text)


def globs(text: str) -> tuple[str, ...]:
    """Globs divided by commas, blanks trimmed."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def split_targets(text: str) -> tuple[str, ...]:
    r"""Metrics targets divided by commas; `\,` is a comma of a path."""
    parts = re.split(r"(?<!\\),", text)
    return tuple(p.strip().replace("\\,", ",") for p in parts if p.strip())


def _targets(text: str) -> str:
    for target in split_targets(text):
        scheme, colon, rest = target.partition(":")
        if scheme not in TARGETS:
            raise ValueError("one of `jsonl:<path>`, `stdout`, `syvain`, `syvain:<folder-id>`", scheme)
        if scheme == "jsonl" and not rest:
            raise ValueError("a path after `jsonl:`")
        if scheme == "stdout" and colon:
            raise ValueError("`stdout` alone")
        if scheme == "syvain" and colon and not rest:
            raise ValueError("a folder id after `syvain:`")
    return text


def _ordinals(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(natural(p.strip()) for p in text.split(","))
    except ValueError:
        raise ValueError("device numbers divided by commas, such as `0,1`") from None
    if len(set(numbers)) != len(numbers):
        raise ValueError("each device number once")
    return numbers


def address(text: str) -> tuple[str, int]:
    """`host:port`, the host of an IPv6 address in brackets."""
    host, colon, port = text.strip().rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not re.fullmatch(r"[A-Za-z0-9._:%-]+", host) or not DIGITS.match(port) or not 0 < int(port) < 65536:
        raise ValueError("`host:port`, such as `10.0.0.1:29500`")
    return host, int(port)


def _gib(text: str) -> float:
    if not re.match(r"[0-9]{1,9}(\.[0-9]{1,9})?\Z", text) or float(text) == 0:
        raise ValueError("a positive number of GiB, such as `12` or `7.5`")
    return float(text)


def _threads(text: str) -> str:
    """OpenMP's own form: a count, or several by comma, of which the first is ours."""
    try:
        return ",".join(str(positive(part.strip())) for part in text.split(","))
    except ValueError:
        raise ValueError("a positive whole number in decimal digits") from None


def _slug(text: str) -> str:
    if not re.match(r"[A-Za-z0-9._-]{1,120}\Z", text):
        raise ValueError("at most 120 letters, digits, `.`, `_` and `-`")
    return text


def _text(text: str) -> str:
    if "\0" in text:
        raise ValueError("text without a null character")
    return text


def is_loopback(host: str) -> bool:
    """Whether a host's name is this machine's own."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def origin(text: str) -> str:
    """`https://host[:port]` without a final slash; `http://` only to this machine, since a key goes there."""
    expected = "an origin such as `https://metrics.041.io`: no path, user or query, and `http://` only to this machine"
    try:
        parts = urlsplit(text.strip())
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise ValueError(expected) from None
    plain = not parts.path.strip("/") and not parts.query and not parts.fragment and "@" not in parts.netloc
    if not plain or not re.fullmatch(r"[A-Za-z0-9.:_-]+", host) or port == 0:
        raise ValueError(expected)
    if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(host)):
        raise ValueError(expected)
    return f"{parts.scheme}://{parts.netloc}"


def _device(text: str) -> str:
    """No guess beside the two there are: whoever writes `gpu` does not mean `cpu`."""
    if text not in ("cpu", "cuda"):
        raise ValueError("`cpu` or `cuda` (a GPU)")
    return text


def _choice(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError("`" + "` or `".join(names) + "`", text, names)
        return text

    return parse


ON, OFF = ("1", "true", "yes", "t"), ("", "0", "false", "no", "f", "off")

KINDS: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    {
        "device": _device,
        "ordinals": _ordinals,
        "positive": positive,
        "natural": natural,
        "text": _text,
        "url": _text,
        "address": lambda text: text.strip() if address(text) else "",
        "wire": _choice("f32", "bf16"),
        "origin": origin,
        "targets": _targets,
        "path": _text,
        "globs": globs,
        "slug": _slug,
        "location": _text,
        "resume": _text,
        "secret": Secret,
        "gib": _gib,
        "explain": _choice("kernels"),
        "threads": _threads,
        "scatter": _choice("csr", "edge"),
        "split": _choice("fused", "full"),
        "count": lambda text: max(1, int(text)) if DIGITS.match(text) else 1,
        "boolean": lambda text: text.lower() in ON,
    }
)


# --- reading ------------


def read(environ: Mapping[str, str], flags: Mapping[str, str | None] | None = None) -> Settings:
    """The settings of these variables and flags (`{"device": "cpu"}`; None: a flag not given). Never raises."""
    given = {k: v for k, v in (flags or {}).items() if v is not None}
    values: dict[str, Value] = {}
    problems: list[Diagnostic] = []
    for variable in VARIABLES:
        try:
            values[variable.key if variable.name in _OWN else variable.name.lower()] = _resolve(
                variable, environ, given
            )
        except _Malformed as bad:
            values[variable.key if variable.name in _OWN else variable.name.lower()] = Value(
                variable.default, "default"
            )
            problems.append(bad.diagnostic)
    return Settings(MappingProxyType(values), (*_unknown(environ), *_unclear(environ)), tuple(problems))


def load(environ: Mapping[str, str], flags: Mapping[str, str | None] | None = None) -> Settings:
    """`read`, raising every malformed value at once."""
    settings = read(environ, flags)
    if settings.problems:
        raise SexpErrors(settings.problems)
    return settings


#: names whose attribute leaves out the prefix; the AWS_* rows would collide, so they keep theirs
_OWN = frozenset(v.name for v in VARIABLES if v.name.startswith("SEXPGPU_") and "_AWS_" not in v.name)


class _Malformed(Exception):
    def __init__(self, diagnostic: Diagnostic):
        super().__init__(diagnostic.message)
        self.diagnostic = diagnostic


def _resolve(variable: Variable, environ: Mapping[str, str], flags: Mapping[str, str]) -> Value:
    if variable.flag and variable.key in flags:
        text = flags[variable.key]
        if text == "" and variable.kind != "device":  # an empty flag selects none
            return Value(() if variable.kind == "globs" else None, "flag", variable.flag)
        return Value(_parse(variable, text, variable.flag), "flag", variable.flag)
    text = environ.get(variable.name, "")
    if text == "" and not (variable.kind == "boolean" and variable.name in environ):
        return Value(variable.default, "default")
    return Value(_parse(variable, text, variable.name), "variable", variable.name)


def _parse(variable: Variable, text: str, via: str) -> Any:
    try:
        return KINDS[variable.kind](text)
    except ValueError as error:
        raise _Malformed(_malformed(variable, text, via, error)) from None


def _malformed(variable: Variable, text: str, via: str, error: ValueError) -> Diagnostic:
    expected, *rest = error.args
    shown = re.sub(r"(?<=://)[^/@\s]*@", "***@", text if len(text) <= 200 else text[:200] + "…")
    known = rest[1] if len(rest) > 1 else TARGETS if variable.kind == "targets" else ()
    guess = suggestion(rest[0], known, "values") if rest else ()
    code = "E-ENV-005" if variable.kind == "targets" and rest else "E-ENV-001"
    return problem(code, f"{via} is `{shown}`; it takes {expected}", help=guess).diagnostic


def _unknown(environ: Mapping[str, str]) -> list[Diagnostic]:
    return [
        note_warning(
            "E-ENV-010",
            f"the variable {name} is set, and nothing reads it",
            help=suggestion(name, BY_NAME, "variables"),
        )
        for name in sorted(environ)
        if name.startswith(("SEXPGPU_", "FLASHCART_")) and name not in BY_NAME
    ]


def _unclear(environ: Mapping[str, str]) -> list[Diagnostic]:
    """A warning for each boolean variable that is off by a word that does not say so."""
    return [
        note_warning(
            "E-ENV-016",
            f"{v.name} is `{environ[v.name][:200]}`, which counts as off: on are 1, true, yes and t",
            help=suggestion(environ[v.name].lower(), ON, "values"),
        )
        for v in VARIABLES
        if v.kind == "boolean" and v.name in environ and environ[v.name].lower() not in (*ON, *OFF)
    ]


#: the values that a role needs, each resolved on its own
FOUR = ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "ENDPOINT_URL", "REGION")


def _levels(role: str) -> tuple[str, ...]:
    """Prefixes of a role's variables, the first match wins."""
    return (f"SEXPGPU_{role.upper()}_", "SEXPGPU_", "")


def _credentials(settings: Settings, role: str) -> Credentials:
    if role not in ROLES:
        raise ValueError(f"no role {role}")
    found: dict[str, Any] = {}
    via: dict[str, str] = {}
    for name in FOUR:
        for level in _levels(role):
            value = settings.values[f"{level}AWS_{name}".lower()].value
            if value is not None:
                found[name], via[name] = value, f"{level}AWS_{name}"
                break
    if "ACCESS_KEY_ID" in via:  # a token belongs to the key id beside it
        token = via["ACCESS_KEY_ID"].replace("ACCESS_KEY_ID", "SESSION_TOKEN")
        value = settings.values[token.lower()].value
        if value is not None:
            found["SESSION_TOKEN"], via["SESSION_TOKEN"] = value, token
    return Credentials(
        role,
        found.get("ACCESS_KEY_ID"),
        found.get("SECRET_ACCESS_KEY"),
        found.get("SESSION_TOKEN"),
        found.get("ENDPOINT_URL"),
        found.get("REGION"),
        MappingProxyType(via),
        settings.plain_http or (),
    )


def missing_values(settings: Settings, role: str, location: str, via: str = "") -> list[Diagnostic]:
    """E-NET-010 where a role lacks one of the four values that `location` needs; `via`: who named the location."""
    names = [name for name in FOUR if name not in _credentials(settings, role).via]
    if not names:
        return []
    levels = {name: [f"{level}AWS_{name}" for level in _levels(role)] for name in names}
    there = [f"{name} comes from {v}" for name, v in _credentials(settings, role).via.items()]
    return [
        problem(
            "E-NET-010",
            (f"{via} is {shown(location)}, and " if via else f"{shown(location)} is on S3, and ")
            + ", ".join(f"AWS_{name}" for name in names)
            + f" of the {role} role {'is' if len(names) == 1 else 'are'} not set",
            notes=(*(f"looked for {', '.join(levels[name])}" for name in names), *there),
            help=[f"export {levels[name][0]}=…" for name in names],
        ).diagnostic
    ]


# --- keeping secrets ------------

SECRETS = frozenset(v.name for v in VARIABLES if v.kind == "secret")


def scrub(text: str, environ: Mapping[str, str]) -> str:
    """`text` with the value of every secret variable masked: for what others wrote, such as an exception's text."""
    for value in sorted({environ[name] for name in SECRETS if environ.get(name)}, key=len, reverse=True):
        text = text.replace(value, "***")
    return text


def child_environment(environ: Mapping[str, str], roles: Iterable[str] = ()) -> dict[str, str]:
    """The variables of a child process: without secrets, but for those of the S3 roles that it is to play."""
    kept = {f"{level}AWS_{name}" for role in roles for level in _levels(role)
            for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN")}  # fmt: skip
    return {name: value for name, value in environ.items() if name not in SECRETS or name in kept}


# --- settings that need others ------------


def not_yet(settings: Settings) -> list[Diagnostic]:
    """E-ENV-003 for each setting that needs other settings, which are missing; of S3, E-NET-010."""
    found: list[Diagnostic] = []

    def refuse(key: str, what: str, mend: str) -> None:
        value = settings.of(key)
        found.append(problem("E-ENV-003", f"{value.via} {what}", help=mend).diagnostic)

    if settings.nodes > 1:
        if settings.rendezvous is None:
            refuse("nodes", f"asks for {settings.nodes} machines, and SEXPGPU_RENDEZVOUS does not say where they meet",
                   "export SEXPGPU_RENDEZVOUS=host:port, an address of node 0, on every machine")
        if settings.node_rank >= settings.nodes:
            refuse("node_rank", f"is {settings.node_rank}, and the last of {settings.nodes} machines is number {settings.nodes - 1}",
                   "nodes count from 0")
    elif settings.node_rank > 0:
        refuse(
            "node_rank",
            f"is {settings.node_rank}, and there is one machine, number 0",
            "leave it out, or set SEXPGPU_NODES",
        )
    if settings.syvain_metrics_api_key is None and any(
        t.partition(":")[0] == "syvain" for t in split_targets(settings.metrics or "")
    ):
        refuse(
            "metrics",
            "names `syvain`, and SYVAIN_METRICS_API_KEY is not set",
            "export SYVAIN_METRICS_API_KEY=…, or write `jsonl:<path>` and send that file later",
        )
    for key in ("checkpoint_dir", "resume"):
        location = getattr(settings, key) or ""
        if location.lower().startswith("s3://"):
            found += missing_values(settings, "checkpoint", location, settings.of(key).via)
            break
    if settings.resume == "latest" and not settings.checkpoint_dir:
        refuse(
            "resume",
            "is `latest`, and there is no checkpoint location to search",
            "add --checkpoint-dir <folder>",
        )
    return found


def require(settings: Settings) -> None:
    """Raise what `not_yet` finds."""
    found = not_yet(settings)
    if found:
        raise SexpErrors(found)


def shown(value: Any) -> str:
    """A setting's value as doctor prints it: secrets masked, credentials in a URL too."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(str(v) for v in value) if value else "none"
    return re.sub(r"(?<=://)[^/@\s]*@", "***@", str(value))
