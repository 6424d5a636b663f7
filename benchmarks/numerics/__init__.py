"""Exactness, floating-point error and low precision: engine against learner."""
