"""A progress bar with a rate, on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int, int], None]  # messages and bytes done so far


@contextmanager
def progress(total_bytes: int | None) -> Iterator[Advance]:
    """Show progress on standard error if that is a terminal, else nothing. None: the total is not known."""
    if not sys.stderr.isatty():
        yield lambda messages, size: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        TextColumn("{task.fields[messages]:,} messages"),
        TextColumn("{task.fields[rate]:,.0f}/s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total_bytes, messages=0, rate=0.0)

        def advance(messages: int, size: int) -> None:
            elapsed = bar.tasks[0].elapsed or 1e-9
            bar.update(task, completed=size, messages=messages, rate=messages / elapsed)

        yield advance
