"""Pruning: methods, stopping rules, the greedy loop and the result of a run.

The loop neither touches modules nor writes files: model.surgery removes units, and records stores the steps.
"""
