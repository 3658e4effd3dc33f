"""Every setting, declared once.

A setting is one annotated field below: that row gives its name, environment variable, flag, kind, bounds and help.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, get_type_hints

import msgspec

from qb.core.wire.value_kinds import (
    BOOLEAN,
    HOURS,
    INTEGER,
    LOG_LEVEL,
    NAMES,
    OPTIONAL_TEXT,
    SECONDS,
    SIZE,
    TEXT,
    WORD,
    Kind,
    one_of,
)

ENGINE = one_of("local", "jetstream")


class Setting(NamedTuple):
    """One row of the table. `name` and `default` come from the field that the row annotates."""

    environment: str
    kind: Kind
    help: str
    alias: str | None = None  # a second, shorter flag
    name: str = ""
    default: Any = None

    @property
    def flags(self) -> tuple[str, ...]:
        """The flag is the variable's name without the prefix: QB_DATA_DIR is --data-dir."""
        flag = "--" + self.environment.removeprefix("QB_").lower().replace("_", "-")
        return (flag, self.alias) if self.alias else (flag,)


# --- the settings: adding one is adding one row ---


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The broker and its binary door."""

    host: Annotated[str, Setting("QB_SERVER_HOST", TEXT, "address to listen on", alias="--host")] = "127.0.0.1"
    port: Annotated[
        int,
        Setting("QB_SERVER_PORT", INTEGER.within(0, 65535), "port to listen on; 0 takes a free one", alias="--port"),
    ] = 9999
    heartbeat_interval: Annotated[
        float, Setting("QB_HEARTBEAT_INTERVAL", SECONDS.within(0.01), "a peer silent for two of these is dropped")
    ] = 30.0
    max_connections: Annotated[
        int, Setting("QB_MAX_CONNECTIONS", INTEGER.within(1, 1_000_000), "connections open at the same time")
    ] = 10_000
    max_connections_per_address: Annotated[
        int,
        Setting(
            "QB_MAX_CONNECTIONS_PER_ADDRESS",
            INTEGER.within(0, 1_000_000),
            "of them from one address; 0: a tenth, and no limit on loopback",
        ),
    ] = 0
    max_unfinished_bytes: Annotated[
        int,
        Setting(
            "QB_MAX_UNFINISHED_BYTES", SIZE.within(1), "bytes of frames, lines and requests that are not whole yet"
        ),
    ] = 128 * 2**20
    max_unread_bytes: Annotated[
        int, Setting("QB_MAX_UNREAD_BYTES", SIZE.within(1), "bytes that all peers were sent and have not read")
    ] = 256 * 2**20
    frame_deadline: Annotated[
        float, Setting("QB_FRAME_DEADLINE", SECONDS.within(0.01), "time for a frame, line or request to become whole")
    ] = 120.0
    max_message_size: Annotated[
        int, Setting("QB_MAX_MESSAGE_SIZE", SIZE.within(1, 2**30), "bytes in the body of one message")
    ] = 16 * 2**20
    max_json_bytes: Annotated[
        int, Setting("QB_MAX_JSON_BYTES", SIZE.within(1024, 2**26), "bytes of one JSON text that is decoded as a whole")
    ] = 4 * 2**20
    shutdown_grace: Annotated[
        float,
        Setting("QB_SHUTDOWN_GRACE", SECONDS.within(0), "time to finish what was received when the broker is stopped"),
    ] = 10.0
    log_level: Annotated[str, Setting("QB_LOG_LEVEL", LOG_LEVEL, "least severe line that is logged")] = "info"
    low_latency: Annotated[
        bool,
        Setting("QB_LOW_LATENCY", BOOLEAN, "wait awake for the next publish of a lone peer; takes most of a core"),
    ] = False
    compression: Annotated[
        tuple[str, ...],
        Setting("QB_COMPRESSION", NAMES, "codecs that peers may use on their connections; none: no name"),
    ] = ("zstd", "lz4")
    auto_create_topics: Annotated[
        bool, Setting("QB_AUTO_CREATE_TOPICS", BOOLEAN, "make an unknown topic when it is published to")
    ] = False
    max_partitions: Annotated[
        int, Setting("QB_MAX_PARTITIONS", INTEGER.within(1, 100_000), "partitions that one topic may have")
    ] = 1024
    max_topics: Annotated[
        int, Setting("QB_MAX_TOPICS", INTEGER.within(1, 1_000_000), "topics that the broker may have")
    ] = 10_000
    max_partitions_in_all: Annotated[
        int,
        Setting(
            "QB_MAX_PARTITIONS_IN_ALL",
            INTEGER.within(1, 1_000_000),
            "partitions that all topics together may have",
        ),
    ] = 50_000
    max_subscriptions: Annotated[
        int, Setting("QB_MAX_SUBSCRIPTIONS", INTEGER.within(1, 1_000_000), "subscriptions that the broker may have")
    ] = 10_000
    max_cursors: Annotated[
        int,
        Setting(
            "QB_MAX_CURSORS", INTEGER.within(1, 100_000_000), "partitions that all subscriptions together may have"
        ),
    ] = 1_000_000
    max_open_messages: Annotated[
        int,
        Setting(
            "QB_MAX_OPEN_MESSAGES",
            INTEGER.within(1, 100_000_000),
            "messages that all subscriptions together may have in flight or waiting",
        ),
    ] = 1_000_000
    max_groups: Annotated[
        int, Setting("QB_MAX_GROUPS", INTEGER.within(1, 1_000_000), "consumer groups that the broker may have")
    ] = 10_000
    max_group_members: Annotated[
        int, Setting("QB_MAX_GROUP_MEMBERS", INTEGER.within(1, 100_000), "members that one consumer group may have")
    ] = 1_000
    max_members_in_all: Annotated[
        int,
        Setting("QB_MAX_MEMBERS_IN_ALL", INTEGER.within(1, 10_000_000), "members that all groups together may have"),
    ] = 20_000
    max_committed_offsets: Annotated[
        int,
        Setting(
            "QB_MAX_COMMITTED_OFFSETS",
            INTEGER.within(1, 100_000_000),
            "partitions for which all groups together may have committed an offset",
        ),
    ] = 1_000_000
    transaction_timeout: Annotated[
        float,
        Setting(
            "QB_TRANSACTION_TIMEOUT", SECONDS.within(0.01), "a stage to which nothing is added for so long expires"
        ),
    ] = 3600.0
    transaction_memory_hours: Annotated[
        float,
        Setting("QB_TRANSACTION_MEMORY_HOURS", HOURS.within(0.001), "how long a committed id without number is known"),
    ] = 168.0
    max_remembered_transactions: Annotated[
        int,
        Setting(
            "QB_MAX_REMEMBERED_TRANSACTIONS",
            INTEGER.within(1, 10_000_000),
            "committed ids that are known; beyond this the oldest without number is forgotten early",
        ),
    ] = 100_000
    max_open_stages: Annotated[
        int,
        Setting("QB_MAX_OPEN_STAGES", INTEGER.within(1, 1_000_000), "stages of transactions open at the same time"),
    ] = 10_000


class JsonSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON-lines door."""

    host: Annotated[str, Setting("QB_JSON_HOST", TEXT, "address to listen on")] = "127.0.0.1"
    port: Annotated[int, Setting("QB_JSON_PORT", INTEGER.within(0, 65535), "port to listen on; 0: no such door")] = 4040
    max_connections: Annotated[
        int, Setting("QB_JSON_MAX_CONNECTIONS", INTEGER.within(1, 1_000_000), "of all connections, by this door")
    ] = 5_000
    idle_timeout: Annotated[
        float,
        Setting(
            "QB_JSON_IDLE_TIMEOUT",
            SECONDS.within(0),
            "a peer that says nothing for so long is dropped, unless it is pushed to; 0: never",
        ),
    ] = 600.0


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP door."""

    host: Annotated[str, Setting("QB_HTTP_HOST", TEXT, "address to listen on")] = "127.0.0.1"
    port: Annotated[int, Setting("QB_HTTP_PORT", INTEGER.within(0, 65535), "port to listen on; 0: no such door")] = 8080
    max_connections: Annotated[
        int, Setting("QB_HTTP_MAX_CONNECTIONS", INTEGER.within(1, 1_000_000), "of all connections, by this door")
    ] = 5_000
    hosts: Annotated[
        tuple[str, ...],
        Setting("QB_HTTP_HOSTS", NAMES, "names by which clients reach this door, besides addresses and localhost"),
    ] = ()


class StorageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The logs on disk."""

    engine: Annotated[
        str,
        Setting(
            "QB_STORAGE_ENGINE",
            ENGINE,
            "local: this machine alone; jetstream: a cell of several brokers",
        ),
    ] = "local"
    data_dir: Annotated[str, Setting("QB_DATA_DIR", TEXT, "directory that holds everything stored")] = "./storage/data"
    fsync_on_write: Annotated[
        bool, Setting("QB_FSYNC_ON_WRITE", BOOLEAN, "ack a publish only when it is on stable storage")
    ] = True
    segment_bytes: Annotated[
        int, Setting("QB_SEGMENT_BYTES", SIZE.within(1024), "a segment of this size is closed and a new one started")
    ] = 128 * 2**20
    segment_hours: Annotated[
        float, Setting("QB_SEGMENT_HOURS", HOURS.within(0.001), "a segment of this age is closed and a new one started")
    ] = 168.0
    retention_hours: Annotated[
        float, Setting("QB_RETENTION_HOURS", HOURS.within(0), "drop closed segments older than this; 0: never")
    ] = 0.0
    retention_bytes: Annotated[
        int, Setting("QB_RETENTION_BYTES", SIZE.within(0), "drop the oldest segments of a larger partition; 0: never")
    ] = 0
    tail_bytes: Annotated[
        int, Setting("QB_TAIL_BYTES", SIZE.within(0), "memory for the newest messages, shared by all partitions")
    ] = 32 * 2**20
    max_pending_bytes: Annotated[
        int,
        Setting("QB_MAX_PENDING_BYTES", SIZE.within(1), "bytes waiting for one log before its publishers must wait"),
    ] = 8 * 2**20
    retention_interval: Annotated[
        float, Setting("QB_RETENTION_INTERVAL", SECONDS.within(0.01), "time between two looks for segments to drop")
    ] = 60.0


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One broker of several; it counts only with the storage engine jetstream."""

    nats_servers: Annotated[
        tuple[str, ...], Setting("QB_NATS_SERVERS", NAMES, "NATS servers that keep the journal: nats://host:4222")
    ] = ()
    nats_login_file: Annotated[
        str,
        Setting("QB_NATS_LOGIN_FILE", OPTIONAL_TEXT, "file with the token for NATS, or with one line USER PASSWORD"),
    ] = ""
    nats_ca_file: Annotated[
        str, Setting("QB_NATS_CA_FILE", OPTIONAL_TEXT, "authority of the certificates of NATS, PEM; none: the system's")
    ] = ""
    nats_cert_file: Annotated[
        str, Setting("QB_NATS_CERT_FILE", OPTIONAL_TEXT, "certificate to log in to NATS with, PEM")
    ] = ""
    nats_key_file: Annotated[str, Setting("QB_NATS_KEY_FILE", OPTIONAL_TEXT, "its private key, PEM")] = ""
    nats_monitors: Annotated[
        tuple[str, ...],
        Setting("QB_NATS_MONITORS", NAMES, "monitoring addresses of the NATS servers: http://host:8222"),
    ] = ()
    nats_replicas: Annotated[
        int, Setting("QB_NATS_REPLICAS", INTEGER.within(1), "copies of the journal that NATS must keep")
    ] = 3
    cell: Annotated[str, Setting("QB_CELL", WORD, "name of the cell that this broker serves")] = "main"
    node_name: Annotated[
        str,
        Setting(
            "QB_NODE_NAME", OPTIONAL_TEXT, "name of this broker, another one for each; none: its advertised address"
        ),
    ] = ""
    advertise: Annotated[
        str,
        Setting("QB_ADVERTISE", OPTIONAL_TEXT, "address by which clients reach this broker; none: where it listens"),
    ] = ""
    host: Annotated[
        str, Setting("QB_CLUSTER_HOST", TEXT, "address on which the other brokers of the cell reach this one")
    ] = "127.0.0.1"
    port: Annotated[int, Setting("QB_CLUSTER_PORT", INTEGER.within(0, 65535), "port for them; 0 takes a free one")] = (
        9989
    )
    tls_cert: Annotated[
        str,
        Setting("QB_CLUSTER_TLS_CERT", OPTIONAL_TEXT, "certificate of this broker for the other brokers, PEM"),
    ] = ""
    tls_key: Annotated[str, Setting("QB_CLUSTER_TLS_KEY", OPTIONAL_TEXT, "its private key, PEM")] = ""
    tls_ca: Annotated[
        str,
        Setting("QB_CLUSTER_TLS_CA", OPTIONAL_TEXT, "authority of the certificates that brokers alone have, PEM"),
    ] = ""
    lease_ttl: Annotated[
        float,
        Setting(
            "QB_LEASE_TTL",
            SECONDS.within(1, 3600),
            "another broker takes over from one that has been silent for so long",
        ),
    ] = 15.0
    scrub_rate: Annotated[
        int,
        Setting(
            "QB_SCRUB_RATE",
            SIZE.within(0, 1 << 30),
            "bytes a second that are proved in the background: of this broker's copy, and of NATS nodes; 0: none",
        ),
    ] = 1 << 20
    fast_takeover: Annotated[
        bool,
        Setting("QB_FAST_TAKEOVER", BOOLEAN, "take over at once if the cluster port of the owner refuses connections"),
    ] = False


class SecuritySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Who may reach the broker, and how."""

    users_file: Annotated[
        str,
        Setting("QB_USERS_FILE", OPTIONAL_TEXT, "file of users and their rights, of a broker without a cluster"),
    ] = ""
    first_users_file: Annotated[
        str,
        Setting("QB_FIRST_USERS_FILE", OPTIONAL_TEXT, "such a file, for the users that begin a cell that has none"),
    ] = ""
    tls_cert: Annotated[
        str, Setting("QB_TLS_CERT", OPTIONAL_TEXT, "certificate chain of the broker, PEM: every door speaks TLS then")
    ] = ""
    tls_key: Annotated[str, Setting("QB_TLS_KEY", OPTIONAL_TEXT, "its private key, PEM")] = ""
    tls_client_ca: Annotated[
        str,
        Setting("QB_TLS_CLIENT_CA", OPTIONAL_TEXT, "authority of the certificates of clients, PEM"),
    ] = ""
    insecure: Annotated[
        bool, Setting("QB_INSECURE", BOOLEAN, "listen beyond loopback without users or without TLS; warned of")
    ] = False
    audit_file: Annotated[
        str,
        Setting(
            "QB_AUDIT_FILE", OPTIONAL_TEXT, "file for log-ins, refusals and administrative acts; -: standard error"
        ),
    ] = ""


class ClientSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults of the command line's client."""

    request_timeout: Annotated[
        float, Setting("QB_REQUEST_TIMEOUT", SECONDS.within(0.001), "how long a request waits for its answer")
    ] = 30.0
    heartbeat_interval: Annotated[
        float,
        Setting("QB_CLIENT_HEARTBEAT_INTERVAL", SECONDS.within(0.01), "how often an idle client says that it lives"),
    ] = 30.0
    servers: Annotated[
        tuple[str, ...],
        Setting("QB_SERVERS", NAMES, "addresses of the brokers of a cluster, in place of host and port"),
    ] = ()
    token_file: Annotated[
        str, Setting("QB_TOKEN_FILE", OPTIONAL_TEXT, "file with the token to log in with, or with lines USER TOKEN")
    ] = ""
    ca_file: Annotated[
        str, Setting("QB_CA_FILE", OPTIONAL_TEXT, "authority of the broker's certificate, PEM; none: the system's")
    ] = ""
    cert_file: Annotated[str, Setting("QB_CLIENT_CERT", OPTIONAL_TEXT, "certificate to log in with, PEM")] = ""
    key_file: Annotated[str, Setting("QB_CLIENT_KEY", OPTIONAL_TEXT, "its private key, PEM")] = ""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be set; each field is a section."""

    server: ServerSettings = ServerSettings()
    json: JsonSettings = JsonSettings()
    http: HttpSettings = HttpSettings()
    storage: StorageSettings = StorageSettings()
    cluster: ClusterSettings = ClusterSettings()
    security: SecuritySettings = SecuritySettings()
    client: ClientSettings = ClientSettings()


def _rows() -> Iterator[Setting]:
    for section, struct in get_type_hints(Settings).items():
        for field, hint in get_type_hints(struct, include_extras=True).items():
            (row,) = hint.__metadata__
            yield row._replace(name=f"{section}.{field}", default=getattr(struct(), field))


TABLE: tuple[Setting, ...] = tuple(_rows())
