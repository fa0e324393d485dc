"""Recovering quality after units are removed, without labels and without training: least squares.

Nothing in here chooses units, reads files or knows about runs.
"""
