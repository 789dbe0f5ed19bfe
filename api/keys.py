"""Makes an API key; prints it once, and its line for the keys file.

    python -m api.keys --tenant acme --name laptop --requests-per-minute 60 >> keys.txt

The key itself goes to stderr, so that stdout, redirected into the file of API_KEYS_FILE,
never contains it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from api.auth.keys import LIMITS, KeysInvalid, digest_of, new_key, parse_keys


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a new key and its line. Exit codes: 0, or 2 for invalid arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m api.keys",
        description="Makes an API key: the key on stderr, its line for PENSTOCK_API_KEYS_FILE on "
        "stdout.",
    )
    parser.add_argument("--tenant", default="default", help="the tenant that owns the key's jobs")
    parser.add_argument("--name", default="", help="its name in logs")
    parser.add_argument("--operator", action="store_true", help="sees the jobs of all tenants")
    for limit in LIMITS:
        parser.add_argument(f"--{limit.replace('_', '-')}", metavar="N", help="limit of the tenant")
    args = parser.parse_args(arguments)
    key = new_key()
    limits = {limit: getattr(args, limit) for limit in LIMITS}
    try:
        line = line_of(key, args.tenant, args.name, is_operator=args.operator, limits=limits)
    except KeysInvalid as error:
        parser.error(str(error))
    sys.stderr.write(f"{key}\n")
    sys.stdout.write(f"{line}\n")
    return 0


def line_of(
    key: str, tenant: str, name: str, *, is_operator: bool, limits: Mapping[str, object]
) -> str:
    """Returns the line of a key for API_KEYS_FILE; limits that are None are left out. Raises
    KeysInvalid with a sentence."""
    words = [digest_of(key), f"tenant={tenant}"]
    if name:
        words.append(f"name={name}")
    if is_operator:
        words.append("operator")
    words += [f"{limit}={value}" for limit, value in limits.items() if value]
    line = " ".join(words)
    try:
        parse_keys(line, "the line")
    except KeysInvalid as error:
        raise KeysInvalid(str(error).removeprefix("the line, line 1: ")) from None
    return line


if __name__ == "__main__":
    sys.exit(main())
