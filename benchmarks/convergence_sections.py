"""Which section of the report a run belongs to, and what a section holds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Iterable, Sequence

from convergence_run import Run
from convergence_statistics import Setting, by_setting
from convergence_store import Result
from convergence_tables import Table, group_table, pooled_table, time_table

LEVELS = {"mnist": 97.0}  # accuracies in percent whose time is taken
MANY_WORKERS = 8
SAID_FIRST = ("dataset", "network", "num_workers", "optimizer", "learning_rate")
UNSAID = ("method", "seed", "num_evaluations")  # the last one changes no number


@dataclass(frozen=True)
class Section:
    """A part of the report.

    Parameters
    ----------
    slug : str
        For the names of its files.
    title : str
        Its heading.
    about : str
        What it shows.
    has_seconds : bool
        Whether its tables and curves say how long the training took.
    has_levels : bool
        Whether the time to an accuracy is in it.
    """

    slug: str
    title: str
    about: str
    has_seconds: bool = False
    has_levels: bool = False


ACCURACY = Section(
    "accuracy",
    "Accuracy (SGD)",
    "SGD with momentum on the servers, samples dealt out evenly, no slow worker.",
)
OTHER_OPTIMIZERS = Section(
    "optimizers",
    "NAG and Adam",
    "Optimizers other than SGD on the servers.",
)
NON_IID = Section(
    "noniid",
    "Non-iid data",
    "Each worker has the samples of some classes only.",
)
STRAGGLERS = Section(
    "stragglers",
    "Stragglers",
    "The last worker sleeps in each step. The others wait for it, but not with "
    "dist_async. All ranks make equally many steps, and seconds are those of the "
    "slowest rank: what is shown is whether the others' wait costs accuracy. In this "
    "measure dist_async cannot gain seconds.",
    has_seconds=True,
)
MANY = Section(
    "many",
    "Many workers",
    f"SGD with {MANY_WORKERS} workers or more; the batch grows with their number.",
)
TIME = Section(
    "time",
    "Accuracy against time",
    "Every role has a link of the given rate, and each step sleeps as long as an "
    "accelerator would compute.",
    has_seconds=True,
    has_levels=True,
)
IMAGENET = Section(
    "imagenet", "ImageNet", "The paper's largest setting.", has_seconds=True
)
SMALL = Section(
    "small",
    "Small runs",
    "On the packaged digits, or on a part of a data set: these show that everything "
    "works, not how good it is.",
)
SECTIONS = (
    ACCURACY,
    OTHER_OPTIMIZERS,
    NON_IID,
    STRAGGLERS,
    MANY,
    TIME,
    IMAGENET,
    SMALL,
)


def section_of(run: Run) -> Section:
    """The one section that a run belongs to."""
    if run.dataset == "imagenet":
        return IMAGENET
    if run.dataset == "digits" or run.max_train or run.max_test:
        return SMALL
    if run.rate or run.compute_ms:
        return TIME
    if run.straggler_ms:
        return STRAGGLERS
    if run.partition != "iid":
        return NON_IID
    if run.optimizer != "sgd":
        return OTHER_OPTIMIZERS
    return MANY if run.num_workers >= MANY_WORKERS else ACCURACY


def by_section(results: Iterable[Result]) -> dict[Section, list[Result]]:
    """The results of each section that has any, in the order of the report."""
    groups: dict[Section, list[Result]] = {section: [] for section in SECTIONS}
    for result in results:
        groups[section_of(result.run)].append(result)
    return {section: group for section, group in groups.items() if group}


def tables_of(section: Section, results: Sequence[Result]) -> list[Table]:
    """A section's tables: one for each setting, then those over the settings."""
    tables = []
    for setting, group in by_setting(results).items():
        words = describe(setting)
        tables.append(group_table(words, group, section.has_seconds))
        if section.has_levels and setting.dataset in LEVELS:
            level = LEVELS[setting.dataset]
            title = f"Time to {level:g} %: {words}"
            tables.append(time_table(title, group, level))
    for title, group in pools(results).items():
        num_settings = len(by_setting(group))
        plural = "setting" if num_settings == 1 else "settings"
        text = f"{title}: pooled over {num_settings} {plural}, and over the seeds"
        table = pooled_table(text, group)
        if table is not None:
            tables.append(table)
    return tables


def pools(results: Iterable[Result]) -> dict[str, list[Result]]:
    """What is pooled, by its words: all but workers and learning rate are equal."""
    groups: dict[str, list[Result]] = {}
    for setting, group in by_setting(results).items():
        words = [setting.dataset, setting.network, setting.optimizer, *_rest(setting)]
        groups.setdefault(", ".join(words), []).extend(group)
    return groups


def describe(setting: Setting) -> str:
    """A setting in words: the usual fields, and all that differ from the defaults."""
    known = f"{setting.dataset}, {setting.network}, {setting.num_workers} workers"
    rate = f"{setting.optimizer} lr {setting.learning_rate:g}"
    return ", ".join([known, rate, *_rest(setting)])


def _rest(setting: Setting) -> list[str]:
    """What is said after the learning rate."""
    words = [f"{setting.epochs} epoch{'' if setting.epochs == 1 else 's'}"]
    for field in dataclasses.fields(Run):
        if field.name in (*SAID_FIRST, "epochs", *UNSAID):
            continue
        value = getattr(setting, field.name)
        if value != field.default:
            words.append(_in_words(field.name, value))
    return words


def _in_words(name: str, value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    forms = {
        "num_servers": "{} servers",
        "batch_size": "batch {}",
        "straggler_ms": "last worker {} ms slower",
        "compute_ms": "computation {} ms",
        "rate": "links of {}",
        "partition": "data by {}",
        "schedule": "schedule {}",
        "warmup_steps": "warm-up {} steps",
        "lr_warmup_epochs": "lr rises for {} epochs at first",
        "max_train": "{} samples",
        "max_test": "{} test samples",
    }
    return forms.get(name, f"{name} {{}}").format(text)
