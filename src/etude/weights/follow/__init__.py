"""Readers that follow a channel and move to its newest version atomically; and updates of live memory in an engine."""
