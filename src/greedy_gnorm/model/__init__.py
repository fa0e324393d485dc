"""Models: where their units are, how units are removed or gated, and how models are saved and loaded.

Nothing in here knows about data, tasks, scores or runs, or decides which units to remove.
"""
