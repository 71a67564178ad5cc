"""Serving under load: LoadGen, our harness around it, and the queue that predicts both."""
