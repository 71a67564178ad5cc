"""Search for cheaper compositions of torch's functions, and check that they compute the same.

The technique `rewrite` will use this package. No technique or command does so yet.
"""
