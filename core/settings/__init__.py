"""Every setting, declared once, and where its value in force came from."""

from qb.core.settings.client_options import (
    connection_options,
    consumer_options,
    credential_files,
    producer_options,
    sending_options,
)
from qb.core.settings.config_file import SettingsError
from qb.core.settings.program_config import program_config
from qb.core.settings.program_table import PROGRAM_TABLE, ConsumerConfig, ProducerConfig, ProgramConfig
from qb.core.settings.settings_sources import DEBUG, LoadedSettings, describe_flags, load, render
from qb.core.settings.settings_table import (
    TABLE,
    ClientSettings,
    ClusterSettings,
    HttpSettings,
    JsonSettings,
    SecuritySettings,
    ServerSettings,
    Setting,
    Settings,
    StorageSettings,
)

__all__ = [
    "DEBUG",
    "PROGRAM_TABLE",
    "TABLE",
    "ClientSettings",
    "ClusterSettings",
    "ConsumerConfig",
    "HttpSettings",
    "JsonSettings",
    "LoadedSettings",
    "ProducerConfig",
    "ProgramConfig",
    "SecuritySettings",
    "ServerSettings",
    "Setting",
    "Settings",
    "SettingsError",
    "StorageSettings",
    "connection_options",
    "consumer_options",
    "credential_files",
    "describe_flags",
    "load",
    "producer_options",
    "program_config",
    "render",
    "sending_options",
]
