"""What each refusal of a server becomes: its code, the words a person can act on, and never a key or the server's text."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from errors_server import Refusing
from seaweed import KEYS, REGION, STUB, Server

import sexpgpu.run.storage.s3 as s3
from sexpgpu.diagnostics import SexpError, render
from sexpgpu.settings import load

KEY, SECRET, TOKEN = STUB


def refused(call: Callable[[], Any], secrets: tuple[str, ...] = (KEY, SECRET, TOKEN)) -> tuple[str, str]:
    """(code, the whole text a person sees)."""
    with pytest.raises(SexpError) as caught:
        call()
    text = render(caught.value.diagnostic)
    shown = text + str(caught.value) + repr(caught.value) + repr(caught.value.diagnostic)
    assert not [secret for secret in secrets if secret in shown] and "SERVERTEXT" not in shown
    return caught.value.diagnostic.code, text


def stub(server: Refusing, **more: str) -> s3.S3Storage:
    environ = {"SEXPGPU_CHECKPOINT_AWS_ACCESS_KEY_ID": KEY, "SEXPGPU_AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL": server.url,
               "SEXPGPU_CHECKPOINT_AWS_SESSION_TOKEN": TOKEN, "AWS_REGION": "here-1", **more}  # fmt: skip
    storage = s3.open_bucket("bucket/p", load(environ).credentials("checkpoint"))
    storage.link.patience = 0.5
    return storage


CASES = [
    (403, "InvalidAccessKeyId", "E-NET-012", "SEXPGPU_CHECKPOINT_AWS_ACCESS_KEY_ID"),
    (403, "SignatureDoesNotMatch", "E-NET-012", "SEXPGPU_AWS_SECRET_ACCESS_KEY"),
    (400, "ExpiredToken", "E-NET-012", "SEXPGPU_CHECKPOINT_AWS_SESSION_TOKEN"),
    (400, "InvalidToken", "E-NET-012", "session token"),
    (404, "NoSuchBucket", "E-NET-013", "no bucket `bucket`"),
    (403, "RequestTimeTooSkewed", "E-NET-014", "clock"),
    (400, "AuthorizationHeaderMalformed", "E-NET-015", "AWS_REGION is `here-1`"),
    (301, "PermanentRedirect", "E-NET-015", "AWS_REGION"),
    (403, "AccessDenied", "E-NET-018", "SEXPGPU_CHECKPOINT_AWS_ACCESS_KEY_ID"),
    (400, "NonsenseFromAServer", "E-NET-020", "400 NonsenseFromAServer"),
    (503, "SlowDown", "E-NET-011", "503 SlowDown"),
    (500, "InternalError", "E-NET-011", "500 InternalError"),
]


@pytest.mark.parametrize(("status", "code", "expected", "words"), CASES, ids=[c[1] for c in CASES])
def test_a_refusal_has_its_code(status: int, code: str, expected: str, words: str) -> None:
    with Refusing(status, code, f"<AWSAccessKeyId>{KEY}</AWSAccessKeyId>") as server:
        for call in (lambda s: s.entries(), lambda s: s.read("x"), lambda s: s.put("x", b"y"), lambda s: s.head("x")):
            found, text = refused(lambda call=call: call(stub(server)))
            assert (found, words in text) == (expected, True), text


def test_the_right_region_is_named_and_not_gone_to() -> None:
    with Refusing(400, "AuthorizationHeaderMalformed", "<Region>there-2</Region>") as server:
        storage = stub(server)
        assert "export AWS_REGION=there-2" in refused(storage.entries)[1]
        assert len(server.requests) == 1
    with Refusing(301, "PermanentRedirect", headers={"x-amz-bucket-region": "there-2"}) as server:
        assert "`there-2`" in refused(lambda: stub(server).read("x"))[1] and len(server.requests) == 1


def test_a_clock_that_is_wrong_is_measured() -> None:
    with Refusing(403, "AccessDenied", date=time.time() + 3600) as server:
        code, text = refused(lambda: stub(server).read("x"))
        apart = re.search(r"clock. It is (\d+) s behind", text)
        assert code == "E-NET-014" and apart and 3500 < int(apart[1]) <= 3600, text
        assert refused(lambda: stub(server).head("x"))[0] == "E-NET-014"


def test_retries_are_bounded() -> None:
    with Refusing(503, "SlowDown") as server:
        refused(lambda: stub(server).entries())
        assert 2 <= len(server.requests) <= 8


def test_a_request_holds_what_was_given_and_nothing_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """~/.aws, AWS_PROFILE, other AWS variables and proxies are poisoned; the signature shows key, region and token."""
    poison(tmp_path, monkeypatch)
    with Refusing(404, "NoSuchBucket") as server:
        assert refused(stub(server).entries)[0] == "E-NET-013"
        ((request, headers),) = server.requests
    assert request.startswith("GET /bucket?")
    assert (
        headers["Authorization"].startswith("AWS4-HMAC-SHA256 Credential=" + KEY + "/")
        and "/here-1/s3/aws4_request" in headers["Authorization"]
    )
    assert headers["X-Amz-Security-Token"] == TOKEN


def poison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every source boto3 would ask by itself, each with something that would show."""
    aws = tmp_path / "home" / ".aws"
    aws.mkdir(parents=True)
    evil = "aws_access_key_id = AKIDPOISON\naws_secret_access_key = poison\naws_session_token = poison\n"
    (aws / "credentials").write_text(f"[default]\n{evil}[evil]\n{evil}")
    (aws / "config").write_text(
        "[default]\nregion = evil-9\nendpoint_url = http://127.0.0.1:1\ns3 =\n  addressing_style = virtual\n"
        "retry_mode = legacy\nmax_attempts = 100\n[profile evil]\nregion = evil-9\ncredential_process = /bin/false\n"
        "ca_bundle = /nowhere\nnonsense line without sense\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in {
        "AWS_PROFILE": "evil", "AWS_DEFAULT_PROFILE": "evil", "AWS_DEFAULT_REGION": "evil-9", "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1",
        "AWS_CONFIG_FILE": str(aws / "config"), "AWS_SHARED_CREDENTIALS_FILE": str(aws / "credentials"), "AWS_CA_BUNDLE": "/nowhere",
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1", "AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1:1", "AWS_RETRY_MODE": "nonsense",
        "AWS_USE_FIPS_ENDPOINT": "true", "AWS_USE_DUALSTACK_ENDPOINT": "true", "AWS_WEB_IDENTITY_TOKEN_FILE": "/nowhere", "AWS_ROLE_ARN": "evil",
        "HTTP_PROXY": "http://127.0.0.1:1", "http_proxy": "http://127.0.0.1:1", "ALL_PROXY": "http://127.0.0.1:1", "AWS_SECURITY_TOKEN": "poison",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "nonsense", "AWS_DEFAULTS_MODE": "nonsense", "AWS_DATA_PATH": "/nowhere",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)


# --- the same by the real server ------------


def test_a_poisoned_machine_reaches_the_real_server(
    server: Server, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(tmp_path, monkeypatch)
    store = server.storage(place, "checkpoint")
    store.put("x", b"1")
    assert store.read("x") == b"1" and os.environ["AWS_PROFILE"] == "evil"


@pytest.mark.parametrize(
    ("who", "bucket", "environ", "expected"),
    [("checkpoint", "checkpoints", {"AWS_ACCESS_KEY_ID": "AKIDNOBODY"}, "E-NET-012"),
     ("checkpoint", "checkpoints", {"AWS_SECRET_ACCESS_KEY": "wrong-wrong-wrong"}, "E-NET-012"),
     ("admin", "no-such-bucket", {}, "E-NET-013"),
     ("data", "checkpoints", {}, "E-NET-018")],
)  # fmt: skip
def test_real_refusals(server: Server, who: str, bucket: str, environ: dict[str, str], expected: str) -> None:
    secrets = (*KEYS[who][:2], *environ.values())
    calls = [lambda s: s.entries(), lambda s: s.read("x"), lambda s: s.head("x"), lambda s: s.hold({})]
    if expected != "E-NET-013":  # this server makes a bucket by a write of an administrator
        calls += [lambda s: s.put("x", b"y"), lambda s: s.put("x", b"y" * (17 << 20)), lambda s: s.delete(["x"])]
    for call in calls:
        found, text = refused(lambda call=call: call(server.storage(f"{bucket}/p", who, **environ)), secrets)
        assert found == expected, text


def test_a_key_for_reading_cannot_write(server: Server) -> None:
    server.storage("datasets/ro").put("x", b"y")
    store = server.storage("datasets/ro", "data")
    assert store.read("x") == b"y"
    assert refused(lambda: store.put("x", b"z"))[0] == "E-NET-018"


def test_a_wrong_clock_by_the_real_server(server: Server, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import botocore.auth
    import botocore.compat

    real = botocore.compat.get_current_datetime
    from datetime import timedelta

    for module in (botocore.auth, botocore.compat):
        if hasattr(module, "get_current_datetime"):
            monkeypatch.setattr(module, "get_current_datetime", lambda **a: real(**a) - timedelta(hours=2))
    code, text = refused(server.storage(place).entries, KEYS["admin"][:2])
    assert code == "E-NET-014" and "clock" in text


def test_the_region_is_what_was_set(server: Server) -> None:
    assert server.environ()["AWS_REGION"] == REGION
