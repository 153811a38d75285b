"""The sentence at the top of a run's page: what was trained, and how well it went."""

from __future__ import annotations

import math
import re

from lightfed.lab.results import text
from lightfed.lab.results.groups import level_counts
from lightfed.lab.results.run import KINDS, Run, base_name, primary_metric
from lightfed.lab.results.text import metric_text, readable

# Whose model was tested, and on which samples, by the kind of a metric.
_TESTED = {
    "global": ("the server's model", "on the test set"),
    "personal": ("the clients' models", "on average, each on its own test samples"),
    "local": ("the server's model", "on average on the clients' own test samples"),
    "trained": (
        "the clients' models",
        "on average after local training, each on its own test samples",
    ),
    "aggregated": (
        "the clients' models",
        "on average after aggregation, each on its own test samples",
    ),
    "finetuned": (
        "the server's model",
        "on average after fine-tuning on each client, on its own test samples",
    ),
    "unseen": ("the server's model", "on average on clients that take part in no round"),
    "unseen_finetuned": (
        "the models of clients that take part in no round",
        "on average after they have trained what is their own",
    ),
    "gap": ("the participation gap", "on average over clients"),
}

# Where the samples of clients are the whole test set, by `data.personal_test`.
_WHOLE_TEST_SET = "on average on the whole test set"

# The dotted name of a class. Other texts, such as that of a function, are no names for readers.
_CLASS = re.compile(r"[A-Za-z_][\w.]*")


def result_sentence(run: Run) -> str:
    """Return what a run has trained, and its main metric, in one sentence without a full stop."""
    return f"{_what_was_trained(run)}; {_how_well(run)}"


def _what_was_trained(run: Run) -> str:
    """Return the first half: `HeteroFL trained 5 sizes of Conv on Digits with 20 clients ...`."""
    verb = "trained" if run.finished else "has so far trained"
    models = _models(run)

    trained = f"{verb} {models}" if models else verb
    parts = [f"{run.algorithm} {trained} on {run.data}{run.note}"]
    if run.num_clients:
        parts.append(f"with {text.counted(run.num_clients, 'client')}")
        if _each_has_one_class(run):
            parts.append("of one class each")

    number = text.counted(run.last_round, "round")
    planned = run.planned
    if planned is not None and planned > run.last_round:
        number = f"{run.last_round:,} of {text.counted(planned, 'round')}"
    parts.append(f"for {number}")
    return " ".join(parts)


def _models(run: Run) -> str:
    """Return which networks the clients have, such as `5 sizes of Conv`; empty if unknown."""
    settings = run.settings
    classes = []
    variants = []
    position = 0
    while f"model.clients.{position}.count" in settings:
        prefix = f"model.clients.{position}.model"
        name = settings.get(f"{prefix}.class_path") or settings.get(prefix) or ""
        if not _CLASS.fullmatch(name):
            return ""
        classes.append(name.rpartition(".")[2])

        # The number of a group is in its keys, and is no difference.
        arguments = []
        for key, value in settings.items():
            if key.startswith(prefix):
                arguments.append((key.removeprefix(prefix), value))
        variants.append(tuple(arguments))
        position += 1

    different_classes = list(dict.fromkeys(classes))
    if not different_classes:
        return ""
    if len(different_classes) > 3:
        return f"{len(different_classes)} architectures"
    if len(different_classes) > 1:
        return " and ".join([", ".join(different_classes[:-1]), different_classes[-1]])

    (name,) = different_classes
    sizes = len(level_counts(settings))
    if sizes > 1:
        return f"{sizes} sizes of {name}"
    if len(set(variants)) > 1:
        return f"{len(set(variants))} variants of {name}"
    return name


def _each_has_one_class(run: Run) -> bool:
    """Return whether the training samples of every client are of a single class."""
    counts = run.arrays("partition").get("train_counts")
    # Data without classes, such as a regression, are a single class for all.
    if counts is None or counts.ndim != 2 or counts.shape[1] < 2:
        return False
    return bool(((counts > 0).sum(axis=1) == 1).all())


def _how_well(run: Run) -> str:
    """Return the second half: the last value of the main metric, and the best one."""
    column = _tested_column(run)
    if not column:
        loss = run.final("train_loss")
        if math.isnan(loss):
            return "no model was tested"
        if math.isinf(loss):
            return "no model was tested, and the training loss is no longer finite"
        loss_text = metric_text("train_loss", loss)
        return f"no model was tested; the training loss of the last round is {loss_text}"

    value = run.final(column)
    best, best_round = run.best(column)
    measured = run.series(column).dropna()

    if math.isinf(value):
        sentence = f"the run diverged: its last {readable(column)} is not finite"
    else:
        sentence = _reached(run, column, value)
        last_measured = int(measured.index[-1])
        if last_measured < run.last_round:
            sentence += f" in round {last_measured}, when it was last tested"

    if best_round > 0 and best != value:
        sentence += f" (best {metric_text(column, best)} in round {best_round})"

    if math.isfinite(value) and math.isinf(run.final("train_loss")):
        sentence += "; the training loss is no longer finite"
    return sentence


def _tested_column(run: Run) -> str:
    """Return the main column of the tests: a metric, else a loss; empty if nothing was tested."""
    column = primary_metric(run)
    if column != "train_loss":
        return column

    tested = [name for name in run.metrics if run.has(name)]
    return min(tested, key=lambda name: KINDS.index(name.partition("/")[0]), default="")


def _reached(run: Run, column: str, value: float) -> str:
    """Return `the server's model reaches 92.50 % accuracy on the test set`."""
    kind, _, _ = column.partition("/")
    subject, where = _TESTED[kind]
    if kind != "global" and run.settings.get("data.personal_test") == "all":
        where = _WHOLE_TEST_SET

    name = readable(base_name(column))
    is_plural = "models" in subject
    if text.is_share(column):
        verb = "reach" if is_plural else "reaches"
        return f"{subject} {verb} {metric_text(column, value)} {name} {where}"
    verb = "end" if is_plural else "ends"
    return f"{subject} {verb} with {name} {metric_text(column, value)} {where}"
