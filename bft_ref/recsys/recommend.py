"""A trained model beside its users and items: names in, names out."""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from bft_ref.recsys import storage
from bft_ref.recsys.data.frames import Catalogue, Label, from_frame
from bft_ref.recsys.data.sequences import Sequences
from bft_ref.recsys.models import CONFIGS, Recommender, Top, top_items
from bft_ref.recsys.train import TrainConfig, fit
from bft_ref.recsys.train.batches import pad_windows
from bft_ref.support.checks import choice, count

Unknown = Literal["popularity", "error"]
CHUNK = 256  # histories scored at once


@dataclass(frozen=True)
class Answer:
    """What one user, or one history, is recommended.

    ``items``: labels, the best first, at most k: fewer where fewer are left;
    ``scores``: one each. ``source``: "model", or "popularity" where the model
    had no known item to go by; the scores are then interactions counted.
    ``user``: who was asked for; None for a history. ``left_out``: labels of
    the history that are not in the catalogue, in its order.
    """

    items: tuple[Label, ...]
    scores: tuple[float, ...]
    source: Literal["model", "popularity"]
    user: Label | None = None
    left_out: tuple[Label, ...] = ()


class _Question(NamedTuple):
    items: NDArray[np.int64]
    times: NDArray[np.float64] | None
    user: Label | None = None
    left_out: tuple[Label, ...] = ()


@dataclass(frozen=True)
class Service:
    """A recommender, what its users have met so far, and everybody's names.

    ``histories`` are what a user is recommended from, and what counts as
    popular; ``catalogue`` names its items and users. ``validation``: how well
    the model ranked held-out items, for the record.
    Raises: ValueError for a model, histories and names of different sizes.
    """

    model: Recommender
    histories: Sequences
    catalogue: Catalogue
    validation: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self):
        items = {
            "model": self.model.config.n_items,
            "histories": self.histories.n_items,
            "catalogue": len(self.catalogue.items),
        }
        if len(set(items.values())) > 1:
            raise ValueError(
                "model, histories, catalogue: expected the same number of "
                f"items, got {items}"
            )
        if len(self.histories) != len(self.catalogue.users):
            raise ValueError(
                f"catalogue: expected {len(self.histories)} users, those of "
                f"the histories, got {len(self.catalogue.users)}"
            )

    @classmethod
    def fit(
        cls,
        frame: Any,
        model: str = "sasrec",
        train: TrainConfig | None = None,
        *,
        user: str = "user",
        item: str = "item",
        time: str | None = "time",
        device: str | torch.device | None = None,
        progress: bool = True,
        **options: Any,
    ) -> "Service":
        """A model trained on a frame of interactions, ready to recommend.

        ``model``: sasrec, bert4rec or hstu; ``options``: fields of its
        configuration, such as ``d_model=32`` or ``bft=BFTConfig()``. The rest
        as :func:`~bft_ref.recsys.data.frames.from_frame` and
        :func:`~bft_ref.recsys.train.trainer.fit` have it.

        The last two items of each user with three or more are not trained on:
        the last but one chooses the epoch (``validation``), the last is left
        for a test of yours. What is recommended goes by all of them.
        Raises: as the two functions; TypeError, ValueError for options.
        """
        choice("model", model, CONFIGS)
        sequences, catalogue = from_frame(
            frame, user=user, item=item, time=time
        )
        fitted = fit(
            sequences,
            CONFIGS[model](n_items=sequences.n_items, **options),
            train or TrainConfig(),
            device=device,
            progress=progress,
        )
        validation = fitted.rankings["validation"].summary()
        return cls(fitted.model, sequences, catalogue, validation)

    def recommend(
        self,
        users: Iterable[Label] | None = None,
        *,
        histories: Iterable[Iterable[Label]] | None = None,
        times: Iterable[Sequence[float]] | None = None,
        k: int = 10,
        exclude_seen: bool = True,
        unknown: Unknown = "popularity",
    ) -> list[Answer]:
        """The k best items for each user, or after each history, in order.

        ``users`` are labels of the frame; ``histories`` are lists of item
        labels, the oldest first, with ``times`` in seconds where the model
        was trained with times and reads them (HSTU). All of a history is
        excluded, however little of it the model sees, unless ``exclude_seen``
        is False. An item that is not in the catalogue is left out of a
        history, and the answer says so. A user who is not there, and a
        history without a known item, get what is most popular, and the answer
        says so; ``unknown="error"`` refuses all three.
        Raises: TypeError for labels of another kind than the frame's;
        ValueError unless one of users and histories is given, for times that
        do not fit or that nothing reads, and for what ``unknown`` refuses.
        """
        k = count("k", k, 1)
        choice("unknown", unknown, get_args(Unknown))
        if (users is None) == (histories is None):
            raise ValueError(
                "users, histories: expected one of the two, got "
                + ("neither" if users is None else "both")
            )
        if users is not None:
            asked = self._of_users(users, times)
        else:
            asked = self._of_histories(histories, times)
        if unknown == "error":
            _refuse_unknown(asked)
        parts = [one.times for one in asked if one.times is not None]
        met = Sequences.of(
            [one.items for one in asked],
            n_items=self.histories.n_items,
            times=np.concatenate(parts) if parts else None,
        )
        answers: list[Answer] = []
        for start in range(0, len(asked), CHUNK):
            rows = np.arange(start, min(start + CHUNK, len(asked)))
            top = self._top(met, rows, k, exclude_seen)
            found = zip(rows, *(x.tolist() for x in top), strict=True)
            answers += [self._answer(asked[at], *best) for at, *best in found]
        return answers

    def _of_users(self, users, times) -> list[_Question]:
        if times is not None:
            raise ValueError(
                "times: expected None for users, whose times are known, got "
                "some; they belong to histories"
            )
        users = users if isinstance(users, str) else list(users)
        indices = self.catalogue.user_indices(users)
        seconds = self.histories.times
        asked = []
        for label, u in zip(users, indices, strict=True):
            own = slice(0)
            if u is not None:
                own = slice(*self.histories.offsets[u : u + 2])
            own_times = None if seconds is None else seconds[own]
            asked.append(
                _Question(self.histories.items[own], own_times, label)
            )
        return asked

    def _of_histories(self, histories, times) -> list[_Question]:
        histories = list(histories)
        reads = self.model.reads_times and self.histories.times is not None
        if reads != (times is not None):
            raise ValueError(
                "times: expected seconds for each item, since the model was "
                "trained with them, got None"
                if reads
                else "times: expected None, since the model does not read "
                "them or was trained without, got some"
            )
        times = [None] * len(histories) if times is None else list(times)
        if len(times) != len(histories):
            raise ValueError(
                f"times: expected seconds for {len(histories)} histories, got "
                f"{len(times)}"
            )
        asked = []
        for at, (labels, seconds) in enumerate(
            zip(histories, times, strict=True)
        ):
            unordered = isinstance(labels, str | bytes | AbstractSet | Mapping)
            if unordered or not isinstance(labels, Iterable):
                raise TypeError(
                    f"histories: expected a list of item labels in place "
                    f"{at}, got {labels!r:.60}"
                )
            ids = self.catalogue.item_ids(labels := list(labels))
            known = np.asarray(ids, dtype=np.int64) > 0
            if seconds is not None and len(seconds) != len(ids):
                raise ValueError(
                    f"times: expected {len(ids)} for the items of history "
                    f"{at}, got {len(seconds)}"
                )
            asked.append(
                _Question(
                    np.asarray(ids, dtype=np.int64)[known],
                    None if seconds is None else np.asarray(seconds)[known],
                    left_out=tuple(
                        x for x, i in zip(labels, ids, strict=True) if not i
                    ),
                )
            )
        return asked

    def _top(
        self, met: Sequences, rows: NDArray, k: int, exclude_seen: bool
    ) -> Top:
        """The best items for some of the histories."""
        popularity = torch.as_tensor(self.histories.frequency).double()
        scores = popularity.repeat(len(rows), 1)
        lengths = met.lengths[rows]
        known = np.flatnonzero(lengths)
        if len(known):
            device = next(self.model.parameters()).device
            items, times, _ = pad_windows(
                met, rows[known], lengths[known], self.model.config.max_length
            )
            seconds = None if times is None else torch.as_tensor(times)
            scores[known] = self.model.scores(
                torch.as_tensor(items).to(device),
                None if seconds is None else seconds.to(device),
            ).to(scores)
        longest = max(1, int(lengths.max()))
        seen = torch.as_tensor(pad_windows(met, rows, lengths, longest)[0])
        return top_items(scores, k, seen if exclude_seen else None)

    def _answer(
        self, asked: _Question, ids: list[int], scores: list[float]
    ) -> Answer:
        given = [
            (self.catalogue.items[i - 1], score)
            for i, score in zip(ids, scores, strict=True)
            if i
        ]
        return Answer(
            tuple(label for label, _ in given),
            tuple(score for _, score in given),
            "model" if len(asked.items) else "popularity",
            asked.user,
            asked.left_out,
        )

    def save(self, path: str | Path) -> None:
        """Write all of it to one file, which :meth:`load` reads.

        :func:`bft_ref.recsys.storage.load` reads the model alone from it.
        """
        h, c = self.histories, self.catalogue
        beside = {
            "items": torch.as_tensor(h.items),
            "offsets": torch.as_tensor(h.offsets),
            "names": storage.packed([c.items, c.users]),
            "validation": storage.packed(dict(self.validation)),
        }
        if h.times is not None:
            beside["times"] = torch.as_tensor(h.times)
        storage.save(self.model, path, beside=beside)

    @classmethod
    def load(
        cls, path: str | Path, device: str | torch.device = "cpu"
    ) -> "Service":
        """What :meth:`save` wrote.

        Raises: as :func:`bft_ref.recsys.storage.load`; ValueError for a model
        that was saved without its users and items.
        """
        model, beside = storage.load(path, device), storage.load_beside(path)
        if "names" not in beside:
            raise ValueError(
                f"path: expected a file of Service.save, got {path}, which "
                "holds a model alone; bft_ref.recsys.storage.load reads it"
            )
        items, users = storage.unpacked(beside["names"])
        times = beside.get("times")
        histories = Sequences(
            beside["items"].numpy(),
            beside["offsets"].numpy(),
            n_items=len(items),
            times=None if times is None else times.numpy(),
            users=list(map(str, users)),
            labels=["", *map(str, items)],
        )
        validation = storage.unpacked(beside["validation"])
        return cls(model, histories, Catalogue(items, users), validation)


def _refuse_unknown(asked: list[_Question]) -> None:
    for at, one in enumerate(asked):
        if one.user is not None and not len(one.items):
            fault = f"users: expected those of the frame, got {one.user!r}"
        elif one.left_out:
            fault = (
                f"histories: expected items of the catalogue, got "
                f"{one.left_out[0]!r} in place {at}"
            )
        elif not len(one.items):
            fault = f"histories: expected an item, got none in place {at}"
        else:
            continue
        raise ValueError(fault + "; unknown='popularity' answers all the same")


def as_columns(answers: Iterable[Answer]) -> dict[str, list]:
    """Columns of a frame with a row an item, for pandas' or polars' DataFrame.

    ``asked``: the place of the user or history that was asked for; ``user``,
    ``rank`` from 1, ``item``, ``score`` and ``source``. Beside a history's
    None, pandas makes floats of users that are whole numbers.
    """
    rows = [
        (at, one.user, rank, item, score, one.source)
        for at, one in enumerate(answers)
        for rank, (item, score) in enumerate(
            zip(one.items, one.scores, strict=True), 1
        )
    ]
    names = ("asked", "user", "rank", "item", "score", "source")
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}
