"""The benches, one module or package per system; each has a function ``bars`` that yields rows."""
