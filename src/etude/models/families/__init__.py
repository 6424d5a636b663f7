"""The built-in model families, one module each.

A module's name is the family's `model_type` of config.json. It contains one class, derived from `config.ModelFamily` or
from a similar family. Added modules are found by their name; a user's own family is a plug-in
(docs/guides/your-checkpoint.md)."""
