"""Module surgery: find related modules, replace them, and check that outputs stay the same."""

from slipstream.surgery.attention import NotRewrittenError, attend, with_attention
from slipstream.surgery.check import difference, outputs_of, tensors_in
from slipstream.surgery.exchange import exchange, why_fixed
from slipstream.surgery.pairs import Pair, consecutive_pairs, place
from slipstream.surgery.parameters import exchange_parameters
from slipstream.surgery.saved import saved_bytes
from slipstream.surgery.selection import ModuleSelection, module_of
from slipstream.surgery.sites import ModuleCall, callers
from slipstream.surgery.units import Units, removable_units, remove_units

__all__ = [
    "ModuleCall",
    "ModuleSelection",
    "NotRewrittenError",
    "Pair",
    "Units",
    "attend",
    "callers",
    "consecutive_pairs",
    "difference",
    "exchange",
    "exchange_parameters",
    "module_of",
    "outputs_of",
    "place",
    "removable_units",
    "remove_units",
    "saved_bytes",
    "tensors_in",
    "why_fixed",
    "with_attention",
]
