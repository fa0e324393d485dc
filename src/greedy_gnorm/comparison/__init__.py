"""Many methods and runs on one model, and what their curves say.

Walks and analyses; drawing and writing tables is up to the report.
"""
