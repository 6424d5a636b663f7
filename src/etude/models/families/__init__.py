"""Families of models, a module each: everything that one family differs in from the others.

A module's name is the family's `model_type` of config.json. It holds one class, derived from `config.ModelFamily` or
from a near family. A file that is added here is found by its name; a family of your own is a class in your package
(docs/guides/your-checkpoint.md).
"""
