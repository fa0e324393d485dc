"""The folder of a run: its journal, its header, their schema, and files that are written completely or not at all.

Records never compute anything; all that is shown of a run comes from here.
"""
