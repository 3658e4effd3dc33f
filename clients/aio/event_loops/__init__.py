"""What the async client needs of the event loop that runs it: trio, asyncio, or a loop of asyncio's kind (uvloop).

anyio gives tasks, cancel scopes and threads (qb.clients.aio.background and its users). What is done for every message
is written here for each of the two by itself: to wait for an answer, and to read and write a connection.
"""
