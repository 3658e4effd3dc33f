"""core.subscriptions: the subscription as pure decisions; docs/SUBSCRIPTIONS.md is its contract.

May import: nothing.
Never: anything.
"""
