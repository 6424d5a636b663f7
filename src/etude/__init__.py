"""etude turns an open mixture-of-experts model into the specialist one product needs.

The folders tell the story of the data; read them in this order:
``tasks → environments → harness → rollouts → experience → training → weights → inference``.
``loop`` wires them, ``cli`` is the door. `ARCHITECTURE.md` has one line on every file.
"""

__version__ = "0.1.0"
