"""docs/LIMITS.md has a row for every setting that is a limit, with the default that is in force."""

from __future__ import annotations

import re

import pytest

from qb.core.settings import TABLE, Setting
from tests.support.brokers import ROOT as PROJECT

DOCUMENT = (PROJECT / "docs" / "LIMITS.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in DOCUMENT.splitlines() if line[:2] == "| "]
NO_LIMITS = {  # addresses, switches and paces: nothing is refused or dropped because of them
    "server.host", "server.port", "server.log_level", "server.low_latency", "server.compression",
    "server.auto_create_topics",
    "json.host", "json.port", "http.host", "http.port", "http.hosts",
    "storage.data_dir", "storage.fsync_on_write", "storage.retention_interval",
    "storage.engine", "cluster.nats_servers", "cluster.nats_monitors", "cluster.nats_login_file",
    "cluster.nats_ca_file",
    "cluster.nats_cert_file",
    "cluster.nats_key_file", "cluster.nats_replicas", "cluster.cell", "cluster.node_name", "cluster.advertise",
    "cluster.host", "cluster.port", "cluster.tls_cert", "cluster.tls_key", "cluster.tls_ca",
    "cluster.fast_takeover", "client.servers",
    "security.users_file", "security.first_users_file", "security.audit_file", "security.tls_cert",
    "security.tls_key", "security.tls_client_ca", "security.insecure",
    "client.token_file", "client.ca_file", "client.cert_file",
    "client.key_file",
    "client.request_timeout", "client.heartbeat_interval",
}  # fmt: skip
LIMITS = [setting for setting in TABLE if setting.name not in NO_LIMITS]


def plain(text: str) -> str:
    return re.sub(r"[ ,]", "", text)


@pytest.mark.parametrize("setting", LIMITS, ids=[setting.environment for setting in LIMITS])
def test_every_setting_that_is_a_limit_has_a_row_with_its_default(setting: Setting) -> None:
    rows = [row for row in ROWS if f"`{setting.environment}`" in row[2]]
    assert rows, f"docs/LIMITS.md has no row for {setting.environment}"
    for row in rows:
        assert plain(setting.kind.show(setting.default)) in plain(row[1]), row


def test_every_setting_in_the_document_exists() -> None:
    assert set(re.findall(r"`(QB_\w+)`", DOCUMENT)) <= {setting.environment for setting in TABLE}


def test_every_row_says_what_happens_beyond_the_limit() -> None:
    assert [row for row in ROWS if len(row) != 4 or not all(row)] == []
