"""The process of one frontend. Exit codes: 0 after a drain, 2 for settings or a library that
cannot be used."""

from __future__ import annotations

import gc
import os
import sys

from api.http.server import make_server
from api.http.uvicorn_compat import check_uvicorn
from api.main import create_app
from api.settings import ApiSettings
from shared.compat import IncompatibleLibrary
from shared.logs import start_logs
from shared.redis.redis_compat import check_redis
from shared.redis.url import UnsupportedUrl, scheme_of
from shared.settings import EXIT_BAD_SETTINGS, SettingsError, load_settings, log_misspellings

# Collect garbage less often than by default: thousands of open streams are a large heap
# to walk, and next to nothing in it is a cycle.
COLLECTIONS = (20_000, 20, 50)


def main() -> int:
    """Serves until SIGTERM or Ctrl-C."""
    try:
        check_uvicorn()
        check_redis()
        settings = load_settings(ApiSettings)
        scheme_of(settings.redis_url)
        app = create_app(settings)
    except (IncompatibleLibrary, SettingsError, UnsupportedUrl) as error:
        sys.stderr.write(f"penstock: {error}\n")
        return EXIT_BAD_SETTINGS
    gc.set_threshold(*COLLECTIONS)
    # The objects loaded so far stay for good. Scanning them at every full collection would stop
    # the event loop for 40 ms and more.
    gc.collect()
    gc.freeze()
    logs = start_logs(settings.log_level, settings.log_format, process="frontend")
    log_misspellings(ApiSettings)
    try:
        make_server(app, settings).run()
    finally:
        logs.stop()
    services = getattr(app.state, "services", None)
    if services is not None and services.pool.num_busy:
        # A thread in native code would meet an interpreter that is being taken down. All that has
        # an end has ended.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0
