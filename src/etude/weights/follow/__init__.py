"""A reader of a chain: at the head, whole or not at all; and what it holds scattered into live memory."""
