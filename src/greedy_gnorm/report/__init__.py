"""What people look at: the page, charts, figures, tables, the model card.

Everything comes from the journal; nothing in here runs a model.
"""
