"""The benches, one module or package a system; each has a function ``bars`` that yields rows."""
