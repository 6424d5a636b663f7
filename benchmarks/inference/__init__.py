"""The reference engine: tokens a second, its caches."""
