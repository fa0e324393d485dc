"""Image classification: one label per image.

A row's text is the path of an image. Where the data holds the image itself, it is a name, and the bytes are the second
text.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greedy_gnorm.data.columns import LABELS, Columns, Format, is_missing, numbered
from greedy_gnorm.data.rows import PIXELS, Encoded, Row, Text
from greedy_gnorm.errors import DataError
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.classification import SequenceTask, SingleLabel
from greedy_gnorm.tasks.task import register_task

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn

    from greedy_gnorm.data.batches import Batch

IMAGES = (
    "image", "img", "images", "picture", "photo", "pixel_values", "image_path", "image_file", "file_name", "filename",
    "path", "file",
)  # fmt: skip
AT_ONCE = 32
"""Images that are decoded together."""


class Picture(Row):
    """An image, by its path or by a name, and its label."""

    __slots__ = ()

    @property
    def words(self) -> tuple[Text, Text | None]:
        return self.text, None

    @property
    def hashed(self) -> tuple[Any, ...]:
        """The label: pixels are the model's inputs, and a folder may be moved."""
        return (self.label,)


@register_task
class Images(SingleLabel):
    """One correct class per image."""

    name = "image_classification"
    auto_class = "AutoModelForImageClassification"
    pipeline = "image-classification"
    reader = ("processor", "AutoImageProcessor")
    format = Format((), IMAGES, (*LABELS, "fine_label"), "image")
    row = Picture

    @classmethod
    def fits(cls, model: nn.Module) -> bool:
        config: Any = model.config
        one_class = config.problem_type in (None, SingleLabel.name) and config.num_labels > 1
        return super(SequenceTask, cls).fits(model) and one_class

    @property
    def tokens(self) -> int:
        """The tokens that the model makes of each image."""
        from greedy_gnorm.model.families import image_tokens

        count = image_tokens(self.config)
        assert count is not None
        return count

    def read_texts(
        self, table: Any, columns: Columns, tokenizer: Any, settings: Settings
    ) -> list[tuple[Text, Text | None]]:
        """The paths of images, or names and the bytes of images that the data holds."""
        import datasets

        column = columns.text
        if isinstance(table.features[column], datasets.Image):
            table = table.cast_column(column, datasets.Image(decode=False))
        cells = list(table[column])
        missing = [row for row, cell in enumerate(cells) if is_missing(cell)]
        if missing:
            raise DataError(f"There is no image in {column!r} of {numbered(missing)}.")
        odd = [row for row, cell in enumerate(cells) if not isinstance(cell, str) and not _is_stored(cell)]
        if odd:
            raise DataError(
                f"Column {column!r} holds {type(cells[odd[0]]).__name__}, neither paths nor images, in {numbered(odd)}."
            )
        return [_named(cell) for cell in cells]

    def encode(self, rows: Sequence[Row], tokenizer: Any, limit: int, settings: Settings) -> tuple[list[Encoded], int]:
        from greedy_gnorm.model.checkpoint import check_pillow

        check_pillow()
        items: list[Encoded] = []
        unreadable: list[str] = []
        for start in range(0, len(rows), AT_ONCE):
            images = []
            for row in rows[start : start + AT_ONCE]:
                try:
                    images.append(self._decoded(row))
                except Exception as error:  # Pillow raises many kinds of errors on a damaged file
                    unreadable.append(f"{row.text} ({' '.join(str(error).split())[:120] or type(error).__name__})")
            if not unreadable:
                pixels = tokenizer(images, return_tensors="pt")[PIXELS]
                self._check_size(pixels)
                some = enumerate(zip(pixels, rows[start : start + AT_ONCE], strict=True), start)
                items += [Encoded({PIXELS: image}, row.label, n, tokens=self.tokens) for n, (image, row) in some]
        if unreadable:
            more = f", and {len(unreadable) - 5} more" if len(unreadable) > 5 else ""
            raise DataError(f"Can't read {len(unreadable)} of {len(rows)} images: {', '.join(unreadable[:5])}{more}.")
        return items, 0

    def token_counts(self, rows: Sequence[Row], tokenizer: Any, limit: int, settings: Settings) -> list[int]:
        return [self.tokens] * len(rows)

    def padding(self, items: Sequence[Encoded], model: nn.Module, tokenizer: Any) -> dict[str, int]:
        """Images have one size."""
        return {PIXELS: 0}

    def completed(self, batch: Batch) -> Batch:
        return replace(batch, tokens=self.tokens)

    def random_inputs(self, rows: int, tokens: int, chance: Generator, choices: int = 1) -> dict[str, Tensor]:
        import torch

        return {PIXELS: torch.randn(rows, *self._size, generator=chance)}

    @property
    def _size(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        from greedy_gnorm.model.families import sides

        height, width = sides(self.config.image_size)
        return int(self.config.num_channels), int(height), int(width)

    def _check_size(self, pixels: Tensor) -> None:
        if tuple(pixels.shape[1:]) != self._size:
            given, taken = (" x ".join(map(str, shape)) for shape in (pixels.shape[1:], self._size))
            raise DataError(
                f"The image processor gives images of {given} numbers, but the model takes {taken}: use the model's "
                f"own processor."
            )

    def _decoded(self, row: Row) -> Any:
        """An image, upright and with the channels that the model takes."""
        from PIL import Image, ImageOps

        source: Any = row.text if row.pair is None else io.BytesIO(row.pair[0])  # type: ignore[arg-type]
        with Image.open(source) as image:
            return ImageOps.exif_transpose(image).convert("L" if self.config.num_channels == 1 else "RGB")


def _is_stored(cell: Any) -> bool:
    """Whether a cell is an image as `datasets` stores it."""
    return isinstance(cell, dict) and (cell.get("bytes") is not None or cell.get("path") is not None)


def _named(cell: Any) -> tuple[Text, Text | None]:
    """The path of an image, or a name with a hash, which tells images apart, and the bytes."""
    if isinstance(cell, str):
        return cell, None
    content, path = cell.get("bytes"), cell.get("path")
    if content is None:
        return str(path), None
    digest = hashlib.blake2b(content, digest_size=4).hexdigest()
    return f"{Path(path).name if path else 'image'} ({digest})", (content,)
