"""Checkpoints on disk: read and written as raw codes, compared, followed."""
