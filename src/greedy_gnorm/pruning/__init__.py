"""Methods, rules, the loop and a run.

The loop touches no module and writes no file: surgery cuts, records keep.
"""
