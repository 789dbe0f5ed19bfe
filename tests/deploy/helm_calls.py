"""Runs in the environment of helm.txt: calls of Helm, or of the schemas, for the tests beside it.

python helm_calls.py lint CHART
python helm_calls.py install CHART RELEASE NAMESPACE    values and kubeconfig on standard input
python helm_calls.py releases RELEASE NAMESPACE         kubeconfig, then lines of {chart, values}
python helm_calls.py validate VERSION                   objects on standard input
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any


def main() -> None:
    """Prints answers as JSON; an error of Helm's is {"error": text}."""
    command, *arguments = sys.argv[1:]
    if command == "releases":
        asyncio.run(releases(json.loads(input()), *arguments))
        return
    given = None if sys.stdin.isatty() else sys.stdin.read()
    if command == "validate":
        answer: Any = validate(arguments[0], json.loads(given or "[]"))
    else:
        answer = asyncio.run(helm(command, arguments, given or ""))
    print(json.dumps(answer))


async def helm(command: str, arguments: list[str], given: str) -> Any:
    import helm_sdkpy

    try:
        if command == "lint":
            config = helm_sdkpy.Configuration()
            return await helm_sdkpy.Lint(config).run(arguments[0])
        chart, release, namespace = arguments
        request = json.loads(given)
        config = helm_sdkpy.Configuration(namespace=namespace, kubeconfig=request["kubeconfig"])
        values = request["values"]
        return await helm_sdkpy.Install(config).run(release, chart, values=values, wait=False)
    except helm_sdkpy.HelmError as error:
        return {"error": str(error)}


async def releases(kubeconfig: str, release: str, namespace: str) -> None:
    """Installs the first line's chart, and upgrades to each following one; answers every line."""
    import helm_sdkpy

    config = helm_sdkpy.Configuration(namespace=namespace, kubeconfig=kubeconfig)
    action: Any = helm_sdkpy.Install(config)
    for line in sys.stdin:
        given = json.loads(line)
        # As the command does it.
        options = {"values": given["values"], "wait": False, "server_side_apply": True}
        try:
            answer = await action.run(release, given["chart"], **options)
        except helm_sdkpy.HelmError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)
        action = helm_sdkpy.Upgrade(config)


def validate(version: str, objects: list[dict[str, Any]]) -> list[str]:
    """Returns what the schemas of a version say against objects; unknown fields too."""
    import kubernetes_validate

    faults = []
    for each in objects:
        try:
            kubernetes_validate.validate(each, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            where = ".".join(map(str, error.path))
            faults.append(f"{each['kind']}/{each['metadata']['name']} {where}: {error.message}")
    return faults


if __name__ == "__main__":
    main()
