"""Values in a text that change from one request, day, session or checkout to the next.

What is found is what looks like such a value; whether it does change, only another request can tell.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

VolatileKind = Literal["time", "date", "id", "path", "version"]

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|"
    r"Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)\.?"
)
_DAY = r"(?:(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?,?\s+)?"
_ZONE = r"(?:\s?(?:Z|UTC|GMT|[A-Z]{3,4}|[+-]\d{2}:?\d{2})\b)?"
_CLOCK = r"(?:[01]?\d|2[0-3]):[0-5]\d"
_LABELLED_ID = (
    r"(?:cch|nonce|request[_ -]?id|trace[_ -]?id|session[_ -]?id|thread[_ -]?id|turn[_ -]?id|run[_ -]?id|"
    r"chunk[_ -]?id|correlation[_ -]?id|conversation[_ -]?id)"
)


class Volatile(NamedTuple):
    """A value that may change."""

    kind: VolatileKind
    form: str
    """How it is written, such as `iso_datetime` or `uuid`."""
    start: int
    end: int

    def of(self, text: str) -> str:
        """The value, as `text` has it."""
        return text[self.start : self.end]


class _Form(NamedTuple):
    kind: VolatileKind
    name: str
    pattern: re.Pattern[str]
    """Its last group that took part is the value, else all of it."""


def _form(kind: VolatileKind, name: str, pattern: str, flags: re.RegexFlag = re.NOFLAG) -> _Form:
    return _Form(kind, name, re.compile(pattern, flags | re.MULTILINE))


# In order of precedence: what overlaps one that was found before it is not found.
_FORMS = (
    _form(
        "path",
        "git_status",
        r"^[ \t]*(?:(?:git\s?status|current branch|on branch|recent commits|git branch)\b[^\n]*"
        r"(?:\n[ \t]*\S[^\n]*)*)",
        re.IGNORECASE,
    ),
    _form(
        "path",
        "cwd",
        r"\b(?:(?:current |primary )?working dir(?:ectory)?|cwd|current dir(?:ectory)?|workspace(?: root| directory)?|"
        r"project root)\b(?:\*\*|`|\")?(?:\s+is)?\s*[:=]?\s*(?:\*\*)?\s*[`\"']?((?:/|~/|[A-Z]:\\)[^\s`\"'<>,;]*)",
        re.IGNORECASE,
    ),
    _form("path", "cwd", r"<cwd>([^<\n]+)</cwd>"),
    _form("id", "uuid", r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"),
    _form(
        "version",
        "labelled_version",
        r"\b(?:[a-z]{1,12}[_-])?version\b[`\"*]*\s*[:=]?\s*[`\"*]*v?(\d+\.\d[0-9A-Za-z.+-]*(?<![.+-]))",
        re.IGNORECASE,
    ),
    _form(
        "time",
        "iso_datetime",
        r"\b\d{4}-(?:0\d|1[0-2])-(?:[0-2]\d|3[01])[T ](?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:[.,]\d+)?)?"
        + _ZONE,
    ),
    _form(
        "time",
        "ctime",
        rf"\b{_DAY}{_MONTH}\s+[0-3]?\d\s+{_CLOCK}:[0-5]\d{_ZONE}\s+\d{{4}}\b",
    ),
    _form(
        "time",
        "long_datetime",
        rf"\b{_DAY}(?:{_MONTH}\s+[0-3]?\d(?:st|nd|rd|th)?,?\s+\d{{4}}|[0-3]?\d(?:st|nd|rd|th)?\s+{_MONTH},?\s+\d{{4}})"
        rf"(?:,|\s+at)?\s+{_CLOCK}(?::[0-5]\d)?(?:\s?[AaPp]\.?[Mm]\.?)?{_ZONE}",
    ),
    _form("date", "iso_date", r"\b(?:19|20)\d{2}[-/](?:0?[1-9]|1[0-2])[-/](?:0?[1-9]|[12]\d|3[01])\b"),
    _form(
        "date",
        "long_date",
        rf"\b{_DAY}(?:{_MONTH}\s+[0-3]?\d(?:st|nd|rd|th)?,?\s+\d{{4}}|[0-3]?\d(?:st|nd|rd|th)?\s+{_MONTH},?\s+\d{{4}})\b",
    ),
    _form(
        "date", "numeric_date", r"\b(?:0?[1-9]|[12]\d|3[01])[./](?:0?[1-9]|[12]\d|3[01])[./](?:19|20)\d{2}\b"
    ),
    _form("time", "clock", rf"\b{_CLOCK}:[0-5]\d(?:\.\d+)?(?:\s?[AaPp]\.?[Mm]\.?)?{_ZONE}"),
    _form(
        "time",
        "clock",
        rf"\b(?:now|time|clock|as of|updated|generated|started)\b[^\n\d]{{0,24}}({_CLOCK}(?:\s?[AaPp]\.?[Mm]\b\.?)?{_ZONE})",
        re.IGNORECASE,
    ),
    _form("time", "unix_time", r"(?<![\w.-])1[5-9]\d{8}(?:\d{3}|\d{6}|\.\d{1,9})?(?![\w-]|\.\d)"),
    _form(
        "id",
        "labelled_id",
        rf"\b{_LABELLED_ID}\b[`\"*]*\s*[:=]\s*[`\"*]*([0-9A-Za-z][0-9A-Za-z_.:-]{{3,}})",
        re.IGNORECASE,
    ),
    _form(
        "id",
        "prefixed_id",
        r"\b(?:ses|sess|msg|req|run|thread|chatcmpl|call|resp|toolu|task)[_-](?=[A-Za-z_-]*\d)[0-9A-Za-z]{8,}\b",
    ),
    _form("id", "ulid", r"\b(?=[A-Z]*\d)[0-7][0-9A-HJKMNP-TV-Z]{25}\b"),
    _form("id", "hex", r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{16,128}\b"),
)


def find_volatile(text: str) -> list[Volatile]:
    """Every value in `text` that may change, in order; none of them overlap."""
    found: list[Volatile] = []
    taken = bytearray(len(text))
    for form in _FORMS:
        for match in form.pattern.finditer(text):
            start, end = match.span(match.lastindex or 0)
            if start < end and not any(taken[start:end]):
                taken[start:end] = b"\1" * (end - start)
                found.append(Volatile(form.kind, form.name, start, end))
    return sorted(found, key=lambda one: one.start)
