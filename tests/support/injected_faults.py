"""Faults of ours, put into the code of a broker in this process."""

from __future__ import annotations


def raise_once(monkeypatch, owner, method):
    """Let the next call of a method raise, once what is returned first is cleared; the second holds that call."""
    real, quiet, raised = getattr(owner, method), [True], []

    def breaks(*arguments, **options):
        if not raised and not quiet:
            raised.append(arguments)
            raise RuntimeError("a bug")
        return real(*arguments, **options)

    monkeypatch.setattr(owner, method, breaks)
    return quiet, raised


def tracebacks(caplog):
    return [record for record in caplog.records if record.exc_info]
