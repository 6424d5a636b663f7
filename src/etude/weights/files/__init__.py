"""Checkpoints on disk: read and write, compare, follow a channel."""
