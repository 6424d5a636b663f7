"""Two snapshots of weights to the bytes between them, and back: exact for every bit pattern, near the bound."""
