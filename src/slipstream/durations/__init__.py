"""How long operator calls take here: asked for and measured first, looked up in predictions."""

from slipstream.durations.durations import Answer, Durations

__all__ = ["Answer", "Durations"]
