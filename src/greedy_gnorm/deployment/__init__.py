"""A pruned model outside of a run: ONNX, measured speed, the hub.

Nothing in here changes what a run decided.
"""
