"""From files and rows to batches: sources, columns, splits, encoding.

Nothing in here knows about scores or runs; the task decides what labels mean.
"""
