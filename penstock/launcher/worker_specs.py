"""What each worker of `make run` is: its label, its model's name, and its own environment.

Without MODELS_FILE all workers are alike, and configured by the environment. MODELS_FILE is TOML:

    [[models]]
    served_model_name = "qwen"
    model = "/models/Qwen3-0.6B"
    engine = "vllm"
    workers = 2

Each table is one model, or one kind of worker of a model; its keys are the worker's settings in
small letters, `workers`, and `env`, a table of further environment variables. What it leaves out
comes from the launcher's environment, but for what only the engine of another table has.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.launcher.settings import LauncherSettings
from shared.cores import available_cores, share_of_cores
from shared.cuda_devices import (
    device_number,
    device_type,
    has_nvidia_driver,
    no_such_device,
    num_cuda_devices,
    visible_devices,
)
from shared.environment import PREFIX, value_of, variable_of
from shared.settings import SettingsError, SharedSettings, load_settings

MAX_WORKERS = 64
# One for the whole `make run`: they are no settings of one model.
_OF_ALL = frozenset(SharedSettings.model_fields) | {"lease_ms"}
# A table of a file is one model.
_OF_LISTS = ("models", "model_swap_wait_s")
# Settings that a file of models replaces.
_ONE_MODEL = ("MODEL", "SERVED_MODEL_NAME", "MODELS", "WORKERS")
_ALL = frozenset({"all"})
_SIZES_KV_CACHE = ("KV_CACHE_MEMORY_GB", "NUM_KV_BLOCKS", "MEMORY_SHARE")


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker process. `model` is its name in requests; empty: only the worker knows it."""

    label: str
    model: str = ""
    own: Mapping[str, str] = field(default_factory=dict)  # variables beside the launcher's own

    def variable(self, name: str) -> str:
        """Returns a variable of the worker's environment; "" if it is not set."""
        return self.own.get(name, os.environ.get(name, ""))

    def setting(self, name: str) -> str:
        """Returns the value of a setting in the worker's environment; "" if it is not set."""
        return self.own.get(variable_of(name), value_of(name, os.environ))

    def with_settings(self, values: Mapping[str, str]) -> WorkerSpec:
        """Returns it with the `values` of settings, by their names."""
        named = {variable_of(name): value for name, value in values.items()}
        return WorkerSpec(self.label, self.model, {**self.own, **named})

    def with_defaults(self, values: Mapping[str, str]) -> WorkerSpec:
        """Returns it with the `values` of settings that it has not."""
        return self.with_settings(
            {name: value for name, value in values.items() if not self.setting(name)}
        )

    @property
    def engine(self) -> str:
        """Returns the worker's ENGINE."""
        return self.setting("ENGINE") or "penstock"


def worker_specs(settings: LauncherSettings) -> list[WorkerSpec]:
    """Returns all workers of one `make run`, with their shares of cores and memory.

    Raises SettingsError for a file of models that cannot be used.
    """
    if settings.models_file is None:
        specs = [WorkerSpec(f"worker {index}") for index in range(settings.workers)]
    else:
        given = [name for name in _ONE_MODEL if value_of(name, os.environ)]
        if given:
            raise SettingsError(
                f"{variable_of(given[0])} and PENSTOCK_MODELS_FILE exclude each other."
            )
        specs = _read(settings.models_file)
    return _with_own_ports(_sharing_memory(_with_own_devices(_sharing_cores(specs))))


def _with_own_ports(specs: Sequence[WorkerSpec]) -> list[WorkerSpec]:
    """Gives workers that would listen on one METRICS_PORT each the next port."""
    taken: Counter[str] = Counter()
    found = []
    for spec in specs:
        port = spec.setting("METRICS_PORT")
        if port.isdecimal():
            spec = spec.with_settings({"METRICS_PORT": str(int(port) + taken[port])})
            taken[port] += 1
        found.append(spec)
    return found


def _sharing_cores(specs: Sequence[WorkerSpec]) -> list[WorkerSpec]:
    """Divides the cores among the workers that do not name a number of threads.

    Frontends and Redis get none of their own: a thread that yields to them costs next to nothing.
    """
    if len(specs) == 1:
        return list(specs)
    given = [
        spec.setting("NUM_THREADS") or spec.variable("OMP_NUM_THREADS").split(",")[0]
        for spec in specs
    ]
    num_open = given.count("")
    left = available_cores() - sum(int(number) for number in given if number.isdecimal())
    shares = (share_of_cores(max(0, left), num_open, index) for index in range(num_open))
    return [
        spec if number else spec.with_defaults({"NUM_THREADS": str(next(shares))})
        for spec, number in zip(specs, given, strict=True)
    ]


def _with_own_devices(specs: Sequence[WorkerSpec]) -> list[WorkerSpec]:
    """Gives workers that may take any CUDA device some that no other worker has, as many as their
    ranks, by CUDA_VISIBLE_DEVICES.

    A worker alone sees all. Several share a device only where DEVICE or their own environment names
    it. Raises SettingsError for a number without a device, and for more workers than fit.
    """
    given = [_devices(spec) for spec in specs]
    if len(specs) == 1 or _ALL not in given:
        return list(specs)
    visible = visible_devices(os.environ)
    there = [str(n) for n in range(num_cuda_devices())] if visible is None else visible
    if not there:
        return list(specs)  # the driver does not answer: each worker reports torch's error
    named = frozenset[str]().union(*given)
    left = [name for name in there if name not in named]
    found = []
    for spec, devices in zip(specs, given, strict=True):
        if devices == _ALL:
            ranks = spec.setting("TENSOR_PARALLEL_SIZE")
            num_ranks = int(ranks) if ranks.isdecimal() else 1
            own, left = left[:num_ranks], left[num_ranks:]
            if len(own) < num_ranks:
                raise SettingsError(_does_not_fit(spec, num_ranks, len(own), len(there)))
            variables = {**spec.own, "CUDA_VISIBLE_DEVICES": ",".join(own)}
            spec = WorkerSpec(spec.label, spec.model, variables)
        found.append(spec)
    return found


def _does_not_fit(spec: WorkerSpec, num_ranks: int, num_left: int, num_there: int) -> str:
    wanted = "a CUDA device of its own"
    if num_ranks > 1:
        wanted = f"{num_ranks} CUDA devices of its own (PENSTOCK_TENSOR_PARALLEL_SIZE)"
    return (
        f"{spec.label} gets {wanted}, and {num_left or 'none'} of {num_there} is left for it: "
        "start fewer workers, or name a device that workers share, PENSTOCK_DEVICE=cuda:0 or in a "
        'file of models device = "cuda:0"; PENSTOCK_DEVICE=cpu leaves them to the CPU.'
    )


def _sharing_memory(specs: Sequence[WorkerSpec]) -> list[WorkerSpec]:
    """Divides the memory that KV caches are sized from, among the workers of one device."""
    all_devices = [_devices(spec) for spec in specs]
    sharing = [sum(_overlap(one, other) for other in all_devices) for one in all_devices]
    return [
        spec
        if num_sharing == 1 or any(spec.setting(name) for name in _SIZES_KV_CACHE)
        else spec.with_defaults({"MEMORY_SHARE": f"{1 / num_sharing:.4g}"})
        for spec, num_sharing in zip(specs, sharing, strict=True)
    ]


def _devices(spec: WorkerSpec) -> frozenset[str]:
    """Returns what the worker takes: {"cpu"}, the names of the CUDA devices that it alone is to
    see, or {"all"} where any will do. Raises SettingsError for a number without a device."""
    device = spec.setting("DEVICE") or "auto"
    own = visible_devices(spec.own)
    visible = visible_devices(os.environ) if own is None else own
    if device == "cpu" or spec.setting("RUNNER") == "echo":
        return frozenset({"cpu"})
    if device_type(device) == "auto" and (visible == [] or not has_nvidia_driver()):
        return frozenset({"cpu"})
    if (number := device_number(device)) is not None:
        num_devices = num_cuda_devices() if visible is None else len(visible)
        # Without an answer of the driver the worker reports the fault.
        if number >= num_devices and (num_devices or visible is not None):
            raise SettingsError(f"{spec.label}: {no_such_device(device, num_devices)}.")
        return frozenset({str(number) if visible is None else visible[number]})
    return _ALL if own is None else frozenset(own)


def _overlap(one: frozenset[str], other: frozenset[str]) -> bool:
    """Returns whether two workers may take the same device, which has a number and a UUID."""
    if "cpu" in one | other:
        return one == other
    is_comparable = len({name.isdecimal() for name in one | other}) == 1
    return "all" in one | other or not is_comparable or bool(one & other)


def _read(path: Path) -> list[WorkerSpec]:
    """Returns the workers of a file of models. Raises SettingsError."""
    tables = _tables(path)
    engines = [
        table.get("engine") or value_of("engine", os.environ) or "penstock" for table in tables
    ]
    specs: list[WorkerSpec] = []
    seen: dict[str, tuple[str, Any]] = {}
    for number, table in enumerate(tables, 1):
        where = f"{path}, [[models]] {number}"
        workers = table.pop("workers", 1)
        if type(workers) is not int or not 1 <= workers <= MAX_WORKERS:
            raise SettingsError(f"{where}: workers must be a number from 1 to {MAX_WORKERS}.")
        own = _variables(where, table, engines[number - 1], engines)
        name = _name_of(where, own)
        checkpoint = own.get(variable_of("MODEL"), "")
        if name in seen and seen[name][0] != checkpoint:
            raise SettingsError(
                f"{where}: {name!r} is the name of another model of this file; set "
                "served_model_name."
            )
        if name in seen and table == seen[name][1]:
            raise SettingsError(f"{where}: it repeats {name!r}; workers = 2 starts two of a kind.")
        seen[name] = (checkpoint, table)
        for _ in range(workers):
            specs.append(WorkerSpec(f"worker {len(specs)} ({name})", name, own))
    if len(specs) > MAX_WORKERS:
        raise SettingsError(f"{path}: {len(specs)} workers are more than {MAX_WORKERS}.")
    return specs


def _tables(path: Path) -> list[dict[str, Any]]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(
            f"PENSTOCK_MODELS_FILE={str(path)!r} cannot be read: {error.strerror}."
        ) from None
    except ValueError as error:  # TOML's, and bytes that are no UTF-8
        raise SettingsError(f"PENSTOCK_MODELS_FILE={str(path)!r} is no TOML: {error}.") from None
    tables = content.pop("models", None)
    if content:
        raise SettingsError(f"{path}: {next(iter(content))!r} is outside of [[models]].")
    if not isinstance(tables, list) or not tables or not all(isinstance(t, dict) for t in tables):
        raise SettingsError(f"{path} has no table [[models]].")
    return tables


def _variables(
    where: str, table: Mapping[str, Any], own_engine: object, others: Sequence[object]
) -> dict[str, str]:
    """Returns a table as environment variables, all of them checked.

    A setting that its engine lacks, but `others` of the file have, is the table's own or none.
    """
    # Imported here: most starts have no such file.
    from worker.engine_settings import OF_ENGINES
    from worker.settings import WorkerSettings

    fields = WorkerSettings.model_fields
    known = [name for name in fields if name not in _OF_ALL and name not in _OF_LISTS]
    further = _further(where, table.get("env", {}), known)
    values: dict[str, str] = {}
    for key, value in table.items():
        if key == "env":
            continue
        if key in _OF_ALL:
            raise SettingsError(
                f"{where}: {key} is the same for all workers: {variable_of(key)}=..."
            )
        if key not in known:
            close = difflib.get_close_matches(key, [*known, "workers", "env"], 1)
            meant = f"; did you mean {close[0]!r}?" if close else "."
            raise SettingsError(f"{where}: the worker has no setting {key!r}{meant}")
        values[key] = _text(where, key, value)
    dropped = [
        name
        for engines, names in OF_ENGINES.items()
        for name in (names if own_engine not in engines and {*engines} & {*others} else ())
        if name not in values
    ]
    defaults = {name: fields[name].default for name in dropped}
    try:
        load_settings(WorkerSettings, redis_url="unix:///unused", **defaults, **values)
    except SettingsError as error:
        raise SettingsError(f"{where}: {error}") from None
    own = {**values, **dict.fromkeys(dropped, "")}
    return {
        **further,
        **{variable_of(key): value for key, value in own.items() if _is_needed(key, value)},
    }


def _further(where: str, env: object, known: Sequence[str]) -> dict[str, str]:
    """Returns the table `env`, which has no setting: those are checked, and are the table's."""
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise SettingsError(f"{where}: env must be a table of strings.")
    for name, value in env.items():
        is_ours = name.upper().startswith(PREFIX)
        setting = name.lower().removeprefix(PREFIX.lower()) if is_ours else ""
        if not name or "=" in name or "\0" in name:
            raise SettingsError(f"{where}: env: {name!r} is no name of a variable.")
        if "\0" in value:
            raise SettingsError(f"{where}: env: {name} has a NUL character.")
        if setting in _OF_ALL:
            raise SettingsError(
                f"{where}: env: {variable_of(setting)} is the same for all workers; set it beside "
                "PENSTOCK_MODELS_FILE."
            )
        if setting in known:
            raise SettingsError(
                f"{where}: env: {name} is a setting: {setting} = ... beside env sets it."
            )
    return env


def _is_needed(name: str, value: str) -> bool:
    """Returns whether a worker must get the variable: an empty one takes the launcher's away."""
    return bool(value) or bool(value_of(name, os.environ))


def _text(where: str, key: str, value: object) -> str:
    """Returns a value as an environment variable has it."""
    match value:
        case bool():
            return "true" if value else "false"
        case str() if "\0" in value:
            raise SettingsError(f"{where}: {key} has a NUL character.")
        case str() | int() | float():
            return str(value)
        case dict():
            try:
                return json.dumps(value)
            except TypeError:  # of TOML's types JSON lacks these alone
                raise SettingsError(
                    f"{where}: {key} has a date or a time, which JSON has not; write it as text."
                ) from None
    raise SettingsError(f"{where}: {key} must be a string, a number, true, false or a table.")


def _name_of(where: str, own: Mapping[str, str]) -> str:
    from worker.settings import served_name

    try:
        name = served_name(
            own.get(variable_of("MODEL"), ""), own.get(variable_of("SERVED_MODEL_NAME"), "")
        )
    except (OSError, RuntimeError) as error:  # a path that is too long, a home that is not there
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise SettingsError(f"{where}: model: {reason}.") from None
    if not name:
        raise SettingsError(f"{where}: set served_model_name.")
    return name
