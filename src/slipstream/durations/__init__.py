"""How long operator calls take here: asked for and measured first, looked up in predictions."""

from slipstream.durations.durations import Answer, Durations
from slipstream.durations.rescale import pace, questions, rescale

__all__ = ["Answer", "Durations", "pace", "questions", "rescale"]
