"""Recovering quality after units are removed, without labels: least squares and distillation.

Empty so far. Nothing in here will choose units or read files.
"""
