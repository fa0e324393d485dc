"""From files and rows to batches: sources, columns, splits, encoding.

Knows nothing of scores or runs; what labels mean is up to the task that is handed in.
"""
