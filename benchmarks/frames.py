"""What does a message cost a processor where its frame is parsed, built, checked or numbered? No sockets, no disks.

Nanoseconds a message, the quickest of the rounds: for changes to these paths, run before and after in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.harness import BenchmarkOptions, report, significant
from qb.clients.protocol.prepared_frames import PreparedFrames
from qb.clients.protocol.publish_frames import PublishForm
from qb.core.wire.frames import MessageType, encode_frame
from qb.core.wire.runs.staged_frames import check_messages, number_messages
from qb.doors.binary.server_connection import PublishRun, ServerConnection

NAME = "frames"
LIMIT = 1 << 20
PASSES = 20  # of each case in a round, of which the quickest counts
RUN = 1_000  # messages
UNIFORM = [b"x" * 100] * RUN
MIXED = [b"x" * (80 + 7 * number % 41) for number in range(RUN)]
KEYS = [f"key-{number % 50}" for number in range(RUN)]

Case = tuple[str, int, Callable[[], object]]  # name, messages, what is timed


def run(options: BenchmarkOptions) -> None:
    """Print each case."""
    cases = [*_parsing(), *_building(), *_staging(), *_spark()]
    best = dict.fromkeys([name for name, _, _ in cases], float("inf"))
    for _ in range(options.rounds):
        for name, messages, action in cases:
            for _ in range(PASSES):
                started = time.perf_counter_ns()
                action()
                best[name] = min(best[name], (time.perf_counter_ns() - started) / messages)
    for name, nanoseconds in best.items():
        report(NAME, f"qb/{name}", nanoseconds_per_message=significant(nanoseconds))


def _parsing() -> Iterator[Case]:
    form = PublishForm("orders", 0)
    lone = [form.frames(number, [body]) for number, body in enumerate(UNIFORM, 1)]
    yield "broker/parse/100B/one-at-a-time", RUN, partial(_parse, lone)
    for name, bodies in (("uniform", UNIFORM), ("mixed-lengths", MIXED)):
        yield f"broker/parse/100B/run-of-1000/{name}", RUN, _parser(form.frames(1, bodies))
    keyed = [PublishForm("orders", 0, key).frames(number, [b"x" * 100]) for number, key in enumerate(KEYS, 1)]
    yield "broker/parse/100B/run-of-1000/keys", RUN, _parser(b"".join(keyed))
    spread = [PublishForm("orders", part).frames(1 + 100 * part, UNIFORM[:100]) for part in range(10)]
    yield "broker/parse/100B/10-runs-of-100/uniform", RUN, _parser(b"".join(spread))


def _parser(data: bytes | bytearray) -> Callable[[], object]:
    return partial(_parse, [data])


def _parse(received: list[bytes | bytearray]) -> None:
    """Parse what came in so many pieces, as a session does."""
    connection = ServerConnection(LIMIT)
    for data in received:
        connection.receive(memoryview(data))
        while (event := connection.next_event()) is not None:
            assert isinstance(event, PublishRun)
            connection.take_run(event.route, 7, 99)


def _building() -> Iterator[Case]:
    form = PublishForm("orders", 0)
    for name, bodies in (("uniform", UNIFORM), ("mixed-lengths", MIXED)):
        yield f"client/build/100B/run-of-1000/{name}", RUN, partial(form.frames, 1, bodies)
        prepared = PreparedFrames(form.frames(1, bodies))
        yield (
            f"client/number-prepared/100B/run-of-1000/{name}",
            RUN,
            partial(prepared.frames, 5, MIXED),
        )


def _staging() -> Iterator[Case]:
    for name, bodies in (("uniform", UNIFORM * 7), ("mixed-lengths", MIXED * 7)):  # 1 MB, as clients stage
        data = b"".join(encode_frame(MessageType.DATA, 0, 5, {"topic": "orders"}, body) for body in bodies)
        yield (
            f"stage/check/100B/frame-of-7000/{name}",
            len(bodies),
            partial(check_messages, data, 0, "orders", LIMIT, LIMIT),
        )
        yield (
            f"stage/number/100B/frame-of-7000/{name}",
            len(bodies),
            partial(number_messages, bytearray(data), 0, 7, LIMIT),
        )


def _spark() -> Iterator[Case]:
    try:
        import numpy as np
        import pyarrow as pa
    except ImportError:
        return
    from pyspark_qb.arrow.decoding import Decoder, FrameChunk
    from pyspark_qb.arrow.encoding import encode
    from pyspark_qb.arrow.row_columns import Columns
    from pyspark_qb.arrow.rows import read_rows

    decoder = Decoder("orders", 0, ("value", "offset", "timestamp", "key"))
    for name, bodies in (("uniform", UNIFORM * 10), ("mixed-lengths", MIXED * 10)):
        frames = [encode_frame(MessageType.DATA, n, 5, {"topic": "orders"}, body) for n, body in enumerate(bodies)]
        positions = np.cumsum([0, *map(len, frames[:-1])])
        chunk = FrameChunk(np.frombuffer(b"".join(frames), np.uint8), positions, 0)
        yield f"spark/decode/100B/chunk-of-10000/{name}", len(frames), partial(decoder.decode, chunk)
        batch = pa.record_batch([pa.array(bodies, pa.binary())], names=["value"])
        rows = read_rows(batch, Columns(value=0), "orders")
        yield f"spark/encode/100B/batch-of-10000/{name}", len(frames), partial(encode, rows, 5, LIMIT)
