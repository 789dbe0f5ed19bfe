"""A job in the background: one process submits it, another one reads it, now or later.

    pip install penstock
    python examples/background_job.py submit "Tell me of the river."     # prints the job's id
    python examples/background_job.py follow resp_0-...                  # any number of times
    python examples/background_job.py cancel resp_0-...

The job runs while no process waits for it. Its answer is kept for an hour after
its end (PENSTOCK_RESPONSE_TTL_S of the service). PENSTOCK_URL and PENSTOCK_KEY as in resume.py.
"""

import sys

from penstock.client import Client, PenstockError


def main(what: str, given: str) -> None:
    with Client() as client:
        if what == "submit":
            print(client.submit(given, max_tokens=200))
        elif what == "cancel":
            print(client.cancel(given)["status"])
        else:
            job = client.job(given)
            print(f"{job['status']}, place in the queue: {job['queue_position']}", file=sys.stderr)
            for delta in client.follow(given):
                print(delta.text, end="", flush=True)
            print()


if len(sys.argv) != 3 or sys.argv[1] not in ("submit", "follow", "cancel"):
    sys.exit(__doc__)
try:
    main(sys.argv[1], sys.argv[2])
except PenstockError as error:
    sys.exit(f"{type(error).__name__}: {error}")
