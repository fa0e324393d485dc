"""Running a model exactly and cheaply, layer by layer and on several processes: outputs, gradients, attention maps.

Passes only measure; what the numbers say about a unit is decided in scores.
"""
