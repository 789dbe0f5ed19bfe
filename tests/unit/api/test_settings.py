"""The settings of a frontend have bounds."""

from __future__ import annotations

import pytest

from api.settings import ApiSettings
from shared.environment import variable_of
from shared.settings import SettingsError, load_settings


def test_settings_have_bounds_and_name_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://localhost")
    monkeypatch.setenv("PENSTOCK_CORS_ORIGINS", "https://a.example/, https://b.example")
    origins = load_settings(ApiSettings).origins_for(has_keys=False)
    assert [origins.allows(f"https://{name}.example") for name in "abc"] == [True, True, False]
    assert load_settings(ApiSettings).queue_timeout_s == 0  # none
    monkeypatch.setenv("PENSTOCK_QUEUE_TIMEOUT_S", "1.5")
    assert load_settings(ApiSettings).queue_timeout_s == 1.5
    for name, value in (("QUEUE_TIMEOUT_S", "-1"), ("KEEPALIVE_S", "16")):
        monkeypatch.setenv(variable_of(name), value)
        with pytest.raises(SettingsError, match=name):
            load_settings(ApiSettings)
        monkeypatch.delenv(variable_of(name))
