"""The settings record: precedence, kinds, secrets, roles, refusals; a test for each row of the table."""

from __future__ import annotations

import copy
import json
import pickle
import re
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from sexpgpu.diagnostics import SexpErrors
from sexpgpu.settings import (
    BY_NAME,
    FOUR,
    VARIABLES,
    Secret,
    Settings,
    child_environment,
    load,
    missing_values,
    not_yet,
    read,
    require,
    scrub,
    shown,
    split_targets,
)

#: variable -> (text, attribute, value)
ROWS = {
    "SEXPGPU_DEVICE": ("cuda", "device", "cuda"),
    "SEXPGPU_DEVICES": ("2,0", "devices", (2, 0)),
    "SEXPGPU_NODES": ("2", "nodes", 2),
    "SEXPGPU_NODE_RANK": ("1", "node_rank", 1),
    "SEXPGPU_RENDEZVOUS": ("host:29500", "rendezvous", "host:29500"),
    "SEXPGPU_NODE_GRADIENTS": ("f32", "node_gradients", "f32"),
    "SEXPGPU_METRICS": ("jsonl:a,stdout", "metrics", "jsonl:a,stdout"),
    "SEXPGPU_STATUS": ("s.json", "status", "s.json"),
    "SEXPGPU_DIAGNOSTICS": (" attention/* ,logits/*", "diagnostics", ("attention/*", "logits/*")),
    "SEXPGPU_RUN_SLUG": ("night-1", "run_slug", "night-1"),
    "SEXPGPU_CHECKPOINT_DIR": ("runs/{slug}", "checkpoint_dir", "runs/{slug}"),
    "SEXPGPU_RESUME": ("latest", "resume", "latest"),
    "SEXPGPU_EVAL_LIMIT": ("123", "eval_limit", 123),
    "SYVAIN_METRICS_API_KEY": ("k", "syvain_metrics_api_key", "k"),
    "SYVAIN_METRICS_FOLDER_ID": ("f", "syvain_metrics_folder_id", "f"),
    "SYVAIN_METRICS_HOST": ("https://other.example:8443/", "syvain_metrics_host", "https://other.example:8443"),
    "SEXPGPU_MEMORY": ("7.5", "memory", 7.5),
    "SEXPGPU_EXPLAIN": ("kernels", "explain", "kernels"),
    "SEXPGPU_PLAIN_HTTP": ("minio, store", "plain_http", ("minio", "store")),
    "FLASHCART_KERNEL_L_MAX": ("4", "flashcart_kernel_l_max", 4),
    "FLASHCART_CACHE_DIR": ("c", "flashcart_cache_dir", "c"),
    "FLASHCART_TP_SCATTER_KERNEL": ("edge", "flashcart_tp_scatter_kernel", "edge"),
    "FLASHCART_TP_CSR_GROUP_BUDGET": ("50", "flashcart_tp_csr_group_budget", 50),
    "FLASHCART_TP_BWD_GROUP_BUDGET": ("50", "flashcart_tp_bwd_group_budget", 50),
    "FLASHCART_TP_DBWD_GROUP_BUDGET": ("50", "flashcart_tp_dbwd_group_budget", 50),
    "FLASHCART_TP_BWD_CSR_MIN_DEG": ("8", "flashcart_tp_bwd_csr_min_deg", 8),
    "FLASHCART_TP_BWD_CSR_SLOTS": ("1", "flashcart_tp_bwd_csr_slots", 1),
    "FLASHCART_TP_BWD_SPLIT": ("full", "flashcart_tp_bwd_split", "full"),
    "FLASHCART_TP_DBWD_SPLIT": ("fused", "flashcart_tp_dbwd_split", "fused"),
    "FLASHCART_TP_PEAK_AWARE_GROUPS": ("no", "flashcart_tp_peak_aware_groups", False),
    **{f"FLASHCART_LAMMPS_{n}": ("Yes", f"flashcart_lammps_{n.lower()}", True)
       for n in ("VALIDATE", "DEBUG", "MEMORY_DEBUG", "EMPTY_CACHE", "CPU")},
    "FLASHCART_LAMMPS_EMPTY_CACHE_EVERY": ("5", "flashcart_lammps_empty_cache_every", 5),
    "PYTORCH_CUDA_ALLOC_CONF": ("x", "pytorch_cuda_alloc_conf", "x"),
    "PYTORCH_ALLOC_CONF": ("x", "pytorch_alloc_conf", "x"),
    "OMP_NUM_THREADS": ("2", "omp_num_threads", "2"),
    "OMP_WAIT_POLICY": ("active", "omp_wait_policy", "active"),
    "XDG_CACHE_HOME": ("c", "xdg_cache_home", "c"),
    "XDG_STATE_HOME": ("s", "xdg_state_home", "s"),
}
DEFAULTS = {
    "device": "cpu", "syvain_metrics_host": "https://metrics.041.io", "nodes": 1, "node_rank": 0, "node_gradients": "f32", "eval_limit": 10_000_000, "flashcart_kernel_l_max": 3,
    "flashcart_tp_scatter_kernel": "csr", "flashcart_tp_csr_group_budget": 100, "flashcart_tp_bwd_group_budget": 100,
    "flashcart_tp_bwd_csr_min_deg": 64, "flashcart_tp_peak_aware_groups": True, "flashcart_lammps_empty_cache_every": 1,
    **dict.fromkeys(["flashcart_lammps_" + n for n in ("validate", "debug", "memory_debug", "empty_cache", "cpu")], False),
}  # fmt: skip


def plain(value: object) -> object:
    return value.reveal() if isinstance(value, Secret) else value


def codes(settings: Settings) -> list[str]:
    return [d.code for d in not_yet(settings)]


def test_every_row_has_a_test() -> None:
    assert {v.name for v in VARIABLES if "AWS_" not in v.name} == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_row(name: str) -> None:
    text, key, value = ROWS[name]
    settings = load({name: text})
    assert plain(getattr(settings, key)) == value
    assert (settings.of(key).source, settings.of(key).via) == ("variable", name)
    unset = load({} if isinstance(value, bool) else {name: ""})  # a boolean's empty text is "off"
    assert getattr(unset, key) == DEFAULTS.get(key)
    assert unset.of(key).source == "default"


@pytest.mark.parametrize(
    ("key", "flag", "variable"),
    [("device", "--device", "SEXPGPU_DEVICE"), ("status", "--status", "SEXPGPU_STATUS"),
     ("metrics", "--metrics", "SEXPGPU_METRICS"), ("checkpoint_dir", "--checkpoint-dir", "SEXPGPU_CHECKPOINT_DIR"),
     ("resume", "--resume", "SEXPGPU_RESUME"), ("diagnostics", "--diagnostics", "SEXPGPU_DIAGNOSTICS")],
)  # fmt: skip
def test_flag_wins(key: str, flag: str, variable: str) -> None:
    text = {"device": "cpu", "metrics": "stdout"}.get(key, "mine")
    settings = load({variable: {"device": "cuda", "metrics": "jsonl:x"}.get(key, "theirs")}, {key: text})
    assert getattr(settings, key) == (("mine",) if key == "diagnostics" else text)
    assert (settings.of(key).source, settings.of(key).via) == ("flag", flag)
    if key != "device":
        none = load({variable: "stdout"}, {key: ""})
        assert not getattr(none, key) and none.of(key).source == "flag"


def test_counts_that_are_none_are_one_and_zero_is_a_budget() -> None:
    for text in ("0", "x", "-3", "1.5"):
        assert load({"FLASHCART_LAMMPS_EMPTY_CACHE_EVERY": text}).flashcart_lammps_empty_cache_every == 1
    assert load({"FLASHCART_TP_DBWD_GROUP_BUDGET": "0"}).flashcart_tp_dbwd_group_budget == 0


def test_empty_boolean_is_off() -> None:
    name = "FLASHCART_TP_PEAK_AWARE_GROUPS"
    assert load({name: ""}).flashcart_tp_peak_aware_groups is False
    for text in ("1", "TRUE", "Yes", "t"):
        assert load({name: text}).flashcart_tp_peak_aware_groups is True


@pytest.mark.parametrize(
    ("name", "text"),
    [("SEXPGPU_EVAL_LIMIT", t) for t in ("0", "-1", "1e6", "1_000", " 5", "٣", "5.0", "9" * 19)]
    + [("SEXPGPU_DEVICE", "gpu"), ("SEXPGPU_DEVICES", "0,0"), ("SEXPGPU_DEVICES", "0,"), ("SEXPGPU_RENDEZVOUS", "host"), ("SEXPGPU_RENDEZVOUS", "host:0"), ("SEXPGPU_NODE_GRADIENTS", "f16"), ("SEXPGPU_MEMORY", "0"),
       ("SEXPGPU_MEMORY", "inf"), ("SEXPGPU_RUN_SLUG", "a/b"), ("SEXPGPU_RUN_SLUG", "a" * 121),
       ("SEXPGPU_METRICS", "jsonl:"), ("SEXPGPU_METRICS", "sylvain"), ("SEXPGPU_EXPLAIN", "kernel"),
       ("OMP_NUM_THREADS", "zero"), ("OMP_NUM_THREADS", "0"), ("OMP_NUM_THREADS", "2,"), ("SEXPGPU_MEMORY", "zero"),
       ("FLASHCART_TP_BWD_SPLIT", "half")],
)  # fmt: skip
def test_malformed(name: str, text: str) -> None:
    with pytest.raises(SexpErrors) as caught:
        load({name: text})
    (found,) = caught.value.diagnostics
    assert found.code in ("E-ENV-001", "E-ENV-005") and name in found.message and found.exit_code == 2


def test_all_malformed_values_are_told_at_once() -> None:
    assert len(read({"SEXPGPU_EVAL_LIMIT": "x", "SEXPGPU_MEMORY": "y"}).problems) == 2


def test_a_flag_hides_a_malformed_variable() -> None:
    assert load({"SEXPGPU_DEVICE": "gpu"}, {"device": "cpu"}).device == "cpu"


def test_unknown_names_warn_with_the_nearest() -> None:
    found = read({"SEXPGPU_DEVISE": "cpu", "FLASHCART_CACHE": "x", "OTHER": "y"}).warnings
    assert [d.severity for d in found] == ["warning", "warning"]
    assert any("SEXPGPU_DEVICE" in text for d in found for text in d.help)


def test_targets() -> None:
    assert split_targets(r"jsonl:a\,b , stdout") == ("jsonl:a,b", "stdout")


@pytest.mark.parametrize(
    ("environ", "code"),
    [({"SEXPGPU_NODES": "2"}, "E-ENV-003"), ({"SEXPGPU_NODE_RANK": "1"}, "E-ENV-003"),
     ({"SEXPGPU_NODE_RANK": "2", "SEXPGPU_NODES": "2", "SEXPGPU_RENDEZVOUS": "h:1"}, "E-ENV-003"),
     ({"SEXPGPU_METRICS": "syvain:1"}, "E-ENV-003"), ({"SEXPGPU_CHECKPOINT_DIR": "s3://b/p"}, "E-NET-010"),
     ({"SEXPGPU_RESUME": "s3://b/p/step-1"}, "E-NET-010"), ({"SEXPGPU_RESUME": "latest"}, "E-ENV-003")],
)  # fmt: skip
def test_refused_until_it_is_there(environ: dict[str, str], code: str) -> None:
    settings = load(environ)
    assert codes(settings) == [code]
    assert next(iter(environ)) in not_yet(settings)[0].message
    with pytest.raises(SexpErrors):
        require(settings)


@pytest.mark.parametrize(
    "environ",
    [{}, {"SEXPGPU_DEVICES": "0"}, {"SEXPGPU_DEVICES": "0,1"}, {"SEXPGPU_DEVICES": "0,1", "SEXPGPU_DEVICE": "cuda"}, {"SEXPGPU_NODES": "1"}, {"SEXPGPU_NODES": "2", "SEXPGPU_RENDEZVOUS": "[::1]:29500"}, {"SYVAIN_METRICS_API_KEY": "k"}, {"AWS_REGION": "r"},
     {"SEXPGPU_RESUME": "latest", "SEXPGPU_CHECKPOINT_DIR": "c"}],
)  # fmt: skip
def test_not_refused(environ: dict[str, str]) -> None:
    require(load(environ))


@pytest.mark.parametrize("role", ["data", "checkpoint"])
@pytest.mark.parametrize("name", ["ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "ENDPOINT_URL", "REGION"])
def test_each_value_of_a_role_resolves_alone(role: str, name: str) -> None:
    levels = [f"SEXPGPU_{role.upper()}_AWS_{name}", f"SEXPGPU_AWS_{name}", f"AWS_{name}"]
    for first in range(3):
        found = load({level: level for level in levels[first:]}).credentials(role)
        assert plain(getattr(found, name.lower())) == levels[first]
        assert found.via == {name: levels[first]}
        assert len(found.missing) == 3
    other = "checkpoint" if role == "data" else "data"
    assert load({levels[0]: "x"}).credentials(other).via == {}


def test_a_session_token_goes_with_its_key_id() -> None:
    environ = {"SEXPGPU_DATA_AWS_ACCESS_KEY_ID": "k", "AWS_SESSION_TOKEN": "t", "AWS_ACCESS_KEY_ID": "other"}
    assert load(environ).credentials("data").session_token is None
    assert plain(load(environ).credentials("checkpoint").session_token) == "t"


def test_secrets_stay_secret() -> None:
    secret = load({"AWS_SECRET_ACCESS_KEY": "hunter2"}).credentials("data").secret_access_key
    assert secret is not None and secret.reveal() == "hunter2"
    for text in (str(secret), repr(secret), f"{secret}", f"{secret:>9}", shown(secret)):
        assert "hunter2" not in text
    for use in (hash, pickle.dumps, copy.copy, copy.deepcopy, lambda s: s == s):
        with pytest.raises(TypeError):
            use(secret)
    assert "hunter2" not in repr(load({"AWS_SECRET_ACCESS_KEY": "hunter2"}))


def test_credentials_in_a_url_are_masked() -> None:
    assert shown("https://me:pass@host:9000") == "https://***@host:9000"


def test_the_record_is_frozen() -> None:
    settings = load({"SEXPGPU_STATUS": "s"})
    with pytest.raises(FrozenInstanceError):
        settings.warnings = ()  # type: ignore[misc]
    with pytest.raises(TypeError):
        settings.values["status"] = settings.of("device")  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        settings.of("status").value = "x"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        _ = settings.nothing


# --- secrets in the hands of others ------------


def test_a_role_needs_all_four() -> None:
    """Each of the four alone is named, with every level that was looked at; a token is not needed."""
    for role in ("data", "checkpoint"):
        for name in FOUR:
            environ = {f"AWS_{n}": "x" for n in FOUR if n != name}
            (found,) = missing_values(load(environ), role, "s3://b/p", "--checkpoint-dir")
            assert found.code == "E-NET-010" and f"AWS_{name} of the {role} role is not set" in found.message
            text = " ".join(found.notes + found.help)
            for level in (f"SEXPGPU_{role.upper()}_", "SEXPGPU_", ""):
                assert f"{level}AWS_{name}" in text
        assert not missing_values(load({f"AWS_{n}": "x" for n in FOUR}), role, "s3://b/p")


def test_an_empty_value_is_looked_for_further_down() -> None:
    found = load({"SEXPGPU_DATA_AWS_REGION": "", "SEXPGPU_AWS_REGION": "", "AWS_REGION": "plain"}).credentials("data")
    assert found.region == "plain" and found.via == {"REGION": "AWS_REGION"}


def test_a_text_of_others_is_scrubbed() -> None:
    environ = {"AWS_SECRET_ACCESS_KEY": "hunter2", "SEXPGPU_AWS_SESSION_TOKEN": "hunter2-longer", "AWS_REGION": "eu"}
    assert scrub("hunter2-longer and hunter2 in eu", environ) == "*** and *** in eu"


def test_a_child_gets_the_secrets_of_its_role_alone() -> None:
    environ = {v.name: v.name.lower() for v in VARIABLES if v.kind == "secret"} | {"PATH": "/bin", "AWS_REGION": "r"}
    assert child_environment(environ) == {"PATH": "/bin", "AWS_REGION": "r"}
    child = child_environment(environ, ("data",))
    assert "SEXPGPU_DATA_AWS_SECRET_ACCESS_KEY" in child and "AWS_SESSION_TOKEN" in child
    assert not [name for name in child if "CHECKPOINT" in name or "SYVAIN" in name]
    assert load(child).credentials("data").secret_access_key is not None


def test_credentials_are_not_shown_hashed_or_pickled() -> None:
    found = load({f"AWS_{n}": f"hunter-{n}" for n in (*FOUR, "SESSION_TOKEN")}).credentials("data")
    assert "hunter-SECRET" not in repr(found) + str(found) and "hunter-SESSION" not in repr(found) and "hunter-ACCESS" not in repr(found)
    for use in (hash, pickle.dumps, copy.deepcopy, json.dumps):
        with pytest.raises(TypeError):
            use(found)


# --- the docs page ------------

#: variable -> default of the page that other tools link to; None: unset, or not said there
PAGE = {
    "SEXPGPU_DEVICE": "cpu", "SEXPGPU_DEVICES": None, "SEXPGPU_NODES": 1, "SEXPGPU_NODE_RANK": 0, "SEXPGPU_RENDEZVOUS": None,
    "SEXPGPU_NODE_GRADIENTS": "f32", "SEXPGPU_METRICS": None, "SEXPGPU_STATUS": None, "SEXPGPU_DIAGNOSTICS": None, "SEXPGPU_RUN_SLUG": None,
    "SEXPGPU_CHECKPOINT_DIR": None, "SEXPGPU_RESUME": None, "SEXPGPU_EVAL_LIMIT": 10_000_000, "SYVAIN_METRICS_API_KEY": None,
    "SYVAIN_METRICS_FOLDER_ID": None, "SEXPGPU_MEMORY": None, "SEXPGPU_EXPLAIN": None,
}  # fmt: skip
FLAGS = {"SEXPGPU_DEVICE": "--device", "SEXPGPU_METRICS": "--metrics", "SEXPGPU_STATUS": "--status", "SEXPGPU_CHECKPOINT_DIR": "--checkpoint-dir",
         "SEXPGPU_RESUME": "--resume", "SEXPGPU_DIAGNOSTICS": "--diagnostics"}  # fmt: skip


def test_the_page_and_the_record_agree_both_ways() -> None:
    text = (Path(__file__).parents[2] / "docs/environment.md").read_text("utf-8")
    rows = re.findall(r"^\| `([A-Z0-9_]+)` \| (.*?) ?\| (.*?) \| (.*) \|$", text, re.M)
    page = {name: (flag.strip("` "), default, doc) for name, flag, default, doc in rows}
    record = {v.name: (v.flag, v.shown_default, v.doc) for v in VARIABLES}
    assert page == record and len(rows) == len(page)
    assert {v.name: v.flag for v in VARIABLES if v.flag} == FLAGS
    for name, default in PAGE.items():
        assert BY_NAME[name].default == default
    levels = ("SEXPGPU_DATA_", "SEXPGPU_CHECKPOINT_", "SEXPGPU_", "")
    assert {f"{level}AWS_{name}" for level in levels for name in FOUR} <= set(record)
    settings = load({})
    assert len(settings.values) == len(VARIABLES)


@pytest.mark.parametrize("text", ["metrics.041.io", "http://metrics.041.io", "https://h/api", "https://h?x=1", "https://me:secret@h", "ftp://h", "https://",
                                  "https://h:0", "https://h:port", "http://127.0.0.1.evil.example"])
def test_origins_that_are_none(text: str) -> None:
    problems = read({"SYVAIN_METRICS_HOST": text}).problems
    assert [d.code for d in problems] == ["E-ENV-001"] and "secret" not in problems[0].message


@pytest.mark.parametrize("text", ["https://metrics.041.io", "https://h:8443/", "http://127.0.0.1:80", "http://localhost:9", "http://[::1]:9", " https://h\n"])
def test_origins(text: str) -> None:
    assert load({"SYVAIN_METRICS_HOST": text}).syvain_metrics_host == text.strip().rstrip("/")
