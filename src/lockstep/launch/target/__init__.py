"""Analysis of the user's script before it runs, and preparation of the processes that run it.

The modules parse the script, find its imports, import packages once for all ranks, seed random generators,
and support old scripts.
"""
