"""Run one attack program. The last line of its output is JSON: ``{"got": text, "why": text}``."""

from __future__ import annotations

import importlib
import json
import sys

from . import kit


def main() -> None:
    module, function, facts = sys.argv[1:4]
    kit.FACTS.update(json.loads(facts))
    got, why = "", ""
    try:
        got = getattr(importlib.import_module(f"{__package__}.{module}"), function)() or ""
    except BaseException as error:  # noqa: BLE001 - being stopped, however it happens, is an outcome
        why = f"{type(error).__name__}: {error}"
    print("\n" + json.dumps({"got": str(got)[:2000], "why": why[:500]}), flush=True)


main()
