"""etude turns an open mixture-of-experts model into the specialist that one product needs.

Data passes through the packages in this order; read them in it: ``tasks → environments → harness → rollouts →
experience → training → weights → inference``. `loop` connects them, and `cli` is the command line. `ARCHITECTURE.md`
has one line on every file."""

__version__ = "0.1.0"
