"""A pruned model outside of a run: ONNX, the hub, its quality and speed beside those of the unpruned model.

Nothing in here changes what a run decided.
"""
