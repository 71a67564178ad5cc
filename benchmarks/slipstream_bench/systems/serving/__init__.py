"""Serving under load: LoadGen, our harness around it, and the queue that foresees both."""
