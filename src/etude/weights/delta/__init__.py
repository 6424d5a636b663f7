"""The delta codec: encodes the difference of two snapshots of weights and applies it, exact for every bit pattern."""
