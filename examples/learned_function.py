"""A function that exists only as examples, found as a program of integers and lists.

python examples/learned_function.py
"""

from __future__ import annotations

import slipstream as ss

# A cleaning step of labels, as it was recorded: positive values, doubled, in order.
EXAMPLES = [
    ([3, -1, 4, -1, 5], [6, 8, 10]),
    ([2, -7, 1], [2, 4]),
    ([-3, 9], [18]),
]


def main() -> None:
    """Print the program, and what would decide between it and its rivals."""
    found = ss.synth.from_examples(EXAMPLES, max_length=5)
    print(found.program.python_source)
    print(f"confidence {found.confidence:.0%}; add the output for {found.ask()}")


if __name__ == "__main__":
    main()
