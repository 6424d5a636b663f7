"""Versions in a blob store: published, found, composed, proven, collected."""
