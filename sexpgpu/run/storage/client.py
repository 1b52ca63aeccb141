"""boto3's S3 client of explicit values: no profile, no configuration file, no instance metadata, no proxy of the
environment, no redirection to another region."""

from __future__ import annotations

import os
import threading
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.session
from botocore.config import Config
from botocore.configprovider import BOTOCORE_DEFAUT_SESSION_VARIABLES, ConfigChainFactory, ConfigValueStore

from sexpgpu.diagnostics import fail
from sexpgpu.run.storage.ahead import DEPTH
from sexpgpu.settings import Credentials

CONNECT, ANSWER = 5.0, 20.0  # seconds that one request waits for a connection, and for the next bytes


def check_endpoint(credentials: Credentials) -> None:
    """E-NET-016 for an address that is none, E-NET-017 for plain http to another machine."""
    url, via = credentials.endpoint_url or "", credentials.via.get("ENDPOINT_URL", "the endpoint")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if parts.scheme not in ("http", "https") or not host or "@" in parts.netloc or parts.query or parts.fragment:
        fail("E-NET-016", f"{via} is no address of a server", help="write it as https://host or https://host:port")
    if parts.scheme == "http" and not is_loopback(host) and host not in credentials.plain_http:
        fail(
            "E-NET-017",
            f"{via} is plain http to {host}: keys' signatures and data would cross the network unprotected",
            help=("write https://", f"if that network is yours: export SEXPGPU_PLAIN_HTTP={host}"),
        )


def is_loopback(host: str) -> bool:
    """Whether a host is this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def make_client(credentials: Credentials) -> Any:
    """boto3's client of explicit values. Its configuration has constants alone, and its files are empty."""
    core = botocore.session.Session()
    chains = ConfigChainFactory(session=core, environ={})
    fixed = {"config_file": os.devnull, "credentials_file": os.devnull}
    core.register_component(
        "config_store",
        ConfigValueStore(
            mapping={
                name: chains.create_config_chain(
                    instance_name=name, default=fixed.get(name, default), conversion_func=convert
                )
                for name, (_, _, default, convert) in BOTOCORE_DEFAUT_SESSION_VARIABLES.items()
            }
        ),
    )
    token = credentials.session_token
    assert credentials.access_key_id is not None and credentials.secret_access_key is not None
    client = boto3.Session(botocore_session=core).client(
        "s3",
        endpoint_url=credentials.endpoint_url,
        region_name=credentials.region,
        aws_access_key_id=credentials.access_key_id.reveal(),
        aws_secret_access_key=credentials.secret_access_key.reveal(),
        aws_session_token=None if token is None else token.reveal(),
        config=Config(
            signature_version="s3v4",
            connect_timeout=CONNECT,
            read_timeout=ANSWER,
            proxies={},
            retries={"mode": "standard", "total_max_attempts": 1},
            tcp_keepalive=True,
            max_pool_connections=4 * DEPTH,
            ignore_configured_endpoint_urls=True,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )
    client.meta.events.register("before-call.s3", _no_redirection)
    return client


def _no_redirection(context: dict[str, Any], **_: Any) -> None:
    """A wrong region is an error with a name, not a second request to somewhere else."""
    context.setdefault("s3_redirect", {})["redirected"] = True


_CLIENTS: dict[int, tuple[Credentials, Any]] = {}  # by the identity of the credentials, which are kept beside
_MAKING = threading.Lock()


def client_of(credentials: Credentials) -> Any:
    """The client of these credentials, made once: that takes a third of a second."""
    with _MAKING:
        if id(credentials) not in _CLIENTS:
            _CLIENTS[id(credentials)] = (credentials, make_client(credentials))
        return _CLIENTS[id(credentials)][1]
