"""``python -m slipstream.child``: a fresh interpreter that answers calls."""

import sys

from slipstream.child.worker import main

main(sys.argv[1:])
