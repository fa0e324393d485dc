"""Winning quality back after units are removed, without labels: least squares and distillation will live here.

Empty so far. Nothing in here chooses units or reads files.
"""
