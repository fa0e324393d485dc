"""Running a model exactly and cheaply: layer by layer, with a cache, for outputs, gradients and attention maps; over
several processes.

Passes measure. What the numbers mean for a unit is up to scores.
"""
