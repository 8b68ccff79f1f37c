"""What in a text may change from one request to the next."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workmem.prompt.volatile import find_volatile


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("Now: 2026-11-29T10:15:03Z.", "time", "2026-11-29T10:15:03Z"),
        ("At 2026-11-29 10:15 UTC you", "time", "2026-11-29 10:15 UTC"),
        ("2026-11-29T10:15:03.123+01:00", "time", "2026-11-29T10:15:03.123+01:00"),
        ("Sun Nov 29 17:37:12 UTC 2026", "time", "Sun Nov 29 17:37:12 UTC 2026"),
        ("It is Sunday, November 29, 2026 at 5:37 PM", "time", "Sunday, November 29, 2026 at 5:37 PM"),
        ("The current time is 17:37", "time", "17:37"),
        ("Clock 17:37:12", "time", "17:37:12"),
        ("started 1795973861 ", "time", "1795973861"),
        ("ts=1795973861123,", "time", "1795973861123"),
        ("Today is 2026-11-29.", "date", "2026-11-29"),
        ("Today's date: 11/29/2026", "date", "11/29/2026"),
        ("Today is Sunday, November 29, 2026.", "date", "Sunday, November 29, 2026"),
        ("Date: 29 November 2026", "date", "29 November 2026"),
        ("session 01982a3b-4c5d-7e6f-8a9b-0c1d2e3f4a5b!", "id", "01982a3b-4c5d-7e6f-8a9b-0c1d2e3f4a5b"),
        ("cc_entrypoint=cli; cch=4a1b2;", "id", "4a1b2"),
        ("Request ID: `req-77-b`", "id", "req-77-b"),
        ("nonce 9f86d081884c7d659a2feaa0c55ad015", "id", "9f86d081884c7d659a2feaa0c55ad015"),
        ('<task id="ses_4f3aB12cd9">', "id", "ses_4f3aB12cd9"),
        ("Working directory: /home/me/project", "path", "/home/me/project"),
        ("  <cwd>/tmp/work here</cwd>", "path", "/tmp/work here"),
        ("Primary working directory: `/srv/app`", "path", "/srv/app"),
        ("cwd: C:\\code\\app", "path", "C:\\code\\app"),
        ("cc_version=2.1.332.9f3; x", "version", "2.1.332.9f3"),
        ("Version: v1.18.0-beta.2\n", "version", "1.18.0-beta.2"),
    ],
)
def test_a_value_is_found_whole_and_by_its_kind(text, kind, value):
    found = [one for one in find_volatile(text) if one.of(text) == value]
    assert [one.kind for one in found] == [kind], find_volatile(text)


def test_a_git_status_is_one_block_up_to_an_empty_line():
    text = "Rules.\n\nCurrent branch: main\nM src/a.py\n?? b\n\nRecent commits:\nabc1234 Fix\n\nBe brief."
    assert [one.of(text) for one in find_volatile(text)] == [
        "Current branch: main\nM src/a.py\n?? b",
        "Recent commits:\nabc1234 Fix",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "You are a helpful assistant. Answer in 3 sentences.",
        "A ratio of 16:9, and John 3:16.",
        "Call 555-0123 or use port 8000; limits are 1024 and 65536.",
        "Use a deadbeef colour, #ffaa00, or facade.",
        "Write files under /tmp and read /etc/hosts.",
        "HTTP/1.1, Python 3.11, section 2.1.3",
    ],
)
def test_plain_text_holds_none(text):
    assert find_volatile(text) == []


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(max_size=200) | st.from_regex(r"([0-9:T ./-]|Nov|version|[a-f0-9]{8}){0,40}", fullmatch=True))
def test_what_is_found_is_in_order_and_apart(text):
    end = 0
    for one in find_volatile(text):
        assert end <= one.start < one.end <= len(text)
        end = one.end
