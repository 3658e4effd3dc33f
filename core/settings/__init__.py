"""Every setting, declared once, and where its value in force came from."""

from qb.core.settings.client_options import connection_options
from qb.core.settings.settings_sources import DEBUG, LoadedSettings, SettingsError, describe_flags, load, render
from qb.core.settings.settings_table import (
    TABLE,
    ClientSettings,
    HttpSettings,
    JsonSettings,
    ServerSettings,
    Setting,
    Settings,
    StorageSettings,
)

__all__ = [
    "DEBUG",
    "TABLE",
    "ClientSettings",
    "HttpSettings",
    "JsonSettings",
    "LoadedSettings",
    "ServerSettings",
    "Setting",
    "Settings",
    "SettingsError",
    "StorageSettings",
    "connection_options",
    "describe_flags",
    "load",
    "render",
]
