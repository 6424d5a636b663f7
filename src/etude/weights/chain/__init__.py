"""Versions of weights in a blob store: publishing, finding, fetching, verifying, garbage collection."""
