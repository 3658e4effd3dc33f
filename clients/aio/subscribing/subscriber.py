"""What a program holds of a subscription that it has joined."""

from __future__ import annotations

from types import TracebackType

from qb.clients.aio.subscribing.joined_subscription import AsyncJoinedSubscription


class AsyncSubscriber:
    """A subscription that this client has joined, and joins again after every lost connection.

    Returned by the client's subscribe methods. It ends when unsubscribe() is called or the client disconnects; or by
    itself, and then `error` says why. Leaving an `async with` block over it unsubscribes. In a child of os.fork() it is
    the parent's: its use raises UsedAfterFork, and unsubscribe() does nothing.

    Args:
        joined: The subscription that the client has joined.

    Example:
        >>> async with await client.subscribe_to_subscription("billing", handle) as subscriber:
        ...     await subscriber.wait(timeout=60)
    """

    def __init__(self, joined: AsyncJoinedSubscription) -> None:
        self._joined = joined

    @property
    def subscription_id(self) -> str:
        """The name of the subscription."""
        return self._joined.subscription_id

    @property
    def error(self) -> BaseException | None:
        """Why it has ended by itself, such as SubscriptionRemoved; None while it has not."""
        return self._joined.error

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended.

        Args:
            timeout: Seconds to wait at most; None waits for ever.

        Returns:
            True when it has ended, False if that took longer than `timeout`.

        Raises:
            QBError: It ended by itself; this is `error`, such as SubscriptionRemoved.
            UsedAfterFork: It was joined by the parent of this process.
        """
        return await self._joined.wait(timeout)

    async def unsubscribe(self, timeout: float | None = None) -> None:
        """Leave the subscription: finish the messages in hand, give back the rest.

        Returns when the broker knows. Called by a handler of this subscription it returns at once, and the rest happens
        when that handler has returned.
        A handler that takes longer is cancelled, as is one that is running when this call is cancelled.

        Args:
            timeout: Seconds that handlers get to finish; the client's `request_timeout` by default.
        """
        await self._joined.leave(timeout)

    async def __aenter__(self) -> AsyncSubscriber:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.unsubscribe()

    def __repr__(self) -> str:
        state = "left" if self._joined.has_ended else "joined"
        if self.error is not None:
            state = f"ended by {type(self.error).__name__}"
        return f"<{type(self).__name__} of {self.subscription_id!r}, {state}>"
