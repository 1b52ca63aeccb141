"""This machine's clock beside those of the servers that the settings name, by the date of their answers."""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Iterator
from dataclasses import replace
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from sexpgpu.diagnostics import Diagnostic, problem
from sexpgpu.doctor import Ask, Check, Fact
from sexpgpu.settings import ROLES, is_loopback, split_targets

NEAR = 30.0  # seconds that nobody minds: a date has whole seconds, an answer takes some
REFUSED = 300.0  # seconds from which servers may refuse signatures
PATIENCE = 5.0


def run(ask: Ask) -> Iterator[Fact | Diagnostic]:
    """E-NET-033. A server that does not answer is another check's finding."""
    for server in servers(ask):
        apart = ahead(server)
        if apart is None:
            yield server, "its date is not known"
            continue
        yield server, f"{abs(apart):.0f} s {'behind' if apart > 0 else 'ahead of'} this machine" if abs(apart) >= 1 else "agrees with this machine"
        if abs(apart) > NEAR:
            found = problem("E-NET-033", f"this machine's clock is {abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} that of {server}",
                            help="set the clock, for instance by NTP: timedatectl set-ntp true").diagnostic
            yield found if abs(apart) > REFUSED else replace(found, severity="warning")


def servers(ask: Ask) -> list[str]:
    """Origins that a run with these settings would speak to, where http is allowed at all."""
    found = [ask.settings.credentials(role).endpoint_url for role in ROLES]
    if any(target.partition(":")[0] == "syvain" for target in split_targets(ask.settings.metrics or "")):
        found.append(ask.settings.syvain_metrics_host)
    origins = []
    for url in found:
        try:
            parts = urlsplit(url or "")
            host, _ = parts.hostname, parts.port
        except ValueError:
            continue
        plain = parts.scheme == "http" and host and (is_loopback(host) or host in (ask.settings.plain_http or ()))
        if host and "@" not in parts.netloc and (parts.scheme == "https" or plain):
            origins.append(f"{parts.scheme}://{parts.netloc}")
    return list(dict.fromkeys(origins))


def ahead(server: str) -> float | None:
    """Seconds by which this clock is ahead of the server's; None where it gives no date. Nothing but a HEAD of `/` is sent."""
    parts = urlsplit(server)
    assert parts.hostname
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    link = kind(parts.hostname, parts.port, timeout=PATIENCE)
    try:
        begin = time.time()
        link.request("HEAD", "/")
        date = link.getresponse().getheader("Date")
        middle = (begin + time.time()) / 2
        return None if date is None else middle - parsedate_to_datetime(date).timestamp() - 0.5
    except (OSError, http.client.HTTPException, ssl.SSLError, ValueError, TypeError):
        return None
    finally:
        link.close()


CHECK = Check("clocks", "clocks", "warning", 30, run)
