"""Every setting, declared once, and where its value in force came from."""

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
    "describe_flags",
    "load",
    "render",
]
