"""Recovering quality after units are removed, without labels: least squares after each step, distillation at the end.

Nothing in here chooses units, reads files or knows about runs.
"""
