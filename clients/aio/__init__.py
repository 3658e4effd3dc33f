"""The async client: tasks."""
