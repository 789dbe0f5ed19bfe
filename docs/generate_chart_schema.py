"""Writes the schema of the chart's values from its values.yaml and the settings classes.

`make docs` runs it; `--check` only compares. Helm refuses a name that is not in values.yaml, a
setting that its process does not have, and a value out of its bounds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from generated_page import write_or_check
from pydantic_settings import BaseSettings

from api.settings import ApiSettings
from shared.environment import variable_of
from worker.settings import WorkerSettings

CHART = Path(__file__).parents[1] / "deploy/helm/penstock"
PAGE = CHART / "values.schema.json"
WIDTH = 110
# Objects of Kubernetes, or of the user's own names.
FREE = {"affinity", "annotations", "labels", "nodeSelector", "podAnnotations", "resources"}
COUNT = {"type": "integer", "minimum": 0}
OBJECTS = {"type": "array", "items": {"type": "object"}}
# What the defaults do not show, by path.
NARROWER: dict[str, dict[str, Any]] = {
    "apiKeys.lines": {"type": "array", "items": {"type": "string"}},
    "frontend.replicas": {"type": "integer", "minimum": 1},
    "frontend.preStopSeconds": COUNT,
    "frontend.shutdownTimeoutSeconds": COUNT,
    "workers.engine": {"enum": ["penstock", "vllm", "http"]},
    "workers.replicas": COUNT,
    "workers.gpus": COUNT,
    "workers.drainTimeoutSeconds": COUNT,
    "workers.loadTimeoutSeconds": {"type": "integer", "minimum": 1},
    "workers.autoscaling.minReplicas": COUNT,
    "workers.autoscaling.maxReplicas": {"type": "integer", "minimum": 1},
    "workers.autoscaling.queueWaitSeconds": {"type": "number", "exclusiveMinimum": 0},
    "workers.autoscaling.sequencesPerWorker": {"type": "number", "exclusiveMinimum": 0},
    "tracing.endpoint": {"type": "string", "pattern": "^(https?://[^/:]+.*)?$"},
    "tracing.settings": {
        "type": "object",
        "propertyNames": {"pattern": "^OTEL_[A-Z0-9_]+$"},
        "additionalProperties": {"type": ["string", "number", "boolean"]},
    },
    "networkPolicy.collectorPort": {"type": "integer", "minimum": 0, "maximum": 65535},
    "networkPolicy.upstreamPort": {"type": "integer", "minimum": 0, "maximum": 65535},
}
OF_MODEL = {
    "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?$"},
    "served": {"type": "string", "minLength": 1, "maxLength": 200, "pattern": '^[^"\\\\]+$'},
}
# A name of PENSTOCK_MODELS has no sign of that list.
ON_DEMAND = {
    "served": {**OF_MODEL["served"], "pattern": r'^[^"\\,=/\s]+$'},
    "model": {"type": "string", "pattern": r"^[^,\s]+$"},
}


def render() -> str:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    del values["models"]
    schema = _schema_of(values)
    properties = schema["properties"]
    worker = properties["workers"]["properties"]
    properties["frontend"]["properties"]["settings"] = {"$ref": "#/definitions/frontendSettings"}
    worker["settings"] = {"$ref": "#/definitions/workerSettings"}
    # A parent chart's values.
    properties["global"] = {"type": "object"}
    of_workers = {name: {"$ref": f"#/properties/workers/properties/{name}"} for name in worker}
    on_demand = {"type": "array", "items": _object(ON_DEMAND, required=["served", "model"])}
    properties["models"] = {
        "type": "array",
        "items": _object(
            {**OF_MODEL, "onDemand": on_demand, **of_workers}, required=["name", "served"]
        ),
    }
    schema["definitions"] = {
        "frontendSettings": _settings(ApiSettings),
        "workerSettings": _settings(WorkerSettings),
    }
    return _dump({"$schema": "https://json-schema.org/draft-07/schema#", **schema}) + "\n"


def _schema_of(value: Any, path: str = "") -> dict[str, Any]:
    """Returns a schema of values of the default's type and members."""
    if path in NARROWER:
        return NARROWER[path]
    if isinstance(value, dict):
        if path.rpartition(".")[2] in FREE:
            return {"type": "object"}
        return _object({n: _schema_of(v, f"{path}.{n}".lstrip(".")) for n, v in value.items()})
    if isinstance(value, list):
        return OBJECTS
    if isinstance(value, bool):
        return {"type": "boolean"}
    return {"type": "integer"} if isinstance(value, int) else {"type": "string"}


def _object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, **more, "properties": properties}


def _settings(settings: type[BaseSettings]) -> dict[str, Any]:
    schema = settings.model_json_schema()
    return _object(
        {
            variable_of(name): _setting(name, field, schema.get("$defs", {}))
            for name, field in schema["properties"].items()
        }
    )


def _setting(name: str, field: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a variable: numbers may stand as numbers or as text, and what the
    process takes in any case may here too."""
    if "anyOf" in field:
        field = next(each for each in field["anyOf"] if each.get("type") != "null")
    if "$ref" in field:
        field = definitions[field["$ref"].rpartition("/")[2]]
    if "enum" in field:
        if name == "log_level":
            return {"type": "string", "pattern": _in_any_case(field["enum"])}
        return {"enum": field["enum"]}
    kind = field.get("type")
    if kind == "boolean":
        pattern = _in_any_case(["true", "false", "1", "0", "yes", "no", "on", "off"])
        kinds = ["boolean", "integer", "string"]
        return {"type": kinds, "pattern": pattern, "minimum": 0, "maximum": 1}
    if kind in ("integer", "number"):
        pattern = "^-?[0-9]+$" if kind == "integer" else "^-?[0-9.]+$"
        bounds = {n: v for n, v in field.items() if n.lower().endswith("imum")}
        return {"type": [kind, "string"], "pattern": pattern, **bounds}
    return {"type": ["string", "number", "boolean"]}


def _in_any_case(words: list[str]) -> str:
    each = ("".join(f"[{c.upper()}{c.lower()}]" if c.isalpha() else c for c in w) for w in words)
    return f"^({'|'.join(each)})$"


def _dump(value: Any, indent: str = "") -> str:
    """Returns JSON, with an object on one line where it fits."""
    line = json.dumps(value)
    if len(indent) + len(line) <= WIDTH or not isinstance(value, dict):
        return line
    inner = indent + "  "
    rows = (f"{inner}{json.dumps(name)}: {_dump(each, inner)}" for name, each in value.items())
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, render()))
