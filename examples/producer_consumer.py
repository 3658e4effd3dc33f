"""A broker, a producer and a consumer in one file: `python -m examples.producer_consumer`. It ends by itself."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from qb import BrokerClient, Consumer


@contextmanager
def running_broker() -> Iterator[str]:
    """Start a broker on a free port, and stop it after the block; gives its address."""
    doors = ["--port", "0", "--json-port", "0", "--http-port", "0"]
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "qb.server", *doors, "--data-dir", directory]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                found = re.search(r"listens on (\S+)", process.stdout.readline())
                assert found, "the broker did not start"
                yield found[1]
            finally:
                process.terminate()
                process.wait()


def main() -> None:
    """Print each step."""
    with running_broker() as address:
        print(f"1. a broker listens on {address.partition(':')[0]}")
        with BrokerClient(address) as client, client.producer("orders", linger_ms=5) as producer:
            client.create_topic("orders", partitions=2)
            print("2. there is a topic with 2 partitions")
            orders = [b'{"id": %d, "item": "tea"}' % number for number in range(3)]
            handles = [producer.send(order, key=f"customer-{n}") for n, order in enumerate(orders)]  # in one batch
            for number, handle in enumerate(handles):
                print(f"3. order {number} is {handle.result(timeout=30).durability}")
        handled = 0
        with Consumer("billing", "orders", host=address) as consumer:
            while handled < 3:
                for message in consumer.poll(timeout=1.0):
                    print(f"4. {message.key} ordered {message.json()['item']}")
                    handled += 1
            consumer.commit()
            print("5. what was handled is committed")
    print("6. the broker has stopped")


if __name__ == "__main__":
    main()
