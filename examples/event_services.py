"""Event-driven services: orders are placed, paid and shipped by services that know only topics.

`python -m examples.event_services` runs all three against the broker that the environment names, and ends when the
orders are shipped. Each step is one transaction: what a service says is published if, and only if, it has handled the
order, and a step that is done again is recognised by its id.
"""

from __future__ import annotations

import queue

from qb import BrokerClient, Message

TOPICS = ("orders-placed", "orders-paid", "orders-shipped")


def main(count: int = 3) -> list[str]:
    """Place orders, and return them in the order in which they were shipped."""
    shipped: queue.Queue[str] = queue.Queue()
    with BrokerClient.from_env() as broker:
        for topic in TOPICS:
            broker.create_topic(topic)

        def pay(message: Message) -> None:
            order = message.json()
            with broker.transaction(f"pay-{order['id']}") as step:
                step.publish("orders-paid", message.body, key=message.key)

        def ship(message: Message) -> None:
            order = message.json()
            with broker.transaction(f"ship-{order['id']}") as step:
                step.publish("orders-shipped", message.body, key=message.key)

        def notify(message: Message) -> None:
            shipped.put(f"{message.json()['id']}: {message.json()['item']} is on its way to {message.key}")

        with (
            broker.create_and_subscribe("payments", "orders-placed", pay),
            broker.create_and_subscribe("warehouse", "orders-paid", ship),
            broker.create_and_subscribe("mail", "orders-shipped", notify),
        ):
            for number in range(count):
                broker.publish_json("orders-placed", {"id": number, "item": "tea"}, key=f"customer-{number}")
            return [shipped.get(timeout=60) for _ in range(count)]


if __name__ == "__main__":
    print("\n".join(main()))
