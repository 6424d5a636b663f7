"""Measurements of `etude corpus build`: what filters miss, what they drop by mistake, speed, memory."""
