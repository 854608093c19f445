"""Names of callers as text that terminals and files can take."""

from __future__ import annotations


def one_line(text: str) -> str:
    """Escape what a terminal would act on: control characters, newlines, and marks that change the writing direction.

    Names of models, engines and tenants come from callers. Printed as they are they could clear an operator's screen or
    forge a row of a table. Escaped text is not escaped again.
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)
