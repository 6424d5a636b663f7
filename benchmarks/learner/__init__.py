"""One training step: shared prefixes, several ranks."""
