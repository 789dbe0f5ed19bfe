"""String formats of JSON schemas, each narrowed to what every parser of it takes.

Where the grammar compiler's own idea of a format is wider than that (the 30th of February is none
of its business, leap seconds are), a pattern or a length of ours takes its place. Times are RFC
3339's with capital T and Z, without leap seconds; years go from 0001 to 9999.
"""

from __future__ import annotations

from collections.abc import Mapping

_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)

# Those with a pattern of ours; the others are the compiler's.
PATTERNS: Mapping[str, str] = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
}
MAX_LENGTHS: Mapping[str, int] = {"hostname": 253, "email": 254}
FORMATS = frozenset({*PATTERNS, *MAX_LENGTHS, "duration", "ipv4", "ipv6", "uri", "uuid"})
# Names for what a text is for: any text will do.
WITHOUT_RULES = frozenset({"password", "path", "file-path", "directory-path"})
