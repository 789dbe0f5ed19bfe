"""A stream that resumes by itself after a cut connection, a killed frontend, a killed worker.

    pip install penstock
    PENSTOCK_URL=http://127.0.0.1:8000,http://127.0.0.1:8001 python examples/resume.py

Kill a process of the service meanwhile: the text pauses and resumes, each token once. Ctrl-C
cancels the job. PENSTOCK_KEY is a key, where the service asks for one.
"""

import sys

from penstock.client import Client, PenstockError

question = " ".join(sys.argv[1:]) or "What is a penstock?"
try:
    with Client() as client, client.chat(question, max_tokens=200) as stream:
        for delta in stream:
            print(delta.text, end="", flush=True)
        print(f"\n{stream.job_id}: {stream.answer.usage['completion_tokens']} tokens")
except PenstockError as error:
    sys.exit(f"{type(error).__name__}: {error}")
