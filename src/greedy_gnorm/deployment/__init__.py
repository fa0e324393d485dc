"""A pruned model outside of a run: ONNX, measured speed, the hub.

Never changes what a run decided.
"""
