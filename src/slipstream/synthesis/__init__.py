"""Functions from examples: short programs of a language of integers and lists.

found = ss.synth.from_examples([([3, -1, 4], [9, 1, 16]), ([2, 0], [4, 0])])
found.program([5, -2])      # [25, 4]
found.ask()                 # an input on which the remaining programs differ
"""

from typing import TYPE_CHECKING

from slipstream.late import late

if TYPE_CHECKING:
    from slipstream.synthesis.examples import Examples
    from slipstream.synthesis.language import Program
    from slipstream.synthesis.search import Rival, Synthesis, from_examples

_SEARCH = dict.fromkeys(("Rival", "Synthesis", "from_examples"), "search")
__all__ = ["Examples", "Program", "Rival", "Synthesis", "from_examples"]
__getattr__, __dir__ = late(
    __name__, {"Examples": "examples", "Program": "language", **_SEARCH}, __all__
)
