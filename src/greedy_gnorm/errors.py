"""Errors that a user can act on: one clear message each, shown without a traceback on the command line."""


class GnormError(Exception):
    """Something in the request can't be done; the message says what was wrong and what to do."""


class UnsupportedModel(GnormError):
    """The model's attention can't be found, cut or scored."""


class DataError(GnormError):
    """The data can't be read, or does not fit the model."""


class NonFiniteScore(GnormError):
    """A score came out NaN or infinite."""


class RunFolderError(GnormError):
    """The output folder can't be used for this run."""
