"""A web application that publishes in a request and handles messages while it serves.

pip install fastapi uvicorn
uvicorn examples.fastapi_app:app
curl -d '{"item": "tea"}' -H 'Content-Type: application/json' http://127.0.0.1:8000/orders

The broker is where the QB_* variables say, as for the command line. Each order is billed by a handler, which publishes
the bill. At shutdown the application takes no more orders, finishes the bill in hand, and leaves the others to the next
process that joins the subscription.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from fastapi import FastAPI
from pydantic import BaseModel

from qb import AsyncBrokerClient, BrokerUnavailable, Message, TopicExists

broker = AsyncBrokerClient.from_env(client_id="shop")


class Order(BaseModel):
    """What is ordered, and how many seconds its bill takes."""

    item: str
    seconds: float = 0.0


class Billing:
    """Writes a bill for each order."""

    started = 0
    finished = 0

    async def handle(self, message: Message) -> None:
        """Called with one order after the other; its return acks the order, an exception brings it again later."""
        self.started += 1
        order = Order.model_validate_json(message.body)
        await anyio.sleep(order.seconds)
        await broker.publish_text("bills", f"one {order.item}", key=order.item)
        self.finished += 1


billing = Billing()


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Connect, handle orders while requests are served, and finish what is in hand at shutdown."""
    async with broker:
        for topic in ("orders", "bills"):
            with suppress(TopicExists):
                await broker.create_topic(topic)
        async with await broker.create_and_subscribe("billing", "orders", billing.handle):
            yield


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=201)
async def place(order: Order) -> dict[str, Any]:
    """Answer when the order is on stable storage."""
    receipt = await broker.publish_text("orders", order.model_dump_json(), key=order.item)
    return {"offset": receipt.offset, "durability": receipt.durability}


@app.get("/health")
async def health() -> dict[str, Any]:
    """Say how billing goes, and whether the broker answers."""
    try:
        broker_ms = round(await broker.ping() * 1e3, 3)
    except BrokerUnavailable as error:
        return {"broker": str(error)}
    return {"broker_ms": broker_ms, "bills_started": billing.started, "bills_finished": billing.finished}
