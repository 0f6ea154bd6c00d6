"""A fixture for commands that write a page nobody reads."""

import pytest


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Audits draw no figures and write no page, which takes longer than small attacks."""
    monkeypatch.setattr(
        "splitveil.report.page.write_page", lambda _, folder, lang="en": folder / "none.html"
    )
