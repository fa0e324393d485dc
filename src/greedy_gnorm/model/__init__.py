"""What can be cut, cutting it, saving and loading it: families, sites, surgery, gates, checkpoints.

Knows nothing of data, tasks, scores or runs, and never decides what to remove.
"""
