"""The figures of this package: matplotlib's, without the global state of pyplot, and shown by notebooks."""

from __future__ import annotations

import io

from matplotlib import figure


class Figure(figure.Figure):
    """A figure that a notebook shows when it is the value of a cell, without pyplot."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()
