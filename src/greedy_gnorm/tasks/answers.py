"""Question answering: the answer to a question is a part of a text, its context.

A context that is too long is read in windows that overlap, each with the question in front. A window is a row of a
batch; the question's answer is the best one of its windows. torch takes seconds to load, so it is imported where it
computes.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from greedy_gnorm.data.columns import Columns, Format, LabelColumn, cells, numbered, read_texts
from greedy_gnorm.data.rows import Encoded, Label, Row, Text
from greedy_gnorm.errors import DataError, UnsupportedModel
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.classification import LOSS, mean
from greedy_gnorm.tasks.task import Task, kl_divergences, register_task
from greedy_gnorm.units import Matrix, Measure, Vector

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn

    from greedy_gnorm.data.batches import Batch

F1, EXACT_MATCH = (Measure(name, largest=1.0) for name in ("f1", "exact_match"))

STRIDE = 128
"""The tokens that neighbouring windows share, unless the user says otherwise."""
LONGEST_WINDOW = 384
"""The most tokens of a window, as is usual for SQuAD."""
LONGEST_QUESTION = 64
"""The most tokens of a question; it takes half of a window at most."""
LONGEST_ANSWER = 30
"""The most tokens of an answer."""
FAR = -1e4
"""The output at padding: far below any other, and finite in every precision."""

Answer = tuple[int, str]
"""Where an answer begins in the context, and its text."""
Span = tuple[int, int]

QUESTION, SCORE, NO_ANSWER, RIGHT, EXACT, UNANSWERED, OPTIONAL, ROW_LOSS = range(8)
"""The statistics of a window, and then of a question: its number, the score of the best answer and that of none, F1
and exact match of the best answer, 1 if there is no right answer, 1 if rows may have none, and the loss.
"""


class Question(Row):
    """A question with its context and the title of the article that this is from, where that is known."""

    __slots__ = ()

    @property
    def context(self) -> str:
        """The text that the answer is a part of."""
        assert self.pair is not None
        return str(self.pair[0])

    @property
    def source(self) -> Text:
        """The article, else the context: questions on one text give each other's answers away."""
        assert self.pair is not None
        return str(self.pair[1] or self.pair[0])


class Window(NamedTuple):
    """What turns the outputs of a window into an answer and judges it.

    `offsets` are the characters of the context's tokens, the first of which is token `begin`. `optional` says whether
    any of the rows has no answer: only then can a question be left unanswered.
    """

    question: int
    context: str
    answers: tuple[Answer, ...]
    begin: int
    offsets: tuple[Span, ...]
    optional: bool

    def tokens(self, start: int, end: int) -> Span:
        """The first and the last token of these characters; (0, 0) if they are not all in this window."""
        if not self.offsets or start < self.offsets[0][0] or end > self.offsets[-1][1]:
            return 0, 0
        inside = [place for place, (low, high) in enumerate(self.offsets) if low < end and high > start]
        return (self.begin + inside[0], self.begin + inside[-1]) if inside else (0, 0)

    def characters(self, first: int, last: int) -> Span:
        """The characters of these tokens of the context."""
        return self.offsets[first - self.begin][0], self.offsets[last - self.begin][1]

    def label(self) -> Span:
        """The tokens of the first answer that is in this window; (0, 0) if none is."""
        spans = (self.tokens(start, start + len(text)) for start, text in self.answers)
        return next((span for span in spans if span != (0, 0)), (0, 0))


@register_task
class Answers(Task):
    """The part of a context that answers a question, or none."""

    name = "question_answering"
    metrics = (F1, EXACT_MATCH, LOSS)
    auto_class = "AutoModelForQuestionAnswering"
    pipeline = "question-answering"
    format = Format((("question", "context"), ("question", "passage")), ("question",), ("answers", "answer"))
    row = Question
    output_names = ("start_logits", "end_logits")

    def read_texts(
        self, table: Any, columns: Columns, tokenizer: Any, settings: Settings
    ) -> list[tuple[Text, Text | None]]:
        if columns.pair is None:
            present = ", ".join(table.column_names)
            raise DataError(f"Which column is the context? Give its name with --text-pair. Columns: {present}.")
        questions, contexts = read_texts(table, columns.text), read_texts(table, columns.pair)
        if columns.label is not None and settings.labels == "data":
            check_answers(contexts, cells(table, columns.label))
        titles = cells(table, "title") if "title" in table.column_names else [None] * len(questions)
        shared: dict[tuple[str, str], tuple[str, str]] = {}  # a context is kept once
        pairs = ((context, title or "") for context, title in zip(contexts, titles, strict=True))
        return [(question, shared.setdefault(pair, pair)) for question, pair in zip(questions, pairs, strict=True)]

    def map_labels(self, columns: Sequence[LabelColumn], settings: Settings) -> list[list[Label]]:
        return [[read_answers(value) for value in column.values] if column.used else [] for column in columns]

    def check_labels(self, labels: Sequence[Any]) -> None:
        """Ready batches, whose labels are not answers, are refused where their windows are needed."""
        if not any(labels):
            raise DataError(f"None of the {len(labels)} evaluation rows has an answer, so quality can't be measured.")

    def doubts(self, labels: Sequence[Any], quality: Mapping[str, float]) -> list[str]:
        if quality["f1"] >= 0.1:
            return []
        return [f"The unpruned model's F1 is {quality['f1']:.1%}: check that it was trained to answer questions."]

    def encode(self, rows: Sequence[Row], tokenizer: Any, limit: int, settings: Settings) -> tuple[list[Encoded], int]:
        """Windows of the contexts; truncated are questions that leave too little room for the context."""
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(
                f"Question answering requires a fast tokenizer, which says where each token lies in the text; this is "
                f"{type(tokenizer).__name__}."
            )
        length, stride = min(limit, LONGEST_WINDOW), STRIDE if settings.stride is None else settings.stride
        most = min(LONGEST_QUESTION, length // 2)
        room = length - most - int(tokenizer.num_special_tokens_to_add(pair=True))
        if room < 2:
            raise DataError(f"The model reads only {limit} tokens: too few for a question and its context.")
        questions, truncated = shortened([str(row.text) for row in rows], tokenizer, most)
        contexts = [Question(*row).context for row in rows]
        found = tokenizer(
            questions, contexts, truncation="only_second", max_length=length, stride=min(stride, room // 2),
            return_overflowing_tokens=True, return_offsets_mapping=True, return_attention_mask=True, verbose=False,
        )  # fmt: skip
        names = [name for name in found if name not in ("overflow_to_sample_mapping", "offset_mapping")]
        optional = any(row.label == () for row in rows)
        items = []
        for place, number in enumerate(found["overflow_to_sample_mapping"]):
            inputs = {name: found[name][place] for name in names}
            in_context = [sequence == 1 for sequence in found.sequence_ids(place)]
            offsets = (span for span, inside in zip(found["offset_mapping"][place], in_context, strict=True) if inside)
            begin = in_context.index(True) if True in in_context else len(in_context)
            label: Any = rows[number].label
            window = Window(number, contexts[number], label or (), begin, tuple(map(tuple, offsets)), optional)
            positions = [1, *map(int, in_context[1:])]
            items.append(Encoded(inputs, None if label is None else window.label(), number, positions, window))
        return items, truncated

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """The start and the end logit of every token, (B, T, 2); those of padding are far below all others.

        transformers' own loss counts the logits of padding, so that it depends on the other rows of a batch.
        """
        import torch

        found: Any = model(**batch.inputs)
        sides = [getattr(found, name, None) for name in self.output_names]
        if not all(isinstance(side, torch.Tensor) and self.has_right_shape(side) for side in sides):
            raise UnsupportedModel(f"{type(model).__name__} has no start and end logits for every token.")
        stacked = torch.stack([side for side in sides if side is not None], dim=-1)
        return stacked.masked_fill(batch.real_tokens().to(stacked.device)[..., None] == 0, FAR)

    def has_right_shape(self, logits: Tensor) -> bool:
        return logits.ndim == 2

    def row_norms(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The norm of all start and end logits of the context and of the first token, which stands for no answer."""
        import torch

        norms: Tensor = torch.linalg.vector_norm(outputs * counted(batch).to(outputs)[..., None], dim=(1, 2))
        return norms

    def row_losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The mean of the cross entropies of start and end over all tokens, as in transformers, but for padding."""
        from torch.nn import functional

        return functional.cross_entropy(outputs, labels[:, :2].long(), reduction="none").mean(-1)

    def row_divergences(self, outputs: Tensor, reference: Tensor, batch: Batch, temperature: float = 1.0) -> Tensor:
        """The mean of those of start and end, each a distribution over the tokens."""
        return kl_divergences(outputs, reference, temperature, dim=1).flatten(1).mean(1)

    def predicted_labels(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The tokens of the best answer in each window, its score and that of no answer."""
        import torch

        first, last, score = best_spans(outputs, batch)
        return torch.stack([first.double(), last.double(), score.double(), outputs[:, 0].double().sum(-1)], dim=1)

    def joined_predictions(self, predicted: Sequence[Tensor], batches: Sequence[Batch]) -> list[Tensor]:
        """The answer of each question over its windows: its tokens in each window, and its characters or -1."""
        import torch

        windows = [window for batch in batches for window in windows_of(batch)]
        best: dict[int, tuple[float, Span]] = {}
        none: dict[int, float] = {}
        for window, (first, last, score, no_answer) in zip(windows, torch.cat(list(predicted)).tolist(), strict=True):
            number = window.question
            if window.offsets and (number not in best or score > best[number][0]):
                best[number] = score, window.characters(int(first), int(last))
            none[number] = min(no_answer, none.get(number, no_answer))
        labels = []
        for batch, some in zip(batches, predicted, strict=True):
            spans = []
            for window in windows_of(batch):
                score, (start, end) = best.get(window.question, (FAR, (-1, -1)))
                if window.optional and none[window.question] > score:
                    start = end = -1
                spans.append([*(window.tokens(start, end) if start >= 0 else (0, 0)), start, end])
            labels.append(torch.tensor(spans, device=some.device))
        return labels

    def drawn_labels(self, outputs: Tensor, batch: Batch, chance: Generator) -> Tensor:
        """A start and an end, each drawn from the context and the first token, and their characters, or -1.

        An end before its start is no answer.
        """
        import torch

        masked = outputs.double().masked_fill(counted(batch).to(outputs.device)[..., None] == 0, -torch.inf)
        chances = masked.softmax(1).transpose(1, 2).flatten(0, 1).cpu()
        drawn = torch.multinomial(chances, 1, generator=chance).view(len(outputs), 2)
        spans = [
            window.characters(first, last) if window.begin <= first <= last else (-1, -1)
            for window, (first, last) in zip(windows_of(batch), drawn.tolist(), strict=True)
        ]
        return torch.cat([drawn, torch.tensor(spans)], dim=1).to(outputs.device)

    def right_rows(self, statistics: Matrix, measure: str) -> NDArray[np.bool_] | None:
        return statistics[:, EXACT] == 1 if measure == EXACT_MATCH.name else None

    def row_statistics(self, outputs: Tensor, labels: Tensor, batch: Batch) -> Tensor:
        import torch

        first, last, score = best_spans(outputs, batch)
        judged = [
            judge(window, span, gold[2:])
            for window, span, gold in zip(
                windows_of(batch), zip(first.tolist(), last.tolist(), strict=True), labels.tolist(), strict=True
            )
        ]
        numbers = torch.tensor(judged, dtype=torch.float64, device=outputs.device)
        scores = torch.stack([score, outputs[:, 0].sum(-1)], dim=1).double()
        losses = self.row_losses(outputs, labels).double()[:, None]
        return torch.cat([numbers[:, :1], scores, numbers[:, 1:], losses], dim=1)

    def combined(self, statistics: Matrix) -> Matrix:
        """The statistics of each question: those of the best answer in its windows, or of none; the mean loss."""
        order = np.lexsort((-statistics[:, SCORE], statistics[:, QUESTION]))
        table = statistics[order]
        starts = np.flatnonzero(np.r_[True, np.diff(table[:, QUESTION]) != 0])
        found = table[starts]
        found[:, NO_ANSWER] = np.minimum.reduceat(table[:, NO_ANSWER], starts)
        found[:, ROW_LOSS] = np.add.reduceat(table[:, ROW_LOSS], starts) / np.diff(np.r_[starts, len(table)])
        none = (found[:, OPTIONAL] == 1) & (found[:, NO_ANSWER] > found[:, SCORE])
        for place in (RIGHT, EXACT):
            found[none, place] = found[none, UNANSWERED]
        return found

    def measures(self, statistics: Matrix) -> Mapping[str, float]:
        return {name: mean(statistics[:, place]) for name, place in COLUMNS.items()}

    def resampled(self, statistics: Matrix, weights: NDArray[np.int64]) -> Mapping[str, Vector]:
        samples = weights.astype(np.float64)
        return {name: samples @ statistics[:, place] / samples.sum(axis=1) for name, place in COLUMNS.items()}


COLUMNS = {F1.name: RIGHT, EXACT_MATCH.name: EXACT, LOSS.name: ROW_LOSS}
"""The measures, each the mean of one of the statistics."""


def counted(batch: Batch) -> Tensor:
    """The tokens whose outputs count, (B, T)."""
    if batch.positions is None:
        raise DataError("Ready batches do not say which tokens are the context: give questions and contexts as rows.")
    return batch.positions


def windows_of(batch: Batch) -> Sequence[Window]:
    """What judges the rows of a batch."""
    counted(batch)
    return batch.notes


def best_spans(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """The first and last token and the score of the best answer in the context of each window, (B,) each.

    Its score is the start logit of its first token plus the end logit of its last one.
    """
    import torch
    from torch.nn import functional

    context = counted(batch).to(outputs.device).clone()
    context[:, 0] = 0
    start, end = outputs.masked_fill(context[..., None] == 0, FAR).unbind(-1)
    tokens = start.shape[1]
    scores = [
        start + functional.pad(end[:, longer:], (0, longer), value=FAR) for longer in range(min(LONGEST_ANSWER, tokens))
    ]
    best, place = torch.stack(scores, dim=1).flatten(1).max(1)
    first = place % tokens
    return first, (first + place // tokens).clamp_max(tokens - 1), best


def judge(window: Window, span: Span, right: Sequence[int]) -> list[float]:
    """The statistics of an answer that need its text. `right` are the characters of the right one (-1: none), or empty
    where the right answers are those of the data.
    """
    texts = [text for _, text in window.answers]
    if right:
        texts = [window.context[slice(*right)]] if right[0] >= 0 else []
    texts = [text for text in texts if normalised(text)] or [""]
    start, end = window.characters(*span) if window.offsets else (0, 0)
    given = window.context[start:end]
    f1, exact = max(text_f1(given, text) for text in texts), max(exact_match(given, text) for text in texts)
    return [window.question, f1, exact, float(texts == [""]), float(window.optional)]


def normalised(text: str) -> list[str]:
    """The words that SQuAD compares: in lower case, without punctuation and articles."""
    plain = "".join(each for each in text.lower() if each not in PUNCTUATION)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


PUNCTUATION = set(string.punctuation)


def exact_match(given: str, right: str) -> float:
    """1 if the words are the same."""
    return float(normalised(given) == normalised(right))


def text_f1(given: str, right: str) -> float:
    """F1 of the words of an answer; without any word on one side, 1 if there is none on both."""
    ours, theirs = Counter(normalised(given)), Counter(normalised(right))
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * (ours & theirs).total() / (ours.total() + theirs.total())


def shortened(questions: Sequence[str], tokenizer: Any, most: int) -> tuple[list[str], int]:
    """The questions with at most so many tokens each, and how many were longer."""
    found = tokenizer(list(questions), add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    spans = found["offset_mapping"]
    short = [
        question if len(offsets) <= most else question[: offsets[most - 1][1]]
        for question, offsets in zip(questions, spans, strict=True)
    ]
    return short, sum(len(offsets) > most for offsets in spans)


def read_answers(value: Any) -> tuple[Answer, ...]:
    """The answers of a row: {"text": [...], "answer_start": [...]} as in `datasets`, or a list of dicts as in SQuAD."""
    try:
        if isinstance(value, Mapping):
            pairs = list(zip(value["answer_start"], value["text"], strict=True))
        else:
            pairs = [(each["answer_start"], each["text"]) for each in value]
        return tuple((int(start), str(text)) for start, text in pairs)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"Answers must be written as {{'text': [...], 'answer_start': [...]}}, or as a list of such dicts, not "
            f"{value!r:.100}."
        ) from error


def check_answers(contexts: Sequence[str], values: Sequence[Any]) -> None:
    """Refuse answers that are not in their context where they should be."""
    wrong = [
        (row, start, text)
        for row, (context, value) in enumerate(zip(contexts, values, strict=True))
        if value is not None
        for start, text in read_answers(value)
        if start < 0 or not text.strip() or context[start : start + len(text)] != text
    ]
    if wrong:
        row, start, text = wrong[0]
        places = [str(place) for place in _occurrences(contexts[row], text)]
        where = f"it begins at {' and '.join(places[:5])}" if places else "the context does not have it"
        rows = list(dict.fromkeys(row for row, _, _ in wrong))
        raise DataError(
            f"Answers are not in their context at answer_start in {numbered(rows)}. In row {row} {text!r:.60} should "
            f"begin at character {start}, but {where}."
        )


def _occurrences(context: str, text: str) -> Iterator[int]:
    place = context.find(text) if text.strip() else -1
    while place >= 0:
        yield place
        place = context.find(text, place + 1)
