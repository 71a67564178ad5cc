"""``python -m slipstream``, an alias of the command ``slipstream``."""

from __future__ import annotations

from slipstream.cli import main

if __name__ == "__main__":
    main()
