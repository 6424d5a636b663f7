"""Benchmarks of the production loop: releases."""
