"""On what was this measured, and what does its disk do by itself?"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

from benchmarks.harness import BenchmarkOptions, bare_appends, case_name, report, report_latency, scratch


def run(options: BenchmarkOptions) -> None:
    """Print the machine, then the disk's own append + fdatasync, small and large."""
    report(
        "machine",
        "hardware and versions",
        date=datetime.date.today().isoformat(),
        processor=_processor(),
        cores=os.cpu_count(),
        memory_gb=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9),
        kernel=platform.release(),
        filesystem=_filesystem(options.directory),
        python=platform.python_version(),
        trio=importlib.metadata.version("trio"),
        load_average=round(os.getloadavg()[0], 1),  # well above 0: other programs were measured too
    )
    with scratch(options) as directory:
        for size, count in ((200, options.scaled(4000)), (1 << 20, options.scaled(400))):
            seconds = bare_appends(directory, size, count)
            rate = size * count / sum(seconds) / 1e6
            case = case_name("bare-append+fdatasync", size, "one-at-a-time", "fdatasync")
            report_latency("machine", case, seconds, megabytes_per_second=round(rate, 1))


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _filesystem(directory: Path) -> str:
    table = subprocess.run(["df", "--output=fstype", directory], capture_output=True, text=True, check=True)
    return table.stdout.split()[-1]
