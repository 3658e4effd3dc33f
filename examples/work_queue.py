"""A work queue: four workers share the tasks, a failure is tried again later, and what keeps failing is set aside.

`python -m examples.work_queue` runs against the broker that the environment names.
"""

from __future__ import annotations

import queue

from qb import BrokerClient, Message

BACKOFF = {"initial": 0.05, "factor": 2.0, "cap": 1.0, "jitter": 0.0}


def main(count: int = 20) -> list[str]:
    """Do the tasks, and return what became of each."""
    outcomes: queue.Queue[str] = queue.Queue()

    def work(message: Message) -> None:
        """Returning acks the task; raising has it delivered again after a pause, to any worker."""
        number = message.json()["number"]
        if number == 13 or (number % 5 == 0 and message.attempt == 1):
            raise ValueError(f"task {number} failed")
        outcomes.put(f"task {number} is done at attempt {message.attempt}")

    def set_aside(message: Message) -> None:
        """A dead letter is the message with its history in properties: fix the cause, then retry_dead_letters()."""
        outcomes.put(f"task {message.json()['number']} is set aside")

    with BrokerClient.from_env() as broker:
        broker.create_topic("tasks")
        broker.create_topic("tasks-failed")
        broker.publish_many("tasks", [b'{"number": %d}' % number for number in range(count)])
        broker.create_subscription(
            "workers", "tasks", max_deliveries=3, backoff=BACKOFF, dead_letter_topic="tasks-failed"
        )
        with (
            broker.subscribe_to_subscription("workers", work, concurrency=4),
            broker.create_and_subscribe("repairs", "tasks-failed", set_aside),
        ):
            return [outcomes.get(timeout=60) for _ in range(count)]


if __name__ == "__main__":
    print("\n".join(sorted(main())))
